"""Sets to validate on: that every kind of file gives the tokens it stands for, and every mistake one line."""

import gzip
import json
import logging
import math
import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from stackexp.config.data import ShardsConfig
from stackexp.data import converted_sets
from stackexp.data.evaluation_sets import EvaluationSet, KnownTokenizer, expand, open_set
from stackexp.data.olmo import NAMES
from stackexp.data.packing import write_documents
from stackexp.data.token_files import write_token_file
from stackexp.data.tokenizer import count_token_bytes, train_tokenizer
from stackexp.datamodules.perplexity import perplexity_loader
from stackexp.errors import RunError
from stackexp.modules.metrics import ChunkLosses
from stackexp.modules.scores import compute_set_scores

T, V = 16, 300
TEXTS = [f"line {n} of {n * n} lines, naïve\n" * 3 for n in range(40)]
TOKENIZER = train_tokenizer(TEXTS, V)
IDS = [id_ for text in TEXTS for id_ in [*TOKENIZER.encode(text).ids, 0]]  # documents, each with its end


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("STACKEXP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sets"


@pytest.fixture
def known(tmp_path) -> KnownTokenizer:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    return KnownTokenizer.read(tmp_path / "tokenizer.json")


def config(**changes) -> ShardsConfig:
    return ShardsConfig(**{"path": "x", "vocab_size": V, "context_length": T} | changes)


def opened(path: Path, known: KnownTokenizer | None = None, **changes) -> EvaluationSet:
    return open_set("set", path, config(**changes), known)


def tokens_of(each: EvaluationSet) -> list[int]:
    return each.chunks.tokens[0 : len(each.chunks.tokens)].tolist()


def raw(path: Path, ids: list[int] = IDS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.array(ids, "<u2").tobytes())
    return path


def json_lines() -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def write_mds(folder: Path, column: str, encoding: str, samples: list, **options) -> Path:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={column: encoding}, size_limit=2000, **options) as writer:
        for sample in samples:
            writer.write({column: sample})
    return folder


def parts(dtype: str) -> list[np.ndarray]:
    """The ids as samples of unequal length."""
    return np.split(np.array(IDS, dtype), [5, 40, 300])


