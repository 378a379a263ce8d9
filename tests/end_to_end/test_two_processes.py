"""Two CPU processes: killed, resumed as a user does it (the first starts the second), and evaluated."""

import json

import pytest
from forks import Forks
from records import only_run, record

from stackexp.runs import RunFolder

TWO = ("trainer.devices=2", "trainer.strategy=ddp", "data.micro_batch_size=2")


@pytest.mark.slow  # test_kills.py kills two processes that are forked faster
def test_two_processes_resume_after_sigkill(program, tiny, tmp_path):
    command = ("fit", "--config", tiny, *TWO, "trainer.max_steps=30")
    command = (*command, "trainer.checkpoint_interval=7", "trainer.val_check_interval=14")
    forks = Forks(tmp_path)
    forks.run(*command, ranks=2)
    reference = only_run(tmp_path / "runs")

    run = RunFolder(tmp_path / "killed")
    started = forks.start(*command, "--run", run.path, ranks=2)
    started.kill_when(lambda: len(record(run)) > 9)
    assert not run.finished
    program.run(*command, "--run", run.path)
    assert record(run) == record(reference)


def test_figures_of_the_same_weights_on_one_and_two_processes(tiny, tmp_path):
    """Batches of another size, and sets that do not divide: what is padded does not count."""
    forks = Forks(tmp_path)
    forks.run("fit", "--config", tiny)
    run = only_run(tmp_path / "runs")
    sets = json.loads(run.result.read_text())["sets"]
    for strategy in ("ddp", "fsdp"):
        options = (*TWO, f"trainer.strategy={strategy}", "data.eval_batch_size=7")
        forks.run("validate", "--run", run.path, *options, ranks=2)
        again = json.loads((run.path / "validate.json").read_text())["sets"]
        assert again.keys() == sets.keys()
        for name, figures in sets.items():
            assert again[name] == pytest.approx(figures, rel=1e-6)
