"""Scores of evaluation sets: intervals, noise, averages, any number of ranks; and means over one optimizer step."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.signal import lfilter

from stackexp.evaluation.scores import format_scores
from stackexp.files import replace_non_finite
from stackexp.modules import scores
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.metrics import ChunkLosses, SequenceScores, StepMetrics
from stackexp.modules.scores import (
    Noise,
    SamplingError,
    average_errors,
    average_groups,
    average_scores,
    compute_set_scores,
    estimate_sampling_error,
    split_noise,
)

SIZES, CORRELATIONS = (60, 100, 200, 400, 800), (0.0, 0.2, 0.4, 0.6, 0.8)
GRID = [(size, correlation, kind) for size in SIZES for correlation in CORRELATIONS for kind in ("normal", "skewed")]


def simulate(size: int, correlation: float, kind: str, repetitions: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses [repetitions, size] and counts [size] of chunks whose true mean loss is 3.

    The losses are an AR(1) process, of exponential innovations and with unequal counts if `kind` is skewed.
    """
    rng = np.random.default_rng([size, round(10 * correlation)])
    shape = (repetitions, size + 60)
    is_skewed = kind == "skewed"
    innovations = rng.exponential(size=shape) - 1 if is_skewed else rng.standard_normal(shape)
    chunks = 3 + lfilter([math.sqrt(1 - correlation**2)], [1, -correlation], innovations, axis=1)[:, 60:]
    counts = rng.integers(10, 256, size).astype(float) if is_skewed else np.ones(size)
    return chunks * counts, counts


def measure_coverage(losses: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Return the share of intervals that contain 3, and the share of series with an interval."""
    errors = [(row.sum() / counts.sum() - 3, estimate_sampling_error(row, counts)) for row in losses]
    covered = [abs(error) < estimate.margin for error, estimate in errors if estimate is not None]
    return float(np.mean(covered)), len(covered) / len(errors)


@pytest.mark.parametrize(
    ("size", "correlation", "kind"), [(60, 0.0, "normal"), (60, 0.8, "normal"), (200, 0.6, "skewed")]
)
def test_interval_has_its_nominal_coverage(size, correlation, kind):
    coverage, share = measure_coverage(*simulate(size, correlation, kind, 4000))
    assert 0.93 < coverage < 0.97
    assert share > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("size", "correlation", "kind"), GRID)
def test_interval_has_its_nominal_coverage_on_the_whole_grid(size, correlation, kind):
    coverage, share = measure_coverage(*simulate(size, correlation, kind, 10_000))
    assert 0.93 < coverage < 0.97
    assert share > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("size", "longest"), [(100, 10), (400, 10), (400, 40), (800, 40)])
def test_interval_covers_the_mean_of_chunks_that_files_have_in_common(size, longest):
    rng = np.random.default_rng(size)
    losses = np.empty((6000, size))
    for row in losses:
        lengths = rng.integers(longest // 8, longest + 1, size)
        row[:] = np.repeat(rng.standard_normal(size), np.maximum(lengths, 1))[:size]
    losses = 3 + math.sqrt(0.3) * losses + math.sqrt(0.7) * rng.standard_normal(losses.shape)
    coverage, share = measure_coverage(losses, np.ones(size))
    assert 0.93 < coverage < 0.97
    assert share > 0.9


def test_few_or_persistent_chunks_have_no_interval():
    noise = np.random.default_rng(0).standard_normal(800)
    assert estimate_sampling_error(noise[:59], np.ones(59)) is None
    assert estimate_sampling_error(noise.cumsum(), np.ones(800)) is None
    assert estimate_sampling_error(np.where(noise > 3, np.inf, noise), np.ones(800)) is None, "a diverged model"
    scores = compute_set_scores(np.stack([noise[:59], np.ones(59), np.zeros(59)]))
    assert "loss_low" not in scores
    assert "too few chunks" in format_scores({"a": scores})


def test_independent_chunks_have_the_interval_of_student():
    error = estimate_sampling_error(np.array([1.0, 2.0, 6.0]), np.ones(3), is_independent=True)
    assert error == pytest.approx((math.sqrt(7 / 3), 2))
    assert error.margin == pytest.approx(4.302653 * math.sqrt(7 / 3))
    assert estimate_sampling_error(np.ones(1), np.ones(1), is_independent=True) is None


def test_error_of_an_average_has_the_degrees_of_welch_and_satterthwaite():
    assert average_errors([SamplingError(3.0, 8), SamplingError(4.0, 5)]) == pytest.approx(
        (2.5, 625 / (81 / 8 + 256 / 5))
    )
    assert average_errors([SamplingError(0.0, 8), SamplingError(0.0, 5)]) == (0.0, 5)


def test_noise_is_split_into_seeds_and_chunks():
    rng, splits = np.random.default_rng(0), []
    for _ in range(300):
        sets = []
        seeds = 0.02 * rng.standard_normal((6, 1))
        for size in (200, 300):
            differences = seeds + 0.1 * rng.standard_normal(size) + 0.2 * rng.standard_normal((6, size))
            sets.append((10 * differences, np.full(size, 10.0)))
        splits.append(split_noise(sets))
    assert math.sqrt(np.mean([split.seed**2 for split in splits])) == pytest.approx(0.02, rel=0.05)
    chunk = math.sqrt((0.1**2 + 0.2**2) * (1 / 200 + 1 / 300) / 4)
    assert math.sqrt(np.mean([split.chunk**2 for split in splits])) == pytest.approx(chunk, rel=0.05)
    assert Noise(0.02, 0.02, 500).chunks_needed == pytest.approx(4500)
    assert split_noise([(np.zeros((2, 59)), np.ones(59))]) is None


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
