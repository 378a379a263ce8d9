"""Sweep workers with fast fake trials: each trial runs exactly once, even if any process is killed."""

import os
import random
import signal
import time

import pytest
from config_files import build_sweep
from processes import kill, wait_until
from sweep_study import ALL_STEPS, TWO, Study

from stackexp.errors import ConfigError, RunError
from stackexp.sweeps import worker
from stackexp.sweeps.sweep import load_sweep
from stackexp.sweeps.trials import (
    START_MARK,
    Claim,
    Trial,
    TrialState,
    find_cause,
    has_worker,
    read_claim,
    read_failure,
    read_status,
    record_failure,
)
from stackexp.sweeps.worker import DevicePool


@pytest.fixture
def study(tmp_path) -> Study:
    return Study(tmp_path)


def test_worker_runs_every_trial_once(study):
    study.write(objective="average.accuracy", direction="maximize")
    output = study.run()
    assert study.get_states() == [TrialState.DONE] * 4
    assert study.count_attempts() == [1] * 4
    assert all(output.count(f"done      {trial.name}") == 1 for trial in study.trials)
    for trial in study.trials:
        trial.folder.check_ownership()
    status = read_status(study.trials[0], "average.accuracy")  # a result without the objective stops nothing
    assert status.objective is None
    assert "result.json has no 'accuracy'" in status.cause
    study.trials[1].folder.result.unlink()
    study.run()
    assert study.count_attempts() == [1, 2, 1, 1]


def test_failed_trials_record_their_cause_and_are_tried_again(study):
    study.set_behavior({"a": {"first": ["error"] * 9}, "b": {"first": ["kill"] * 9}})
    output = study.run(expect=1)
    a, b = (read_status(trial, "average.loss") for trial in study.trials[:2])
    assert study.get_states() == [TrialState.FAILED, TrialState.FAILED, TrialState.DONE, TrialState.DONE]
    assert (a.cause, a.attempts, a.step) == ("non-finite loss in batch 3", 1, 2)
    assert (b.cause, b.attempts) == ("killed by SIGKILL", 1)
    assert read_failure(a.trial)["exit_code"] == 1
    assert "2 of 4 trials failed" in output.splitlines()[-1]
    study.set_behavior({})
    study.run()
    assert study.get_states() == [TrialState.DONE] * 4
    assert study.count_attempts() == [2, 2, 1, 1]
    assert study.read_steps() == [ALL_STEPS] * 4, "resumed where they failed"


def test_retries_limit_the_attempts_of_each_trial(study):
    """A trial that saves and stops has not failed."""
    failures = {"a": {"first": ["error", "kill"]}, "b": {"first": ["error"] * 9}, "c": {"first": ["save", "save"]}}
    study.set_behavior(failures)
    study.run("--retries", 2, expect=1)
    assert study.get_states() == [TrialState.DONE, TrialState.FAILED, TrialState.DONE, TrialState.DONE]
    assert study.count_attempts() == [3, 3, 3, 1]
    assert read_status(study.trials[1], "average.loss").attempts == 3
    assert not study.trials[2].failure.exists()
    study.run("--retries", 1, expect=1)
    assert study.count_attempts() == [3, 5, 3, 1], "earlier failures are forgiven"


def test_concurrent_workers_run_each_trial_once_and_share_the_retries(study):
    slow = {"first": ["error"] * 9, "seconds": 8}  # it fails after all workers have started
    study.set_behavior({"a": slow} | {name: {"seconds": 0.4} for name in "bcd"})
    study.finish([study.start(*TWO, "--retries", 1) for _ in range(3)], expect=1)
    assert study.count_attempts() == [2, 1, 1, 1]
    assert study.read_steps()[1:] == [ALL_STEPS] * 3


def test_trials_of_killed_workers_count_against_the_limit(study):
    study.set_behavior({"a": {"seconds": 60}})
    for _ in range(2):
        process = study.start("--max-parallel", 1)
        wait_until(lambda: sum(study.count_attempts()) == 1 and has_worker(study.folder), process)
        time.sleep(1.5)
        assert study.count_attempts() == [1, 0, 0, 0]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    os.kill(read_claim(study.trials[0]).pid, signal.SIGTERM)
    study.set_behavior({})
    study.run("--max-parallel", 1)
    assert study.count_attempts() == [2, 1, 1, 1]


