"""Metrics of evaluation sets, means over one optimizer step, and requests to all ranks."""

import math

import pytest
import torch

from stackexp.modules.metrics import ChunkLosses, SequenceScores
from stackexp.modules.scores import compute_set_scores
from stackexp.modules.step_metrics import StepMetrics

NUM_CHUNKS, LENGTH = 23, 6


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """23 chunks of 6 tokens, the last of 4."""
    losses = torch.rand(NUM_CHUNKS, LENGTH - 1, generator=torch.Generator().manual_seed(0))
    lengths = torch.full((NUM_CHUNKS,), LENGTH)
    lengths[-1] = 4
    num_bytes = torch.arange(losses.numel()).view_as(losses)
    return {"index": torch.arange(NUM_CHUNKS), "lengths": lengths, "losses": losses, "num_bytes": num_bytes}


def score_chunks(batch: dict[str, torch.Tensor], batch_size: int, ranks: int = 1) -> list[ChunkLosses]:
    """Return the metric of each rank; ranks take batches alternately, the last is filled up with padding."""
    metrics = [ChunkLosses(NUM_CHUNKS) for _ in range(ranks)]
    for number, start in enumerate(range(0, NUM_CHUNKS, batch_size)):
        rows = {name: values[start : start + batch_size] for name, values in batch.items()}
        missing = batch_size - len(rows["index"])
        fill = {"index": torch.full((missing,), -1), "lengths": torch.zeros(missing, dtype=torch.int64)}
        fill |= {name: torch.full((missing, LENGTH - 1), 10**9) for name in ("losses", "num_bytes")}
        metrics[number % ranks].update(**{name: torch.cat([rows[name], fill[name]]) for name in rows})
    return metrics


@pytest.mark.parametrize("batch_size", [1, 7, 40])
def test_scores_are_token_means_for_any_batch_size(batch, batch_size):
    (metric,) = score_chunks(batch, batch_size)
    scores = compute_set_scores(metric.compute())
    scored = [row[: length - 1] for row, length in zip(batch["losses"].double(), batch["lengths"], strict=True)]
    mean = torch.cat(scored).mean().item()
    tokens = 22 * 5 + 3
    num_bytes = batch["num_bytes"].sum().item() - batch["num_bytes"][-1, 3:].sum().item()
    assert (scores["instances"], scores["tokens"], scores["bytes"]) == (NUM_CHUNKS, tokens, num_bytes)
    assert scores["loss"] == pytest.approx(mean, rel=1e-12)
    assert scores["perplexity"] == pytest.approx(math.exp(mean), rel=1e-12)
    assert scores["bits_per_byte"] == pytest.approx(mean * tokens / math.log(2) / num_bytes, rel=1e-12)
    assert scores == compute_set_scores(score_chunks(batch, 5)[0].compute()), "bit for bit"


def test_scores_of_three_ranks_equal_those_of_one_bit_for_bit(batch):
    gathered = sum(rank.compute() for rank in score_chunks(batch, 4, ranks=3))  # as torchmetrics sums over ranks
    assert compute_set_scores(gathered) == compute_set_scores(score_chunks(batch, 1)[0].compute())


def test_bytes_come_from_the_record_if_the_tokenizer_is_unknown(batch):
    chunks = score_chunks(batch, 7)[0].compute()
    chunks[2] = 0
    assert not {"bits_per_byte", "bytes"} & compute_set_scores(chunks).keys()
    scores = compute_set_scores(chunks, bytes_per_token=4.0)
    assert scores["bytes"] == 4 * scores["tokens"]
    assert scores["bits_per_byte"] == pytest.approx(scores["loss"] / math.log(2) / 4)


def test_scores_of_a_length_do_not_depend_on_its_batches():
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(10, 4, dtype=torch.float64, generator=generator)
    is_counted = torch.rand(10, 4, generator=generator) < 0.7
    is_correct = (torch.rand(10, 4, generator=generator) < 0.6) & is_counted

    def score(*batches: list[int]) -> dict[str, float]:
        metric = SequenceScores(10)
        for rows in batches:
            metric.update(torch.tensor(rows), losses[rows], is_correct[rows], is_counted[rows])
        return metric.compute()

    whole = score(list(range(10)))
    assert whole["accuracy"] == is_correct.sum().item() / is_counted.sum().item()
    assert whole["loss"] == pytest.approx(losses.mean().item(), rel=1e-12)
    assert whole["sequences"] == 10
    assert score([3, 1, 2], [9, 8, 7, 0, -1], [4, 5, 6, -1]) == whole


def test_floats_are_averaged_and_keep_their_order():
    metrics = StepMetrics()
    for loss, length in ((1.0, 4.0), (2.0, 7.0)):
        metrics.add("lr", 0.1)
        metrics.add("loss", torch.tensor(loss))
        metrics.add("length", length)
    drained = metrics.drain()
    assert drained == {"lr": pytest.approx(0.1), "loss": 1.5, "length": 5.5}
    assert list(drained) == ["lr", "loss", "length"]


def test_requests_travel_with_the_metrics():
    metrics = StepMetrics()
    metrics.add("loss", torch.tensor(1.0))
    metrics.request("stop", False)
    metrics.request("save", True)
    assert metrics.drain() == {"loss": 1.0}
    assert metrics.requests == {"save"}
    metrics.request("save", False)
    assert metrics.drain() == {}
    assert metrics.requests == set()
