"""The Slurm launcher on a real two-node Slurm cluster, with shell scripts as trials."""

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import wait_until

from stackexp.cli import main
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.trainer import TrainerConfig
from stackexp.errors import ConfigError, RunError
from stackexp.runs import RunFolder
from stackexp.sweeps import slurm as slurm_commands
from stackexp.sweeps.launchers import slurm as launcher_module
from stackexp.sweeps.launchers.slurm import SlurmLauncher
from stackexp.sweeps.launchers.slurm_jobs import Task, find_newest_tasks, read_exit_code, write_exit_code
from stackexp.sweeps.schema import Resources
from stackexp.sweeps.sweep import load_sweep
from stackexp.sweeps.trials import Trial

COUNT = 'echo >>"$0/starts"; '
UNTIL_STOPPED = f"{COUNT}trap 'sleep 1; exit 75' USR1 TERM; touch $0/ready; until [ -e $0/go ]; do sleep 0.05; done; "
"""Runs until the file `go` exists; ends with 75 a second after it is stopped."""


@pytest.fixture
def sweep(slurm, tmp_path, monkeypatch) -> "Sweep":
    monkeypatch.setattr(launcher_module, "SQUEUE_SECONDS", 0)
    return Sweep(tmp_path / "study")


class Sweep:
    """A sweep's folder with shell commands as trials; $0 is the trial's folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.shell: dict[str, str] = {}
        folder.mkdir()

    def trial(self, name: str, shell: str, **trainer: int) -> Trial:
        self.shell[name] = shell
        folder = RunFolder(self.folder / name)
        folder.path.mkdir()
        return Trial(folder, ExperimentConfig(trainer=TrainerConfig(**trainer)), {})

    def launcher(self, max_parallel: int | None = None, **resources) -> SlurmLauncher:
        return SlurmLauncher(self.folder, [], Resources(**resources), max_parallel, self.command)

    def command(self, trial: Trial) -> list[str]:
        return ["bash", "-c", self.shell[trial.name], str(trial.folder.path)]


def wait_for_codes(launcher: SlurmLauncher, number: int = 1) -> dict[str, int]:
    """Wait until `number` more trials have ended and return their names and exit codes."""
    found: dict[str, int] = {}

    def has_enough() -> bool:
        found.update({trial.name: code for trial, code in launcher.collect_ended()})
        return len(found) >= number

    wait_until(has_enough)
    return found


def count_starts(trial: Trial) -> int:
    path = trial.folder.path / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def is_ready(trial: Trial) -> bool:
    return (trial.folder.path / "ready").exists()


def test_each_trial_ends_with_its_own_code(sweep, monkeypatch):
    """The highest exit code of several processes counts. The output is in the trial's log, and no process hangs."""
    endings = {"done": 0, "failed": 1, "config": 2, "busy": 74}
    trials = [sweep.trial(name, f"echo {name} $SLURM_PROCID; exit {code}") for name, code in endings.items()]
    trials.append(sweep.trial("killed", "kill -9 $$"))
    trials.append(sweep.trial("hanging", "((SLURM_PROCID == 1)) && exit 1; sleep 100", num_nodes=2))
    trials.append(sweep.trial("one-of-two", "((SLURM_PROCID == 1)) && exit 3; sleep 1; exit 1", num_nodes=2))
    monkeypatch.setattr(launcher_module, "SCRIPT", launcher_module.SCRIPT.replace("--wait=300", "--wait=2"))
    launcher = sweep.launcher()
    launcher.start(trials)
    assert launcher.count_free() == 1000 - 7
    ended = wait_for_codes(launcher, 7)
    assert ended.pop("hanging") in (-9, -15)
    assert ended == endings | {"killed": -9, "one-of-two": 3}
    assert launcher.count_free() == 1000
    assert all(f"{trial.name} 0\n" in trial.log.read_text() for trial in trials[:4])
    record = json.loads((trials[1].folder.path / "exit.json").read_text())
    assert (record["exit_code"], record["attempt"]) == (1, 1)
    lines = [json.loads(line) for line in (sweep.folder / "jobs.jsonl").read_text().splitlines()]
    assert [len(line["trials"]) for line in lines] == [5, 2], "one array job for each shape"


