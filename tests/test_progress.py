"""Progress on standard error: a bar in a terminal, lines in a file."""

import io
import re
import sys
from types import SimpleNamespace

import pytest

from stackexp.cli import main
from stackexp.config.experiment import LoggingConfig
from stackexp.terminal import format_duration, open_bar
from stackexp.training.callbacks import metrics_log
from stackexp.training.callbacks.metrics_log import Progress


@pytest.fixture
def log() -> SimpleNamespace:
    return SimpleNamespace(last_line={})


@pytest.fixture
def trainer() -> SimpleNamespace:
    state = SimpleNamespace(fn="fit")
    return SimpleNamespace(global_step=5, max_steps=20, num_val_batches=[2, 2], is_global_zero=True, state=state)


def make_progress(trainer, is_first: bool, config: LoggingConfig, log) -> Progress:
    trainer.is_global_zero, trainer.sanity_checking = is_first, False
    callback = Progress(config, log)
    callback.setup(trainer, None, "fit")
    return callback


def take_steps(callback, trainer, log, steps) -> None:
    """Call the hook for each (step, loss); a step that comes twice is a micro-batch."""
    for step, loss in steps:
        trainer.global_step = step
        if loss:
            log.last_line = log.last_line | {"train/loss": loss, "train/tokens_per_second": 12345.6}
        callback.on_train_batch_end(trainer, None, None, None, 0)


@pytest.mark.parametrize("is_first", [True, False])
def test_bar_counts_steps_and_shows_loss_and_speed(monkeypatch, log, trainer, is_first):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    callback = make_progress(trainer, is_first, LoggingConfig(), log)
    callback.on_train_start(trainer, None)
    take_steps(callback, trainer, log, [(5, None), (6, 9.0), (6, 9.0), (7, 2.34567)])
    callback.on_validation_start(trainer, None)
    callback.on_validation_batch_end(trainer, None, None, None, 0)
    callback.on_validation_end(trainer, None)
    callback.on_train_end(trainer, None)
    output = terminal.getvalue()
    assert ("validating" in output) == is_first
    last = output.rstrip("\n").rpartition("\r")[2]
    expected = r"fit: +35%\|.*\| 7/20 \[00:00, loss 2.346, 12,346 tokens/s, 0 s left\]" if is_first else ""
    assert re.fullmatch(expected, last)


@pytest.mark.parametrize("is_first", [True, False])
def test_lines_show_the_time_left_without_the_first_step(monkeypatch, log, trainer, capsys, is_first):
    now = 1000.0
    monkeypatch.setattr(metrics_log.time, "monotonic", lambda: now)
    callback = make_progress(trainer, is_first, LoggingConfig(progress_bar=False, log_interval_seconds=30), log)
    callback.on_train_start(trainer, None)
    now += 500  # compiles
    take_steps(callback, trainer, log, [(6, 9.0)])
    for step in range(7, 21):
        now += 10
        take_steps(callback, trainer, log, [(step, 3.0), (step, 3.0)])
    log.last_line |= {"val/loss/average": 2.5}
    callback.on_validation_start(trainer, None)
    callback.on_validation_end(trainer, None)
    lines = [
        "step 6/20: loss 9.000, 12,346 tokens/s",
        "step 9/20: loss 3.000, 12,346 tokens/s, 1 min 50 s left",
        "step 12/20: loss 3.000, 12,346 tokens/s, 1 min 20 s left",
        "step 15/20: loss 3.000, 12,346 tokens/s, 50 s left",
        "step 18/20: loss 3.000, 12,346 tokens/s, 20 s left",
        "step 20/20: loss 3.000, 12,346 tokens/s",
        "step 20/20: validation loss 2.5000",
    ]
    assert capsys.readouterr().err.splitlines() == (lines if is_first else [])


def test_log_file_of_a_run_has_lines_without_carriage_returns(tiny, capsys):
    assert main(["fit", "--config", str(tiny), "logging.log_interval_seconds=0.001"]) == 0
    output = capsys.readouterr().err
    assert "\r" not in output
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert len(lines) == 12 + 2, "steps and validations"
    assert re.match(r"step 1/12: loss [56]\.", lines[0])
    assert re.fullmatch(r"step 5/12: loss 5\.\d+, [\d,]+ tokens/s, \d+ s left", lines[4])
    assert lines[-1].startswith("step 12/12: validation loss 5.")


def test_durations_have_two_units():
    assert [format_duration(s) for s in (0.4, 42, 185, 7800, 273600)] == [
        *("0 s", "42 s", "3 min 5 s", "2 h 10 min", "3 d 4 h")
    ]


def test_a_log_gets_the_first_and_the_last_frame_as_lines(capsys):
    for _ in open_bar(range(10), desc="reading"):
        pass
    printed = capsys.readouterr().err
    assert "\r" not in printed
    first, last = printed.splitlines()
    assert first.startswith("reading:   0%")
    assert last.startswith("reading: 100%")
    assert len(last) <= 80
