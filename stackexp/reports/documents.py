"""Update the tables in Markdown documents by rerunning the commands that print them."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from stackexp.errors import RunError

BEGIN = r"<!-- (python -m stackexp report [^\n]*?) -->\n"
END = "<!-- end of report -->"
"""A table is between a comment with its command and this line."""


def update_document(path: Path) -> list[str]:
    """Replace every table of a document by the current output of its command, and return the commands.

    Commands run in the current folder. Raises RunError if there is no table, or a command fails.
    """
    text = path.read_text(encoding="utf-8")
    commands = re.findall(BEGIN, text)
    if not commands or len(commands) != text.count(END):
        raise RunError(f"{path}: expected tables between <!-- python -m stackexp report ... --> and {END}")
    end = 0
    for command in commands:
        begin = text.index(f"<!-- {command} -->\n", end) + len(f"<!-- {command} -->\n")
        table = _run(path, command)
        text = text[:begin] + table + text[text.index(END, begin) :]
        end = begin + len(table)
    path.write_text(text, encoding="utf-8")
    return commands


def _run(path: Path, command: str) -> str:
    argv = [sys.executable, "-m", "stackexp", *shlex.split(command)[3:]]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{path}: `{command}` failed: {done.stderr.strip()}")
    return done.stdout
