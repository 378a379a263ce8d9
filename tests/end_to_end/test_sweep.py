"""A sweep with real trials: after its worker and a trial are killed, the same command finishes it."""

import json
import os
import signal

import pytest
import yaml
from processes import Program, wait_until

from stackexp.sweeps.sweep import load_sweep
from stackexp.sweeps.trials import TrialState, get_state


@pytest.mark.slow  # two minutes; tests/test_sweep_worker.py kills workers too
def test_same_command_finishes_a_killed_sweep(program: Program, tiny, tmp_path):
    path = tmp_path / "slots.yaml"
    keys = {"config": "tiny.yaml", "overrides": ["trainer.max_steps=40"], "grid": {"model.memory.num_slots": [2, 3, 4]}}
    path.write_text(yaml.safe_dump(keys))
    trials = load_sweep(str(path)).trials
    first, second, third = (trial.folder for trial in trials)

    worker = program.start("sweep", "run", path, "--max-parallel", "2")
    wait_until(lambda: first.newest_checkpoint() is not None and (second.path / "environment.json").exists(), worker)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    processes = [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and _runs(pid, str(first.path))]
    assert processes
    os.kill(processes[0], signal.SIGKILL)  # the other trial continues without a worker
    assert not third.path.exists()

    output = program.run("sweep", "run", path, "--max-parallel", "2")
    assert [get_state(trial) for trial in trials] == [TrialState.DONE] * 3
    assert not any(trial.folder.is_running for trial in trials)
    sessions = [len(json.loads((run.path / "environment.json").read_text())) for run in (first, second, third)]
    assert sessions == [2, 1, 1]  # the killed one was resumed, no other one was started twice
    for run in (first, second, third):
        losses = [line["step"] for line in run.read_metrics() if "train/loss" in line]
        assert losses == list(range(1, 41))
    assert "resumed from" in trials[0].log.read_text()
    assert output.count("done  ") == 3

    rows = program.run("sweep", "results", path, "--tables").splitlines()[4:7]
    assert {row.split()[0] for row in rows} == {"S=2", "S=3", "S=4"}
    objectives = [float(row.split()[1]) for row in rows]
    assert objectives == sorted(objectives)


def _runs(pid: str, folder: str) -> bool:
    """Return True if a process is the fit of a folder."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode().split("\0")[-2:-1] == [folder]
    except OSError:
        return False
