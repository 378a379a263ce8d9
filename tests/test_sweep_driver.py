"""Drivers with trials that take no time: what is missing is done, once, whoever is killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import TINY
from processes import kill, wait_until

from stackexp import cli
from stackexp.sweeps import grid
from stackexp.sweeps.driver import has_driver
from stackexp.sweeps.status import State, is_running, read, read_failure, state_of

DRIVER = Path(__file__).with_name("sweep_driver.py")


class Study:
    """Trials a, b, c, d in a folder of their own, and drivers of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = TINY | {"logging": {"root": str(folder / "runs")}, "data": TINY["data"] | {"path": "unused"}}
        (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
        names = [{"name": name, "model.memory.num_slots": slots} for slots, name in enumerate("abcd", 1)]
        (folder / "letters.yaml").write_text(yaml.safe_dump({"config": "tiny.yaml", "list": names}))
        self.behave({})

    def behave(self, behaviour: dict) -> None:
        (self.folder / "runs").mkdir(exist_ok=True)
        (self.folder / "runs" / "behaviour.json").write_text(json.dumps(behaviour))

    @property
    def trials(self) -> list:
        return grid.read(str(self.folder / "letters.yaml")).trials

    @property
    def runs(self) -> Path:
        return self.folder / "runs" / "letters"

    def start(self, parallel: int = 2, retries: int = 0) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, DRIVER, self.folder / "letters.yaml", str(parallel), str(retries)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def drive(self, expect: int = 0, **options: int) -> str:
        driver = self.start(**options)
        output, _ = driver.communicate(timeout=60)
        assert driver.returncode == expect, output
        return output

    def states(self) -> list[State]:
        return [state_of(trial) for trial in self.trials]

    def attempts(self) -> list[int]:
        """How often each trial has held its folder."""
        files = [trial.folder.path / "attempts" for trial in self.trials]
        return [len(file.read_text().splitlines()) if file.exists() else 0 for file in files]

    def steps(self) -> list[list[int]]:
        return [[line["step"] for line in trial.folder.read_metrics()] for trial in self.trials]


@pytest.fixture
def study(tmp_path) -> Study:
    return Study(tmp_path)


ALL = list(range(1, 11))


def test_every_trial_is_done_once_and_then_no_more(study):
    output = study.drive()
    assert study.states() == [State.DONE] * 4
    assert study.attempts() == [1] * 4
    assert all(output.count(f"done      {trial.name}") == 1 for trial in study.trials)
    study.drive()
    assert study.attempts() == [1] * 4
    study.trials[1].folder.result.unlink()
    study.drive()
    assert study.attempts() == [1, 2, 1, 1]


def test_no_more_than_asked_run_at_once(study):
    study.behave({name: {"seconds": 0.5} for name in "abcd"})
    driver = study.start(parallel=2)
    most = 0
    while driver.poll() is None:
        most = max(most, sum(is_running(trial) for trial in study.trials))
        time.sleep(0.02)
    assert most == 2


def test_failed_trials_keep_their_cause_and_stop_no_other(study):
    study.behave({"a": {"first": ["error"] * 9}, "b": {"first": ["kill"] * 9}})
    output = study.drive(expect=1)
    a, b = (read(trial, "average.loss") for trial in study.trials[:2])
    assert study.states() == [State.FAILED, State.FAILED, State.DONE, State.DONE]
    assert (a.cause, a.attempts, a.step) == ("non-finite loss in batch 3", 1, 2)
    assert (b.cause, b.attempts) == ("killed by SIGKILL", 1)
    assert read_failure(a.trial)["exit_code"] == 1
    assert "error: " in output.splitlines()[-1]
    assert "2 of 4 trials failed" in output
    study.behave({})
    study.drive()  # the same command tries them again, from where they were
    assert study.states() == [State.DONE] * 4
    assert study.attempts() == [2, 2, 1, 1]
    assert study.steps() == [ALL] * 4
    assert a.trial.log.read_text().count("from step") == 2


def test_failed_trials_are_tried_again_as_often_as_asked(study):
    study.behave({"a": {"first": ["error", "kill"]}, "b": {"first": ["error"] * 9}})
    study.drive(expect=1, retries=2)
    assert study.states() == [State.DONE, State.FAILED, State.DONE, State.DONE]
    assert study.attempts() == [2 + 1, 3, 1, 1]
    assert read(study.trials[1], "average.loss").attempts == 3


def test_a_trial_that_saved_and_stopped_has_not_failed(study):
    study.behave({"a": {"first": ["save", "save"]}})
    study.drive()
    assert study.attempts() == [3, 1, 1, 1]
    assert not study.trials[0].failure.exists()


def test_a_result_without_the_objective_stops_nothing(study):
    keys = yaml.safe_load((study.folder / "letters.yaml").read_text()) | {"objective": "average.accuracy"}
    (study.folder / "letters.yaml").write_text(yaml.safe_dump(keys))
    study.drive()
    assert study.attempts() == [1] * 4
    status = read(study.trials[0], "average.accuracy")
    assert status.objective is None
    assert status.cause == "objective average.accuracy: result.json has no 'accuracy' there, but loss"


def test_two_drivers_do_each_trial_once(study):
    study.behave({name: {"seconds": 0.4} for name in "abcd"})
    drivers = [study.start(parallel=2) for _ in range(3)]
    outputs = [driver.communicate(timeout=60)[0] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0, 0], outputs
    assert study.attempts() == [1] * 4
    assert study.steps() == [ALL] * 4


def test_two_drivers_share_the_attempts_of_a_failing_trial(study):
    study.behave({"a": {"first": ["error"] * 9, "seconds": 1}, "b": {"seconds": 2}})
    drivers = [study.start(parallel=2, retries=1) for _ in range(2)]
    outputs = [driver.communicate(timeout=60)[0] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [1, 1], outputs
    assert study.attempts() == [2, 1, 1, 1]


def test_trials_of_a_killed_driver_live_on_and_are_not_started_twice(study):
    study.behave({name: {"seconds": 3} for name in "ab"})
    first = study.start(parallel=2)
    wait_until(lambda: study.attempts()[:2] == [1, 1], first)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert [is_running(trial) for trial in study.trials[:2]] == [True, True]
    study.drive(parallel=2)
    assert study.attempts() == [1] * 4
    assert study.steps() == [ALL] * 4


def test_killed_with_its_trials_a_driver_leaves_what_the_next_goes_on_with(study):
    study.behave({"a": {"seconds": 3}})
    first = study.start(parallel=1)
    wait_until(lambda: len(study.steps()[0]) > 3, first)
    trial = int((study.trials[0].folder.path / "attempts").read_text())
    kill(first)
    os.kill(trial, signal.SIGKILL)
    assert study.states()[0] in (State.STOPPED, State.RUNNING)  # running for as long as the kill takes
    study.behave({})
    study.drive()
    assert study.steps() == [ALL] * 4
    assert study.attempts() == [2, 1, 1, 1]


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), ("stop", 75)])
def test_stopping_saves_and_the_same_command_goes_on(study, how, code):
    study.behave({name: {"seconds": 5} for name in "ab"})
    drivers = [study.start(parallel=1), study.start(parallel=1)]
    wait_until(lambda: study.attempts()[:2] == [1, 1], drivers[0])
    assert has_driver(study.runs)
    if how == "stop":
        assert cli.main(["sweep", "stop", str(study.folder / "letters.yaml")]) == 0
    for driver in drivers:
        if how != "stop":
            driver.send_signal(how)
        output, _ = driver.communicate(timeout=20)
        assert driver.returncode == code, output
        assert f"go on with: python -m stackexp sweep run {study.runs}" in output
    assert not has_driver(study.runs)
    assert study.states() == [State.STOPPED] * 2 + [State.WAITING] * 2
    study.behave({})
    study.drive()
    assert study.steps() == [ALL] * 4
    assert not any(trial.failure.exists() for trial in study.trials)


def test_drivers_killed_at_random_moments_lose_and_repeat_nothing(study):
    study.behave({name: {"seconds": 0.5} for name in "abcd"})
    chance = random.Random(0)
    for _ in range(6):
        driver = study.start(parallel=2)
        time.sleep(chance.uniform(0.2, 1.2))
        os.kill(driver.pid, signal.SIGKILL)
        driver.communicate()
    study.drive()
    assert study.states() == [State.DONE] * 4
    assert study.attempts() == [1] * 4
    assert study.steps() == [ALL] * 4
