"""Trials as processes of this machine: one per GPU they need, or a share of the CPU's cores."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable

from stackexp.errors import ConfigError
from stackexp.sweeps.launchers import fit_command
from stackexp.sweeps.trials import Trial

GRACE_SECONDS = 120
"""What trials are given to save before they are killed."""


class LocalLauncher:
    """Up to `max_parallel` trials at once; None: as many as there are devices for (GPUs, else the CPU's cores).

    Trials live in process groups of their own: they outlive a driver that is killed, and Ctrl-C reaches it alone.
    Raises ConfigError if a trial needs more than this machine has.
    """

    def __init__(
        self,
        trials: list[Trial],
        max_parallel: int | None = None,
        command: Callable[[Trial], list[str]] = fit_command,
    ) -> None:
        self._gpus = [] if all(trial.config.trainer.accelerator == "cpu" for trial in trials) else visible_gpus()
        cores = len(os.sched_getaffinity(0))
        devices = max((_devices(trial, len(self._gpus)) for trial in trials), default=1)
        room = len(self._gpus) // devices if self._gpus else max(1, cores // devices)
        self._limit = min(room, max_parallel or room) if self._gpus else max_parallel or room
        parallel = max(1, min(self._limit, len(trials)))
        self._threads = max(1, cores // (parallel * devices))
        self._command = command
        self._running: dict[Trial, subprocess.Popen] = {}
        self._given: dict[Trial, list[str]] = {}  # the GPUs that a trial has

    def start(self, trials: list[Trial]) -> None:
        for trial in trials:
            with open(trial.log, "a") as log:
                self._running[trial] = subprocess.Popen(
                    self._command(trial),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment(trial),
                    start_new_session=True,
                )

    def _environment(self, trial: Trial) -> dict[str, str]:
        environment = {"OMP_NUM_THREADS": str(self._threads)} | os.environ
        if self._gpus:
            taken = {gpu for given in self._given.values() for gpu in given}
            free = [gpu for gpu in self._gpus if gpu not in taken]
            self._given[trial] = free[: trial.config.trainer.devices]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._given[trial])
        return environment

    def ended(self) -> list[tuple[Trial, int]]:
        codes = [(trial, process.poll()) for trial, process in self._running.items()]
        codes = [(trial, code) for trial, code in codes if code is not None]
        for trial, code in codes:
            process = self._running.pop(trial)
            self._given.pop(trial, None)
            if code < 0:  # its other processes have lost the first one
                _kill_group(process)
        return codes

    def free(self) -> int:
        return self._limit - len(self._running)

    def cancel(self, trial: Trial) -> None:
        self._running[trial].terminate()

    def stop(self) -> None:
        for process in self._running.values():
            process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._running.values():
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill_group(process)
                process.wait()


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name: the ids it has named already, or 0, 1, ..."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return [name.strip() for name in named.split(",")][:count] if named else [str(i) for i in range(count)]


def _devices(trial: Trial, gpus: int) -> int:
    trainer = trial.config.trainer
    if trainer.num_nodes > 1:
        raise ConfigError(
            f"{trial.name}: needs {trainer.num_nodes} nodes; the local launcher has one: --launcher slurm"
        )
    if (gpus or trainer.accelerator == "cuda") and trainer.devices > gpus:
        raise ConfigError(f"{trial.name}: needs {trainer.devices} GPUs, this machine has {gpus}; --launcher slurm")
    return trainer.devices


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
