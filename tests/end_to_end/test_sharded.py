"""One run over changing devices: its checkpoints are read by any number of processes, and its record is one."""

import json
import re

import pytest
from forks import Forks
from records import assert_close, losses, only_run

from stackexp.runs import RunFolder

INTERVALS = ("trainer.max_steps=48", "trainer.checkpoint_interval=5", "trainer.val_check_interval=12")
CHEAP = ("data.eval_batch_size=64", "logging.progress_bar=false")
SESSIONS = {  # processes and micro-batches a step: 2 x 2, 1 x 1, 2 x 1, 2 x 4
    "fsdp": ("trainer.strategy=fsdp", "trainer.devices=2", "data.micro_batch_size=2"),
    "one process": ("data.micro_batch_size=8",),
    "ddp": ("trainer.strategy=ddp", "trainer.devices=2", "data.micro_batch_size=4"),
    "hsdp": ("trainer.strategy=hsdp", "trainer.devices=2", "data.micro_batch_size=1"),
}


def test_one_run_on_two_devices_one_and_two_again(tiny, tmp_path):
    """Each session but the last is told to stop (SIGTERM), and the next, with other devices, goes on from there."""
    forks, folder = Forks(tmp_path), tmp_path / "run"
    fit = ("fit", "--config", tiny, *INTERVALS, *CHEAP)
    forks.run(*fit)
    reference = only_run(tmp_path / "runs")
    run, stopped_at = RunFolder(folder), []
    for number, (session, options) in enumerate(SESSIONS.items(), 1):
        started = forks.start(*fit, "--run", folder, *options, ranks=2 if "trainer.devices=2" in options else 1)
        if number < len(SESSIONS):
            started.wait_until(lambda number=number: 11 * number in losses(run))
            started[-1].terminate()
        codes = started.join()
        assert set(codes) == {75 if number < len(SESSIONS) else 0}, (session, started.output.read_text())
        stopped_at.append(int(run.newest_checkpoint().name))
    assert stopped_at == sorted(set(stopped_at)), "every session took steps"
    assert len(json.loads((folder / "environment.json").read_text())) == 4
    assert_close(run, reference)

    # What is kept: the newest two and the best
    kept = {run.best_checkpoint(), *run.saved()[-2:]}
    assert set(run.saved()) == kept
    assert not list(run.checkpoints.glob(".*"))

    # The same figures from the folder, sharded or not, and from one consolidated file
    sets = json.loads(run.result.read_text())["sets"]
    validate = ("validate", "--run", folder, *CHEAP)
    forks.run(*validate, ranks=2)
    assert_same_figures(json.loads((folder / "validate.json").read_text())["sets"], sets)
    forks.run(*validate, "trainer.strategy=single", "trainer.devices=1")
    assert_same_figures(json.loads((folder / "validate.json").read_text())["sets"], sets)
    forks.run("checkpoint", "consolidate", "--run", folder, "--to", "model.safetensors")
    shown = forks.run("validate", "--config", tiny, "--ckpt_path", "model.safetensors")
    for name, figures in sets.items():
        assert re.search(rf"^{name} .*\b{figures['loss']:.4f}\b", shown, re.MULTILINE)

    # A text from a run of two devices, by one process
    assert forks.run("generate", "--run", folder, "--prompt", "def f", "--max_new_tokens", "5").startswith("def f")


def assert_same_figures(ours: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]]) -> None:
    assert ours.keys() == theirs.keys()
    for name, figures in theirs.items():
        assert ours[name] == pytest.approx(figures, rel=1e-6)
