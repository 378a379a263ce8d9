"""Means over a step, and the loss of a set."""

import math
import random

import numpy as np
import pytest
import torch

from stackexp.modules import metrics
from stackexp.modules.metrics import (
    ChunkLosses,
    StepMetrics,
    bootstrap_interval,
    group_averages,
    macro_average,
    perplexity,
    set_figures,
)
from stackexp.reports.tables import score_rows


def test_step_metrics_are_means_over_micro_batches():
    metrics = StepMetrics()
    for loss in (1.0, 2.0, 6.0):
        metrics.add("loss", torch.tensor(loss))
    metrics.add("norm", torch.tensor(0.5, requires_grad=True))
    assert metrics.drain() == {"loss": 3.0, "norm": 0.5}
    assert metrics.drain() == {}


def test_requests_are_shared_with_the_metrics_but_are_not_metrics():
    metrics = StepMetrics()
    metrics.add("loss", torch.tensor(1.0))
    metrics.request("stop", False)
    metrics.request("save", True)
    assert metrics.drain() == {"loss": 1.0}
    assert metrics.requests == {"save"}
    metrics.request("save", False)
    assert metrics.drain() == {}
    assert metrics.requests == set()


CHUNKS, LENGTH = 23, 6


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """23 chunks of 6 ids, the last of 4, as a model's losses and the bytes of their ids."""
    losses = torch.rand(CHUNKS, LENGTH - 1, generator=torch.Generator().manual_seed(0))
    lengths = torch.full((CHUNKS,), LENGTH)
    lengths[-1] = 4
    num_bytes = torch.arange(losses.numel()).view_as(losses)
    return {"index": torch.arange(CHUNKS), "lengths": lengths, "losses": losses, "num_bytes": num_bytes}


def chunk_losses(batch: dict[str, torch.Tensor], size: int, ranks: int = 1) -> list[ChunkLosses]:
    """Of each rank, that took batches of `size` in turns, the last filled up with padding that must not count."""
    of_ranks = [ChunkLosses(CHUNKS) for _ in range(ranks)]
    for turn, begin in enumerate(range(0, CHUNKS, size)):
        rows = {name: values[begin : begin + size] for name, values in batch.items()}
        missing = size - len(rows["index"])
        fill = {"index": torch.full((missing,), -1), "lengths": torch.zeros(missing, dtype=torch.int64)}
        fill |= {name: torch.full((missing, LENGTH - 1), 10**9) for name in ("losses", "num_bytes")}
        of_ranks[turn % ranks].update(**{name: torch.cat([rows[name], fill[name]]) for name in rows})
    return of_ranks


@pytest.mark.parametrize("size", [1, 7, 40])
def test_figures_are_token_means_whatever_the_batch_size(batch, size):
    (whole,) = chunk_losses(batch, size)
    figures = set_figures(whole.gather())
    scored = [row[: length - 1] for row, length in zip(batch["losses"].double(), batch["lengths"], strict=True)]
    mean = torch.cat(scored).mean().item()
    tokens = 22 * 5 + 3
    num_bytes = batch["num_bytes"].sum().item() - batch["num_bytes"][-1, 3:].sum().item()
    assert figures["instances"] == CHUNKS
    assert (figures["tokens"], figures["bytes"]) == (tokens, num_bytes)
    assert figures["loss"] == pytest.approx(mean, rel=1e-12)
    assert figures["perplexity"] == pytest.approx(math.exp(mean), rel=1e-12)
    assert figures["bits_per_byte"] == pytest.approx(mean * tokens / math.log(2) / num_bytes, rel=1e-12)
    assert figures == set_figures(chunk_losses(batch, 5)[0].gather()), "to the last bit"


def test_figures_are_those_of_one_rank_to_the_last_bit(batch):
    gathered = sum(rank.gather() for rank in chunk_losses(batch, 4, ranks=3))  # as all_reduce does
    assert set_figures(gathered) == set_figures(chunk_losses(batch, 1)[0].gather())


