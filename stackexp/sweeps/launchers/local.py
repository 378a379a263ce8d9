"""Run trials as processes of this machine. Each gets whole GPUs, a share of one, or a share of the CPU cores.

A trial's process.json has its process id, host, start time and GPUs, so a new driver finds the trials of a killed one.
The system reuses process ids, so a record counts only if the start time matches.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from stackexp.errors import ConfigError, FolderBusyError, RunError
from stackexp.files import hold_lock, is_locked, read_json, read_start_time, write_json
from stackexp.sweeps.launchers import Command, build_fit_command
from stackexp.sweeps.schema import Resources
from stackexp.sweeps.trials import Trial

GRACE_SECONDS = 120
"""Time for trials to save before they are killed."""
POLL_SECONDS = 0.1
FILE_NAME = "process.json"


class LocalLauncher:
    """Runs up to `max_parallel` trials at once; None: as many as the devices (GPUs, else CPU cores) allow.

    Trials run in separate process groups: they survive a killed driver, and Ctrl-C stops only the driver. Trials of a
    killed driver that still run count against the limit and keep their GPUs, and `stop` stops them too.
    Raises ConfigError if a trial needs more than this machine has, or would share several GPUs.
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
        self._devices = devices = max((_count_devices(trial, len(self._gpus)) for trial in trials), default=1)
        self._trials_per_gpu = resources.trials_per_gpu
        if devices > 1 and self._trials_per_gpu > 1:
            raise ConfigError(f"resources.trials_per_gpu: trials of {devices} devices cannot share GPUs; set it to 1")
        gpus = len(self._gpus) * self._trials_per_gpu
        room = gpus // devices if self._gpus else max(1, cores // devices)
        self._limit = min(room, max_parallel or room) if self._gpus else max_parallel or room
        parallel = max(1, min(self._limit, len(trials)))
        self._threads = max(1, cores // (parallel * devices))
        self._command, self._folder = command, folder
        self._running: dict[Trial, subprocess.Popen] = {}
        self._refused: list[Trial] = []  # not started

    def start(self, trials: list[Trial]) -> None:
        """Start one process for each trial.

        Skips a trial whose GPUs another driver has just taken, or whose process still runs after its driver was killed.
        """
        for trial in trials:
            with hold_lock(self._folder / ".gpus.lock", "starting a trial"):
                gpus = self._find_free_gpus()[: trial.config.trainer.devices]
                is_short = self._gpus and len(gpus) < trial.config.trainer.devices
                if is_short or read_process(trial.folder.path / FILE_NAME):
                    self._refused.append(trial)
                    continue
                process = self._running[trial] = self._start_process(trial, gpus)
                record_process(trial.folder.path, process.pid, gpus)

    def _start_process(self, trial: Trial, gpus: list[str]) -> subprocess.Popen:
        environment = {"OMP_NUM_THREADS": str(self._threads)} | os.environ
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        with open(trial.log, "a") as log:
            return subprocess.Popen(
                self._command(trial),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def collect_ended(self) -> list[tuple[Trial, int]]:
        """Return the trials that ended since the last call and their exit codes.

        A trial that was not started has that of FolderBusyError, so the driver tries it again.
        """
        refused = [(trial, FolderBusyError.exit_code) for trial in self._refused]
        self._refused.clear()
        codes = [(trial, process.poll()) for trial, process in self._running.items()]
        ended = [(trial, code) for trial, code in codes if code is not None]
        for trial, code in ended:
            process = self._running.pop(trial)
            if code < 0:  # the trial's other processes have lost the first one
                _kill_group(process.pid)
        return ended + refused

    def count_free(self) -> int:
        """Return how many more trials may be started now."""
        free = self._limit - len(self._running) - len(self._find_orphans())
        return min(free, len(self._find_free_gpus()) // self._devices) if self._gpus else free

    def _find_free_gpus(self) -> list[str]:
        """Return the GPUs that take another trial, the emptiest first; one that takes two is listed twice.

        Trials of other drivers of the sweep count too.
        """
        used = Counter(gpu for process in find_processes(self._folder) for gpu in process.gpus)
        places = [(trials, gpu) for gpu in self._gpus for trials in range(used[gpu], self._trials_per_gpu)]
        return [gpu for _, gpu in sorted(places, key=lambda place: place[0])]

    def _find_orphans(self) -> list["TrialProcess"]:
        """Return the living trials whose driver is dead."""
        own = {process.pid for process in self._running.values()}
        others = [process for process in find_processes(self._folder) if process.pid not in own]
        return [process for process in others if not is_locked(self._folder / process.name / ".claim")]

    def cancel(self, trial: Trial) -> None:
        """Send SIGTERM to one trial."""
        self._running[trial].terminate()

    def stop(self) -> None:
        """Send SIGTERM to all trials, and SIGKILL to those that are alive after GRACE_SECONDS."""
        own, orphans = list(self._running.values()), self._find_orphans()
        for process in own:
            process.terminate()
        for orphan in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan.pid, signal.SIGTERM)

        def find_alive() -> list[int]:
            alive = [process.pid for process in own if process.poll() is None]
            return [*alive, *(orphan.pid for orphan in orphans if orphan.is_alive)]

        deadline = time.monotonic() + GRACE_SECONDS
        while find_alive() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for pid in find_alive():
            _kill_group(pid)
        for process in own:
            process.wait()

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


# Records of running trials


@dataclass(frozen=True)
class TrialProcess:
    """A trial that runs, or ran, in a process group of its own."""

    name: str
    pid: int
    host: str
    start_time: str  # clock ticks since the boot of the machine
    gpus: list[str]

    @property
    def is_alive(self) -> bool:
        """Return True if the process runs on this machine."""
        return self.host == socket.gethostname() and read_start_time(self.pid) == self.start_time != ""


def record_process(folder: Path, pid: int, gpus: list[str]) -> None:
    """Write the record of a trial that was just started."""
    process = TrialProcess(folder.name, pid, socket.gethostname(), read_start_time(pid), gpus)
    write_json(folder / FILE_NAME, asdict(process))


def find_processes(folder: Path) -> list[TrialProcess]:
    """Return the running trials of the sweep in `folder` on this machine, started by any driver."""
    processes = map(read_process, sorted(folder.glob(f"*/{FILE_NAME}")))
    return [process for process in processes if process]


def read_process(path: Path) -> TrialProcess | None:
    """Return the process recorded in a file, or None if it has ended or the record is missing or damaged."""
    with contextlib.suppress(RunError, OSError, TypeError):
        process = TrialProcess(**read_json(path))
        return process if process.is_alive else None
    return None


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