@pytest.mark.slow  # Slurm looks at time limits twice a minute
def test_trial_is_requeued_before_the_time_limit(sweep, slurm):
    """The warning comes after 15 seconds. A process that has saved does not end the other one."""
    save = "((SLURM_PROCID)) && sleep 2 && touch $0/saved; exit 75"
    shell = f"{COUNT}trap '{save}' USR1; [ -e $0/saved ] || sleep 100 & wait"
    trials = [sweep.trial("short", COUNT), sweep.trial("long", shell, num_nodes=2)]
    launcher = sweep.launcher(time="1", signal_seconds=45)
    launcher.start(trials)
    assert wait_for_codes(launcher) == {"short": 0}
    wait_until(lambda: "PENDING" in slurm.squeue().values() and (trials[1].folder.path / "saved").exists())
    assert launcher.collect_ended() == []
    wait_until(lambda: slurm.hurry() or count_starts(trials[1]) == 4)
    assert wait_for_codes(launcher) == {"long": 0}
    assert json.loads((trials[1].folder.path / "exit.json").read_text())["attempt"] == 2
    assert count_starts(trials[0]) == 1, "only the task itself is requeued"


@pytest.mark.process
def test_trial_keeps_its_job_when_slurm_requeues_it(sweep, slurm, tmp_path, monkeypatch):
    """Simulate a node failure after which the script cannot requeue the job again."""
    script = tmp_path / "bin" / "scontrol"
    script.parent.mkdir()
    refused = "touch $0.refused; echo 'Job is pending execution' >&2; exit 1"
    script.write_text(f'#!/bin/bash\n[ -e $0.refused ] || {{ {refused}; }}\nexec {shutil.which("scontrol")} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    trial = sweep.trial("t", f"{COUNT}[ -e $0/saved ] || {{ touch $0/saved; exit 75; }}")
    launcher = sweep.launcher()
    launcher.start([trial])
    wait_until(lambda: slurm.squeue() and "PENDING" in slurm.squeue().values() and count_starts(trial))
    assert launcher.collect_ended() == []
    wait_until(lambda: slurm.hurry() or count_starts(trial) == 2)
    assert wait_for_codes(launcher) == {"t": 0}
    assert (tmp_path / "bin" / "scontrol.refused").exists()
    assert len((sweep.folder / "jobs.jsonl").read_text().splitlines()) == 1


def test_max_parallel_limits_the_running_tasks(sweep):
    shell = "echo 1 >>$0/../load; sleep 0.5; echo -1 >>$0/../load"
    trials = [sweep.trial(f"t{i}", shell) for i in range(4)] + [
        sweep.trial(f"wide{i}", shell, devices=2) for i in (0, 1)
    ]
    launcher = sweep.launcher(max_parallel=2)
    launcher.start(trials[:3])
    launcher.start(trials[3:])
    assert set(wait_for_codes(launcher, 6).values()) == {0}
    load = [int(line) for line in (sweep.folder / "load").read_text().split()]
    assert len(load) == 2 * (4 + 2 * 2)
    running = [sum(load[: i + 1]) for i in range(len(load))]
    assert 2 <= max(running) <= 4, "two trials, of up to two processes"


def test_drivers_do_not_submit_a_trial_twice(sweep, slurm):
    """Start drivers at the same time and later; all of them receive the exit code."""
    trials = [sweep.trial(f"t{i}", UNTIL_STOPPED) for i in range(3)]
    launchers = [sweep.launcher() for _ in range(4)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda launcher: launcher.start(trials), launchers))
    wait_until(lambda: all(map(is_ready, trials)))
    later = sweep.launcher()
    later.start(trials)
    assert len(slurm.squeue()) == 3
    for trial in trials:
        (trial.folder.path / "go").touch()
    for launcher in (*launchers, later):
        assert wait_for_codes(launcher, 3) == {"t0": 0, "t1": 0, "t2": 0}
    assert [count_starts(trial) for trial in trials] == [1, 1, 1]

    for attempt in (2, 3, 4):  # one that has ended may be started again at once
        later.start(trials[:1])
        assert wait_for_codes(later) == {"t0": 0}
        assert count_starts(trials[0]) == attempt


@pytest.mark.process
def test_stop_saves_running_trials_and_requeues_none(sweep, slurm):
    trials = [sweep.trial(f"t{i}", UNTIL_STOPPED) for i in range(3)]
    trials.append(sweep.trial("stubborn", f"{COUNT}trap '' TERM; touch $0/ready; sleep 100 & wait; wait"))
    launcher = sweep.launcher(max_parallel=3, signal_seconds=5)
    launcher.start([trials[3], *trials[:3]])
    wait_until(lambda: sum(map(is_ready, trials)) == 3)
    sweep.launcher(signal_seconds=5).stop()  # as `sweep stop` without a driver
    assert slurm.squeue() == {}
    assert wait_for_codes(launcher, 4) == {"t0": 75, "t1": 75, "t2": 75, "stubborn": -9}
    assert [count_starts(trial) for trial in trials] == [1, 1, 0, 1]