def test_bytes_come_from_the_record_where_no_tokenizer_tells_them(batch):
    chunks = chunk_losses(batch, 7)[0].gather()
    chunks[2] = 0
    figures = set_figures(chunks)
    assert "bits_per_byte" not in figures
    assert "bytes" not in figures
    figures = set_figures(chunks, bytes_per_token=4.0)
    assert figures["bytes"] == 4 * figures["tokens"]
    assert figures["bits_per_byte"] == pytest.approx(figures["loss"] / math.log(2) / 4)


def test_the_interval_is_that_of_resampled_chunks(batch):
    chunks = chunk_losses(batch, 7)[0].gather()
    low, high = bootstrap_interval(chunks[0], chunks[1])
    rng, means = random.Random(1), []
    for _ in range(4000):
        drawn = rng.choices(range(CHUNKS), k=CHUNKS)
        means.append(sum(chunks[0, drawn]) / sum(chunks[1, drawn]))
    means.sort()
    width = means[-100] - means[100]
    assert low == pytest.approx(means[100], abs=0.1 * width)
    assert high == pytest.approx(means[-100], abs=0.1 * width)
    assert low < set_figures(chunks)["loss"] < high


def test_the_interval_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(3)
    samples = rng.gamma(9.0, size=(200, 60))
    inside = [low < 9.0 < high for low, high in (bootstrap_interval(s, np.ones(60), 400) for s in samples)]
    assert 0.88 < np.mean(inside) < 0.99


def test_the_interval_of_many_chunks_is_that_of_their_blocks():
    losses = np.random.default_rng(3).gamma(9.0, size=metrics.BLOCKS + 1)
    blocks = np.add.reduceat(losses, np.arange(0, len(losses), 2))
    counts = np.full(len(blocks), 2)
    counts[-1] = 1
    assert bootstrap_interval(losses, np.ones(len(losses)), 50) == bootstrap_interval(blocks, counts, 50)


def test_a_single_chunk_has_no_interval():
    assert "loss_low" not in set_figures(np.ones((3, 2)), interval=False)
    assert "loss_low" not in set_figures(np.array([[3.0], [2.0], [1.0]]))


def test_macro_average_is_unweighted_and_never_below_the_perplexity_of_the_mean():
    sets = {
        name: {"loss": x, "perplexity": math.exp(x), "bits_per_byte": x / 2} for name, x in (("a", 1.0), ("b", 3.0))
    }
    average = macro_average(sets)
    assert average["loss"] == 2.0
    assert average["perplexity"] == pytest.approx((math.e + math.e**3) / 2)
    assert average["exp_mean_loss"] == pytest.approx(math.exp(2.0))
    assert average["perplexity"] > average["exp_mean_loss"]


def test_each_group_has_its_averages():
    sets = {name: {"loss": loss, "perplexity": math.exp(loss)} for name, loss in (("v2/a", 1.0), ("v2/b", 3.0))}
    sets |= {"v3/a": {"loss": 5.0, "perplexity": 7.0}, "alone": {"loss": 9.0, "perplexity": 1.0}}
    groups = group_averages(sets)
    assert groups.keys() == {"v2", "v3"}
    assert groups["v2"] == {"sets": 2} | macro_average({"a": sets["v2/a"], "b": sets["v2/b"]})
    assert groups["v3"]["loss"] == 5.0
    assert "bits_per_byte" not in groups["v2"]


def test_perplexity_of_a_hopeless_loss_is_infinite_and_short():
    assert perplexity(1000.0) == math.inf
    assert metrics.finite({"a": {"b": math.inf, "c": math.nan, "d": 1.0, "e": "x"}}) == {
        "a": {"b": None, "c": None, "d": 1.0, "e": "x"}
    }
    for loss, cell in ((1000.0, "inf"), (600.0, "3.77e+260"), (2.0, "7.39")):
        assert score_rows({"a": {"loss": loss, "perplexity": perplexity(loss)}})[0][0][5] == cell
