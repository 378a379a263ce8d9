"""An English corpus of manuals, dictionaries and books from Debian packages, with whole genres held out.

FOLDER/packages    the .deb files
FOLDER/cleaned     plain text of each package
FOLDER/text        train/<package>.jsonl, validation/<set>.jsonl, test/<set>.jsonl and sources.json
FOLDER/train       the prepared training set

Each step is written atomically, so a repeated command resumes.
"""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stackexp.data.debian import Package, PackageList, check_tools, download_packages, read_files
from stackexp.data.plain_text import to_documents
from stackexp.errors import RunError
from stackexp.files import (
    WRITE_REMEDY,
    create_folder_atomically,
    explain_failed_writes,
    hash_values,
    hold_lock,
    read_json,
    read_json_lines,
    write_json,
    write_json_lines,
)
from stackexp.terminal import open_bar

PACKAGES = Path(__file__).with_suffix(".yaml")
CLEANING_VERSION = 1  # increase it when the same packages give another text
MIN_CHARACTERS, MAX_CHARACTERS = 400, 30_000  # per document; longer ones are cut between paragraphs
HELD_OUT_BYTES = 1_200_000  # cap of a held-out set, about 1,000 chunks of 256 tokens
MIXED_SET, MIXED_SHARE = "training-genres", 96  # validation set of 1/96 of the training documents
COPIES, SHORT_COPIES, SHORT = 3, 50, 60  # copies kept of a paragraph, and of one below SHORT characters
COMMON_WORDS = re.compile(r"\b(the|of|and|to|a|in|is|for|that|it|or|be|with|as|are|this|by|on|not|an)\b", re.IGNORECASE)
MIN_COMMON_WORDS, MIN_ASCII = 0.12, 0.95  # share of the words, of the letters


def build_english(folder: Path, packages: PackageList, latest: bool = False) -> dict[str, Any]:
    """Download and clean the packages, write the sets to `folder`/text, and return the contents of sources.json.

    Raises RunError if a tool or a package is missing, a hash differs, or the folder holds the text of another list.
    """
    check_tools()
    text = folder / "text"
    with explain_failed_writes(folder, WRITE_REMEDY):
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder / ".lock", f"building {folder}"):
            files = download_packages(packages.packages, folder / "packages", latest)
            key = hash_values([CLEANING_VERSION, packages.validation, packages.test, *map(asdict, files)])
            if not text.exists():
                cleaned = clean_packages(files, folder / "cleaned")
                with create_folder_atomically(text) as temporary:
                    _write_sets(temporary, cleaned, packages, key)
            sources = read_json(text / "sources.json")
    if sources["key"] != key:
        raise RunError(f"{text}: made from other packages or settings; delete it or choose another --to")
    return sources


def clean_packages(files: dict[Package, Path], folder: Path) -> dict[Package, Path]:
    """Return a JSON Lines file of each package's documents in `folder`; write those that are missing."""
    folder.mkdir(exist_ok=True)
    keys = {package: hash_values([CLEANING_VERSION, asdict(package)])[:12] for package in files}
    cleaned = {package: folder / f"{package.name}-{keys[package]}.jsonl" for package in files}
    missing = [package for package in files if not cleaned[package].exists()]
    for package in open_bar(missing, desc="cleaning packages", unit="package"):
        _clean_package(package, files[package], cleaned[package])
    return cleaned


def _clean_package(package: Package, deb: Path, path: Path) -> None:
    documents = []
    for name, data in sorted(read_files(deb, package.files)):
        texts = [text for document in to_documents(data, package.format) for text in cut_document(document)]
        documents += [{"text": text, "source": f"{package.name}/{name}"} for text in texts if is_english(text)]
    if not documents:
        raise RunError(f"{deb}: no file with English text matches {package.files!r}; correct the list of packages")
    if package.max_bytes is not None:
        documents = _limit_bytes(documents, package.max_bytes)
    write_json_lines(path, documents)


def _limit_bytes(documents: list[dict[str, str]], max_bytes: int) -> list[dict[str, str]]:
    """Return a random choice of documents, in order, that reaches `max_bytes`."""
    chosen, size = set(), 0
    for _, index in sorted((hash_values(document["text"]), index) for index, document in enumerate(documents)):
        if size >= max_bytes:
            break
        chosen.add(index)
        size += len(documents[index]["text"].encode())
    return [document for index, document in enumerate(documents) if index in chosen]


