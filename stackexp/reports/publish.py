"""Results to commit: small copies of runs with only what reports read, and documents with the tables of reports."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from stackexp.errors import RunError
from stackexp.files import (
    create_folder_atomically,
    read_json,
    read_json_lines,
    write_hashed_json,
    write_json,
    write_json_lines,
)
from stackexp.frame import list_tests, read_evaluation, read_validations
from stackexp.reports.interventions import FILE as INTERVENTIONS
from stackexp.runs import RunFolder
from stackexp.sweeps.trials import FAILURE
from stackexp.sweeps.verdict import PLAN

BEGIN = r"<!-- (python -m stackexp (?:report|verdict)\b[^\n]*?) -->\n"
END = "<!-- end of report -->"
"""A table is between a comment with its command and this line."""


def copy_run(folder: RunFolder, target: Path) -> None:
    """Copy a run that is finished or has failed into the new folder `target`.

    Raises RunError for damage, and for links, which may lead anywhere.
    """
    chunks = list(folder.path.glob("*.chunks"))
    data = folder.path / "data.jsonl"
    earlier = sorted(folder.path.glob("config.step-*.yaml"))
    paths = [folder.config, *earlier, folder.result, folder.environment, data, *folder.path.glob("*.json")]
    for path in [*paths, *chunks, *(path for root in chunks for path in root.rglob("*"))]:
        if path.is_symlink():
            raise RunError(f"{path}: a symbolic link; replace it by the file")
        if path.exists() and not path.is_file() and not path.is_dir():
            raise RunError(f"{path}: not a regular file; replace it by one")
    records = {record.pop("file"): record for record in read_validations(folder)}
    for path in list_tests(folder):
        records[path.name] = read_evaluation(path)
    folder.read_options()  # raises an error for damage
    if folder.is_finished:
        folder.read_result()
    with create_folder_atomically(target) as new:
        RunFolder(new).mark()
        for path in (folder.config, *earlier, folder.result, folder.path / INTERVENTIONS):
            if path.exists():
                shutil.copyfile(path, new / path.name)
        if (path := folder.path / FAILURE).exists():
            write_json(new / FAILURE, _anonymize_failure(read_json(path)))
        for name, record in records.items():
            names = {key: Path(value).name for key, value in record.get("paths", {}).items()}
            named = {"checkpoint": Path(record["checkpoint"]).name} | ({"paths": names} if names else {})
            write_hashed_json(new / name, record | named)
        for path in chunks:
            scores = path.with_suffix(".json")
            if scores == folder.result or scores.name in records or not scores.exists():  # not of another run
                shutil.copytree(path, new / path.name)
        write_json(new / "environment.json", [_anonymize_session(session) for session in folder.read_sessions()])
        write_json_lines(new / "data.jsonl", list(read_json_lines(data, skip_damaged=True))[-1:])


def _anonymize_failure(failure: dict[str, Any]) -> dict[str, Any]:
    """Return a failure without the name of the host, and with the names of files instead of their paths."""
    cause = re.sub(r"(\(process \d+) on \S+\)", r"\1)", failure.get("cause", ""))
    return failure | {"cause": re.sub(r"/\S*/(?=[^\s/])", "", cause)}


def list_plans(run: Path, root: Path) -> list[Path]:
    """Return the plans of verdicts in the folders from `root` to a run below it. Raises RunError for a link."""
    folders = [folder for folder in run.parents if folder == root or root in folder.parents]
    plans = [path for folder in folders if (path := folder / PLAN).exists()]
    if links := [path for path in plans if path.is_symlink() or not path.is_file()]:
        raise RunError(f"{links[0]}: not a regular file; replace it by one")
    return plans


def _anonymize_session(session: dict[str, Any]) -> dict[str, Any]:
    """Return a session without the host name and the folders of files."""
    kept = {key: value for key, value in session.items() if key != "host"}
    if origin := session.get("origin"):
        kept["origin"] = origin | {"path": Path(origin["path"]).name}
    return kept


def update_document(path: Path) -> list[str]:
    """Replace every table of a document by the current output of its command, and return the commands.

    Commands run in the current folder. Raises RunError if there is no table, or a command fails.
    """
    text = path.read_text(encoding="utf-8")
    commands = re.findall(BEGIN, text)
    if trains := [command for command in commands if " verdict " in command and "--report" not in command.split()]:
        raise RunError(f"{path}: `{trains[0]}` would train; add --report")
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
