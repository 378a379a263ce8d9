"""`data english` with small packages and a local mirror: sets, duplicates, hashes, missing tools and resumption."""

import json
import os
import random
import shutil
import signal
import subprocess
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import yaml
from processes import wait_until

from stackexp.config.compose import compose
from stackexp.config.data import DataConfig
from stackexp.data import english
from stackexp.data.debian import load_packages, read_files
from stackexp.data.shards import TokenSet
from stackexp.errors import RunError
from stackexp.files import compute_sha256

pytestmark = pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="needs dpkg-deb")
WORDS = ["lock", "list", "reader", "queue", "memory", "page", "file", "kernel", "signal", "process", "thread", "writer"]
GENRES = {"kernel-doc": "manuals", "shell-doc": "manuals", "novel": "novels", "essay": "essays"}
APT_GET = """#!/bin/sh
# apt-get download --quiet=2 NAME[=VERSION]
echo "$3" >> "$MIRROR/requests"
file=$(ls "$MIRROR/$(echo "$3" | tr = _)"*.deb 2>/dev/null)
if [ -z "$file" ]; then
    echo "E: Version '2' for '$3' was not found" >&2
    exit 100
fi
cp $file .
"""


def write_text(seed: int, paragraphs: int = 20) -> str:
    """Return paragraphs of English-like sentences, separated by blank lines."""
    rng = random.Random(seed)
    sentences = (
        " ".join(f"the {rng.choice(WORDS)} of a" for _ in range(4)) + f" {seed}-{n}" for n in range(paragraphs)
    )
    return "\n\n".join(f"In {sentence} is to be held." for sentence in sentences)


