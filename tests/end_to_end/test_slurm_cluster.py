"""A run and a sweep on a real Slurm cluster of two nodes, with a requeue and a killed node."""

import json
import re
from pathlib import Path

import pytest
import yaml
from processes import Program, kill, wait_until
from records import losses, record
from slurm import Slurm

from stackexp.runs import RunFolder
from stackexp.sweeps.sweep import load_sweep
from stackexp.sweeps.trials import TrialState, get_state, read_claim

DOCS = Path(__file__).parents[2] / "docs" / "cluster.md"
FSDP = ("trainer.strategy=fsdp", "data.micro_batch_size=2", "trainer.max_steps=60")


@pytest.fixture
def program(slurm, tmp_path) -> Program:
    return Program(tmp_path)


def batch_script() -> str:
    """Return the batch script of the docs."""
    return next(block for block in re.findall(r"```bash\n(.*?)```", DOCS.read_text(), re.DOTALL) if "#SBATCH" in block)


def for_two_nodes(script: str) -> str:
    """Adapt the script to the test's config, on two nodes without GPUs."""
    config = f"--config tiny.yaml trainer.num_nodes=2 {' '.join(FSDP)}"
    changes = {
        "--nodes=1": "--nodes=2",
        "--ntasks-per-node=8": "--ntasks-per-node=1",
        "--cpus-per-task=8": "--cpus-per-task=1",
        "#SBATCH --gpus-per-node=8\n": "",
        "source .venv/bin/activate\n": "",
        "--config pretrain/stacktrans-360m trainer=fsdp": config,
    }
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    return script


@pytest.mark.process
def test_a_requeued_run_resumes_exactly(slurm: Slurm, program, tiny, tmp_path):
    """The docs' script shards the run over two nodes; it is signaled, requeued, and equals an undisturbed run."""
    reference = program.start("fit", "--config", tiny, *FSDP, "trainer.devices=2", "--run", tmp_path / "reference")
    (tmp_path / "job.sh").write_text(for_two_nodes(batch_script()))
    run = RunFolder(tmp_path / "runs" / "my-run")
    job = slurm.output("sbatch", "--parsable", f"--chdir={tmp_path}", tmp_path / "job.sh").strip()
    wait_until(lambda: len(losses(run)) > 5)
    slurm.output("scancel", "--signal=USR1", job)
    wait_until(lambda: slurm.squeue() == {job: "PENDING"})
    assert not run.is_finished
    slurm.hurry()
    wait_until(lambda: slurm.squeue() == {})
    assert run.is_finished, (tmp_path / "my-run.txt").read_text()
    assert "resumed from" in (tmp_path / "my-run.txt").read_text()
    assert len(json.loads((run.path / "environment.json").read_text())) == 2
    assert reference.wait() == 0
    kill(reference)
    assert record(run) == record(RunFolder(tmp_path / "reference"))


@pytest.mark.process
def test_a_sweep_survives_a_signal_and_the_loss_of_a_node(slurm: Slurm, program, tiny, tmp_path):
    """One trial is sharded over both nodes. In the end all trials are finished, each exactly once."""
    path = tmp_path / "study.yaml"
    slots = [{"model.memory.num_slots": number} for number in (2, 3)]
    wide = {"model.memory.num_slots": 4, "trainer.num_nodes": 2, "trainer.strategy": "fsdp"}
    overrides = ["trainer.max_steps=60", "data.micro_batch_size=2"]
    path.write_text(yaml.safe_dump({"config": "tiny.yaml", "overrides": overrides, "list": [wide, *slots]}))
    trials = load_sweep(str(path)).trials
    assert len(trials) == 3

    program.run("sweep", "run", path, "--launcher", "slurm")
    wait_until(lambda: len(losses(trials[0].folder)) > 5)
    slurm.output("scancel", "--batch", "--signal=USR1", read_claim(trials[0]).job)
    wait_until(lambda: get_state(trials[0]) == TrialState.STOPPED)
    wait_until(lambda: slurm.hurry() or len(losses(trials[0].folder)) > 20)
    slurm.kill_node("n1")
    assert not trials[0].folder.is_finished, "the kill came too late"
    wait_until(lambda: "PENDING" in slurm.squeue().values())
    slurm.start_node("n1")
    wait_until(lambda: not slurm.squeue() or slurm.hurry() or not slurm.squeue())

    assert [get_state(trial) for trial in trials] == [TrialState.DONE] * 3, [trial.log.read_text() for trial in trials]
    for trial in trials:
        steps = [line["step"] for line in trial.folder.read_metrics() if "train/loss" in line]
        assert steps == list(range(1, 61)), trial.name
        assert not trial.failure.exists()
    sessions = [len(json.loads((trial.folder.path / "environment.json").read_text())) for trial in trials]
    assert sessions[0] == 3
    assert max(sessions[1:]) <= 2
