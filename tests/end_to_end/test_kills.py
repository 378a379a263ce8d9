"""SIGKILL at random moments, with a checkpoint after every step: the run always resumes, and nothing is lost.

Some kills hit the startup of the resumed run, the others a step or the writing of its checkpoint.
"""

import random
import time
from pathlib import Path

import pytest
from forks import Forks
from records import losses, only_run, record

from stackexp.runs import RunFolder

EVERY_STEP = ("trainer.checkpoint_interval=1", "trainer.val_check_interval=25", "data.eval_sequences=8")
QUIET = ("logging.progress_bar=false",)
TWO = ("trainer.devices=2", "data.micro_batch_size=2")


def kill_often(
    kills: int, folder: Path, tiny: Path, options: tuple[str, ...], ranks: int
) -> tuple[RunFolder, RunFolder, int]:
    """Train once with `kills` kills and once without; return both runs, and the number of kills during a save."""
    forks, moments, unfinished = Forks(folder), random.Random(0), 0
    fit = ("fit", "--config", tiny, *EVERY_STEP, *QUIET, *options)
    forks.run(*fit, ranks=ranks)
    reference, run = only_run(folder / "runs"), RunFolder(folder / "killed")
    for number in range(kills):
        steps, moment = len(losses(run)), moments.uniform(0, 1)
        deadline = time.monotonic() + (moment if number % 4 == 0 else 1000)
        started = forks.start(*fit, "--run", run.path, ranks=ranks)
        started.wait_until(
            lambda steps=steps, deadline=deadline: len(losses(run)) > steps or time.monotonic() > deadline
        )
        if number % 4:
            time.sleep(0.15 * moment)
        started.kill()
        assert not run.is_finished, "too few steps for this many kills"
        unfinished += any(run.checkpoints.glob(".*"))
    forks.run(*fit, "--run", run.path, ranks=ranks)
    return run, reference, unfinished


@pytest.mark.process
@pytest.mark.parametrize("kills", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_a_killed_run_always_resumes(tiny, tmp_path, kills):
    run, reference, unfinished = kill_often(kills, tmp_path, tiny, (f"trainer.max_steps={8 * kills}",), ranks=1)
    assert run.is_finished
    assert record(run) == record(reference)
    assert unfinished > kills // 10, "too few kills hit the writing of a checkpoint"


@pytest.mark.slow  # more than a minute
def test_a_killed_run_of_two_processes_always_resumes(tiny, tmp_path):
    options = ("trainer.max_steps=30", "trainer.strategy=fsdp", *TWO)
    run, reference, _ = kill_often(3, tmp_path, tiny, options, ranks=2)
    assert run.is_finished
    assert record(run) == record(reference)
