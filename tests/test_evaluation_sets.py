"""Evaluation sets: reading every kind of file, caching and conversion."""

import gzip
import json
import math
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from corpora import prepare_set
from evaluation_files import (
    IDS,
    TEXTS,
    TOKENIZER,
    T,
    V,
    config,
    make_json_lines,
    open_one,
    read_tokens,
    write_raw,
)
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from stackexp.cli import main
from stackexp.data import evaluation_sets
from stackexp.data.evaluation_sets import EvaluationSet, find_sets, open_set
from stackexp.data.olmo import NAMES
from stackexp.data.token_files import write_token_file
from stackexp.data.tokenizer import KnownTokenizer, count_token_bytes, train_tokenizer
from stackexp.data.units import write_documents
from stackexp.datamodules.pretraining import build_perplexity_loader
from stackexp.errors import RunError
from stackexp.modules.metrics import ChunkLosses
from stackexp.modules.scores import compute_set_scores

pytestmark = pytest.mark.usefixtures("cache")


WRITERS = {
    "raw.npy": lambda folder: write_raw(folder / "raw.npy"),
    "real.npy": lambda folder: np.save(folder / "real.npy", np.array(IDS, np.int32)),
    "raw.bin": lambda folder: write_raw(folder / "raw.bin"),
    "text.jsonl": lambda folder: (folder / "text.jsonl").write_bytes(make_json_lines()),
    "text.jsonl.gz": lambda folder: (folder / "text.jsonl.gz").write_bytes(gzip.compress(make_json_lines())),
    "text.jsonl.zst": lambda folder: (folder / "text.jsonl.zst").write_bytes(zstandard.compress(make_json_lines())),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_set_gives_its_tokens(tmp_path, known, name):
    WRITERS[name](tmp_path)
    dataset = open_one(tmp_path / name, known)
    assert read_tokens(dataset) == IDS
    assert len(dataset.chunks) == len(IDS) // T


def test_a_prepared_set_is_concatenated_and_cut_at_any_context_length(tmp_path, known):
    corpus = write_documents(tmp_path / "set", TEXTS, TOKENIZER, T)
    for context_length in (T, 7, 100):
        dataset = open_one(tmp_path / "set", known, context_length=context_length)
        assert read_tokens(dataset) == IDS[: corpus.sequences * T]
        assert {len(chunk) for chunk in dataset.chunks} == {context_length}
        assert np.concatenate(list(dataset.chunks)).tolist() == IDS[: len(dataset.chunks) * context_length]


def test_a_text_file_is_one_document(tmp_path, known):
    """Equal bytes in another format are another set."""
    (tmp_path / "a.jsonl").write_bytes(make_json_lines())
    (tmp_path / "a.txt").write_bytes(make_json_lines())
    assert read_tokens(open_one(tmp_path / "a.jsonl", known)) == IDS
    assert read_tokens(open_one(tmp_path / "a.txt", known)) != IDS
    (tmp_path / "text.txt").write_text(TEXTS[0] + TEXTS[1])
    assert read_tokens(open_one(tmp_path / "text.txt", known)) == [*TOKENIZER.encode(TEXTS[0] + TEXTS[1]).ids, 0]


@pytest.mark.parametrize("name", [b"caf\xe9.npy", b"a\nb.npy"], ids=["latin-1", "line feed"])
def test_names_that_cannot_be_written_are_refused_at_once(tmp_path, name):
    write_raw(tmp_path / os.fsdecode(name))
    with pytest.raises(RunError, match="is not UTF-8 or has control characters; rename it"):
        find_sets("mine", tmp_path)


def test_a_text_with_a_long_name_is_read(tmp_path, known):
    path = tmp_path / f"{'x' * 240}.txt"
    path.write_text(TEXTS[0], encoding="utf-8")
    assert read_tokens(open_one(path, known)) == [*TOKENIZER.encode(TEXTS[0]).ids, 0]


def test_lines_without_a_document_are_skipped_with_a_warning(tmp_path, known, caplog):
    (tmp_path / "text.jsonl").write_bytes(b'{"id": 1}\n' + make_json_lines() + b"{broken\n")
    for _ in range(2):  # the second time, the tokens are in the cache
        assert read_tokens(open_one(tmp_path / "text.jsonl", known)) == IDS
        assert "skipped 2 lines without a document; the first: text.jsonl:1: no text" in caplog.text
        caplog.clear()


# The cache


def test_text_is_tokenized_again_only_if_it_or_the_tokenizer_changes(tmp_path, known, cache, monkeypatch):
    path, reads = tmp_path / "text.jsonl", []
    read_pieces = evaluation_sets.read_pieces
    monkeypatch.setattr(evaluation_sets, "read_pieces", lambda source: reads.append(source) or read_pieces(source))
    path.write_bytes(make_json_lines())
    first = open_one(path, known)
    assert open_one(path, known).identity == first.identity
    assert len(reads) == 1
    path.write_bytes(make_json_lines() + b'{"text": "one more"}\n')
    assert len(read_tokens(open_one(path, known))) > len(IDS)
    assert len(reads) == 2
    train_tokenizer(TEXTS, V - 10).save(str(tmp_path / "other.json"))
    assert read_tokens(open_one(path, KnownTokenizer.read(tmp_path / "other.json"))) != read_tokens(
        open_one(path, known)
    )
    assert len(reads) == 3
    assert len(list(cache.rglob("*.npy"))) == 3


def test_a_damaged_file_in_the_cache_is_replaced(tmp_path, known, cache):
    (tmp_path / "text.jsonl").write_bytes(make_json_lines())
    open_one(tmp_path / "text.jsonl", known)
    [file] = cache.rglob("*.npy")
    whole = file.read_bytes()
    for damaged in (whole[:-2], whole[:-2] + bytes(255 - byte for byte in whole[-2:])):
        file.write_bytes(damaged)
        assert read_tokens(open_one(tmp_path / "text.jsonl", known)) == IDS


def open_in_process(path: Path, tokenizer: Path, start, queue) -> None:
    write, made = evaluation_sets.write_token_file, []
    evaluation_sets.write_token_file = lambda *args, **options: made.append(write(*args, **options))
    start.wait()
    queue.put((read_tokens(open_one(path, KnownTokenizer.read(tokenizer))), len(made)))


def test_concurrent_processes_convert_once(tmp_path, known):
    (tmp_path / "text.jsonl").write_bytes(make_json_lines())
    context = multiprocessing.get_context("fork")
    start, queue = context.Barrier(4), context.Queue()
    arguments = (tmp_path / "text.jsonl", known.path, start, queue)
    processes = [context.Process(target=open_in_process, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    assert [ids for ids, _ in found] == [IDS] * 4
    assert sorted(made for _, made in found) == [0, 0, 0, 1]
    for process in processes:
        process.join()


# Folders of sets


def test_a_folder_of_sets_is_a_group(tmp_path, known):
    group = tmp_path / "group"
    for name in ("raw.npy", "text.jsonl.gz"):
        group.mkdir(exist_ok=True)
        WRITERS[name](group)
    write_token_file(group / "with.record.npy", [np.array(IDS)], vocab_size=V, tokenizer=known.fingerprint, source="x")
    write_documents(group / "prepared", TEXTS, TOKENIZER, T)
    write_raw(group / "4chan" / "val" / "part-0-00000.npy")  # as on OLMo's server
    write_raw(group / "two" / "a.npy")
    write_raw(group / "two" / "b.npy")
    (group / "README.md").write_text("what these are")
    (group / ".hidden.npy").write_bytes(b"")
    (group / "two" / "upwards").symlink_to(group)
    found = find_sets("g", group)
    assert list(found) == ["g/4chan", "g/prepared", "g/raw", "g/text", "g/two/a", "g/two/b", "g/with.record"]
    for name, path in found.items():
        assert read_tokens(open_set(name, path, config(), known))[: 10 * T] == IDS[: 10 * T]
    assert find_sets("one", group / "raw.npy") == {"one": group / "raw.npy"}
    assert find_sets("one", group / "prepared") == {"one": group / "prepared"}


# Scores


def score_uniform_bytes(dataset: EvaluationSet, table: np.ndarray, batch_size: int = 7) -> dict[str, float]:
    """Score a model that assigns the same probability to every byte."""
    losses, table = ChunkLosses(len(dataset.chunks)), torch.from_numpy(table)
    for batch in build_perplexity_loader(dataset.chunks, batch_size):
        num_bytes = table[batch["tokens"][:, 1:]]
        losses.update(batch["index"], batch["length"], num_bytes * math.log(256), num_bytes)
    return compute_set_scores(losses.compute(), dataset.bytes_per_token)


def test_bits_per_byte_do_not_depend_on_the_tokenizer(tmp_path, known):
    (tmp_path / "text.jsonl").write_bytes(make_json_lines())
    train_tokenizer(TEXTS, V - 40).save(str(tmp_path / "other.json"))
    other, size = KnownTokenizer.read(tmp_path / "other.json"), sum(len(text.encode()) for text in TEXTS)
    for tokenizer in (known, other):
        table = count_token_bytes(tokenizer.tokenizer, V)
        dataset = open_one(tmp_path / "text.jsonl", tokenizer, score_remainder=True)
        scores = score_uniform_bytes(dataset, table)
        assert scores["bytes"] == size - table[read_tokens(dataset)[0]], "all but the first token"
        assert scores["bits_per_byte"] == pytest.approx(8, rel=1e-6)


def train_word_pieces() -> Tokenizer:
    """A tokenizer in lower case, whose tokens inside words begin with ##."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=90, special_tokens=["[UNK]", "<|endoftext|>"], limit_alphabet=20, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def train_with_a_space_before_the_text() -> Tokenizer:
    """A tokenizer like SentencePiece's: U+2581 is a space, and begins every document."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def train_with_spaces_in_bytes() -> Tokenizer:
    """Return a tokenizer that replaces a space by U+2581, which it encodes as three byte tokens."""
    vocabulary = {"<unk>": 0, "</s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " ")])
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def train_with_normalization() -> Tokenizer:
    tokenizer = train_tokenizer(TEXTS, V)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


TRAINERS = (
    *(train_word_pieces, train_with_a_space_before_the_text, train_with_spaces_in_bytes),
    train_with_normalization,
)


@pytest.mark.parametrize("train", TRAINERS)
def test_bytes_are_those_of_the_text_for_every_tokenizer(tmp_path, train):
    """Ids without a text have a byte count only if they decode to a text of the same size."""
    train().save(str(tmp_path / "tokenizer.json"))
    tokenizer = KnownTokenizer.read(tmp_path / "tokenizer.json")
    texts = [text.replace("ï", "i\u0308") for text in TEXTS]
    size = sum(len(text.encode()) for text in texts)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    write_documents(tmp_path / "prepared", texts, tokenizer.tokenizer, T)
    for name in ("text.jsonl", "prepared"):
        dataset = open_one(tmp_path / name, tokenizer)
        assert not dataset.has_exact_bytes
        assert dataset.bytes_per_token * len(dataset.chunks.tokens) == pytest.approx(size, rel=0.02), "the last chunk"
    ids = read_tokens(open_one(tmp_path / "text.jsonl", tokenizer))
    raw = write_raw(tmp_path / "raw.npy", ids)
    options = ("--to", tmp_path / "from-ids", "--tokenizer", tokenizer.path, "--context-length", T)
    assert main(["data", "prepare", str(raw), *map(str, options)]) == 0
    for name in ("raw.npy", "from-ids"):
        dataset = open_one(tmp_path / name, tokenizer)
        is_known = dataset.has_exact_bytes or bool(dataset.bytes_per_token)
        assert is_known == (train is train_with_normalization)


@pytest.mark.parametrize("unit_bytes", [1, 1 << 20])
def test_bytes_are_unknown_if_those_of_one_file_of_ids_are(tmp_path, unit_bytes):
    train_with_spaces_in_bytes().save(str(tmp_path / "tokenizer.json"))
    tokenizer = KnownTokenizer.read(tmp_path / "tokenizer.json")
    for name, text in {"a": "withoutspaces\n", "b": "with spaces\n"}.items():
        write_raw(tmp_path / "ids" / f"{name}.npy", [*tokenizer.tokenizer.encode(text).ids, 1] * 9)
    options = {"tokenizer": tokenizer.path, "context_length": T, "unit_bytes": unit_bytes}
    assert prepare_set(tmp_path / "ids" / "a.npy", tmp_path / "a", **options).bytes == 9 * len("withoutspaces\n")
    assert prepare_set(tmp_path / "ids", tmp_path / "both", **options).bytes == 0
    assert len(list((tmp_path / "both").glob("unit.*"))) == (2 if unit_bytes == 1 else 1)
    dataset = open_one(tmp_path / "both", tokenizer)
    assert not dataset.bytes_per_token
    assert not dataset.has_exact_bytes, "although the first file is exact"


def test_without_a_tokenizer_text_bytes_come_from_the_record(tmp_path):
    record = {"vocab_size": V, "tokenizer": "gpt-neox-20b", "source": "x"}
    write_token_file(tmp_path / "set.npy", [np.array(IDS)], text_bytes=3 * len(IDS), **record)
    scores = score_uniform_bytes(open_one(tmp_path / "set.npy"), np.zeros(V, np.int64))
    assert scores["bytes"] == 3 * scores["tokens"]
    write_raw(tmp_path / "raw.npy")
    assert "bits_per_byte" not in score_uniform_bytes(open_one(tmp_path / "raw.npy"), np.zeros(V, np.int64))


def test_the_identity_of_a_set_changes_with_its_contents(tmp_path, known):
    first = open_one(write_raw(tmp_path / "a.npy"), known).identity
    assert open_one(tmp_path / "a.npy", known).identity == first
    assert open_one(write_raw(tmp_path / "a.npy", [1, *IDS[1:]]), known).identity != first
    for name, texts in {"one": TEXTS, "two": TEXTS[::-1]}.items():
        write_documents(tmp_path / name, texts, TOKENIZER, T)
    assert open_one(tmp_path / "one", known).identity != open_one(tmp_path / "two", known).identity


def test_opening_many_sets_loads_none_into_memory(tmp_path):
    block = np.arange(1_000_000, dtype="<u2") % 50_280
    for version, names in NAMES.items():
        for name in names:
            (tmp_path / version).mkdir(exist_ok=True)
            (tmp_path / version / f"{name}.npy").write_bytes(block.tobytes())
    begin, settings = time.process_time(), config(vocab_size=50_304, context_length=2048)
    sets = [open_set(*item, settings, None) for v in NAMES for item in find_sets(v, tmp_path / v).items()]
    assert time.process_time() - begin < 2
    assert [dataset.name for dataset in sets] == [
        f"{version}/{name}" for version in NAMES for name in sorted(NAMES[version])
    ]
    assert all(isinstance(dataset.chunks.tokens, np.memmap) for dataset in sets)
    assert {len(dataset.chunks) for dataset in sets} == {488}


def test_folder_of_source_files_is_one_set(tmp_path, known, caplog):
    """Read a document per file, in the order of the names, as `data prepare` does."""
    folder = tmp_path / "code"
    for number, text in enumerate(TEXTS):
        path = folder / f"part{number % 3}" / f"{number:02}.{('py', 'md')[number % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "logo.png").write_bytes(b"not text")
    assert find_sets("mine", folder) == {"mine": folder}
    (tmp_path / "mixed").mkdir()
    for name in ("setup.py", "requirements.txt"):
        (tmp_path / "mixed" / name).write_text("text")
    (tmp_path / "mixed" / "code").symlink_to(folder)
    (tmp_path / "mixed" / "empty").mkdir()
    assert list(find_sets("mine", tmp_path / "mixed")) == ["mine/requirements", "mine/code"]
    assert "mixed: its .py and .rst files are not scored" in caplog.text
    order = sorted(range(len(TEXTS)), key=lambda n: (n % 3, n))
    expected = [id_ for n in order for id_ in [*TOKENIZER.encode(TEXTS[n]).ids, 0]]
    assert read_tokens(open_one(folder, known)) == expected
    (folder / "part0" / "00.py").write_text("changed\n")
    assert read_tokens(open_one(folder, known)) != expected
