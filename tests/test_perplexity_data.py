import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stackexp.config.data import ShardsConfig
from stackexp.data.evaluation_sets import Concatenated
from stackexp.data.packing import write_documents
from stackexp.data.shards import TokenSet
from stackexp.data.token_files import Chunks
from stackexp.data.tokenizer import train_tokenizer
from stackexp.datamodules.perplexity import PADDING, RankBatches, build_perplexity_loader
from stackexp.datamodules.pretraining import PretrainingData
from stackexp.errors import RunError

T, V = 16, 300
TEXTS = [f"line {n} of {n * n} lines\n" * 3 for n in range(200)]
TOKENIZER = train_tokenizer(TEXTS, V)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Two sets of the same tokenizer and one of another, `foreign`."""
    folder = tmp_path_factory.mktemp("prepared")
    write_documents(folder / "train", TEXTS, TOKENIZER, T)
    write_documents(folder / "short", TEXTS[:7], TOKENIZER, T)
    write_documents(folder / "foreign", TEXTS, train_tokenizer(TEXTS, V - 10), T)
    return folder


def data_of(folder: Path, stage: str = "fit", **changes) -> PretrainingData:
    sets = {"short": str(folder / "short"), "train": str(folder / "train")}
    settings = {"path": str(folder / "train"), "validation": sets, "test": {"short": sets["short"]}}
    settings |= {"vocab_size": V, "context_length": T, "global_batch_tokens": 8 * T, "micro_batch_size": 2}
    data = PretrainingData(ShardsConfig(**settings | changes), seed=0)
    data.setup(stage)
    return data


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 100])
@pytest.mark.parametrize("length", [1, 12, 25])
def test_every_sequence_once_over_all_ranks(length, batch_size, world_size):
    ranks = [RankBatches(length, batch_size, rank, world_size) for rank in range(world_size)]
    batches = [list(rank) for rank in ranks]
    assert len({len(b) for b in batches}) == 1, "ranks must take the same number of turns"
    assert all(len(rank) == len(b) for rank, b in zip(ranks, batches, strict=True))
    assert all(len(batch) == batch_size for rank in batches for batch in rank)
    seen = Counter(i for rank in batches for batch in rank for i in batch)
    padding = seen.pop(PADDING, 0)
    assert seen == Counter(range(length))
    assert padding == len(ranks[0]) * world_size * batch_size - length < batch_size * world_size


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (8, 1), (5, 2), (64, 3)])
def test_a_sum_over_a_set_depends_on_neither_batch_nor_ranks(prepared, batch_size, world_size):
    tokens = TokenSet(prepared / "short")
    expected = {i: tokens[i].tolist() for i in range(len(tokens))}
    found = {}
    for rank in range(world_size):
        for batch in build_perplexity_loader(Chunks(Concatenated(tokens), T, False), batch_size, None, rank, world_size):
            assert batch["tokens"].shape == (batch_size, T)
            assert batch["tokens"].dtype == batch["index"].dtype == batch["length"].dtype == torch.int64
            rows = batch["index"] != PADDING
            assert batch["length"].tolist() == [T * row for row in rows.tolist()]
            found |= zip(batch["index"][rows].tolist(), batch["tokens"][rows].tolist(), strict=True)
    assert found == expected


def test_a_chunk_cut_short_is_padded_and_says_how_long_it_is():
    (batch,) = build_perplexity_loader(Chunks(np.arange(100, 110), 7, score_remainder=True), 3)
    assert batch["tokens"].tolist() == [[*range(100, 107)], [*range(106, 110), 0, 0, 0], [0] * 7]
    assert batch["length"].tolist() == [7, 4, 0]
    assert batch["index"].tolist() == [0, 1, PADDING]


def test_the_limit_holds_while_fitting_and_nowhere_else(prepared):
    def indices(loader) -> list[int]:
        return [i for batch in loader for i in batch["index"].tolist() if i != PADDING]

    whole = len(TokenSet(prepared / "short"))
    assert whole > 5
    fitting = data_of(prepared, "fit", eval_sequences=5)
    assert indices(fitting.val_dataloader()[0]) == list(range(5))
    sample, rows = fitting.val_dataloader()[0].dataset, TokenSet(prepared / "short")
    assert [sample[i]["tokens"].tolist() for i in range(5)] == [rows[i * whole // 5].tolist() for i in range(5)]
    fitting.setup("validate")
    assert indices(fitting.val_dataloader()[0]) == list(range(whole))
    assert indices(data_of(prepared, "validate", eval_sequences=5).val_dataloader()[0]) == list(range(whole))
    assert indices(data_of(prepared, "test", eval_sequences=5).test_dataloader()[0]) == list(range(whole))
    assert len(indices(data_of(prepared, "fit", eval_sequences=10**6).val_dataloader()[0])) == whole


def test_names_tokenizer_and_bytes(prepared):
    data = data_of(prepared, "validate", vocab_size=V + 20)
    assert data.set_names("validate") == ["short", "train"]
    assert data.set_names("test") == ["short"]
    assert [len(loader.dataset) for loader in data.val_dataloader()] == [
        len(TokenSet(prepared / n)) for n in ("short", "train")
    ]
    assert data.token_bytes.shape == (V + 20,)
    assert data.token_bytes.dtype == np.int64
    assert data.tokenizer.decode(TokenSet(prepared / "short")[0].tolist()).startswith("line 0 of 0 lines\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": 32}, r"context length 16, but data\.context_length is 32; set data\.context_length=16"),
        ({"vocab_size": V - 1}, r"has 300 tokens, but data\.vocab_size is 299; set data\.vocab_size=300"),
        (
            {"path": "nowhere"},
            r"nowhere: no such folder; make one with: stackexp data prepare SOURCE --to nowhere "
            r"--vocab-size 300 --context-length 16$",
        ),
        (
            {"global_batch_tokens": 10**6 * T},
            r"do not fill one global batch of 1000000; set data\.global_batch_tokens=",
        ),
        (
            {"validation": {"x": "nowhere"}},
            r"nowhere: no such file or folder for set x; correct the path or create it with: python -m stackexp data "
            r"prepare SOURCE --to nowhere --tokenizer TOKENIZER\.json$",
        ),
        (
            {"validation": {"x": "foreign"}},
            r"foreign: made with another tokenizer than .*train; prepare it with --tokenizer",
        ),
    ],
)
def test_sets_that_do_not_fit_are_one_line(prepared, changes, message, monkeypatch):
    monkeypatch.chdir(prepared)
    with pytest.raises(RunError, match=message) as error:
        data_of(prepared, **changes)
    assert "\n" not in str(error.value)


def test_a_stage_without_sets(prepared):
    with pytest.raises(RunError, match=r"no validation sets; name one with data\.validation\.NAME=PLACE"):
        data_of(prepared, "validate", validation={})
    with pytest.raises(RunError, match="no test sets"):
        data_of(prepared, "test", test={})
    fitting = data_of(prepared, "fit", validation={})
    fitting.setup("validate")
    assert fitting.val_dataloader() == []


def damage_index(folder: Path) -> None:
    (folder / "index.json").write_text('{"version": 2, "shards": [{')


def damage_entries(folder: Path) -> None:
    (folder / "index.json").write_text('{"version": 2, "shards": [{"samples": 3}]}')


def remove_index(folder: Path) -> None:
    (folder / "index.json").unlink()


def truncate_shard(folder: Path) -> None:
    shard = folder / "unit.00000" / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-2])


def remove_shard(folder: Path) -> None:
    (folder / "unit.00000" / "shard.00000.mds").unlink()


def empty_index(folder: Path) -> None:
    (folder / "index.json").write_text('{"version": 2, "shards": []}')


def damage_corpus(folder: Path) -> None:
    (folder / "corpus.json").write_text("{")


def other_format(folder: Path) -> None:
    record = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps(record | {"format_version": 99}))


def unfinished(folder: Path) -> None:
    (folder / "corpus.json").unlink()


def other_tokenizer(folder: Path) -> None:
    train_tokenizer(TEXTS, V - 10).save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_index, r"index\.json: missing or corrupt; prepare the set again"),
        (damage_entries, r"index\.json: missing or corrupt"),
        (remove_index, r"index\.json: missing or corrupt"),
        (truncate_shard, r"shard\.00000\.mds: missing or not as long as index\.json records"),
        (remove_shard, r"shard\.00000\.mds: missing or not as long"),
        (empty_index, r"index\.json and corpus\.json do not agree"),
        (damage_corpus, r"corpus\.json: corrupt; prepare the set again"),
        (other_format, r"corpus\.json: format 99, expected 1; prepare the set again"),
        (unfinished, "holds no finished set"),
        (other_tokenizer, r"tokenizer\.json: not the tokenizer the set was made with"),
    ],
)
def test_damage_is_seen_before_the_first_step(prepared, tmp_path, damage, message):
    for name in ("train", "short"):
        shutil.copytree(prepared / name, tmp_path / name)
    data_of(tmp_path)
    damage(tmp_path / "train")
    with pytest.raises(RunError, match=message) as error:
        data_of(tmp_path)
    assert "\n" not in str(error.value)


def test_a_token_id_outside_the_vocabulary_is_named_before_it_reaches_the_model(prepared):
    data = data_of(prepared)
    batch = {"tokens": torch.tensor([[1, V]]), "index": torch.tensor([7])}
    with pytest.raises(RunError, match=r"token id 300 in sequences \[7\] is not below data\.vocab_size 300"):
        data.on_before_batch_transfer(batch, 0)
    batch["tokens"] -= 1
    assert data.on_before_batch_transfer(batch, 0) is batch


def test_ranks_share_the_validation_sets(prepared):
    data = data_of(prepared)
    seen = []
    for rank in range(2):
        data.trainer = SimpleNamespace(global_rank=rank, world_size=2)
        seen.append({i for batch in data.val_dataloader()[0] for i in batch["index"].tolist()} - {PADDING})
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == set(range(len(TokenSet(prepared / "short"))))
