"""Banned words in code, docs and messages, and limits on the size of files and functions."""

import ast
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXTS = sorted(
    path
    for pattern in ("stackexp/**/*.py", "tests/**/*.py", "benchmarks/*.py", "configs/**/*.yaml", "sweeps/**/*.yaml")
    for path in ROOT.glob(pattern)
)
TEXTS += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted(ROOT.glob("stackexp/**/*.py"))
BANNED = re.compile(
    # Archaic or dialect words and phrases.
    r"\b(afresh|albeit|amongst|anew|as it were|foregoing|foretell\w*|foretold|forthwith|hence|henceforth|hitherto|lest|"
    r"nought|once more|thence|thereby|thereof|there is that|therein|thither|upon|whence|wherein|whereof|whilst|withal|"
    r"go(?:es)? on with|gone on with|lets? go|ma[dk]es? up|made up|mend(?:ed|s|ing)?|is broken off|what it is told|"
    r"all the same|asked for|hangs? on|in turns|of what|so many|so that [^.;:]{1,40} may|the more so|whatever it is|"
    r"whoever|stands? (?:beside|for|in|on)|"
    # Personification: code does not wish, hear, know, remember, say or tell.
    r"dawdl\w*|hears?|knows?|remembers?|told|tells|wish(?:es|ed)?|"
    r"(?:it|that|which|message|line|plan|model|run|sweep|config|file|record) says?)\b"
    # `beside` and `tell` are also a config key and a file method.
    r"|(?<![\w.`\"])(?:beside\b(?![.:\"`])|tell\b(?!\())",
    re.IGNORECASE,
)
FIRST_WORDS = re.compile(r"(What|Whether|Of|Who|How|That|As|Told|Where|Which|Why)\b")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 80


def show(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_texts_have_no_banned_words():
    found = [
        f"{show(path, number)}: {match[0]}"
        for path in TEXTS
        if path != Path(__file__)  # holds the list
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := BANNED.search(line))
    ]
    assert found == []


def test_docstrings_start_with_a_verb_or_a_noun():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        show(path, getattr(node, "lineno", 1))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds) and FIRST_WORDS.match(ast.get_docstring(node) or "")
    ]
    assert found == []


def test_files_and_functions_are_short():
    found = []
    for path in (path for path in TEXTS if path.suffix == ".py"):
        text = path.read_text(encoding="utf-8")
        if len(text.splitlines()) > MAX_FILE_LINES:
            found.append(show(path, 1))
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        found += [show(path, f.lineno) for f in functions if f.end_lineno - f.lineno + 1 > MAX_FUNCTION_LINES]
    assert found == []


def test_tests_of_a_file_stay_together(request):
    """pytest-xdist appends the group to the id; without groups, two Slurm clusters would use the same ports."""
    group = request.node.get_closest_marker("xdist_group").args[0]
    assert group == "test_style.py"
    assert request.node.nodeid.endswith(f"@{group}") or "PYTEST_XDIST_WORKER" not in os.environ
