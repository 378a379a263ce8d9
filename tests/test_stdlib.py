"""The quickstart corpus."""

import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stackexp.config.data import StdlibConfig
from stackexp.data import stdlib
from stackexp.data.shards import TokenSet
from stackexp.errors import RunError
from stackexp.files import get_cache_root

ROOT = Path(sysconfig.get_paths()["stdlib"])
SMALL = StdlibConfig(vocab_size=300, context_length=64)
SETS = ["stdlib-asyncio", "stdlib-json+email", "stdlib-docstrings", "stdlib-logging+http", "stdlib-xml"]


@pytest.fixture
def cache(cache, monkeypatch) -> Path:
    monkeypatch.setattr(stdlib, "TRAIN_BYTES", 200_000)
    return cache


@pytest.fixture(scope="module")
def corpora() -> dict[str, dict[str, str]]:
    return stdlib.read_stdlib(ROOT)


def test_sets_are_disjoint_and_large_enough(corpora):
    paths = [path for texts in corpora.values() for path in texts]
    assert len(paths) == len(set(paths))
    assert sorted(corpora) == sorted(["train", *SETS])
    for name, texts in corpora.items():
        assert sum(map(len, texts.values())) > 50_000, name
    assert 2_000_000 < sum(map(len, corpora["train"].values())) < stdlib.TRAIN_BYTES + 1_000_000
    assert {"test", "tests", "site-packages", "idlelib"}.isdisjoint(part for path in paths for part in path.split("/"))
    assert not any(
        path.startswith(("asyncio/", "json/", "email/", "logging/", "http/", "xml/")) for path in corpora["train"]
    )


def test_docstrings_set_contains_docstrings_only(corpora):
    texts = corpora["stdlib-docstrings"]
    assert not set(texts) & set(corpora["train"])
    assert texts["heapq.py"].startswith("Heap queue algorithm")
    code = 'import a\n"""not a docstring"""\ndef f(): "of f"\nclass C:\n    "of C"\n    async def g(self): "of g"\n'
    assert stdlib.extract_docstrings(code) == "of f\n\nof C\n\nof g\n"


def test_sets_are_prepared_once_and_then_cached(cache):
    first = stdlib.prepare_stdlib(SMALL)
    assert list(first.validation) + list(first.test) == SETS
    folders = [first.train, *first.validation.values(), *first.test.values()]
    opened = [TokenSet(folder) for folder in folders]
    assert all(len(tokens) > 100 for tokens in opened)
    assert len({tokens.corpus.tokenizer for tokens in opened}) == 1
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert stdlib.prepare_stdlib(SMALL) == first
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    other = stdlib.prepare_stdlib(StdlibConfig(vocab_size=300, context_length=32))
    assert other.train.parent != first.train.parent
    assert TokenSet(other.train).corpus.context_length == 32


def test_cache_root_follows_the_environment(monkeypatch):
    for name in ("STACKEXP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value, root in (("HOME", "/x", "/x/.cache/stackexp"), ("XDG_CACHE_HOME", "/xdg", "/xdg/stackexp")):
        monkeypatch.setenv(name, value)
        assert get_cache_root() == Path(root)


SCRIPT = """
from stackexp.config.data import StdlibConfig
from stackexp.data import stdlib
stdlib.TRAIN_BYTES = 200_000
stdlib.prepare_stdlib(StdlibConfig(vocab_size=300, context_length=64))
"""


def start(**kwargs) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", SCRIPT], env=os.environ, **kwargs)


def test_killed_preparation_leaves_no_set(cache):
    for _ in range(5):  # the machine may finish before the kill
        process = start()
        while not list(cache.glob(".stdlib-*/train")) and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if hit := bool(list(cache.glob(".stdlib-*"))):
            break
        shutil.rmtree(cache)
    assert hit, "no kill hit an unfinished preparation"
    assert not [path for path in cache.glob("stdlib-*") if not path.suffix]
    prepared = stdlib.prepare_stdlib(SMALL)
    assert len(TokenSet(prepared.train)) > 100
    assert not list(cache.glob(".stdlib-*"))


def fake_stdlib(folder: Path) -> Path:
    packages = [package for group in (stdlib.VALIDATION_PACKAGES | stdlib.TEST_PACKAGES).values() for package in group]
    for name in [f"{package}/__init__.py" for package in packages] + ["heapq.py", "os.py", "test/test_os.py"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'"""Docstring of {name}."""\n')
    return folder


def test_declared_encodings_are_read_and_broken_files_skipped(tmp_path):
    root = fake_stdlib(tmp_path)
    (root / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    (root / "binary.py").write_bytes(b"name = '\xe9'\n")
    (root / "csv.py").write_text("def broken(:\n")
    (root / "empty.py").write_text("")
    texts = stdlib.read_stdlib(root)
    assert sorted(texts["train"]) == ["latin.py", "os.py"]
    assert texts["train"]["latin.py"].endswith("name = 'é'\n")
    assert "csv.py" not in texts["stdlib-docstrings"]


def test_unwritable_cache_is_a_one_line_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STACKEXP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RunError, match=r"cannot be written .*STACKEXP_CACHE"):
        stdlib.prepare_stdlib(SMALL)


def test_packages_add_files_that_repeat_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib, "TRAIN_BYTES_WITH_PACKAGES", 60)
    root = tmp_path / "site"
    files = {"one/a.py": "a = 1\n" * 3, "one/copy.py": "a = 1\n" * 3, "two/held_out.py": "held = 'out'\n"}
    files |= {"two/tests/test_a.py": "assert a\n", "two/latin.py": "# coding: unknown\n", "two/b.py": "b = 2\n" * 9}
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    known = {"train": {"x.py": "x = 0\n"}, "held": {"y.py": "held = 'out'\n"}}
    found = stdlib.read_packages(root, known)
    assert sorted(found.values()) == ["a = 1\n" * 3, "b = 2\n" * 9]
    assert all(path.startswith("packages/") for path in found)
    monkeypatch.setattr(stdlib, "TRAIN_BYTES_WITH_PACKAGES", 10)
    assert len(stdlib.read_packages(root, known)) == 1, "the last file may exceed the cap"


def test_the_prepared_folder_lists_the_installed_packages(cache, tmp_path, monkeypatch):
    site = tmp_path / "site"
    for name, version in [("one", "1.2"), ("stackexp", "0.1.0"), ("a_b", "3")]:
        (site / f"{name}-{version}.dist-info").mkdir(parents=True)
        (site / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (site / "one.py").write_text("one = 1\n")
    paths = sysconfig.get_paths() | {"purelib": str(site)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    folder = stdlib.prepare_stdlib(replace(SMALL, packages=True)).train.parent
    assert (folder / "requirements.txt").read_text() == f"# Python {platform.python_version()}\na_b==3\none==1.2\n"
    assert not (stdlib.prepare_stdlib(SMALL).train.parent / "requirements.txt").exists()
