"""Means over a step, and the loss of a set."""

import math

import pytest
import torch

from stackexp.modules.metrics import CorpusLoss, StepMetrics, macro_average, perplexity


def test_step_metrics_are_means_over_micro_batches():
    metrics = StepMetrics()
    for loss in (1.0, 2.0, 6.0):
        metrics.add("loss", torch.tensor(loss))
    metrics.add("norm", torch.tensor(0.5, requires_grad=True))
    assert metrics.drain() == {"loss": 3.0, "norm": 0.5}
    assert metrics.drain() == {}


def test_wishes_travel_with_the_metrics_and_are_none():
    metrics = StepMetrics()
    metrics.add("loss", torch.tensor(1.0))
    metrics.wish("stop", False)
    metrics.wish("save", True)
    assert metrics.drain() == {"loss": 1.0}
    assert metrics.wishes == {"save"}
    metrics.wish("save", False)
    assert metrics.drain() == {}
    assert metrics.wishes == set()


def test_corpus_loss_does_not_depend_on_the_batch_size_and_skips_padding():
    losses = torch.rand(7, 5, generator=torch.Generator().manual_seed(0))
    num_bytes = torch.arange(35).view(7, 5)
    whole, split = CorpusLoss(), CorpusLoss()
    whole.update(losses, num_bytes, torch.ones(7, dtype=torch.bool))
    for row in range(7):
        padded = torch.cat([losses[row : row + 1], torch.full((1, 5), 1e9)])
        split.update(padded, num_bytes[row : row + 1].expand(2, -1), torch.tensor([True, False]))
    assert split.compute() == pytest.approx(whole.compute(), rel=1e-12)
    result = whole.compute()
    assert result["tokens"] == 35
    assert result["bytes"] == sum(range(35))
    assert result["loss"] == pytest.approx(losses.double().mean().item())
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["bits_per_byte"] == pytest.approx(losses.double().sum().item() / math.log(2) / sum(range(35)))


def test_macro_average_is_unweighted_and_never_below_the_perplexity_of_the_mean():
    sets = {
        name: {"loss": x, "perplexity": math.exp(x), "bits_per_byte": x / 2} for name, x in (("a", 1.0), ("b", 3.0))
    }
    average = macro_average(sets)
    assert average["loss"] == 2.0
    assert average["perplexity"] == pytest.approx((math.e + math.e**3) / 2)
    assert average["perplexity"] > math.exp(average["loss"])


def test_perplexity_of_a_hopeless_loss_is_infinite():
    assert perplexity(1000.0) == math.inf
