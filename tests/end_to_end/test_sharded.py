"""Sharded checkpoints: written while training continues, loaded by any number of processes."""

import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from records import assert_close, losses, only_run

from stackexp.cli import main
from stackexp.files import read_json
from stackexp.models import checkpoints
from stackexp.runs import RunFolder

INTERVALS = ("trainer.max_steps=48", "trainer.checkpoint_interval=5", "trainer.val_check_interval=12")
QUIET = ("logging.progress_bar=false",)
SESSIONS = {  # processes x micro-batches per step: 2 x 2, 1 x 1, 2 x 1, 2 x 4
    "fsdp": ("trainer.strategy=fsdp", "trainer.devices=2", "data.micro_batch_size=2"),
    "one process": ("data.micro_batch_size=8",),
    "ddp": ("trainer.strategy=ddp", "trainer.devices=2", "data.micro_batch_size=4"),
    "hsdp": ("trainer.strategy=hsdp", "trainer.devices=2", "data.micro_batch_size=1"),
}


@pytest.mark.process
def test_run_resumes_with_a_different_number_of_devices(tiny, forks, tmp_path):
    """Every session but the last is stopped by SIGTERM, and the next one resumes on other devices."""
    folder = tmp_path / "run"
    fit = ("fit", "--config", tiny, *INTERVALS, *QUIET)
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
    assert len(read_json(folder / "environment.json")) == 4
    assert_close(run, reference)
    assert set(run.list_checkpoints()) == {run.best_checkpoint(), *run.list_checkpoints()[-2:]}, (
        "the newest two and the best are kept"
    )
    assert not list(run.checkpoints.glob(".*"))

    # The figures are the same from the folder, sharded or not, and from a consolidated file.
    sets = read_json(run.result)["sets"]
    validate = ("validate", "--run", folder, *QUIET)
    for options, ranks in (((), 2), (("trainer.strategy=single", "trainer.devices=1"), 1)):
        forks.run(*validate, *options, ranks=ranks)
        assert_same_figures(read_json(folder / "validate.json")["sets"], sets)
    forks.run("checkpoint", "consolidate", "--run", folder, "--to", "model.safetensors")
    printed = forks.run("validate", "--config", tiny, "--ckpt_path", "model.safetensors")
    for name, figures in sets.items():
        assert re.search(rf"^{name} .*\b{figures['loss']:.4f}\b", printed, re.MULTILINE)
    assert forks.run("generate", "--run", folder, "--prompt", "def f", "--max_new_tokens", "5").startswith("def f")


def assert_same_figures(ours: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]]) -> None:
    assert ours.keys() == theirs.keys()
    for name, figures in theirs.items():
        assert ours[name] == pytest.approx(figures, rel=1e-6)


def fit_on_a_slow_disk(*arguments: object) -> int:
    """Run `fit --run FOLDER` with a disk that finishes a checkpoint only after two more steps are logged."""
    run, write = RunFolder(Path(arguments[-1])), dcp.FileSystemWriter.write_data

    def write_late(self, *args):
        step, deadline = int(Path(self.path).name.strip(".")), time.monotonic() + 60
        while max(losses(run)) < min(step + 2, 12):
            assert time.monotonic() < deadline, "training waits for the checkpoint"
            time.sleep(0.01)
        return write(self, *args)

    dcp.FileSystemWriter.write_data = write_late
    return main([str(argument) for argument in arguments])


def load_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Load the weights and the optimizer's moments, unsharded."""
    stored = checkpoints.check_files(checkpoint)
    sizes = {name: tensor for name, tensor in stored.items() if hasattr(tensor, "size")}
    tensors = {name: torch.empty(tensor.size, dtype=tensor.properties.dtype) for name, tensor in sizes.items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return tensors


@pytest.mark.process
def test_a_checkpoint_holds_its_own_step_while_two_processes_continue(tiny, forks, tmp_path):
    runs = [RunFolder(tmp_path / name) for name in ("fast", "slow")]
    fit = ("fit", "--config", tiny, "trainer.checkpoint_interval=4", "trainer.keep_checkpoints=9", *QUIET)
    fit = (*fit, *SESSIONS["fsdp"], "trainer.val_check_interval=null", "--run")
    forks.run(*fit, runs[0].path, ranks=2)
    forks.run(*fit, runs[1].path, ranks=2, function=fit_on_a_slow_disk)
    for step in (4, 8, 12):
        fast, slow = (load_tensors(run.checkpoints / f"{step:08d}") for run in runs)
        assert sum(name.startswith("optimizer.") for name in fast) > sum(name.startswith("model.") for name in fast)
        assert fast.keys() == slow.keys()
        assert all(torch.equal(fast[name], slow[name]) for name in fast)