def cut_document(text: str) -> Iterator[str]:
    """Cut a text between paragraphs into documents of at most MAX_CHARACTERS, not counting empty lines.

    A longer paragraph is a document of its own.
    """
    part: list[str] = []
    size = 0
    for paragraph in text.split("\n\n"):
        if part and size + len(paragraph) > MAX_CHARACTERS:
            yield "\n\n".join(part)
            part, size = [], 0
        part.append(paragraph)
        size += len(paragraph)
    yield "\n\n".join(part)


def is_english(text: str) -> bool:
    """Return True for a text of at least MIN_CHARACTERS with the common words of English."""
    letters = [character for character in text if character.isalpha()]
    if len(text) < MIN_CHARACTERS or sum(map(str.isascii, letters)) < MIN_ASCII * len(letters):
        return False
    words = len(re.findall(r"[^\W\d_]+", text))
    return len(COMMON_WORDS.findall(text)) >= MIN_COMMON_WORDS * words


class Deduplicator:
    """Removes repeated paragraphs, and documents that mostly repeat earlier paragraphs."""

    def __init__(self) -> None:
        self._copies: Counter[bytes] = Counter()
        self._held_out: set[bytes] = set()

    def hold_out(self, text: str) -> None:
        """Remove the long paragraphs of `text` from all later documents."""
        self._held_out |= {_normalize(paragraph) for paragraph in text.split("\n\n") if len(paragraph) >= SHORT}

    def filter(self, documents: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
        """Yield the documents that remain, without repeated paragraphs."""
        for document in documents:
            kept, repeated = [], 0
            for paragraph in document["text"].split("\n\n"):
                key, is_short = _normalize(paragraph), len(paragraph) < SHORT
                self._copies[key] += 1
                is_held_out = not is_short and key in self._held_out
                if not is_short and (self._copies[key] > 1 or is_held_out):
                    repeated += len(paragraph)
                if not is_held_out and self._copies[key] <= (SHORT_COPIES if is_short else COPIES):
                    kept.append(paragraph)
            text = "\n\n".join(kept)
            if len(text) >= MIN_CHARACTERS and repeated <= len(document["text"]) / 2:
                yield document | {"text": text}


def _normalize(paragraph: str) -> bytes:
    """Return a hash of a paragraph's letters and digits, without case."""
    return hashlib.blake2b(re.sub(r"[\W_]+", "", paragraph).lower().encode(), digest_size=8).digest()


def _write_sets(folder: Path, cleaned: dict[Package, Path], packages: PackageList, key: str) -> None:
    """Write all sets, held-out ones first, so that no training document repeats their paragraphs."""
    unique = Deduplicator()
    sizes: dict[str, dict[str, int]] = {}
    hashes = []

    def write(name: str, documents: list[dict[str, str]]) -> None:
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_json_lines(path, documents)
        texts = [document["text"] for document in documents]
        sizes[name] = {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
        hashes.append([name, hash_values(texts)])

    genres: dict[str, list[Package]] = {}
    for package in cleaned:
        genres.setdefault(package.genre, []).append(package)
    held_out = {f"validation/{genre}": genre for genre in packages.validation}
    held_out |= {f"test/{genre}": genre for genre in packages.test}
    if unknown := set(held_out.values()) - set(genres):
        raise RunError(f"no package has the held-out genre {min(unknown)}; correct the list of packages")
    for name, genre in held_out.items():
        rows = [row for package in genres.pop(genre) for row in read_json_lines(cleaned[package], is_log=False)]
        documents = list(unique.filter(rows))
        for document in documents:
            unique.hold_out(document["text"])
        write(name, _limit_bytes(documents, HELD_OUT_BYTES))
    mixed: list[dict[str, str]] = []
    training: dict[str, list[dict[str, str]]] = {}
    for package in sorted(itertools.chain(*genres.values()), key=lambda package: package.name):
        training[package.name] = []
        for row in read_json_lines(cleaned[package], is_log=False):
            is_mixed = int(hash_values(row["text"])[:8], 16) % MIXED_SHARE == 0
            (mixed if is_mixed else training[package.name]).append(row)
    mixed = list(unique.filter(mixed))
    if mixed:
        write(f"validation/{MIXED_SET}", mixed)
    for document in mixed:
        unique.hold_out(document["text"])
    for name, rows in training.items():
        if documents := list(unique.filter(rows)):
            write(f"train/{name}", documents)
    record = {
        "key": key,
        "sha256": hash_values(hashes),
        "sets": sizes,
        "packages": [asdict(package) for package in cleaned],
    }
    write_json(folder / "sources.json", record)
