"""Sweep drivers with fast fake trials: each trial runs exactly once, even if any process is killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path

import pytest
import yaml
from conftest import TINY
from processes import kill, wait_until

from stackexp import cli
from stackexp.errors import RunError
from stackexp.files import read_json, write_json
from stackexp.sweeps.driver import Driver, TrialSource, has_driver
from stackexp.sweeps.launchers import local
from stackexp.sweeps.launchers.local import LocalLauncher, find_processes, record_process
from stackexp.sweeps.runner import stop_sweep
from stackexp.sweeps.schema import Resources
from stackexp.sweeps.sweep import load_sweep
from stackexp.sweeps.trials import State, Trial, get_state, read_failure, read_status

DRIVER = Path(__file__).with_name("sweep_driver.py")
ALL_STEPS = list(range(1, 11))


class Study:
    """A sweep of the trials a, b, c and d, and its drivers."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "letters.yaml"
        self.root = folder / "runs"
        config = TINY | {"logging": {"root": str(self.root)}, "data": TINY["data"] | {"path": "unused"}}
        (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
        trials = [{"name": name, "model.memory.num_slots": slots} for slots, name in enumerate("abcd", 1)]
        self.write(list=trials)
        self.root.mkdir()
        self.set_behavior({})

    def write(self, **keys: object) -> None:
        old = yaml.safe_load(self.path.read_text()) if self.path.exists() else {"config": "tiny.yaml"}
        self.path.write_text(yaml.safe_dump(old | keys))

    def set_behavior(self, behavior: dict) -> None:
        (self.root / "behavior.json").write_text(json.dumps(behavior))

    @cached_property
    def trials(self) -> list[Trial]:
        return load_sweep(str(self.path)).trials

    @property
    def folder(self) -> Path:
        return self.root / "letters"

    def start(self, parallel: int = 2, retries: int = 0) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, DRIVER, self.path, str(parallel), str(retries)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def drive(self, expect: int = 0, **options: int) -> str:
        return self.finish([self.start(**options)], expect)

    def finish(self, drivers: list[subprocess.Popen], expect: int = 0) -> str:
        """Wait for drivers and return their output; fails unless they exit with `expect`."""
        outputs = [driver.communicate(timeout=120)[0] for driver in drivers]
        assert [driver.returncode for driver in drivers] == [expect] * len(drivers), outputs
        return "\n".join(outputs)

    def get_states(self) -> list[State]:
        return [get_state(trial) for trial in self.trials]

    def count_attempts(self) -> list[int]:
        """Return how often each trial has held its folder."""
        files = [trial.folder.path / "attempts" for trial in self.trials]
        return [len(file.read_text().splitlines()) if file.exists() else 0 for file in files]

    def read_steps(self) -> list[list[int]]:
        return [[line["step"] for line in trial.folder.read_metrics()] for trial in self.trials]


@pytest.fixture
def study(tmp_path) -> Study:
    return Study(tmp_path)


def test_driver_runs_every_trial_once(study):
    study.write(objective="average.accuracy")
    output = study.drive()
    assert study.get_states() == [State.DONE] * 4
    assert study.count_attempts() == [1] * 4
    assert all(output.count(f"done      {trial.name}") == 1 for trial in study.trials)
    for trial in study.trials:
        trial.folder.check_ownership()
    status = read_status(study.trials[0], "average.accuracy")  # a result without the objective stops nothing
    assert status.objective is None
    assert status.cause == "objective average.accuracy: result.json has no 'accuracy'; it has loss"
    study.trials[1].folder.result.unlink()
    study.drive()
    assert study.count_attempts() == [1, 2, 1, 1]


def test_failed_trials_record_their_cause_and_are_tried_again(study):
    study.set_behavior({"a": {"first": ["error"] * 9}, "b": {"first": ["kill"] * 9}})
    output = study.drive(expect=1)
    a, b = (read_status(trial, "average.loss") for trial in study.trials[:2])
    assert study.get_states() == [State.FAILED, State.FAILED, State.DONE, State.DONE]
    assert (a.cause, a.attempts, a.step) == ("non-finite loss in batch 3", 1, 2)
    assert (b.cause, b.attempts) == ("killed by SIGKILL", 1)
    assert read_failure(a.trial)["exit_code"] == 1
    assert output.splitlines()[-1].startswith("error: ")
    assert "2 of 4 trials failed" in output
    study.set_behavior({})
    study.drive()
    assert study.get_states() == [State.DONE] * 4
    assert study.count_attempts() == [2, 2, 1, 1]
    assert study.read_steps() == [ALL_STEPS] * 4, "resumed where they failed"


def test_retries_limit_the_attempts_of_each_trial(study):
    """A trial that saves and stops has not failed."""
    failures = {"a": {"first": ["error", "kill"]}, "b": {"first": ["error"] * 9}, "c": {"first": ["save", "save"]}}
    study.set_behavior(failures)
    study.drive(expect=1, retries=2)
    assert study.get_states() == [State.DONE, State.FAILED, State.DONE, State.DONE]
    assert study.count_attempts() == [3, 3, 3, 1]
    assert read_status(study.trials[1], "average.loss").attempts == 3
    assert not study.trials[2].failure.exists()


def test_concurrent_drivers_run_each_trial_once_and_share_the_retries(study):
    slow = {"first": ["error"] * 9, "seconds": 8}  # it fails after all drivers have started
    study.set_behavior({"a": slow} | {name: {"seconds": 0.4} for name in "bcd"})
    study.finish([study.start(parallel=2, retries=1) for _ in range(3)], expect=1)
    assert study.count_attempts() == [2, 1, 1, 1]
    assert study.read_steps()[1:] == [ALL_STEPS] * 3


def test_trial_has_failed_even_if_another_driver_tries_it_again(study):
    trial = study.trials[0]
    launcher = LocalLauncher(study.folder, [trial], Resources(), 1, lambda trial: ["false"])

    def try_again(trials: list[Trial]) -> None:
        if failure := read_failure(trial):
            write_json(trial.failure, failure | {"tried_again": True})

    with pytest.raises(RunError, match="1 of 1 trials failed"):
        Driver(study.folder, TrialSource([trial]), launcher, retries=0, show_progress=try_again).run()


@pytest.mark.process
def test_trials_of_killed_drivers_count_against_the_limit(study):
    study.set_behavior({"a": {"seconds": 12}})
    for _ in range(2):
        driver = study.start(parallel=1)
        wait_until(lambda: sum(study.count_attempts()) == 1 and has_driver(study.folder), driver)
        time.sleep(1)  # ten rounds
        assert study.count_attempts() == [1, 0, 0, 0]
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    study.set_behavior({})
    study.drive(parallel=1)
    assert study.count_attempts() == [1] * 4


@pytest.mark.process
def test_stop_after_a_killed_driver_stops_its_trials(study):
    study.set_behavior({name: {"seconds": 60} for name in "ab"})
    driver = study.start(parallel=2)
    wait_until(lambda: study.count_attempts()[:2] == [1, 1], driver)
    wait_until(lambda: all(len(steps) > 0 for steps in study.read_steps()[:2]), driver)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    assert set(LocalLauncher.find_jobs(study.folder)) == {trial.name for trial in study.trials[:2]}
    stop_sweep(load_sweep(str(study.path)))
    assert LocalLauncher.find_jobs(study.folder) == {}
    assert not any(trial.folder.is_running for trial in study.trials)
    study.set_behavior({})
    study.drive()
    assert study.read_steps() == [ALL_STEPS] * 4


def test_gpus_of_orphans_are_not_given_out_again(study, monkeypatch):
    monkeypatch.setattr(local, "find_gpus", lambda: ["0", "1", "2"])
    first, second = study.trials[:2]
    sleeping = lambda trial: ["sleep", "30"]  # noqa: E731
    for trial in study.trials:
        trial.config.trainer.accelerator = "cuda"
    launcher = LocalLauncher(study.folder, study.trials, Resources(), None, sleeping)
    for trial in (first, second):
        trial.folder.path.mkdir(parents=True, exist_ok=True)
    launcher.start([first])
    (orphan,) = find_processes(study.folder)
    assert (orphan.name, orphan.gpus) == (first.name, ["0"])
    other = LocalLauncher(study.folder, study.trials, Resources(), None, sleeping)
    assert other.count_free() == 2
    assert launcher.count_free() == 2
    other.start([second])
    assert launcher.count_free() == 1, "a living driver's trials count, too"
    assert {process.name: process.gpus for process in find_processes(study.folder)}[second.name] == ["1"]
    other.stop()
    assert find_processes(study.folder) == []
    launcher.stop()


def test_process_id_that_is_used_again_is_no_trial(study):
    trial = study.trials[0]
    trial.folder.path.mkdir(parents=True, exist_ok=True)
    record_process(trial.folder.path, os.getpid(), [])
    record = read_json(trial.folder.path / "process.json")
    assert [process.pid for process in find_processes(study.folder)] == [os.getpid()]
    write_json(trial.folder.path / "process.json", record | {"start_time": "1"})
    assert find_processes(study.folder) == []
    write_json(trial.folder.path / "process.json", record | {"pid": 2**22 + 1, "start_time": ""})
    assert find_processes(study.folder) == [], "it ended before its start time was read"
    (trial.folder.path / "process.json").write_text("[")
    assert find_processes(study.folder) == []


def test_next_driver_resumes_after_driver_and_trial_were_killed(study):
    study.set_behavior({"a": {"seconds": 3}})
    first = study.start(parallel=1)
    wait_until(lambda: len(study.read_steps()[0]) > 3, first)
    trial = int((study.trials[0].folder.path / "attempts").read_text())
    kill(first)
    os.kill(trial, signal.SIGKILL)
    study.set_behavior({})
    study.drive()
    assert study.read_steps() == [ALL_STEPS] * 4
    assert study.count_attempts() == [2, 1, 1, 1]


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), ("stop", 75)])
def test_stopped_trials_save_and_the_same_command_resumes(study, how, code):
    study.set_behavior({name: {"seconds": 5} for name in "ab"})
    drivers = [study.start(parallel=1), study.start(parallel=1)]
    wait_until(lambda: study.count_attempts()[:2] == [1, 1], drivers[0])
    assert has_driver(study.folder)
    if how == "stop":
        assert cli.main(["sweep", "stop", str(study.path)]) == 0
    else:
        for driver in drivers:
            driver.send_signal(how)
    output = study.finish(drivers, expect=code)
    assert output.count(f"resume with: python -m stackexp sweep run {study.folder}") == 2
    assert not has_driver(study.folder)
    assert study.get_states() == [State.STOPPED] * 2 + [State.WAITING] * 2
    study.set_behavior({})
    study.drive()
    assert study.read_steps() == [ALL_STEPS] * 4
    assert not any(trial.failure.exists() for trial in study.trials)


def test_randomly_killed_drivers_neither_lose_nor_repeat_trials(study):
    study.set_behavior({name: {"seconds": 0.5} for name in "abcd"})
    rng = random.Random(0)
    for _ in range(5):
        driver = study.start(parallel=2)
        time.sleep(rng.uniform(0.2, 1.2))
        os.kill(driver.pid, signal.SIGKILL)
        driver.communicate()
    study.drive()
    assert study.get_states() == [State.DONE] * 4
    assert study.count_attempts() == [1] * 4
    assert study.read_steps() == [ALL_STEPS] * 4
