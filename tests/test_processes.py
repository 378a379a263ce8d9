"""The processes of a run: what they share, and how they report a lost process."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from stackexp.config.trainer import TrainerConfig
from stackexp.errors import ConfigError, RunError
from stackexp.training import watchdog
from stackexp.training.processes import Processes, _connect, _exit_with_children, _find_environment, start_processes

ERRORS = (ConfigError("a"), RunError("b"), FileNotFoundError("c"))


def raise_on_first(*_: object) -> int:
    """Print the error that every rank gets for each error of rank 0."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    processes = Processes(rank, 2, LightningEnvironment())

    def fail(error: Exception) -> None:
        assert rank == 0
        raise error

    for error in ERRORS:
        with pytest.raises(type(error)) as caught:
            processes.run_on_first(lambda error=error: fail(error))
        os.write(1, f"{rank} {caught.value} {caught.value.is_reported}\n".encode())  # a whole line at once
    dist.destroy_process_group()
    return 0


def test_errors_of_rank_0_are_raised_on_every_rank(forks):
    lines = forks.run(ranks=2, function=raise_on_first).splitlines()
    assert sorted(line for line in lines if line[0] in "01") == [
        *("0 a False", "0 b False", "0 c False"),
        *("1 a True", "1 b True", "1 c True"),
    ]


def prepare_slowly(*_: object) -> int:
    """Prepare on rank 1, and decide on rank 0, for longer than the timeouts."""
    trainer = TrainerConfig(devices=2, collective_timeout_seconds=3, startup_timeout_seconds=5)
    with start_processes(trainer, "cpu") as processes:
        found = processes.run_on_all(lambda: time.sleep(12 * processes.rank) or processes.rank)
        print(found, processes.run_on_first(lambda: time.sleep(12) or "decided"), flush=True)
    return 0


@pytest.mark.process
def test_preparation_may_take_longer_than_the_timeouts(forks):
    lines = forks.run(ranks=2, function=prepare_slowly).splitlines()
    assert sorted(line for line in lines if line[0] in "01") == ["0 decided", "1 decided"]


def test_a_paused_watchdog_finds_no_hang(monkeypatch):
    monkeypatch.setattr(watchdog, "_connect_store", lambda rank, size: dist.HashStore())
    dog = watchdog.Watchdog(0, 1, 10, 5, lambda: None)
    processes = Processes(0, 1, LightningEnvironment(), dog)
    for run in (processes.run_on_all, processes.run_on_first):
        dog._last_progress -= 100
        assert run(dog._check) is None
    assert dog._check() is None, "the startup begins again"
    dog._last_progress -= 100
    assert dog._check().startswith("no progress for 10 s: rank 0 at ")


@pytest.mark.parametrize("count", [1, 4])
def test_torchrun_must_start_as_many_processes_as_the_config_says(monkeypatch, count):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", str(count))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(RunError, match=rf"torchrun started {count} processes, but trainer.devices .* = 2; make them"):
        _find_environment(TrainerConfig(devices=2))


def test_torchrun_may_be_started_by_srun(monkeypatch):
    """One task per node, each of which starts a process per device."""
    variables = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "SLURM_STEP_NUM_TASKS": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment, children = _find_environment(TrainerConfig(devices=8, num_nodes=2))
    assert (type(environment).__name__, children) == ("TorchElasticEnvironment", [])


def wait_for_child(*_: object) -> int:
    """Wait as rank 2, which starts rank 3 on the second node of two."""
    os.environ["NODE_RANK"] = "1"
    child = subprocess.Popen([sys.executable, "-c", "exit(5)"])
    with _exit_with_children([child], devices=2):
        time.sleep(60)  # the process exits before
    return 0


def test_a_process_lost_during_startup_is_named_by_its_global_rank(forks):
    output = forks.run(function=wait_for_child, expect=1)
    assert output == "error: rank 3 exited during startup with code 5; see its output above\n"


def test_nccl_does_not_abort_before_the_watchdog_reports(monkeypatch):
    """torchrun sets the variable to 1, which ends the process at the first NCCL error."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    found = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, **__: found.append(os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])
    )
    assert _connect(LightningEnvironment(), TrainerConfig(), "cuda") == 0
    assert found == ["0"]


NOTES = """
import os
from lightning.pytorch.loggers import Logger


def note(text):
    print(f"noted {text} on rank {os.environ.get('RANK')}", flush=True)


class Notes(Logger):
    name, version = "notes", 0

    def __init__(self):
        super().__init__()
        note("start")

    def log_hyperparams(self, params):
        pass

    def log_metrics(self, metrics, step=None):
        pass

    def save(self):
        note("save")

    def finalize(self, status):
        note(status)
"""
TWO = ("trainer.devices=2", "trainer.strategy=ddp", "data.micro_batch_size=2", "logging.progress_bar=false")


@pytest.mark.process
def test_only_rank_0_has_loggers_and_reports(tiny, forks, tmp_path):
    """Lightning calls `save` and `finalize` of the loggers on every rank. EarlyStopping fails on every rank."""
    (tmp_path / "notes.py").write_text(NOTES)
    stopping = "{class: 'lightning.pytorch.callbacks:EarlyStopping', options: {monitor: nothing}}"
    options = ("logging.loggers=['notes.py:Notes']", f"trainer.callbacks=[{stopping}]")
    output = forks.run("fit", "--config", tiny, *TWO, *options, ranks=2, expect=1)
    noted = [line for line in output.splitlines() if line.startswith("noted")]
    assert noted
    assert all(line.endswith("on rank 0") for line in noted)
    assert output.count("error: ") == 1
    assert output.count("stack implementation: ") == 1
