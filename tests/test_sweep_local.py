"""The local launcher, which divides the machine among trials, and the live status table."""

import fcntl
import io
import os
import sys

import pytest
from config_files import build_sweep
from processes import wait_until
from rich.console import Console

from stackexp.errors import ConfigError
from stackexp.sweeps.display import Display
from stackexp.sweeps.launchers import local
from stackexp.sweeps.launchers.local import LocalLauncher
from stackexp.sweeps.schema import Resources
from stackexp.sweeps.trials import Trial, find_cause

PRINT = "import os, time; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['OMP_NUM_THREADS'], flush=True)"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def build_trials(*overrides: str, count: int = 4) -> list[Trial]:
    trials = build_sweep("data.micro_batch_size=1", *overrides, seeds=list(range(count))).trials
    for trial in trials:
        trial.folder.path.mkdir(parents=True, exist_ok=True)
    return trials


def build_launcher(
    trials: list[Trial], program: str, max_parallel: int | None = None, resources: Resources | None = None
) -> LocalLauncher:
    folder, command = trials[0].folder.path.parent, [sys.executable, "-c", program]
    return LocalLauncher(folder, trials, resources or Resources(), max_parallel, lambda trial: command)


def wait_for_ended(launcher: LocalLauncher, count: int) -> list[tuple[Trial, int]]:
    ended: list[tuple[Trial, int]] = []
    wait_until(lambda: ended.extend(launcher.collect_ended()) or len(ended) >= count)
    return ended


def test_gpus_are_divided_among_trials(monkeypatch):
    monkeypatch.setattr(local, "find_gpus", lambda: ["4", "5", "6", "7", "GPU-8"])
    trials = build_trials("trainer.devices=2")
    launcher = build_launcher(trials, PRINT + "; time.sleep(0.3)")
    assert launcher.count_free() == 2
    launcher.start(trials[:2])
    assert launcher.count_free() == 0
    wait_for_ended(launcher, 2)
    launcher.start(trials[2:3])
    assert [code for _, code in wait_for_ended(launcher, 1)] == [0]
    printed = [trial.log.read_text().split()[0] for trial in trials[:3]]
    assert printed == ["4,5", "6,7", "4,5"]


def test_small_trials_share_gpus(monkeypatch):
    monkeypatch.setattr(local, "find_gpus", lambda: ["4", "5"])
    trials = build_trials("trainer.devices=1", count=5)
    launcher = build_launcher(trials, PRINT + "; time.sleep(0.5)", resources=Resources(trials_per_gpu=2))
    assert launcher.count_free() == 4
    launcher.start(trials[:3])
    assert launcher.count_free() == 1
    launcher.start(trials[3:4])
    assert launcher.count_free() == 0
    wait_for_ended(launcher, 4)
    assert [trial.log.read_text().split()[0] for trial in trials[:4]] == ["4", "5", "4", "5"]


def test_trials_of_several_gpus_share_none(monkeypatch):
    monkeypatch.setattr(local, "find_gpus", lambda: ["0", "1", "2", "3"])
    with pytest.raises(ConfigError, match=r"trials_per_gpu: trials of 2 devices cannot share GPUs; set it to 1"):
        build_launcher(build_trials("trainer.devices=2"), PRINT, resources=Resources(trials_per_gpu=4))


def test_a_trial_that_a_killed_driver_has_started_is_not_started_again():
    trials = build_trials("trainer.accelerator=cpu", count=1)
    first, second = (build_launcher(trials, PRINT + "; time.sleep(0.5)") for _ in range(2))
    first.start(trials)
    second.start(trials)
    assert second.collect_ended() == [(trials[0], 74)]
    assert wait_for_ended(first, 1) == [(trials[0], 0)]


