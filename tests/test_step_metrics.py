"""Means over one optimizer step, and requests to all ranks."""

import pytest
import torch

from stackexp.modules.step_metrics import StepMetrics


def test_values_are_averaged_over_micro_batches():
    metrics = StepMetrics()
    for loss in (1.0, 2.0, 6.0):
        metrics.add("loss", torch.tensor(loss))
    metrics.add("norm", torch.tensor(0.5, requires_grad=True))
    assert metrics.drain() == {"loss": 3.0, "norm": 0.5}
    assert metrics.drain() == {}


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
