"""The local launcher: what each trial gets of this machine, and the table of all of them."""

import fcntl
import io
import os
import sys
import time

import pytest
import yaml
from config_files import BASE, write
from rich.console import Console
from rich.live import Live

from stackexp.errors import ConfigError
from stackexp.sweeps import grid, local
from stackexp.sweeps.display import LiveTable
from stackexp.sweeps.local import LocalLauncher

PRINT = "import os, time; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['OMP_NUM_THREADS'], flush=True)"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def trials(*overrides: str, count: int = 4) -> list:
    keys = {"config": BASE, "seeds": list(range(count)), "overrides": ["data.micro_batch_size=1", *overrides]}
    found = grid.read(write("study.yaml", yaml.safe_dump(keys))).trials
    for trial in found:
        trial.folder.path.mkdir(parents=True, exist_ok=True)
    return found


def launcher(found: list, program: str, max_parallel: int | None = None) -> LocalLauncher:
    return LocalLauncher(found, max_parallel, lambda trial: [sys.executable, "-c", program])


def end(launched: LocalLauncher, count: int) -> list:
    codes = []
    while len(codes) < count:
        codes += launched.ended()
        time.sleep(0.02)
    return codes


def test_gpus_are_divided_among_trials(monkeypatch):
    monkeypatch.setattr(local, "visible_gpus", lambda: ["4", "5", "6", "7", "GPU-8"])
    found = trials("trainer.devices=2")
    launched = launcher(found, PRINT + "; time.sleep(0.3)")
    assert launched.free() == 2
    launched.start(found[:2])
    assert launched.free() == 0
    end(launched, 2)
    launched.start(found[2:3])
    assert [code for _, code in end(launched, 1)] == [0]
    printed = [trial.log.read_text().split()[0] for trial in found[:3]]
    assert printed == ["4,5", "6,7", "4,5"]


def test_more_gpus_than_there_are_is_one_line(monkeypatch):
    monkeypatch.setattr(local, "visible_gpus", lambda: ["0", "1"])
    with pytest.raises(ConfigError, match=r"seed=0-\w+: needs 8 GPUs, this machine has 2; --launcher slurm"):
        launcher(trials("trainer.devices=8"), PRINT)
    with pytest.raises(ConfigError, match=r"needs 2 nodes; the local launcher has one"):
        launcher(trials("trainer.num_nodes=2", count=5)[4:], PRINT)


def test_cores_are_divided_among_trials(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    found = trials("trainer.accelerator=cpu")
    for parallel, threads in {None: 2, 1: 8, 2: 4, 16: 2}.items():
        launched = launcher(found, PRINT, parallel)
        assert launched.free() == (parallel or 8)
        launched.start(found[:1])
        end(launched, 1)
        assert found[0].log.read_text().split()[-1] == str(threads)
    assert found[0].log.read_text().split()[0] == "None"


def test_users_threads_are_left_alone(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = trials("trainer.accelerator=cpu", count=1)
    launched = launcher(found, PRINT)
    launched.start(found)
    end(launched, 1)
    assert found[0].log.read_text().split()[-1] == "3"


def test_a_trial_that_does_not_stop_in_time_is_killed(monkeypatch):
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.5)
    found = trials("trainer.accelerator=cpu", count=2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    launched = launcher(found, deaf, 2)
    launched.start(found)
    while not all("on" in trial.log.read_text() for trial in found):
        time.sleep(0.02)
    launched.stop()
    assert sorted(launched.ended(), key=lambda pair: pair[0].name) == [(found[0], -9), (found[1], -9)]


def test_one_trial_can_be_cancelled():
    found = trials("trainer.accelerator=cpu", count=2)
    launched = launcher(found, "import time; time.sleep(60)", 2)
    launched.start(found)
    launched.cancel(found[1])
    assert end(launched, 1) == [(found[1], -15)]
    launched.stop()


def test_the_table_on_a_terminal_shows_all_trials_those_that_run_first():
    found = trials(count=3)
    found[0].folder.result.write_text('{"average": {"loss": 2.5}}')
    lock = open(found[2].folder.path / ".lock", "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    line = '{"step": 150, "tokens": 614400, "time": 0, "loss/train": 3.25, "throughput/tokens_per_second": 4096.0}\n'
    found[2].folder.metrics.write_text(line)
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    with Live(console=console, auto_refresh=False) as live:
        LiveTable("average.loss", live).update(found)
    lock.close()
    lines = [line.split() for line in console.file.getvalue().splitlines() if line.startswith(" seed=")]
    assert [row[1] for row in lines[-3:]] == ["running", "waiting", "done"]
    assert lines[-3][2:] == ["150/300", "3.250", "4,096", "2m30s", "1"]
    assert lines[-1][2:] == ["300/300", "2.5000", "1"]
    assert "3 trials: 1 waiting, 1 running, 1 done" in console.file.getvalue()
