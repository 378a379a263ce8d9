"""Workers on a real two-node Slurm cluster, with fast fake trials."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import wait_until
from slurm import Slurm
from sweep_study import ALL_STEPS, Study
from verdict_question import Question

from stackexp.sweeps.trials import TrialState, read_claim, read_failure

SUBMIT = ("--launcher", "slurm")


@pytest.fixture
def study(slurm, tmp_path) -> Study:
    """Four trials."""
    return Study(tmp_path)


def set_trials(study: Study, names: str, wide: str = "") -> None:
    """Keep the trials of these names; those in `wide` run on both nodes."""
    trials = [{"name": name, "model.memory.num_slots": slots} for slots, name in enumerate(names, 1)]
    for trial in trials:
        if trial["name"] in wide:
            trial["trainer.num_nodes"] = 2
    study.write(list=trials, overrides=["data.micro_batch_size=1"])


def wait_for_end(slurm: Slurm) -> None:
    """Wait until the queue is empty; start requeued jobs at once."""
    wait_until(lambda: not slurm.squeue() or slurm.hurry() or not slurm.squeue())


def read_job_logs(study: Study) -> str:
    return "\n".join(path.read_text() for path in study.folder.glob("jobs/*/*.txt"))


def test_workers_run_every_trial_once(study, slurm, monkeypatch, invoke):
    """The trial on two nodes waits for the others, because --max-parallel is 2. Rerunning adds no workers."""
    set_trials(study, "abcd", wide="d")
    study.set_behavior({name: {"wait": True} for name in "abc"})
    scripts = invoke("sweep run", study.path, *SUBMIT, "--max-parallel", "2", "--dry-run")
    assert "#SBATCH --array=0-1\n" in scripts
    assert "#SBATCH --nodes=2\n" in scripts
    output = study.run(*SUBMIT, "--max-parallel", 2)
    assert "2 workers, each with 1 nodes" in output
    assert "1 workers, each with 2 nodes" in output
    assert len(slurm.squeue()) == 3
    wait_until(lambda: study.count_attempts()[:2] == [1, 1])
    assert "no more workers are needed" in study.run(*SUBMIT, "--max-parallel", 2)
    status = study.run(verb="status")
    assert f"job {read_claim(study.trials[0]).job}" in status
    assert "Slurm jobs: 1 pending (Dependency), 2 running" in status
    (study.root / "go").touch()
    wait_for_end(slurm)
    assert study.get_states() == [TrialState.DONE] * 4
    assert study.count_attempts() == [1] * 4
    assert (study.trials[3].folder.path / "rank1").exists()
    assert study.trials[0].log.read_text().count("from step 0") == 1
    assert "done      a-" in read_job_logs(study)
    assert "no more workers are needed" in study.run(*SUBMIT)


def test_concurrent_submissions_run_no_trial_twice(study, slurm):
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: study.run(*SUBMIT), range(3)))
    wait_for_end(slurm)
    assert study.get_states() == [TrialState.DONE] * 4
    assert study.count_attempts() == [1] * 4


@pytest.mark.process
def test_a_verdict_submits_one_stage_after_the_other(slurm, tmp_path):
    """A failed trial is retried by the same command, whose workers still run the whole stage."""
    question = Question(tmp_path)
    question.keep_arms("plain", "good")
    question.write(tuning={"space": {"optimizer.lr": {"values": [0.001, 0.002]}}}, pairs=4)
    question.behavior["good-1-seed=50-"]["first"] = ["error"]
    for stage, done in (("tuning", 7), ("tuning", 8), ("pairs", 8)):
        assert "each with 1 nodes" in question.run(*SUBMIT)
        wait_for_end(slurm)
        assert len(question.list_runs(stage)) == done
    printed = question.run(*SUBMIT)
    assert "good" in printed
    assert "  helps  " in printed
    assert "4/4" in printed
    assert question.count_attempts() == [1] * 15 + [2]


@pytest.mark.process
@pytest.mark.parametrize("number", ["TERM", "USR1"])
def test_a_preempted_worker_passes_the_signal_on_and_is_requeued(study, slurm, number):
    """One trial runs on both nodes."""
    set_trials(study, "ab", wide="a")
    study.set_behavior({name: {"seconds": 8} for name in "ab"})
    study.run(*SUBMIT)
    wait_until(lambda: all(len(steps) > 1 for steps in study.read_steps()))
    jobs = [read_claim(trial).job for trial in study.trials]
    slurm.output("scancel", "--batch", f"--signal={number}", *jobs)
    wait_until(lambda: slurm.squeue() == dict.fromkeys(jobs, "PENDING"))
    assert study.get_states() == [TrialState.STOPPED] * 2
    wait_for_end(slurm)
    assert study.read_steps() == [ALL_STEPS] * 2
    assert study.count_attempts() == [2, 2]
    assert not any(trial.failure.exists() for trial in study.trials)


@pytest.mark.process
def test_a_cancelled_worker_is_not_requeued(study, slurm):
    study.set_behavior({name: {"seconds": 20} for name in "abcd"})
    study.run(*SUBMIT, "--max-parallel", 1)
    wait_until(lambda: study.read_steps()[0])
    slurm.output("scancel", *slurm.squeue())
    wait_until(lambda: not slurm.squeue())
    time.sleep(2)
    assert not slurm.squeue()
    assert study.get_states() == [TrialState.STOPPED] + [TrialState.WAITING] * 3
    study.set_behavior({})
    study.run(*SUBMIT)
    wait_for_end(slurm)
    assert study.read_steps() == [ALL_STEPS] * 4


@pytest.mark.process
def test_stop_saves_running_trials_and_requeues_none(study, slurm):
    """Four workers fit on the nodes; the others wait in the queue."""
    set_trials(study, "abcdef")
    study.set_behavior({name: {"seconds": 20} for name in "abcdef"})
    study.run(*SUBMIT)
    wait_until(lambda: sum(map(bool, study.read_steps())) == 4)
    output = study.run(verb="stop")
    assert "6 trials: 2 waiting, 4 stopped" in output
    assert slurm.squeue() == {}
    assert sum(study.count_attempts()) == 4


@pytest.mark.process
def test_a_lost_node_loses_no_trial(study, slurm):
    """Slurm requeues the worker of the lost node. The other workers do not fail."""
    set_trials(study, "abc", wide="a")
    study.set_behavior({name: {"seconds": 10} for name in "abc"})
    study.run(*SUBMIT)
    wait_until(lambda: any(study.read_steps()))
    slurm.kill_node("n1")
    wait_until(lambda: "RUNNING" not in slurm.squeue().values() or "PENDING" in slurm.squeue().values())
    slurm.start_node("n1")
    study.set_behavior({})
    wait_for_end(slurm)
    assert study.read_steps() == [ALL_STEPS] * 3
    assert not any(trial.failure.exists() for trial in study.trials)


def test_workers_share_the_retries(study, slurm):
    study.set_behavior({"a": {"first": ["error"] * 9}, "b": {"first": ["kill"]}})
    study.run(*SUBMIT, "--retries", 1)
    wait_for_end(slurm)
    assert study.count_attempts() == [2, 2, 1, 1]
    assert study.get_states() == [TrialState.FAILED] + [TrialState.DONE] * 3
    assert read_failure(study.trials[0])["cause"] == "non-finite loss in batch 3"


@pytest.mark.process
def test_a_worker_is_requeued_when_the_controller_is_back(study, slurm):
    study.set_behavior({"a": {"seconds": 10}})
    set_trials(study, "a")
    study.run(*SUBMIT)
    wait_until(lambda: study.read_steps()[0])
    slurm.stop_controller()
    pid = read_claim(study.trials[0]).pid
    worker = int(slurm.call("ps", "-o", "ppid=", "-p", pid).stdout)
    slurm.call("kill", "-USR1", worker)
    wait_until(lambda: study.get_states() == [TrialState.STOPPED])
    slurm.start_controller()
    wait_until(lambda: "PENDING" in slurm.squeue().values())
    wait_for_end(slurm)
    assert study.read_steps() == [ALL_STEPS]


@pytest.mark.slow  # Slurm looks at time limits twice a minute
def test_a_worker_is_requeued_before_the_time_limit(study, slurm):
    """The warning comes after a minute."""
    set_trials(study, "ab", wide="a")
    study.write(resources={"time": "0:02:00", "signal_seconds": 60})
    study.set_behavior({"a": {"wait": True}})
    study.run(*SUBMIT)
    wait_until(lambda: study.read_steps()[0])
    study.set_behavior({})
    wait_until(lambda: list(slurm.squeue().values()) == ["PENDING"])
    wait_for_end(slurm)
    assert study.read_steps() == [ALL_STEPS] * 2
    assert study.count_attempts() == [2, 1]


def test_a_worker_refuses_trials_that_have_changed(study, slurm):
    slurm.output("scontrol", "update", "NodeName=n[0-1]", "State=DRAIN", "Reason=test")
    study.run(*SUBMIT, "--max-parallel", 1)
    config = study.path.with_name("tiny.yaml")
    config.write_text(config.read_text() + "seed: 7\n")
    slurm.output("scontrol", "update", "NodeName=n[0-1]", "State=RESUME")
    wait_for_end(slurm)
    assert study.count_attempts() == [0] * 4
    assert "have changed since this worker was submitted" in read_job_logs(study)


def test_refusal_of_slurm_is_reported(study):
    study.write(resources={"partition": "gpu"})
    assert "error: sbatch: " in study.run(*SUBMIT, expect=1)


def test_missing_slurm_is_a_config_error(tmp_path, monkeypatch, invoke):
    study = Study(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "sbatch not found" in invoke("sweep run", study.path, *SUBMIT, expect=2)
