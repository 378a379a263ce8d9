"""Token data modules: evaluation sets and their loaders, checks of prepared sets, tokenizer and limits."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from loaders import TEXTS, TOKENIZER, T, V

from stackexp.config.data import ShardsConfig
from stackexp.data.evaluation_sets import Concatenated
from stackexp.data.shards import TokenSet
from stackexp.data.token_files import Chunks
from stackexp.data.tokenizer import train_tokenizer
from stackexp.data.units import write_documents
from stackexp.datamodules.base import PADDING, RankBatches
from stackexp.datamodules.pretraining import PretrainingData, build_perplexity_loader
from stackexp.errors import RunError


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """The sets `train` and `short`, and `foreign` with another tokenizer."""
    folder = tmp_path_factory.mktemp("prepared")
    write_documents(folder / "train", TEXTS, TOKENIZER, T)
    write_documents(folder / "short", TEXTS[:7], TOKENIZER, T)
    write_documents(folder / "foreign", TEXTS, train_tokenizer(TEXTS, V - 10), T)
    return folder


def open_data(folder: Path, stage: str = "fit", **changes) -> PretrainingData:
    sets = {"short": str(folder / "short"), "train": str(folder / "train")}
    settings = {"path": str(folder / "train"), "validation": sets, "test": {"short": sets["short"]}}
    settings |= {"vocab_size": V, "context_length": T, "global_batch_tokens": 8 * T, "micro_batch_size": 2}
    data = PretrainingData(ShardsConfig(**settings | changes), seed=0)
    data.setup(stage)
    return data


def read_indices(loader) -> list[int]:
    return [i for batch in loader for i in batch["index"].tolist() if i != PADDING]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 100])
@pytest.mark.parametrize("length", [1, 12, 25])
def test_rank_batches_cover_every_item_once(length, batch_size, world_size):
    ranks = [RankBatches(length, batch_size, rank, world_size) for rank in range(world_size)]
    batches = [list(rank) for rank in ranks]
    assert len({len(b) for b in batches}) == 1
    assert all(len(rank) == len(b) for rank, b in zip(ranks, batches, strict=True))
    assert all(len(batch) == batch_size for rank in batches for batch in rank)
    items = Counter(i for rank in batches for batch in rank for i in batch)
    padding = items.pop(PADDING, 0)
    assert items == Counter(range(length))
    assert padding == len(ranks[0]) * world_size * batch_size - length < batch_size * world_size


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (8, 1), (5, 2), (64, 3)])
def test_loaders_read_every_chunk_once(prepared, batch_size, world_size):
    tokens = TokenSet(prepared / "short")
    chunks = Chunks(Concatenated(tokens), T, False)
    found = {}
    for rank in range(world_size):
        for batch in build_perplexity_loader(chunks, batch_size, None, rank, world_size):
            assert batch["tokens"].shape == (batch_size, T)
            assert batch["tokens"].dtype == batch["index"].dtype == batch["length"].dtype == torch.int64
            rows = batch["index"] != PADDING
            assert batch["length"].tolist() == [T * row for row in rows.tolist()]
            found |= zip(batch["index"][rows].tolist(), batch["tokens"][rows].tolist(), strict=True)
    assert found == {i: tokens[i].tolist() for i in range(len(tokens))}


def test_a_short_chunk_is_padded_and_has_its_length():
    (batch,) = build_perplexity_loader(Chunks(np.arange(100, 110), 7, score_remainder=True), 3)
    assert batch["tokens"].tolist() == [[*range(100, 107)], [*range(106, 110), 0, 0, 0], [0] * 7]
    assert batch["length"].tolist() == [7, 4, 0]
    assert batch["index"].tolist() == [0, 1, PADDING]


def test_eval_sequences_limits_validation_during_training_only(prepared):
    rows = TokenSet(prepared / "short")
    assert len(rows) > 5
    data = open_data(prepared, "fit", eval_sequences=5)
    loader = data.val_dataloader()[0]
    assert read_indices(loader) == list(range(5))
    expected = [rows[i * len(rows) // 5].tolist() for i in range(5)]
    assert [loader.dataset[i]["tokens"].tolist() for i in range(5)] == expected
    data.setup("validate")
    everything = list(range(len(rows)))
    assert read_indices(data.val_dataloader()[0]) == everything
    assert read_indices(open_data(prepared, "validate", eval_sequences=5).val_dataloader()[0]) == everything
    assert read_indices(open_data(prepared, "test", eval_sequences=5).test_dataloader()[0]) == everything
    assert read_indices(open_data(prepared, "fit", eval_sequences=10**6).val_dataloader()[0]) == everything


def test_set_names_tokenizer_and_token_bytes(prepared):
    data = open_data(prepared, "validate", vocab_size=V + 20)
    assert data.list_set_names("validate") == ["short", "train"]
    assert data.list_set_names("test") == ["short"]
    sizes = [len(loader.dataset) for loader in data.val_dataloader()]
    assert sizes == [len(TokenSet(prepared / name)) for name in ("short", "train")]
    assert data.token_bytes.shape == (V + 20,)
    assert data.token_bytes.dtype == np.int64
    assert data.tokenizer.decode(TokenSet(prepared / "short")[0].tolist()).startswith("line 0 of 0 lines\n")
    data.skipped_sets = frozenset(["short"])
    assert data.list_set_names("validate") == [dataset.name for dataset in data.sets("validate")] == ["train"]


# Errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": 32}, r"context length 16, but data\.context_length is 32; set data\.context_length=16"),
        ({"vocab_size": V - 1}, r"has 300 tokens, but data\.vocab_size is 299; set data\.vocab_size=300"),
        ({"path": "nowhere"}, r"nowhere: no such folder; .* --to nowhere --vocab-size 300 --context-length 16$"),
        ({"global_batch_tokens": 10**6 * T}, r"do not fill a global batch of 1000000; set data\.global_batch_tokens="),
        ({"validation": {"x": "foreign"}}, r"foreign: made with another tokenizer than .*train; prepare it with --to"),
    ],
)
def test_unsuitable_sets_are_reported_in_one_line(prepared, changes, message, monkeypatch):
    monkeypatch.chdir(prepared)
    with pytest.raises(RunError, match=message) as error:
        open_data(prepared, **changes)
    assert "\n" not in str(error.value)


def test_the_corpus_of_another_environment_names_the_cause(prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    monkeypatch.setenv("STACKEXP_CACHE", str(prepared))
    with pytest.raises(RunError, match="this Python or its packages differ from those of the run; use the environment"):
        open_data(prepared, validation={"x": "foreign"})


def test_only_training_works_without_evaluation_sets(prepared):
    with pytest.raises(RunError, match=r"no validation sets; add one with data\.validation\.NAME=PATH"):
        open_data(prepared, "validate", validation={})
    with pytest.raises(RunError, match="no test sets"):
        open_data(prepared, "test", test={})
    data = open_data(prepared, "fit", validation={})
    data.setup("validate")
    assert data.val_dataloader() == []


SHARD = "unit.00000/shard.00000.mds"
CORRUPT_INDEX = r"index\.json: missing or corrupt; prepare the set again"
OTHER_TOKENIZER = train_tokenizer(TEXTS, V - 10).to_str()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("index.json", '{"version": 2, "shards": [{', CORRUPT_INDEX),
        ("index.json", None, CORRUPT_INDEX),
        ("index.json", '{"version": 2, "shards": []}', r"index\.json and corpus\.json disagree"),
        (SHARD, None, r"shard\.00000\.mds: missing or not as long"),
        ("corpus.json", "{", r"corpus\.json: corrupt; prepare the set again"),
        ("corpus.json", lambda text: text.replace('_version": ', '_version": 9'), "format 91, expected 1"),
        ("corpus.json", None, "holds no finished set"),
        ("tokenizer.json", OTHER_TOKENIZER, r"tokenizer\.json: not the tokenizer the set was made with"),
    ],
)
def test_damage_is_reported_before_training(prepared, tmp_path, file, content, message):
    """`content` is the new content of the file, a function of the old one, or None to delete the file."""
    for name in ("train", "short"):
        shutil.copytree(prepared / name, tmp_path / name)
    path = tmp_path / "train" / file
    if content is None:
        path.unlink()
    else:
        path.write_text(content(path.read_text()) if callable(content) else content)
    with pytest.raises(RunError, match=message) as error:
        open_data(tmp_path)
    assert "\n" not in str(error.value)


def test_an_invalid_token_id_is_reported_before_it_reaches_the_model(prepared):
    data = open_data(prepared)
    batch = {"tokens": torch.tensor([[1, V]]), "index": torch.tensor([7])}
    with pytest.raises(RunError, match=r"token id 300 in sequences \[7\] is not below data\.vocab_size 300"):
        data.on_before_batch_transfer(batch, 0)
    batch["tokens"] -= 1
    assert data.on_before_batch_transfer(batch, 0) is batch


def test_a_set_with_a_larger_tokenizer_than_the_model_is_refused(prepared):
    """The run has no tokenizer of its own, so that of the set would be used."""
    message = rf"foreign/tokenizer\.json: has {V - 10} ids, more than data\.vocab_size 100; prepare the set with"
    with pytest.raises(RunError, match=message):
        open_data(prepared, "validate", path=None, validation={"foreign": str(prepared / "foreign")}, vocab_size=100)


@pytest.mark.parametrize(("extra", "warns"), [(0, False), (100, False), (128, True)])
def test_vocabulary_far_above_the_tokenizers_is_reported(prepared, caplog, extra, warns):
    TokenSet(prepared / "train").check_vocab_size(V + extra)
    assert ("128 token ids are never trained; set data.vocab_size=300" in caplog.text) == warns