def test_cancel_ends_one_trial(sweep, slurm):
    trials = [sweep.trial("a", UNTIL_STOPPED), sweep.trial("b", UNTIL_STOPPED), sweep.trial("c", UNTIL_STOPPED)]
    launcher = sweep.launcher(max_parallel=2)
    launcher.start(trials)
    wait_until(lambda: is_ready(trials[0]) and is_ready(trials[1]))
    launcher.cancel(trials[2])
    launcher.cancel(trials[0])
    assert wait_for_codes(launcher, 2) == {"a": 75, "c": 75}
    wait_until(lambda: list(slurm.squeue().values()) == ["RUNNING"])


def test_vanished_job_counts_as_killed(sweep, slurm):
    trial = sweep.trial("a", f"{COUNT}touch $0/ready; sleep 100")
    launcher = sweep.launcher()
    launcher.start([trial])
    wait_until(lambda: is_ready(trial))
    slurm.output("scancel", *slurm.squeue())
    assert wait_for_codes(launcher) == {"a": -9}
    assert slurm.squeue() == {}


@pytest.mark.process
def test_no_trial_ends_while_the_controller_is_down(sweep, slurm, monkeypatch):
    """Recorded exit codes still count, and a new trial is submitted when the controller is back."""
    monkeypatch.setattr(slurm_commands, "RETRY_SECONDS", 0.2)
    trials = [sweep.trial("a", UNTIL_STOPPED), sweep.trial("b", UNTIL_STOPPED), sweep.trial("c", COUNT)]
    launcher = sweep.launcher()
    launcher.start(trials[:2])
    wait_until(lambda: all(map(is_ready, trials[:2])))
    slurm.stop_controller()
    assert launcher.collect_ended() == []
    record = {"exit_code": 0, "job": find_newest_tasks(sweep.folder)["a"].job}
    (trials[0].folder.path / "exit.json").write_text(json.dumps(record))
    assert wait_for_codes(launcher) == {"a": 0}
    with ThreadPoolExecutor() as pool:
        submission = pool.submit(launcher.start, trials[2:])
        time.sleep(1)
        slurm.start_controller()
        submission.result()
    for trial in trials[:2]:
        (trial.folder.path / "go").touch()
    assert wait_for_codes(launcher, 2) == {"b": 0, "c": 0}
    assert [count_starts(trial) for trial in trials] == [1, 1, 1]


def test_refusal_of_slurm_is_reported(sweep):
    with pytest.raises(RunError, match=r"^sbatch: .*invalid partition specified: gpu"):
        sweep.launcher(partition="gpu").start([sweep.trial("a", "true")])


def test_missing_slurm_is_a_config_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="sbatch not found"):
        SlurmLauncher(tmp_path, [], Resources())


def test_sweep_status_and_stop_without_a_driver(slurm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text("config: quickstart\ngrid: {model.memory.num_heads: [1, 2]}\n")
    found = load_sweep("study.yaml")
    for trial in found.trials:
        trial.folder.path.mkdir(parents=True)
    launcher = SlurmLauncher(
        found.folder,
        found.trials,
        Resources(),
        1,
        lambda trial: ["bash", "-c", UNTIL_STOPPED, str(trial.folder.path.resolve())],
    )
    launcher.start(found.trials)
    wait_until(lambda: is_ready(found.trials[0]))
    assert main(["sweep", "status", "study.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "running n0, job " in lines[2]
    assert "pending (JobArrayTaskLimit), job " in lines[3]
    assert main(["sweep", "stop", "study.yaml"]) == 0
    assert "stopping its slurm jobs" in capsys.readouterr().out
    assert slurm.squeue() == {}
    assert wait_for_codes(launcher, 2) == {trial.name: 75 for trial in found.trials}


def test_a_cut_off_record_of_a_full_disk_counts_as_missing(tmp_path):
    (tmp_path / "exit.json").touch()
    assert read_exit_code(tmp_path, Task("job", 0)) is None
    write_exit_code(tmp_path, Task("job", 0), "1_0", 3)
    assert read_exit_code(tmp_path, Task("job", 0)) == 3
    assert read_exit_code(tmp_path, Task("other", 0)) is None
