"""Progress on standard error: a bar in a terminal, lines in a file."""

import io
import os
import pty
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from records import only_run

from stackexp.config.experiment import LoggingConfig
from stackexp.training.callbacks import progress
from stackexp.training.callbacks.progress import StepBar, StepLines, build_progress, format_duration


@pytest.fixture
def log() -> SimpleNamespace:
    return SimpleNamespace(last_line={})


@pytest.fixture
def trainer() -> SimpleNamespace:
    data = SimpleNamespace(set_names=lambda stage: {"validate": ["left", "right"]}[stage])
    state = SimpleNamespace(fn="fit")
    return SimpleNamespace(
        global_step=5, max_steps=20, datamodule=data, num_val_batches=[2, 2], is_global_zero=True, state=state
    )


def take_steps(callback, trainer, log, steps) -> None:
    """Call the hook for each (step, loss); a step that comes twice is a micro-batch."""
    for step, loss in steps:
        trainer.global_step = step
        if loss:
            log.last_line = log.last_line | {"train/loss": loss, "train/tokens_per_second": 12345.6}
        callback.on_train_batch_end(trainer, None, None, None, 0)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_bar_counts_steps_and_shows_loss_and_speed(monkeypatch, log, trainer, is_enabled):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    callback = StepBar(log)
    if not is_enabled:
        callback.disable()
    callback.on_train_start(trainer, None)
    take_steps(callback, trainer, log, [(5, None), (6, 9.0), (6, 9.0), (7, 2.34567)])
    callback.on_validation_start(trainer, None)
    for index, dataloader in ((0, 0), (0, 1)):
        callback.on_validation_batch_end(trainer, None, None, None, index, dataloader)
    callback.on_validation_end(trainer, None)
    callback.on_train_end(trainer, None)
    output = sys.stderr.getvalue()
    if not is_enabled:
        assert output == ""
        return
    assert "validating right" in output
    last = output.rstrip("\n").rpartition("\r")[2]
    assert "fit" in last
    assert " 7/20 " in last
    assert "loss 2.346, 12,346 tokens/s" in last


def test_time_left_does_not_count_the_first_step(monkeypatch, log, trainer, capsys):
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    callback = StepLines(log, interval=30)
    callback.on_train_start(trainer, None)
    now += 500  # compiles
    take_steps(callback, trainer, log, [(6, 9.0)])
    for step in range(7, 21):
        now += 10
        take_steps(callback, trainer, log, [(step, 3.0), (step, 3.0)])
    log.last_line |= {"val/loss/average": 2.5}
    callback.on_validation_end(trainer, None)
    assert capsys.readouterr().err.splitlines() == [
        "step 6/20: loss 9.000, 12,346 tokens/s",
        "step 9/20: loss 3.000, 12,346 tokens/s, 1 min 50 s left",
        "step 12/20: loss 3.000, 12,346 tokens/s, 1 min 20 s left",
        "step 15/20: loss 3.000, 12,346 tokens/s, 50 s left",
        "step 18/20: loss 3.000, 12,346 tokens/s, 20 s left",
        "step 20/20: loss 3.000, 12,346 tokens/s",
        "step 20/20: validation loss 2.5000",
    ]


def test_other_ranks_print_nothing(log, trainer, capsys):
    callback = StepLines(log, interval=0.01)
    trainer.is_global_zero = False
    callback.on_train_start(trainer, None)
    take_steps(callback, trainer, log, [(6, 9.0), (7, 9.0)])
    callback.on_validation_end(trainer, None)
    assert capsys.readouterr().err == ""


def test_terminals_get_a_bar_and_files_get_lines(monkeypatch, log):
    assert isinstance(build_progress(LoggingConfig(), log), StepLines)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    assert isinstance(build_progress(LoggingConfig(), log), StepBar)
    assert isinstance(build_progress(LoggingConfig(progress_bar=False), log), StepLines)


def test_log_file_of_a_run_has_lines_without_carriage_returns(program, tiny, tmp_path):
    output = program.run("fit", "--config", tiny, "logging.log_interval_seconds=0.001")
    assert "\r" not in output
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert len(lines) == 12 + 2, "steps and validations"
    assert lines[0].startswith("step 1/12: loss 5.")
    assert re.fullmatch(r"step 5/12: loss 5\.\d+, [\d,]+ tokens/s, \d+ s left", lines[4])
    assert lines[-1].startswith("step 12/12: validation loss 5.")


@pytest.mark.process
def test_bar_in_a_terminal_of_80_columns(program, tiny, tmp_path):
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "stackexp", "fit", "--config", str(tiny)]
    subprocess.run(["stty", "cols", "80", "rows", "24"], stdin=terminal, check=True)
    process = subprocess.Popen(
        command, cwd=tmp_path, env=program.environment, stdout=subprocess.DEVNULL, stderr=terminal, stdin=terminal
    )
    os.close(terminal)
    output = b""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        try:
            output += os.read(main, 65536)
        except OSError:  # the program has closed the terminal
            break
    assert process.wait() == 0
    frames = [frame for frame in re.split(rb"[\r\n]+", output) if b"12/12" in frame]
    assert frames
    assert max(len(re.sub(rb"\x1b\[[A-Z0-9]*", b"", frame).decode()) for frame in frames) <= 80
    assert b"validating" in output
    assert only_run(tmp_path / "runs").is_finished


def test_durations_have_two_units():
    assert [format_duration(s) for s in (0.4, 42, 185, 7800, 273600)] == [
        *("0 s", "42 s", "3 min 5 s", "2 h 10 min", "3 d 4 h")
    ]
