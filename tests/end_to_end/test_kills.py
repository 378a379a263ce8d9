"""SIGKILL at random moments, with a checkpoint after every step: the run always goes on, and nothing is lost.

Some moments lie within the resuming itself, the others within a step or the writing of its checkpoint.
"""

import random
import time
from pathlib import Path

import pytest
from forks import Forks
from records import losses, only_run, record

from stackexp.runs import RunFolder

EVERY_STEP = ("trainer.checkpoint_interval=1", "trainer.val_check_interval=25", "data.eval_sequences=8")
QUIET = ("logging.tensorboard=false", "logging.progress_bar=false")
FSDP = ("trainer.strategy=fsdp", "trainer.devices=2", "data.micro_batch_size=2")


def kill_often(
    kills: int, folder: Path, tiny: Path, options: tuple[str, ...], ranks: int
) -> tuple[RunFolder, RunFolder, int]:
    """Train to the end through `kills` kills, and once without: both runs, and how many kills fell into a save."""
    forks, moments, unfinished = Forks(folder), random.Random(0), 0
    fit = ("fit", "--config", tiny, *EVERY_STEP, *QUIET, *options)
    forks.run(*fit, ranks=ranks)
    reference, run = only_run(folder / "runs"), RunFolder(folder / "killed")
    for number in range(kills):
        taken, moment = len(losses(run)), moments.uniform(0, 1)
        soon = time.monotonic() + (moment if number % 4 == 0 else 1000)
        started = forks.start(*fit, "--run", run.path, ranks=ranks)
        started.wait_until(lambda taken=taken, soon=soon: len(losses(run)) > taken or time.monotonic() > soon)
        if number % 4:
            time.sleep(0.15 * moment)
        started.kill()
        assert not run.finished, "too few steps for so many kills"
        unfinished += any(run.checkpoints.glob(".*"))
    forks.run(*fit, "--run", run.path, ranks=ranks)
    return run, reference, unfinished


@pytest.mark.parametrize("kills", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_a_killed_run_always_goes_on(tiny, tmp_path, kills):
    run, reference, unfinished = kill_often(kills, tmp_path, tiny, (f"trainer.max_steps={8 * kills}",), ranks=1)
    assert run.finished
    assert record(run) == record(reference)
    assert unfinished > kills // 10, "hardly a kill came while a checkpoint was written"


@pytest.mark.slow  # more than a minute
def test_a_killed_run_of_two_processes_always_goes_on(tiny, tmp_path):
    run, reference, _ = kill_often(3, tmp_path, tiny, ("trainer.max_steps=30", *FSDP), ranks=2)
    assert run.finished
    assert record(run) == record(reference)