MAKERS = {
    "raw.npy": lambda folder: raw(folder / "raw.npy"),
    "real.npy": lambda folder: np.save(folder / "real.npy", np.array(IDS, np.int32)),
    "raw.bin": lambda folder: raw(folder / "raw.bin"),
    "text.jsonl": lambda folder: (folder / "text.jsonl").write_bytes(json_lines()),
    "text.jsonl.gz": lambda folder: (folder / "text.jsonl.gz").write_bytes(gzip.compress(json_lines())),
    "text.jsonl.zst": lambda folder: (folder / "text.jsonl.zst").write_bytes(zstandard.compress(json_lines())),
    "mds": lambda folder: write_mds(folder / "mds", "tokens", "ndarray:uint16", parts("uint16")),
    "bytes64": lambda folder: write_mds(folder / "bytes64", "tokens", "bytes", [p.tobytes() for p in parts("<i8")]),
    "bytes16": lambda folder: write_mds(folder / "bytes16", "tokens", "bytes", [p.tobytes() for p in parts("<u2")]),
    "mds-text": lambda folder: write_mds(folder / "mds-text", "text", "str", TEXTS),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_kind_of_set_holds_the_tokens_it_stands_for(tmp_path, known, name):
    MAKERS[name](tmp_path)
    each = opened(tmp_path / name, known)
    assert tokens_of(each) == IDS
    assert len(each.chunks) == len(IDS) // T


@pytest.mark.parametrize("context_length", [T, 7, 100])
def test_a_prepared_set_is_one_row_of_tokens_cut_at_any_context_length(tmp_path, known, context_length):
    corpus = write_documents(tmp_path / "set", TEXTS, TOKENIZER, T)
    each = opened(tmp_path / "set", known, context_length=context_length)
    assert tokens_of(each) == IDS[: corpus.sequences * T]
    assert {len(chunk) for chunk in each.chunks} == {context_length}
    assert np.concatenate(list(each.chunks)).tolist() == IDS[: len(each.chunks) * context_length]


def test_a_text_is_one_document(tmp_path, known):
    (tmp_path / "text.txt").write_text(TEXTS[0] + TEXTS[1])
    assert tokens_of(opened(tmp_path / "text.txt", known)) == [*TOKENIZER.encode(TEXTS[0] + TEXTS[1]).ids, 0]


def test_lines_without_a_document_are_left_out_with_a_warning(tmp_path, known, caplog):
    (tmp_path / "text.jsonl").write_bytes(b'{"id": 1}\n' + json_lines() + b"{broken\n")
    assert tokens_of(opened(tmp_path / "text.jsonl", known)) == IDS
    assert "2 lines hold no document and are left out; the first: text.jsonl:1: no text" in caplog.text


# The cache


def test_text_is_tokenised_once_as_long_as_neither_it_nor_the_tokenizer_changes(tmp_path, known, cache, monkeypatch):
    path, reads = tmp_path / "text.jsonl", []
    read_pieces = converted_sets.read_pieces
    monkeypatch.setattr(converted_sets, "read_pieces", lambda source: reads.append(source) or read_pieces(source))
    path.write_bytes(json_lines())
    first = opened(path, known)
    assert opened(path, known).identity == first.identity
    assert len(reads) == 1
    path.write_bytes(json_lines() + b'{"text": "one more"}\n')
    assert len(tokens_of(opened(path, known))) > len(IDS)
    assert len(reads) == 2
    train_tokenizer(TEXTS, V - 10).save(str(tmp_path / "other.json"))
    assert tokens_of(opened(path, KnownTokenizer.read(tmp_path / "other.json"))) != tokens_of(opened(path, known))
    assert len(reads) == 3
    assert len(list(cache.glob("*.npy"))) == 3


def test_a_damaged_file_of_the_cache_is_made_again(tmp_path, known, cache):
    (tmp_path / "text.jsonl").write_bytes(json_lines())
    opened(tmp_path / "text.jsonl", known)
    [file] = cache.glob("*.npy")
    file.write_bytes(file.read_bytes()[:-2])
    assert tokens_of(opened(tmp_path / "text.jsonl", known)) == IDS


def open_it(path: Path, tokenizer: Path, start, queue) -> None:
    write, made = converted_sets.write_token_file, []
    converted_sets.write_token_file = lambda *args, **options: made.append(write(*args, **options))
    start.wait()
    queue.put((tokens_of(opened(path, KnownTokenizer.read(tokenizer))), len(made)))


def test_of_processes_that_need_it_at_once_one_makes_it(tmp_path, known):
    (tmp_path / "text.jsonl").write_bytes(json_lines())
    context = multiprocessing.get_context("fork")
    start, queue = context.Barrier(4), context.Queue()
    arguments = (tmp_path / "text.jsonl", known.path, start, queue)
    processes = [context.Process(target=open_it, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    assert [ids for ids, _ in found] == [IDS] * 4
    assert sorted(made for _, made in found) == [0, 0, 0, 1]
    for process in processes:
        process.join()


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, known, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STACKEXP_CACHE", str(tmp_path / "file"))
    (tmp_path / "text.jsonl").write_bytes(json_lines())
    with pytest.raises(RunError, match=r"cannot write .*; free space or set STACKEXP_CACHE") as error:
        opened(tmp_path / "text.jsonl", known)
    assert "\n" not in str(error.value)


# Folders of sets


def test_a_folder_of_sets_is_a_group(tmp_path, known):
    group = tmp_path / "group"
    for name in ("raw.npy", "text.jsonl.gz"):
        group.mkdir(exist_ok=True)
        MAKERS[name](group)
    write_token_file(group / "with.record.npy", [np.array(IDS)], vocab_size=V, tokenizer=known.fingerprint, source="x")
    write_documents(group / "prepared", TEXTS, TOKENIZER, T)
    raw(group / "4chan" / "val" / "part-0-00000.npy")  # as on OLMo's server
    raw(group / "two" / "a.npy")
    raw(group / "two" / "b.npy")
    (group / "README.md").write_text("what these are")
    (group / ".hidden.npy").write_bytes(b"")
    (group / "two" / "upwards").symlink_to(group)
    found = expand("g", group)
    assert list(found) == ["g/4chan", "g/prepared", "g/raw", "g/text", "g/two/a", "g/two/b", "g/with.record"]
    for name, path in found.items():
        assert tokens_of(open_set(name, path, config(), known))[: 10 * T] == IDS[: 10 * T]
    assert expand("one", group / "raw.npy") == {"one": group / "raw.npy"}
    assert expand("one", group / "prepared") == {"one": group / "prepared"}


def test_two_files_of_one_name_are_not_mixed_up(tmp_path):
    raw(tmp_path / "a.npy")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(RunError, match=r"a\.npy and a\.txt are both g/a; rename one"):
        expand("g", tmp_path)


def test_what_is_missing_is_told_with_the_command_that_makes_it(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RunError, match=r"data/olmo/v2: no such folder; fetch them with: python -m stackexp data fetch v2$"
    ):
        expand("v2", Path("data/olmo/v2"))
    with pytest.raises(
        RunError, match=r"fetch v3; in another vocabulary then: data retokenize data/olmo/v3 --to mine/v3"
    ):
        expand("v3", Path("mine/v3"))
    with pytest.raises(RunError, match=r"nowhere: no such file or folder, set x; .* data prepare SOURCE --to nowhere"):
        expand("x", Path("nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"empty: holds no sets; expected .*\.npy"):
        expand("x", Path("empty"))
    for name in NAMES["v2"][2:]:
        raw(Path(f"data/olmo/v2/{name}.npy"))
    expand("v2", Path("data/olmo/v2"), whole=False)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert len(expand("v2", Path("data/olmo/v2"))) == 11
    assert (
        "v2: 2 sets are missing: 4chan, c4_100_domains; fetch them with: python -m stackexp data fetch" in caplog.text
    )


# Figures


def figures_of(each: EvaluationSet, table: np.ndarray, size: int = 7) -> dict[str, float]:
    """Of a model to which every byte is as likely as any other."""
    losses, table = ChunkLosses(len(each.chunks)), torch.from_numpy(table)
    for batch in perplexity_loader(each.chunks, size):
        num_bytes = table[batch["tokens"][:, 1:]]
        losses.update(batch["index"], batch["length"], num_bytes * math.log(256), num_bytes)
    return compute_set_scores(losses.gather(), each.bytes_per_token)


def test_bits_per_byte_do_not_depend_on_the_tokenizer(tmp_path, known):
    (tmp_path / "text.jsonl").write_bytes(json_lines())
    train_tokenizer(TEXTS, V - 40).save(str(tmp_path / "other.json"))
    other, size = KnownTokenizer.read(tmp_path / "other.json"), sum(len(text.encode()) for text in TEXTS)
    for tokenizer in (known, other):
        table = count_token_bytes(tokenizer.tokenizer, V)
        each = opened(tmp_path / "text.jsonl", tokenizer, score_remainder=True)
        figures = figures_of(each, table)
        assert figures["bytes"] == size - table[tokens_of(each)[0]], "all but the first token"
        assert figures["bits_per_byte"] == pytest.approx(8, rel=1e-6)


def test_bytes_of_ids_without_a_tokenizer_are_those_of_their_record(tmp_path):
    record = {"vocab_size": V, "tokenizer": "gpt-neox-20b", "source": "x"}
    write_token_file(tmp_path / "set.npy", [np.array(IDS)], text_bytes=3 * len(IDS), **record)
    figures = figures_of(opened(tmp_path / "set.npy"), np.zeros(V, np.int64))
    assert figures["bytes"] == 3 * figures["tokens"]
    raw(tmp_path / "raw.npy")
    assert "bits_per_byte" not in figures_of(opened(tmp_path / "raw.npy"), np.zeros(V, np.int64))


def test_the_identity_of_a_set_changes_with_what_it_holds(tmp_path, known):
    first = opened(raw(tmp_path / "a.npy"), known).identity
    assert opened(tmp_path / "a.npy", known).identity == first
    assert opened(raw(tmp_path / "a.npy", [1, *IDS[1:]]), known).identity != first
    for name, texts in {"one": TEXTS, "two": TEXTS[::-1]}.items():
        write_documents(tmp_path / name, texts, TOKENIZER, T)
    assert opened(tmp_path / "one", known).identity != opened(tmp_path / "two", known).identity


def test_two_dozen_sets_are_opened_at_once_and_none_is_read_into_memory(tmp_path):
    block = np.arange(1_000_000, dtype="<u2") % 50_280
    for version, names in NAMES.items():
        for name in names:
            (tmp_path / version).mkdir(exist_ok=True)
            (tmp_path / version / f"{name}.npy").write_bytes(block.tobytes())
    begin, settings = time.process_time(), config(vocab_size=50_304, context_length=2048)
    sets = [open_set(*item, settings, None) for v in NAMES for item in expand(v, tmp_path / v).items()]
    assert time.process_time() - begin < 2
    assert [each.name for each in sets] == [f"{version}/{name}" for version in NAMES for name in sorted(NAMES[version])]
    assert all(isinstance(each.chunks.tokens, np.memmap) for each in sets)
    assert {len(each.chunks) for each in sets} == {488}


# Whose ids


def neox(tmp_path: Path) -> KnownTokenizer:
    """A tokenizer with the ids that tell GPT-NeoX-20B's: two special tokens, and as many in all."""
    tokenizer = train_tokenizer(TEXTS, V)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": 1, "content": "<|padding|>"})
    vocab = {token: n if n == 0 else n + 1 for token, n in spec["model"]["vocab"].items()} | {"<|padding|>": 1}
    spec["model"]["vocab"] = vocab | {f"word{n}": n for n in range(len(vocab), 50_277)}
    (tmp_path / "neox.json").write_text(json.dumps(spec))
    return KnownTokenizer.read(tmp_path / "neox.json")


def test_olmos_files_go_with_their_own_vocabulary_alone(tmp_path, known):
    path, ids = tmp_path / "4chan.npy", [50_279, *IDS]
    write_token_file(path, [np.array(ids)], vocab_size=50_280, tokenizer="gpt-neox-20b", source="https://x")
    for tokenizer in (None, neox(tmp_path)):
        assert tokens_of(opened(path, tokenizer, vocab_size=50_304)) == ids
    remedy = r"re-encode it with: python -m stackexp data retokenize .*4chan\.npy --to FOLDER --from .* --tokenizer "
    with pytest.raises(RunError, match=rf"GPT-NeoX-20B's, not of .*/tokenizer\.json; {remedy}.*/tokenizer\.json"):
        opened(path, known, vocab_size=50_304)
    with pytest.raises(RunError, match=rf"token id 50,279, but data\.vocab_size is 49,152; {remedy}"):
        opened(path, None, vocab_size=49_152)
    raw(tmp_path / "bare.npy", ids)
    with pytest.raises(RunError, match=r"token id 50,279, but .*tokenizer\.json has 300 tokens; re-encode"):
        opened(tmp_path / "bare.npy", known, vocab_size=50_304)


def test_a_record_that_names_another_tokenizer_is_believed(tmp_path, known):
    write_token_file(tmp_path / "a.npy", [np.array(IDS)], vocab_size=V, tokenizer="0" * 64, source="x")
    with pytest.raises(RunError, match=r"another tokenizer's, not of .*tokenizer\.json; .*data retokenize"):
        opened(tmp_path / "a.npy", known)
    write_token_file(tmp_path / "a.npy", [np.array(IDS)], vocab_size=V, tokenizer=known.fingerprint, source="x")
    assert tokens_of(opened(tmp_path / "a.npy", known)) == IDS


def damaged_mds(folder: Path) -> Path:
    write_mds(folder, "tokens", "ndarray:uint16", parts("uint16"))
    shard = next(folder.glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-1])
    return folder


BAD = {
    "an odd number of bytes": (lambda f: (f / "x.npy").write_bytes(b"abc"), "x.npy", "3 bytes are no whole number"),
    "an empty file": (lambda f: (f / "x.npy").write_bytes(b""), "x.npy", "empty"),
    "less than a chunk": (
        lambda f: raw(f / "x.npy", [1] * (T - 1)),
        "x.npy",
        r"15 tokens do not fill one chunk of data\.context_length 16; lower it, or score .*\(--keep-remainder\)",
    ),
    "ids too large": (
        lambda f: raw(f / "x.npy", [1] * 50 + [V]),
        "x.npy",
        r"token id 300, but data\.vocab_size is 300",
    ),
    "negative ids": (lambda f: np.save(f / "x.npy", np.full(50, -1)), "x.npy", "token id -1"),
    "an unknown suffix": (lambda f: (f / "x.parquet").write_bytes(b"x"), "x.parquet", r"neither token ids nor text"),
    "no text": (lambda f: (f / "x.jsonl").write_bytes(b"\n"), "x.jsonl", "no text in it"),
    "a corrupt gzip": (
        lambda f: (f / "x.jsonl.gz").write_bytes(gzip.compress(json_lines())[:-40]),
        "x.jsonl.gz",
        "corrupt or cut short",
    ),
    "a corrupt index": (lambda f: ((f / "x").mkdir(), (f / "x/index.json").write_text("{")), "x", "missing or corrupt"),
    "other columns": (
        lambda f: write_mds(f / "x", "image", "bytes", [b"1"]),
        "x",
        r"MDS shards with the columns \['image'\]; expected `tokens` or `text`",
    ),
    "compressed shards": (
        lambda f: write_mds(f / "x", "tokens", "ndarray:uint16", parts("uint16"), compression="zstd"),
        "x",
        "compressed shards; write them again",
    ),
    "a shard cut off": (lambda f: damaged_mds(f / "x"), "x", "missing or not as long as index.json records"),
    "MDS ids too large": (
        lambda f: write_mds(f / "x", "tokens", "ndarray:uint16", [np.array([V], "uint16")]),
        "x",
        r"token id 300, but data\.vocab_size is 300",
    ),
    "MDS floats": (
        lambda f: write_mds(f / "x", "tokens", "ndarray:float32", [np.ones(9, "float32")]),
        "x",
        "`tokens` are float32, no token ids",
    ),
    "MDS bytes of nothing": (
        lambda f: write_mds(f / "x", "tokens", "bytes", [b"\xff\xff\xff"]),
        "x",
        r"`tokens` are no integers below data\.vocab_size 300",
    ),
    "an unfinished set": (
        lambda f: ((f / "x").mkdir(), (f / "x/plan.json").write_text("{}")),
        "x",
        "holds no finished set; make one with: stackexp data prepare SOURCE --to",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_that_names_the_file(tmp_path, known, case):
    make, name, message = BAD[case]
    make(tmp_path)
    with pytest.raises(RunError, match=message) as error:
        opened(tmp_path / name, known)
    assert "\n" not in str(error.value)
    assert str(tmp_path / name) in str(error.value)
    assert not list((tmp_path / "cache").rglob("*.npy*")), "nothing is left in the cache"


def test_text_needs_a_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 100)
    with pytest.raises(RunError, match=r"a\.txt: text, but the model's tokenizer is not known; set data\.path"):
        opened(tmp_path / "a.txt")