def test_a_trial_without_a_free_gpu_is_not_started(monkeypatch):
    """Two drivers have found the same free GPU."""
    monkeypatch.setattr(local, "find_gpus", lambda: ["0"])
    trials = build_trials("trainer.devices=1", count=2)
    first, second = (build_launcher(trials, PRINT + "; time.sleep(0.5)") for _ in range(2))
    assert first.count_free() == second.count_free() == 1
    first.start(trials[:1])
    second.start(trials[1:])
    assert second.collect_ended() == [(trials[1], 74)]
    assert second.collect_ended() == []
    wait_for_ended(first, 1)
    assert not trials[1].log.exists()
    second.start(trials[1:])
    assert wait_for_ended(second, 1) == [(trials[1], 0)]
    assert trials[1].log.read_text().split()[0] == "0"


def test_too_few_devices_is_a_config_error(monkeypatch):
    monkeypatch.setattr(local, "find_gpus", lambda: ["0", "1"])
    with pytest.raises(ConfigError, match=r"seed=0-\w+: needs 8 GPUs, this machine has 2; use --launcher slurm"):
        build_launcher(build_trials("trainer.devices=8"), PRINT)
    with pytest.raises(ConfigError, match=r"needs 2 nodes, this is one"):
        build_launcher(build_trials("trainer.num_nodes=2", count=5)[4:], PRINT)


def test_cores_are_divided_among_trials(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    trials = build_trials("trainer.accelerator=cpu")
    for parallel, threads in {None: 2, 1: 8, 2: 4, 16: 2}.items():
        launcher = build_launcher(trials, PRINT, parallel)
        assert launcher.count_free() == (parallel or 8)
        launcher.start(trials[:1])
        wait_for_ended(launcher, 1)
        assert trials[0].log.read_text().split()[-1] == str(threads)
    assert trials[0].log.read_text().split()[0] == "None"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    launcher.start(trials[:1])
    wait_for_ended(launcher, 1)
    assert trials[0].log.read_text().split()[-1] == "3", "the user's choice"


def test_trial_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.5)
    trials = build_trials("trainer.accelerator=cpu", count=2)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    )
    launcher = build_launcher(trials, stubborn, 2)
    launcher.start(trials)
    wait_until(lambda: all("on" in trial.log.read_text() for trial in trials))
    launcher.stop()
    assert sorted(launcher.collect_ended(), key=lambda pair: pair[0].name) == [(trials[0], -9), (trials[1], -9)]


def test_cancel_stops_one_trial():
    trials = build_trials("trainer.accelerator=cpu", count=2)
    launcher = build_launcher(trials, "import time; time.sleep(60)", 2)
    launcher.start(trials)
    launcher.cancel(trials[1])
    assert wait_for_ended(launcher, 1) == [(trials[1], -15)]
    launcher.stop()


@pytest.mark.parametrize("width", [80, 120])
def test_live_table_shows_running_trials_first(width):
    trials = build_trials(count=3)
    trials[0].folder.result.write_text('{"average": {"loss": 2.5}}')
    lock = open(trials[2].folder.path / ".lock", "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    line = '{"step": 150, "tokens": 614400, "time": 0, "train/loss": 3.25, "train/tokens_per_second": 4096.0}\n'
    trials[2].folder.metrics.write_text(line)
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    with Display("average.loss", console) as display:
        display.update(trials)
    lock.close()
    header = next(line for line in console.file.getvalue().splitlines() if "trial" in line and "loss" in line)
    assert header.split()[-7:] == ["trial", "state", "step", "loss", "tokens/s", "left", "objective"]
    lines = [line.split() for line in console.file.getvalue().splitlines() if line.startswith(" seed=")]
    assert [row[1] for row in lines[-3:]] == ["running", "waiting", "done"]
    assert lines[-3][2:] == ["150/300", "3.250", "4,096", "2", "min", "30", "s"]
    assert lines[-1][2:] == ["300/300", "2.5000"], "no attempts column, since none was retried"
    assert "3 trials: 1 waiting, 1 running, 1 done" in console.file.getvalue()


def test_the_cause_of_a_failure_is_a_signal_or_an_exit_code():
    (trial,) = build_trials(count=1)
    assert find_cause(trial, -9) == "killed by SIGKILL"
    for code in (-127, 255):  # no signals
        assert find_cause(trial, code) == f"exit code {code} without a result: no output"