def build_deb(folder: Path, name: str, files: dict[str, str], version: str = "1:1.0") -> Path:
    root = folder / f"{name}.root"
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "DEBIAN").mkdir(parents=True)
    about = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: n <n@n>\nDescription: text\n"
    (root / "DEBIAN/control").write_text(about)
    path = folder / f"{name}_{version}_all.deb"
    subprocess.run(["dpkg-deb", "--build", "-Znone", root, path], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(root)
    return path


@pytest.fixture
def mirror(tmp_path, monkeypatch) -> Path:
    """A folder of packages that a substitute for apt-get downloads from, with the list packages.yaml."""
    folder, tools = tmp_path / "mirror", tmp_path / "tools"
    folder.mkdir()
    tools.mkdir()
    (tools / "apt-get").write_text(APT_GET)
    (tools / "apt-get").chmod(0o755)
    monkeypatch.setattr(english, "MIXED_SHARE", 8)
    monkeypatch.setenv("MIRROR", str(folder))
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    entries = []
    for number, (name, genre) in enumerate(GENRES.items()):
        texts = {f"usr/share/doc/{n}.txt": write_text(100 * number + n) for n in range(30)}
        path = build_deb(folder, name, texts | {"usr/share/doc/image.png": "no text"})
        about = {"genre": genre, "format": "text", "files": r".*\.txt", "license": "public domain"}
        entries.append({"name": name, "version": "1:1.0", "sha256": compute_sha256(path), **about})
    write_list(folder, entries)
    return folder


def write_list(mirror: Path, entries: list[dict]) -> None:
    contents = {"validation": ["novels"], "test": ["essays"], "packages": entries}
    (mirror / "packages.yaml").write_text(yaml.safe_dump(contents))


def read_list(mirror: Path) -> list[dict]:
    return yaml.safe_load((mirror / "packages.yaml").read_text())["packages"]


@pytest.fixture
def build(mirror, capture):
    """`build(to, *arguments)` builds the sets of the mirror and returns what it prints: `out` and `err`."""
    sizes = ("--vocab-size", "300", "--context-length", "64", "--workers", "1")
    return partial(capture, f"data english --packages {mirror}/packages.yaml", *sizes, "--to")


def read_texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_one_command_writes_text_sources_and_shards(build, tmp_path):
    to = tmp_path / "english"
    output = build(to).out
    sets = {path.relative_to(to / "text").as_posix() for path in (to / "text").rglob("*.jsonl")}
    mixed = f"validation/{english.MIXED_SET}.jsonl"
    assert sets == {
        "train/kernel-doc.jsonl",
        "train/shell-doc.jsonl",
        "validation/novels.jsonl",
        "test/essays.jsonl",
        mixed,
    }
    assert read_texts(to / "text/validation/novels.jsonl") == [write_text(200 + n) for n in sorted(range(30), key=str)]
    trained = [text for name in ("kernel-doc", "shell-doc") for text in read_texts(to / f"text/train/{name}.jsonl")]
    assert len(trained) + len(read_texts(to / "text" / mixed)) == 60
    assert TokenSet(to / "train").corpus.documents == len(trained)
    sources = json.loads((to / "text/sources.json").read_text())
    assert [package["license"] for package in sources["packages"]] == ["public domain"] * 4
    assert sources["sets"]["validation/novels"]["documents"] == 30
    assert f"SHA-256 of the text: {sources['sha256']}, not as in the list" in output


def test_the_config_trains_the_model_of_the_small_ablation_on_the_folder(build, empty_folder, invoke):
    small, config = compose(["ablation/small"], []), compose(["ablation/small_english"], [])
    for section in ("model", "optimizer", "schedule", "trainer", "seed"):
        assert getattr(config, section) == getattr(small, section)
    for key in (field.name for field in fields(DataConfig) if field.name != "kind"):
        assert getattr(config.data, key) == getattr(small.data, key), key
    error = invoke("fit --config ablation/small_english", expect=1)
    assert "train: no such folder; build it with: python -m stackexp data english" in error
    build(Path("data/english"))
    sizes = ["data.vocab_size=300", "data.context_length=64", "data.global_batch_tokens=1024", "data.eval_sequences=2"]
    steps = ["trainer.max_steps=1", "schedule.warmup_steps=0", "model.num_layers=2", "trainer.accelerator=cpu"]
    printed = invoke("fit --config ablation/small_english", *sizes, *steps)
    assert {"english/novels", f"english/{english.MIXED_SET}"} <= set(printed.split())


def test_the_built_in_list_is_valid():
    packages = load_packages(english.PACKAGES)
    genres = {package.genre for package in packages.packages}
    assert {*packages.validation, *packages.test} < genres
    assert len(packages.packages) == len({package.name for package in packages.packages}) > 30
    assert all(len(package.sha256) == 64 and package.license for package in packages.packages)


def test_a_repeated_command_downloads_and_writes_nothing(mirror, build, tmp_path):
    to = tmp_path / "english"
    build(to)
    before = {path: path.stat().st_mtime_ns for path in to.rglob("*.jsonl")}
    build(to)
    assert {path: path.stat().st_mtime_ns for path in to.rglob("*.jsonl")} == before
    assert len((mirror / "requests").read_text().split()) == len(GENRES)


def test_a_killed_command_resumes(mirror, build, tmp_path, program):
    to, whole = tmp_path / "english", tmp_path / "whole"
    arguments = ["--packages", mirror / "packages.yaml", "--vocab-size", "300", "--context-length", "64"]
    process = program.start("data", "english", "--to", to, *arguments)
    wait_until(lambda: list(to.glob("packages/*.deb")) or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (to / "train/corpus.json").exists(), "the kill was too late"
    next(to.glob("packages/*.deb")).unlink()
    (to / "packages/.part").mkdir(exist_ok=True)  # of a kill during a download
    build(to)
    build(whole)
    assert (to / "text/sources.json").read_text() == (whole / "text/sources.json").read_text()
    assert not (to / "packages/.part").exists()


def test_repeated_and_held_out_paragraphs_are_removed():
    texts = [write_text(n, 12) for n in range(8)]
    notice = "This notice is long enough to count as a repeated paragraph of each page of the manual."
    unique = english.Deduplicator()
    held_out = write_text(99, 4)
    unique.hold_out(held_out)
    rows = [{"text": f"{text}\n\n{notice}\n\n{held_out}"} for text in texts]
    rows += [{"text": texts[0].upper()}, {"text": write_text(50, 2)}]
    found = [row["text"] for row in unique.filter(rows)]
    assert found[: english.COPIES] == [f"{text}\n\n{notice}" for text in texts[: english.COPIES]]
    assert found[english.COPIES :] == texts[english.COPIES :], "the copy of a document and the short one are left out"


def test_long_documents_are_cut_between_paragraphs(monkeypatch):
    monkeypatch.setattr(english, "MAX_CHARACTERS", 500)
    text = write_text(0)
    parts = list(english.cut_document(text))
    assert "\n\n".join(parts) == text
    assert all(len(part) <= 600 for part in parts)


@pytest.mark.parametrize(
    "text",
    [
        "Too short.",
        " ".join(["Der Leser hält die Sperre und wartet auf den letzten Schreiber."] * 20),
        " ".join(["читатель держит блокировку"] * 40),
        " ".join(f"symbol_{n}" for n in range(100)),
    ],
)
def test_other_texts_are_not_english(text):
    assert english.is_english(write_text(0))
    assert not english.is_english(text)


def test_another_hash_is_an_error(mirror, build, tmp_path):
    entries = read_list(mirror)
    entries[1]["sha256"] = "0" * 64
    write_list(mirror, entries)
    error = build(tmp_path / "english", expect=1).err
    assert "shell-doc=1:1.0: SHA-256 is" in error
    assert "--latest" in error
    assert not list((tmp_path / "english/packages").glob("shell-doc*"))


def test_missing_versions_are_listed_and_latest_leaves_missing_packages_out(mirror, build, tmp_path):
    entries = read_list(mirror)
    entries[0]["version"], entries[1]["name"] = "2", "bash-doc"
    write_list(mirror, entries)
    to = tmp_path / "english"
    error = build(to, expect=1).err
    assert "2 of 4 packages cannot be downloaded: kernel-doc=2, bash-doc=1:1.0 (Version '2' for 'kernel-doc=2'" in error
    assert "left out: bash-doc" in build(to, "--latest").err
    sources = json.loads((to / "text/sources.json").read_text())
    assert {package["name"]: package["version"] for package in sources["packages"]}["kernel-doc"] == "1:1.0"
    assert len(sources["packages"]) == 3


def test_a_file_put_into_the_folder_needs_no_download(mirror, build, tmp_path):
    to = tmp_path / "english"
    (to / "packages").mkdir(parents=True)
    for path in mirror.glob("*.deb"):
        path.rename(to / "packages" / path.name)
    build(to)
    assert not (mirror / "requests").exists()


def test_missing_tools_are_a_one_line_error(build, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    error = build(tmp_path / "english", expect=1).err
    assert "apt-get and dpkg-deb: not installed; run the command on Debian or Ubuntu" in error
    assert not (tmp_path / "english").exists()


def test_the_text_of_another_list_is_refused(mirror, build, tmp_path):
    to = tmp_path / "english"
    build(to)
    entries = read_list(mirror)
    entries[0]["max_bytes"] = 1000
    write_list(mirror, entries)
    assert "made from other packages or settings; delete it" in build(to, expect=1).err


@pytest.mark.parametrize(("key", "value"), [("format", "htm"), ("files", "(")])
def test_a_wrong_format_or_pattern_is_found_before_a_download(mirror, build, tmp_path, key, value):
    entries = read_list(mirror)
    entries[0][key] = value
    write_list(mirror, entries)
    assert "packages.yaml: not a list of packages (" in build(tmp_path / "english", expect=1).err
    assert not (mirror / "requests").exists()


@pytest.mark.parametrize(
    "text", ["packages: [{name: a}]", "a: [", "- 1", "validation: []", "validation: [a]\ntest: [a]\npackages: []"]
)
def test_a_wrong_list_is_a_one_line_error(tmp_path, text):
    path = tmp_path / "list.yaml"
    path.write_text(text)
    with pytest.raises(RunError, match=r"list\.yaml: not a list of packages .*; correct the file"):
        load_packages(path)


def test_a_list_without_matching_files_or_genre_is_an_error(mirror, build, tmp_path):
    entries = read_list(mirror)
    write_list(mirror, [entry | {"files": "nothing"} for entry in entries])
    assert "no file with English text matches 'nothing'" in build(tmp_path / "one", expect=1).err
    write_list(mirror, [entry for entry in entries if entry["genre"] != "essays"])
    assert "no package has the held-out genre essays" in build(tmp_path / "two", expect=1).err


def test_a_damaged_package_is_an_error(mirror):
    path = next(mirror.glob("novel_*.deb"))
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(RunError, match=r"novel_.*\.deb: .*delete the file and rerun"):
        list(read_files(path, r".*\.txt"))


def test_limits_choose_documents_by_hash():
    package = [{"text": f"text {n}"} for n in range(100)]
    chosen = english._limit_bytes(package, 60)
    assert chosen == english._limit_bytes(package, 60)
    assert [row for row in package if row in chosen] == chosen
    assert 60 <= sum(len(row["text"]) for row in chosen) < 68