def test_next_worker_resumes_after_worker_and_trial_were_killed(study):
    study.set_behavior({"a": {"seconds": 3}})
    first = study.start("--max-parallel", 1)
    wait_until(lambda: len(study.read_steps()[0]) > 3, first)
    claim = read_claim(study.trials[0])
    kill(first)
    os.kill(claim.pid, signal.SIGKILL)
    study.set_behavior({})
    study.run()
    assert study.read_steps() == [ALL_STEPS] * 4
    assert study.count_attempts() == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("how", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.process),
        (signal.SIGTERM, 75),
        pytest.param("stop", 75, marks=pytest.mark.process),
        ("killed", -9),
    ],
)
def test_stopped_trials_save_and_the_same_command_resumes(study, how, code):
    """`sweep stop` also stops the trials of a killed worker."""
    study.set_behavior({name: {"seconds": 20} for name in "ab"})
    workers = [study.start(*TWO), study.start(*TWO)]
    wait_until(lambda: all(study.read_steps()[:2]), workers[0])
    assert has_worker(study.folder)
    assert {read_claim(trial).pid for trial in study.trials[:2]} == {int(a) for a in study.read_attempts(0)[:2]}
    if how in ("stop", "killed"):
        for process in workers if how == "killed" else []:
            os.kill(process.pid, signal.SIGKILL)
        assert "4 trials: 2 waiting, 2 stopped" in study.run(verb="stop")
    else:
        for process in workers:
            process.send_signal(how)
    output = study.finish(workers, expect=code)
    if how != "killed":
        assert output.count(f"resume with: python -m stackexp sweep run {study.folder}") == 2
    assert not has_worker(study.folder)
    assert study.get_states() == [TrialState.STOPPED] * 2 + [TrialState.WAITING] * 2
    study.set_behavior({})
    study.run()
    assert study.read_steps() == [ALL_STEPS] * 4
    assert not any(trial.failure.exists() for trial in study.trials)


@pytest.mark.process
def test_randomly_killed_workers_neither_lose_nor_repeat_trials(study):
    study.set_behavior({name: {"seconds": 0.5} for name in "abcd"})
    rng = random.Random(0)
    for _ in range(5):
        process = study.start(*TWO)
        time.sleep(rng.uniform(1.0, 3.5))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    study.run()
    assert study.get_states() == [TrialState.DONE] * 4
    assert study.count_attempts() == [1] * 4
    assert study.read_steps() == [ALL_STEPS] * 4


def test_trial_that_ignores_signals_is_killed(study):
    study.set_behavior({"a": {"seconds": 30, "stubborn": True}})
    process = study.start("--max-parallel", 1)
    wait_until(lambda: study.read_steps()[0], process)
    process.send_signal(signal.SIGTERM)
    study.finish([process], expect=75)
    assert study.get_states()[0] == TrialState.STOPPED


# Devices


def build_machine(monkeypatch, *overrides: str, gpus: list[str], count: int = 4, limit=None, **resources) -> DevicePool:
    monkeypatch.setattr(worker, "find_gpus", lambda: gpus)
    keys = {"resources": resources} if resources else {}
    sweep = build_sweep("data.micro_batch_size=1", *overrides, seeds=list(range(count)), **keys)
    return DevicePool(sweep, sweep.trials, limit)


def fill(machine: DevicePool, trial: Trial, claims: list[Claim] = []) -> list[list[str]]:  # noqa: B006
    """Return the GPUs of as many copies of a trial as fit with the claims."""
    claims, reserved = list(claims), []
    while (gpus := machine.reserve(trial, claims)) is not None:
        reserved.append(gpus)
        claims.append(Claim(*machine.location, 1, trial.config.trainer.devices, gpus))
    return reserved


@pytest.mark.usefixtures("empty_folder")
def test_gpus_are_divided_among_trials(monkeypatch):
    machine = build_machine(monkeypatch, "trainer.devices=2", gpus=["4", "5", "6", "7", "GPU-8"])
    (trial, *_) = load_sweep("study.yaml", ["data.micro_batch_size=1", "trainer.devices=2"]).trials
    assert fill(machine, trial) == [["4", "5"], ["6", "7"]]
    elsewhere = Claim("other-host", "", 1, 2, ["4", "5"])
    here = Claim(*machine.location, 1, 2, ["4", "5"])
    assert fill(machine, trial, [here, elsewhere]) == [["6", "7"]], "those of killed and other workers count, too"


