"""The quickstart's corpus: the Python standard library's own source, split by file and cached.

Every machine that runs us has it. The sets are capped, so that a first run starts and ends within minutes.
"""

import ast
import hashlib
import json
import os
import shutil
import sysconfig
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from stackexp.config.data import StdlibConfig
from stackexp.data.locking import locked
from stackexp.data.packing import write_documents
from stackexp.data.shards import FORMAT_VERSION
from stackexp.data.tokenizer import train_tokenizer
from stackexp.errors import RunError

TRAIN_BYTES, HELD_OUT_BYTES = 6_000_000, 200_000  # of text in UTF-8 in each set; the last file may exceed it
LEFT_OUT = {
    *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "distutils"),
    *("ensurepip", "turtledemo", "lib-dynload", "pydoc_data", "encodings", "_pyrepl"),
}
"""Folders that are not read: tests, other people's packages, what some Pythons lack, tables of numbers."""

HELD_OUT = {
    "validation": {"stdlib-asyncio": ("asyncio",), "stdlib-json+email": ("json", "email")},
    "test": {"stdlib-logging+http": ("logging", "http"), "stdlib-xml": ("xml",)},
}
DOCSTRINGS = "stdlib-docstrings"  # a validation set: docstrings only, of these files
DOCSTRING_FILES = {
    *("_pydecimal.py", "argparse.py", "calendar.py", "csv.py", "difflib.py", "doctest.py", "fractions.py", "heapq.py"),
    *("optparse.py", "pickletools.py", "random.py", "shutil.py", "statistics.py", "textwrap.py", "turtle.py"),
}


@dataclass(frozen=True)
class StdlibSets:
    """Folders of the prepared sets, by name, and the tokenizer.json they share."""

    train: Path
    validation: dict[str, Path]
    test: dict[str, Path]
    tokenizer: Path


@dataclass
class Corpora:
    """Texts by their path under the standard library, in order; `skipped` files could not be read as Python source."""

    train: dict[str, str]
    held_out: dict[str, dict[str, str]]
    skipped: list[str]


def prepare_stdlib(config: StdlibConfig, progress: bool = True) -> StdlibSets:
    """The prepared sets for the config's vocab_size and context_length, made on first use.

    The cache is keyed by the texts themselves. A kill leaves nothing that counts; of two first runs one waits.
    Raises RunError if this Python has no source of its standard library, or the disk is full.
    """
    corpora = read_stdlib(Path(sysconfig.get_paths()["stdlib"]))
    settings = [FORMAT_VERSION, config.vocab_size, config.context_length, corpora.train, corpora.held_out]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    folder = get_cache_root() / f"stdlib-{key}"
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_suffix(".lock"), f"the preparation of {folder}"):
                if not folder.is_dir():
                    _build(folder, corpora, config, progress)
    except OSError as e:
        raise RunError(
            f"cannot write {folder} ({e.strerror}); free space or set STACKEXP_CACHE to another folder"
        ) from e
    sets = {split: {name: folder / name for name in names} for split, names in _names().items()}
    return StdlibSets(folder / "train", sets["validation"], sets["test"], folder / "train" / "tokenizer.json")


def get_cache_root() -> Path:
    """$STACKEXP_CACHE, $XDG_CACHE_HOME/stackexp or ~/.cache/stackexp."""
    if root := os.environ.get("STACKEXP_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "stackexp")


def read_stdlib(root: Path) -> Corpora:
    """Read and split the .py files under `root`. Each set takes files in the order of their path's hash, up to its cap.

    Raises RunError if a set would be empty.
    """
    packages = {package: name for sets in HELD_OUT.values() for name, held in sets.items() for package in held}
    texts = {name: {} for name in ["train", *_names()["validation"], *_names()["test"]]}
    sizes, skipped = Counter(), []
    for path in sorted(_files(root), key=lambda path: hashlib.sha256(path.encode()).digest()):
        name = DOCSTRINGS if path in DOCSTRING_FILES else packages.get(path.split("/")[0], "train")
        if sizes[name] >= (TRAIN_BYTES if name == "train" else HELD_OUT_BYTES):
            continue
        try:
            with tokenize.open(root / path) as file:
                text = file.read() if name != DOCSTRINGS else docstrings(file.read())
            size = len(text.encode())
        except (OSError, SyntaxError, ValueError, RecursionError):  # in no known encoding, or not this version's Python
            skipped.append(path)
            continue
        if text.strip():
            texts[name][path] = text
            sizes[name] += size
    for name in texts:
        if not texts[name]:
            raise RunError(
                f"{root}: this Python comes without the source of its standard library (nothing for {name}); "
                "install it whole, or train on your own text with data.kind=shards"
            )
    return Corpora(texts.pop("train"), texts, skipped)


def docstrings(source: str) -> str:
    """All docstrings of a Python file in order, one blank line between. Raises SyntaxError if it does not parse."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node))) + "\n"


def _names() -> dict[str, list[str]]:
    return {
        "validation": [*HELD_OUT["validation"], DOCSTRINGS],
        "test": [*HELD_OUT["test"]],
    }


def _files(root: Path) -> list[str]:
    """Paths of the .py files under root, with slashes."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in LEFT_OUT and not f.startswith(("config-", "."))]
        found += [Path(folder, f).relative_to(root).as_posix() for f in files if f.endswith(".py")]
    return found


def _build(folder: Path, corpora: Corpora, config: StdlibConfig, progress: bool) -> None:
    """Train the tokenizer and write every set into a folder beside, then rename it. The caller holds the lock."""
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    sets = {"train": corpora.train, **corpora.held_out}
    try:
        with tqdm(total=len(sets) + 1, desc="tokenizer", unit="set", disable=not progress) as bar:
            tokenizer = train_tokenizer(corpora.train.values(), config.vocab_size)
            for name, texts in sets.items():
                bar.update()
                bar.set_description(name)
                write_documents(temporary / name, texts.values(), tokenizer, config.context_length)
            bar.update()
            bar.set_description(f"{len(corpora.train)} files to train on, {len(corpora.skipped)} skipped")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
