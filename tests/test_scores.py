"""Scores of named sets: bootstrap intervals, averages over sets and groups."""

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
from stackexp.modules.metrics import ChunkLosses
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
    assert "loss_low" not in compute_set_scores(np.ones((3, 2)), with_interval=False)
    assert "loss_low" not in compute_set_scores(np.array([[3.0], [2.0], [1.0]]))


@pytest.mark.parametrize(
    ("is_exact", "per_token", "expected"), [(True, 9.0, 50), (False, 9.0, 36), (False, None, None)]
)
def test_bytes_of_tokens_are_used_only_if_they_are_exact(is_exact, per_token, expected):
    metric = ChunkLosses(1)
    metric.update(torch.tensor([0]), torch.tensor([5]), torch.ones(1, 4), torch.tensor([[10, 20, 5, 15]]))
    module = SimpleNamespace(_scores_whole_sets=False)
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
    assert average["perplexity"] > average["exp_mean_loss"]


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