@pytest.mark.usefixtures("empty_folder")
def test_small_trials_share_gpus(monkeypatch):
    machine = build_machine(monkeypatch, gpus=["4", "5"], trials_per_gpu=2)
    (trial, *_) = load_sweep("study.yaml", ["data.micro_batch_size=1"]).trials
    assert fill(machine, trial) == [["4"], ["5"], ["4"], ["5"]]
    assert fill(machine, trial, [Claim(*machine.location, 1, 1, ["4"])]) == [["5"], ["4"], ["5"]]
    assert machine.threads == max(1, len(os.sched_getaffinity(0)) // 4)


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    ("override", "resources", "message"),
    [
        ("trainer.devices=2", {"trials_per_gpu": 4}, "trials of 2 devices cannot share GPUs"),
        ("trainer.devices=8", {}, "needs 8 GPUs, this machine has 4"),
        ("trainer.num_nodes=2", {}, "needs 2 nodes, this machine is one"),
    ],
)
def test_what_does_not_fit_is_a_config_error(monkeypatch, override, resources, message):
    with pytest.raises(ConfigError, match=message):
        build_machine(monkeypatch, override, gpus=["0", "1", "2", "3"], **resources)


@pytest.mark.usefixtures("empty_folder")
def test_cores_are_divided_among_trials(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for limit, (threads, parallel) in {None: (2, 8), 1: (8, 1), 2: (4, 2), 16: (2, 16)}.items():
        machine = build_machine(monkeypatch, "trainer.accelerator=cpu", gpus=["0"], limit=limit)
        (trial, *_) = load_sweep("study.yaml", ["data.micro_batch_size=1", "trainer.accelerator=cpu"]).trials
        assert (machine.threads, len(fill(machine, trial))) == (threads, parallel)


def test_a_diverged_trial_is_recognized_whichever_rank_reports_last(study):
    trial, cause = study.trials[0], "step 5: loss nan with gradient norm nan on samples [1]"
    trial.folder.path.mkdir(parents=True, exist_ok=True)
    for lines in ([f"error: {cause}", f"error: rank 1: {cause}"], [f"error: rank 1: {cause}", f"error: {cause}"]):
        trial.log.write_text("\n".join(["=== started now", *lines]))
        assert find_cause(trial, 1) == cause


def test_the_cause_of_a_failure_is_a_signal_or_an_exit_code(study):
    trial = study.trials[0]
    assert find_cause(trial, -9) == "killed by SIGKILL"
    for code in (-127, 255):  # no signals
        assert find_cause(trial, code) == f"exit code {code} without a result: no output"


def test_a_divergence_that_no_worker_has_recorded_is_not_retried(study):
    """The worker was killed, or stopped, while the trial diverged."""
    diverged, stopped = study.trials[:2]
    for trial, end in ((diverged, "error: step 2: loss nan with gradient norm 1"), (stopped, "saved; stopped")):
        trial.folder.mark()
        trial.log.write_text(f"{START_MARK}now by a\n{end}\n")
    study.set_behavior({})
    study.run(expect=1)
    assert study.get_states() == [TrialState.FAILED, *[TrialState.DONE] * 3]
    assert study.count_attempts() == [0, 1, 1, 1]
    assert read_failure(diverged)["attempts"] == 1
    study.run()
    assert study.count_attempts() == [1, 1, 1, 1], "the next command tries it again"


def test_a_verdict_does_not_retry_what_another_process_has_just_recorded_as_diverged(study, monkeypatch):
    """The trial diverges after the verdict has listed the missing trials, and before its worker starts."""
    trial = study.trials[0]
    trial.folder.mark()
    trial.log.write_text(f"{START_MARK}now by a\nerror: step 2: loss nan with gradient norm 1\n")
    record_failure(trial, 1)
    monkeypatch.chdir(study.root.parent)
    with pytest.raises(RunError, match="1 of 1 trials failed"):
        worker.run_sweep(load_sweep(str(study.path)), only={trial})
    assert study.count_attempts()[0] == 0
