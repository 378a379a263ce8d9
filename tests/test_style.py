"""Banned words in code, docs and messages, and limits on the size of files and functions."""

import ast
import re
from pathlib import Path

import pytest

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
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 60
LONG_FUNCTIONS: set[str] = set()  # "file:function" with the reason in a comment there


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_text_has_no_banned_words(path):
    if path == Path(__file__):
        pytest.skip("holds the list")
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [f"{number}: {match[0]}" for number, line in enumerate(lines, 1) if (match := BANNED.search(line))]
    assert found == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_start_with_a_verb_or_a_noun(path):
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
    assert [text.splitlines()[0] for text in docstrings if FIRST_WORDS.match(text)] == []


@pytest.mark.parametrize(
    "path", [path for path in TEXTS if path.suffix == ".py"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_files_and_functions_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [f.name for f in functions if f.end_lineno - f.lineno + 1 > MAX_FUNCTION_LINES]
    allowed = {name.partition(":")[2] for name in LONG_FUNCTIONS if name.startswith(f"{path.relative_to(ROOT)}:")}
    assert set(long) <= allowed
