"""Run trials as processes of this machine. Each gets the GPUs it needs, or a share of the CPU cores."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from stackexp.errors import ConfigError
from stackexp.sweeps.launchers.base import Command, build_fit_command
from stackexp.sweeps.launchers.local_processes import TrialProcess, find_orphans, find_processes, record_process
from stackexp.sweeps.schema import Resources
from stackexp.sweeps.trials import Trial

GRACE_SECONDS = 120
"""How long trials may save before they are killed."""
POLL_SECONDS = 0.2


class LocalLauncher:
    """Runs up to `max_parallel` trials at once; None: as many as there are devices for (GPUs, else CPU cores).

    Trials run in separate process groups: they survive a killed driver, and Ctrl-C stops only the driver. Trials of a
    killed driver that still run count against the limit and keep their GPUs, and `stop` stops them too.
    Raises ConfigError if a trial needs more than this machine has.
    """

    def __init__(
        self,
        folder: Path,
        trials: list[Trial],
        resources: Resources,
        max_parallel: int | None = None,
        command: Command = build_fit_command,
    ) -> None:
        self._gpus = [] if all(trial.config.trainer.accelerator == "cpu" for trial in trials) else find_gpus()
        cores = len(os.sched_getaffinity(0))
        devices = max((_count_devices(trial, len(self._gpus)) for trial in trials), default=1)
        room = len(self._gpus) // devices if self._gpus else max(1, cores // devices)
        self._limit = min(room, max_parallel or room) if self._gpus else max_parallel or room
        parallel = max(1, min(self._limit, len(trials)))
        self._threads = max(1, cores // (parallel * devices))
        self._command, self._folder = command, folder
        self._running: dict[Trial, subprocess.Popen] = {}
        self._used_gpus: dict[Trial, list[str]] = {}

    def start(self, trials: list[Trial]) -> None:
        """Start one process for each trial."""
        for trial in trials:
            with open(trial.log, "a") as log:
                process = self._running[trial] = subprocess.Popen(
                    self._command(trial),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._build_environment(trial),
                    start_new_session=True,
                )
            record_process(trial.folder.path, process.pid, self._used_gpus.get(trial, []))

    def _build_environment(self, trial: Trial) -> dict[str, str]:
        environment = {"OMP_NUM_THREADS": str(self._threads)} | os.environ
        if self._gpus:
            used = {gpu for process in find_processes(self._folder) for gpu in process.gpus}
            free = [gpu for gpu in self._gpus if gpu not in used]
            self._used_gpus[trial] = free[: trial.config.trainer.devices]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._used_gpus[trial])
        return environment

    def collect_ended(self) -> list[tuple[Trial, int]]:
        """Return the trials that ended since the last call and their exit codes."""
        codes = [(trial, process.poll()) for trial, process in self._running.items()]
        ended = [(trial, code) for trial, code in codes if code is not None]
        for trial, code in ended:
            process = self._running.pop(trial)
            self._used_gpus.pop(trial, None)
            if code < 0:  # the trial's other processes have lost the first one
                _kill_group(process)
        return ended

    def count_free(self) -> int:
        """Return how many more trials may be started now."""
        return self._limit - len(self._running) - len(self._find_orphans())

    def _find_orphans(self) -> list[TrialProcess]:
        own = {process.pid for process in self._running.values()}
        return [process for process in find_orphans(self._folder) if process.pid not in own]

    def cancel(self, trial: Trial) -> None:
        """Send SIGTERM to one trial."""
        self._running[trial].terminate()

    def stop(self) -> None:
        """Send SIGTERM to all trials, and SIGKILL to those that are alive after GRACE_SECONDS."""
        orphans = self._find_orphans()
        for process in self._running.values():
            process.terminate()
        for orphan in orphans:
            orphan.signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._running.values():
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill_group(process)
                process.wait()
        for orphan in orphans:
            while orphan.is_alive and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            if orphan.is_alive:
                orphan.signal(signal.SIGKILL, group=True)

    @staticmethod
    def find_jobs(folder: Path) -> dict[str, str]:
        """Return the trials that run on this machine: trial name -> "process <id>"."""
        return {process.name: f"process {process.pid}" for process in find_processes(folder)}


def find_gpus() -> list[str]:
    """Return the GPU ids for CUDA_VISIBLE_DEVICES: those it has already, or 0, 1, ..."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return [name.strip() for name in visible.split(",")][:count] if visible else [str(i) for i in range(count)]


def _count_devices(trial: Trial, gpus: int) -> int:
    """Return the devices that a trial needs. Raises ConfigError if this machine has fewer."""
    trainer = trial.config.trainer
    if trainer.num_nodes > 1:
        raise ConfigError(f"{trial.name}: needs {trainer.num_nodes} nodes, this is one; use --launcher slurm")
    if (gpus or trainer.accelerator == "cuda") and trainer.devices > gpus:
        raise ConfigError(f"{trial.name}: needs {trainer.devices} GPUs, this machine has {gpus}; use --launcher slurm")
    return trainer.devices


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
