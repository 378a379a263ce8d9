"""Scores of evaluation sets: bootstrap intervals, averages, any number of ranks; and means over one optimizer step."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stackexp.evaluation.scores import format_scores
from stackexp.files import replace_non_finite
from stackexp.modules import scores
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.metrics import ChunkLosses, SequenceScores, StepMetrics
from stackexp.modules.scores import average_groups, average_scores, bootstrap_interval, compute_set_scores


def test_interval_agrees_with_resampling_in_plain_python():
    rng = np.random.default_rng(0)
    chunks = np.stack([rng.gamma(9.0, size=23), rng.integers(3, 6, 23), np.zeros(23)])
    low, high = bootstrap_interval(chunks[0], chunks[1])
    resampler, means = random.Random(1), []
    for _ in range(4000):
        drawn = resampler.choices(range(23), k=23)
        means.append(sum(chunks[0, drawn]) / sum(chunks[1, drawn]))
    means.sort()
    mean, widening = compute_set_scores(chunks)["loss"], 2.074 / 1.960 * math.sqrt(23 / 22)
    expected = [mean + widening * (end - mean) for end in (means[100], means[-100])]
    assert [low, high] == pytest.approx(expected, abs=0.03 * (expected[1] - expected[0]))
    assert low < mean < high


@pytest.mark.parametrize(("size", "correlation"), [(12, 0.0), (60, 0.0), (300, 0.0), (300, 0.5)])
def test_interval_has_its_nominal_coverage(size, correlation):
    rng = np.random.default_rng(3)
    samples = rng.standard_normal((300, size))
    for i in range(1, size):
        samples[:, i] = correlation * samples[:, i - 1] + math.sqrt(1 - correlation**2) * samples[:, i]
    inside = [low < 0 < high for low, high in (bootstrap_interval(s, np.ones(size), 400) for s in samples)]
    assert 0.92 < np.mean(inside) < 0.98


def test_many_chunks_are_resampled_in_blocks():
    losses = np.random.default_rng(3).gamma(9.0, size=scores.MAX_BOOTSTRAP_BLOCKS + 2)
    blocks = np.add.reduceat(losses, np.arange(0, len(losses), 2))
    counts = np.full(len(blocks), 2)
    counts[-1] = 1
    assert bootstrap_interval(losses, np.ones(len(losses)), 50) == bootstrap_interval(blocks, counts, 50)


def test_a_single_chunk_has_no_interval():
    assert "loss_low" not in compute_set_scores(np.array([[3.0], [2.0], [1.0]]))


@pytest.mark.parametrize(
    ("is_exact", "per_token", "expected"), [(True, 9.0, 50), (False, 9.0, 36), (False, None, None)]
)
def test_bytes_of_tokens_are_used_only_if_they_are_exact(is_exact, per_token, expected):
    metric = ChunkLosses(1)
    metric.update(torch.tensor([0]), torch.tensor([5]), torch.ones(1, 4), torch.tensor([[10, 20, 5, 15]]))
    module = SimpleNamespace(trainer=SimpleNamespace(datamodule=SimpleNamespace(eval_limit=10)))
    dataset = SimpleNamespace(name="set", has_exact_bytes=is_exact, bytes_per_token=per_token)
    found = LanguageModeling.compute_set_scores(module, dataset, metric)
    assert found.get("bytes") == expected
    assert ("bits_per_byte" in found) == (expected is not None)


def test_average_is_unweighted_over_sets():
    sets = {
        name: {"loss": x, "perplexity": math.exp(x), "bits_per_byte": x / 2} for name, x in (("a", 1.0), ("b", 3.0))
    }
    average = average_scores(sets)
    assert average["loss"] == 2.0
    assert average["perplexity"] == pytest.approx((math.e + math.e**3) / 2)
    assert average["exp_mean_loss"] == pytest.approx(math.exp(2.0))


def test_each_group_has_its_averages():
    sets = {name: {"loss": loss, "perplexity": math.exp(loss)} for name, loss in (("v2/a", 1.0), ("v2/b", 3.0))}
    sets |= {"v3/a": {"loss": 5.0, "perplexity": 7.0}, "alone": {"loss": 9.0, "perplexity": 1.0}}
    groups = average_groups(sets)
    assert groups.keys() == {"v2", "v3"}
    assert groups["v2"] == {"sets": 2} | average_scores({"a": sets["v2/a"], "b": sets["v2/b"]})
    assert groups["v3"]["loss"] == 5.0
    assert "bits_per_byte" not in groups["v2"]


@pytest.mark.parametrize(("loss", "cell"), [(1000.0, "inf"), (600.0, "3.77e+260"), (2.0, "7.39")])
def test_large_perplexities_stay_readable(loss, cell):
    perplexity = scores.compute_perplexity(loss)
    assert cell in format_scores({"a": {"loss": loss, "perplexity": perplexity}})


def test_json_gets_null_for_infinity_and_nan():
    value = {"a": {"b": math.inf, "c": math.nan, "d": 1.0, "e": "x"}}
    assert replace_non_finite(value) == {"a": {"b": None, "c": None, "d": 1.0, "e": "x"}}


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
