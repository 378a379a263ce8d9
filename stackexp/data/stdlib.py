"""The quickstart corpus: the source of the Python standard library, split by file and cached.

Every machine with Python has it. The sets are capped so that a first run takes only minutes.
"""

import ast
import hashlib
import os
import platform
import shutil
import sysconfig
import tokenize
from collections import Counter
from importlib import metadata
from pathlib import Path

from stackexp.config.data import StdlibConfig
from stackexp.data.path_checks import DataPaths
from stackexp.data.shards import FORMAT_VERSION
from stackexp.data.tokenizer import train_tokenizer
from stackexp.data.units import write_documents
from stackexp.errors import RunError
from stackexp.files import (
    CACHE_REMEDY,
    create_folder_atomically,
    explain_failed_writes,
    get_cache_root,
    hash_values,
    hold_lock,
)
from stackexp.terminal import open_bar

TRAIN_BYTES, HELD_OUT_BYTES = 6_000_000, 200_000  # caps of UTF-8 text per set; the last file may exceed them
TRAIN_BYTES_WITH_PACKAGES = 24_000_000
EXCLUDED_FOLDERS = {  # tests, other packages, tables of numbers, and folders that some Pythons lack
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "distutils"),
    *("ensurepip", "turtledemo", "lib-dynload", "pydoc_data", "encodings", "_pyrepl"),
}
VALIDATION_PACKAGES = {"stdlib-asyncio": ("asyncio",), "stdlib-json+email": ("json", "email")}
TEST_PACKAGES = {"stdlib-logging+http": ("logging", "http"), "stdlib-xml": ("xml",)}
DOCSTRINGS = "stdlib-docstrings"  # a validation set of the docstrings of DOCSTRING_FILES
DOCSTRING_FILES = {
    *("_pydecimal.py", "argparse.py", "calendar.py", "csv.py", "difflib.py", "doctest.py", "fractions.py", "heapq.py"),
    *("optparse.py", "pickletools.py", "random.py", "shutil.py", "statistics.py", "textwrap.py", "turtle.py"),
}
VALIDATION_NAMES = [*VALIDATION_PACKAGES, DOCSTRINGS]
TEST_NAMES = [*TEST_PACKAGES]


def prepare_stdlib(config: StdlibConfig) -> DataPaths:
    """Return the prepared sets for the config's vocab_size and context_length; prepare them on first use.

    The cache key is a hash of the texts and settings. A killed process leaves no incomplete set; a second process waits
    for the first. With `packages`, requirements.txt in the cache folder lists the installed packages; pip can install
    them again, which rebuilds the corpus.

    Raises RunError if this Python lacks the source of its standard library, or if the cache cannot be written.
    """
    texts = read_stdlib(Path(sysconfig.get_paths()["stdlib"]))
    if config.packages:
        texts["train"] |= read_packages(Path(sysconfig.get_paths()["purelib"]), texts)
    held_out = {name: texts[name] for name in [*VALIDATION_NAMES, *TEST_NAMES]}
    settings = [FORMAT_VERSION, config.vocab_size, config.context_length, texts["train"], held_out]
    key = hash_values(settings)[:16]
    folder = get_cache_root() / f"stdlib-{key}"
    with explain_failed_writes(folder, CACHE_REMEDY):
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with hold_lock(folder.with_suffix(".lock"), f"the preparation of {folder}"):
                if not folder.is_dir():
                    _write_sets(folder, texts, config)
    validation = {name: folder / name for name in VALIDATION_NAMES}
    return DataPaths(folder / "train", validation, {name: folder / name for name in TEST_NAMES})


def read_packages(root: Path, texts: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return .py files under `root` by path, sorted by path hash, until they and `texts` reach the size cap.

    Duplicates of another file, or of a file in `texts`, are skipped.
    """
    known = {text for of_set in texts.values() for text in of_set.values()}
    size = sum(len(text.encode()) for text in texts["train"].values())
    found: dict[str, str] = {}
    for path in _sort_by_hash(_find_python_files(root)):
        if size >= TRAIN_BYTES_WITH_PACKAGES:
            break
        text = _read_source(root / path)
        if text.strip() and text not in known:
            known.add(text)
            found[f"packages/{path}"] = text
            size += len(text.encode())
    return found


def list_requirements(root: Path) -> str:
    """Return the packages installed under `root`, except stackexp, as lines of a pip requirements file."""
    installed = {f"{dist.name}=={dist.version}" for dist in metadata.distributions(path=[str(root)])}
    lines = sorted(line for line in installed if not line.startswith("stackexp=="))
    return "".join(f"{line}\n" for line in [f"# Python {platform.python_version()}", *lines])


def _sort_by_hash(paths: list[str]) -> list[str]:
    return sorted(paths, key=lambda path: hashlib.sha256(path.encode()).digest())


def _read_source(path: Path) -> str:
    """Return the text of a .py file, empty if it has an unknown encoding or cannot be read."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (OSError, SyntaxError, ValueError):
        return ""


def read_stdlib(root: Path) -> dict[str, dict[str, str]]:
    """Return the .py files under `root` by set and path. Files that are not valid Python source are skipped.

    Each set takes files sorted by path hash, up to its size cap. Raises RunError if a set is empty.
    """
    packages = VALIDATION_PACKAGES | TEST_PACKAGES
    set_names = {package: name for name, members in packages.items() for package in members}
    texts: dict[str, dict[str, str]] = {name: {} for name in ["train", *VALIDATION_NAMES, *TEST_NAMES]}
    sizes: Counter[str] = Counter()
    for path in _sort_by_hash(_find_python_files(root)):
        name = DOCSTRINGS if path in DOCSTRING_FILES else set_names.get(path.split("/")[0], "train")
        if sizes[name] >= (TRAIN_BYTES if name == "train" else HELD_OUT_BYTES):
            continue
        text = _read_source(root / path)
        try:
            text = extract_docstrings(text) if name == DOCSTRINGS else text
            size = len(text.encode())
        except (SyntaxError, ValueError, RecursionError):  # another version's syntax
            continue
        if text.strip():
            texts[name][path] = text
            sizes[name] += size
    for name in texts:
        if not texts[name]:
            raise RunError(
                f"{root}: the source of the Python standard library is missing (nothing for {name}); install a "
                "complete Python, or train on your own text with data.kind=shards"
            )
    return texts


def extract_docstrings(source: str) -> str:
    """Return all docstrings of a Python file in order, separated by a blank line. Raises SyntaxError."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node))) + "\n"


def _find_python_files(root: Path) -> list[str]:
    """Return the paths of the .py files under `root`, with slashes."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in EXCLUDED_FOLDERS and not f.startswith(("config-", "."))]
        found += [Path(folder, f).relative_to(root).as_posix() for f in files if f.endswith(".py")]
    return found


def _write_sets(folder: Path, texts: dict[str, dict[str, str]], config: StdlibConfig) -> None:
    """Train the tokenizer and write every set. Other processes must not write `folder` at the same time."""
    for unfinished in folder.parent.glob(f".{folder.name}.*"):  # left by a killed process
        shutil.rmtree(unfinished)
    with create_folder_atomically(folder) as temporary:
        tokenizer = train_tokenizer(texts["train"].values(), config.vocab_size)
        for name in open_bar(texts, desc="preparing the standard library", unit="set"):
            write_documents(temporary / name, texts[name].values(), tokenizer, config.context_length)
        if config.packages:
            (temporary / "requirements.txt").write_text(list_requirements(Path(sysconfig.get_paths()["purelib"])))
