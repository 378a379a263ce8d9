"""A stop within a validation loses no step: the validation ends early only if its step has been saved."""

import itertools
import os
import signal
from types import SimpleNamespace

import pytest
import torch

from stackexp.errors import StoppedError
from stackexp.training.callbacks import steps
from stackexp.training.callbacks.steps import StepRequests
from stackexp.training.signals import STOP_SIGNALS, StopRequest


class Stop:
    is_set = True

    def note_progress(self):
        pass

    def build_error(self):
        return StoppedError("SIGTERM")


def make_trainer(step, fn="fit"):
    return SimpleNamespace(global_step=step, state=SimpleNamespace(fn=fn))


def end_validation_batch(requests, trainer):
    requests.on_validation_batch_end(trainer, SimpleNamespace(device=torch.device("cpu")))


def test_an_unsaved_step_is_not_lost():
    requests = StepRequests(Stop())
    requests.on_train_start(make_trainer(0), None)
    end_validation_batch(requests, make_trainer(6))
    requests.on_save_checkpoint(make_trainer(4), None, {})
    end_validation_batch(requests, make_trainer(6))


def test_a_validation_of_a_saved_step_stops_at_once():
    requests = StepRequests(Stop())
    requests.on_train_start(make_trainer(0), None)
    requests.on_save_checkpoint(make_trainer(6), None, {})
    with pytest.raises(StoppedError):
        end_validation_batch(requests, make_trainer(6))
    resumed = StepRequests(Stop())
    resumed.on_train_start(make_trainer(6), None)
    with pytest.raises(StoppedError):
        end_validation_batch(resumed, make_trainer(6))


@pytest.mark.parametrize("fn", ["validate", "test"])
def test_an_evaluation_stops_at_once(fn):
    with pytest.raises(StoppedError):
        end_validation_batch(StepRequests(Stop()), make_trainer(6, fn))


@pytest.mark.parametrize(("seconds", "expected"), [(0.01, 16), (1.0, 5), (60.0, 1)])
def test_processes_check_for_a_stop_at_least_every_few_seconds(monkeypatch, seconds, expected):
    """Each check is an all-reduce, so batches between two checks depend only on values that all ranks share."""
    now, checks = [0.0], []
    monkeypatch.setattr(steps.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(steps.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(steps.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(steps.dist, "all_reduce", lambda shared: checks.append(now[0] / seconds) or shared.mul_(2))
    stop = Stop()
    stop.is_set = False
    requests = StepRequests(stop)
    for _ in range(64):
        now[0] += seconds
        end_validation_batch(requests, make_trainer(6, "validate"))
    assert checks[0] == 1
    assert {round(later - earlier) for earlier, later in itertools.pairwise(checks)} == {expected}


def test_a_stop_is_requested_even_if_nobody_reads_its_announcement(monkeypatch):
    """Ctrl-C in `fit 2>&1 | tee log` also ends tee."""

    def fail(*_) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "write", fail)
    for number in (*STOP_SIGNALS, signal.SIGINT):
        stop = StopRequest(None, grace_seconds=60)
        stop._handle(number, None)
        assert stop.is_set
        stop.end_grace_period()
