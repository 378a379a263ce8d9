"""The worker of a sweep: claim a trial, run `fit --run FOLDER`, record how it ended, and repeat until none is left.

Any number of workers may run one sweep, on any machines, and any of them may be killed. A worker claims a trial by
locking the file `.claim` in the trial's folder. The trial's process inherits the lock, so a trial whose worker was
killed remains claimed until it ends. Workers claim one at a time, under a lock in the sweep's folder. So they never
reserve the same GPU, and never draw the same trial of a search. All other state is read from the run folders.
"""

import contextlib
import dataclasses
import os
import shlex
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from stackexp.config.compose import to_yaml
from stackexp.errors import ConfigError, FolderBusyError, RunError, StoppedError
from stackexp.files import hold_lock, try_lock, write_atomically, write_json
from stackexp.sweeps import slurm
from stackexp.sweeps.search import Study
from stackexp.sweeps.status import ChangePrinter
from stackexp.sweeps.sweep import COPY, Sweep, load_sweep
from stackexp.sweeps.trials import (
    START_MARK,
    WORKERS,
    Claim,
    Trial,
    count_failures,
    find_unrecorded_divergence,
    has_diverged,
    has_worker,
    read_claim,
    read_failure,
    record_failure,
    reset_retries,
    write_claim,
)

STOP = "stop"
"""A worker stops if this file is in the sweep's folder."""
POLL_SECONDS = 0.5
RECHECK_SECONDS = 5
"""Pause before a worker checks again for a trial that it can claim."""
GRACE_SECONDS = 120
"""Time for trials to save before they are killed."""
STOP_SECONDS = 180
"""Time that `stop_sweep` waits for the workers."""


class DevicePool:
    """The devices that a worker may use: GPUs, or CPU cores if no trial uses GPUs or this machine has none.

    In a Slurm job, these are the devices of the job. `parallel` trials run at once, with `threads` each. Raises
    ConfigError if a trial needs more devices than there are.
    """

    def __init__(self, sweep: Sweep, trials: list[Trial], max_parallel: int | None):
        self.location = socket.gethostname(), slurm.get_job()
        self.max_parallel, self.trials_per_gpu = max_parallel, sweep.config.resources.trials_per_gpu
        self.gpus = [] if all(trial.config.trainer.accelerator == "cpu" for trial in trials) else find_gpus()
        self.cores = int(os.environ.get("SLURM_CPUS_ON_NODE", 0)) or len(os.sched_getaffinity(0))
        devices = max((self._count_devices(trial) for trial in trials), default=1)
        count = sweep.config.search.trials if sweep.config.search else len(trials)
        self.parallel = max(1, min(count, max_parallel or self.cores // devices))
        if self.gpus:
            self.parallel = max(1, min(self.parallel, len(self.gpus) * self.trials_per_gpu // devices))
        self.threads = max(1, self.cores // (self.parallel * devices))

    def _count_devices(self, trial: Trial) -> int:
        nodes, devices = trial.shape
        advice = "use --launcher slurm"
        if nodes > slurm.get_shape()[0]:
            raise ConfigError(f"{trial.name}: needs {nodes} nodes, this machine is one; {advice}")
        if nodes == 1 and devices > len(self.gpus) and (self.gpus or trial.config.trainer.accelerator == "cuda"):
            raise ConfigError(f"{trial.name}: needs {devices} GPUs, this machine has {len(self.gpus)}; {advice}")
        if devices > 1 and self.trials_per_gpu > 1:
            raise ConfigError(f"resources.trials_per_gpu: trials of {devices} devices cannot share GPUs; set it to 1")
        return devices

    def reserve(self, trial: Trial, claims: list[Claim]) -> list[str] | None:
        """Return the GPUs for a trial, the least used first; None if the trial does not fit now.

        `claims` are those of the whole sweep. Those of killed workers and of other workers on this machine also count.
        """
        here = [claim for claim in claims if (claim.host, claim.job) == self.location]
        nodes, devices = trial.shape
        if here and (len(here) >= (self.max_parallel or len(claims) + 1) or nodes > 1):
            return None
        if nodes > 1:
            return []
        if not self.gpus:
            used = sum(claim.devices for claim in here)
            return [] if self.max_parallel or not used or used + devices <= self.cores else None
        counts = Counter(gpu for claim in here for gpu in claim.gpus)
        free = [gpu for gpu in self.gpus if counts[gpu] < self.trials_per_gpu]
        return sorted(free, key=lambda gpu: counts[gpu])[:devices] if len(free) >= devices else None


def find_gpus() -> list[str]:
    """Return the GPU ids for CUDA_VISIBLE_DEVICES: those it has already, or 0, 1, ..."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return [name.strip() for name in visible.split(",")][:count] if visible else [str(i) for i in range(count)]


class Worker:
    """Runs the trials of a sweep, or `only` some, that have no result. A failed trial is retried up to `retries` times.

    A worker in a Slurm job, `is_job`, runs the trials of the job's shape, and ends when no unclaimed one is left.
    Other workers also wait for the trials that are claimed elsewhere. A trial has as many threads as if all ran.
    """

    def __init__(
        self,
        sweep: Sweep,
        *,
        retries: int,
        max_parallel: int | None = None,
        is_job: bool = False,
        only: Collection[Trial] | None = None,
    ) -> None:
        self._sweep, self._retries, self._is_job, self._only = sweep, retries, is_job, only
        self._changes = ChangePrinter(sweep.config.objective)
        self._study = Study(sweep) if sweep.config.search else None
        trials = [sweep.base_trial] if self._study else self._find_trials() if is_job else sweep.trials
        self._machine = DevicePool(sweep, trials, max_parallel)
        self._running: dict[Trial, tuple[subprocess.Popen, IO[str]]] = {}  # processes and claims
        self._started: dict[Trial, None] = {}  # trials that this worker has started, in order
        self._recheck_at = 0.0
        self._signal = 0

    def run(self) -> None:
        """Run until every trial is done, is pruned or has no retries left.

        Raises RunError if trials failed, StoppedError after SIGTERM, SIGUSR1 or `sweep stop`, KeyboardInterrupt after
        SIGINT. Stops running trials and raises ConfigError if no finished trial of a search has the objective.
        """
        folder = self._sweep.folder
        with hold_lock(folder / WORKERS, "sweep stop", shared=True), self._catch_signals():
            is_over = False
            while self._running or not is_over:
                self._collect_ended()
                if self._signal or is_stop_requested(folder):
                    self._stop()
                for trial in self._study.find_pruned(list(self._running)) if self._study else []:
                    self._send_stop(trial)
                try:
                    is_over = self._start_trials()
                except ConfigError:
                    for trial in self._running:
                        self._send_stop(trial)
                    raise
                self._changes.update(self._list_watched())
                time.sleep(POLL_SECONDS)
        trials = self._find_trials()
        failed = [] if self._is_job else [trial for trial in trials if not trial.is_settled]
        if failed:
            cause = read_failure(failed[0])["cause"]
            raise RunError(
                f"{folder}: {len(failed)} of {len(trials)} trials failed, the first {failed[0].name}: {cause}; "
                "`sweep status` shows all causes; the same command retries them"
            )

    def _list_watched(self) -> list[Trial]:
        """Return the trials whose changes are printed: in a Slurm job, only those of this worker."""
        return list(self._started) if self._is_job else self._find_trials()

    # Start

    def _start_trials(self) -> bool:
        """Claim and start trials while devices are free. Return True if no trial is left for this worker."""
        if time.monotonic() < self._recheck_at:
            return False
        lock = try_lock(self._sweep.folder / ".claims.lock")
        if lock is None:
            return False
        with lock:
            while True:
                missing = [trial for trial in self._find_trials() if not self._is_over(trial)]
                watched = {*missing, *self._running}  # a finished trial keeps its devices until its process ends
                claims = {trial: claim for trial in watched if (claim := read_claim(trial))}
                if not self._start_next([trial for trial in missing if trial not in claims], list(claims.values())):
                    break
        self._recheck_at = time.monotonic() + RECHECK_SECONDS
        if self._is_job:  # other jobs run their own trials; one of this job may outlive its worker
            missing = [trial for trial in missing if trial not in claims or claims[trial].job == slurm.get_job()]
        return not missing and (self._study is None or self._study.is_complete())

    def _find_trials(self) -> list[Trial]:
        """Return the trials of the sweep, or `only` some of them, and in a Slurm job those of its shape."""
        trials = [trial for trial in self._sweep.trials if self._only is None or trial in self._only]
        return [trial for trial in trials if trial.shape == slurm.get_shape()] if self._is_job else trials

    def _is_over(self, trial: Trial) -> bool:
        """Return True if the trial is settled, or has failed too often in this `sweep run`.

        A trial that diverged is not retried: a second chance would favor unstable trainings.
        """
        if trial.is_settled or trial in self._running:
            return trial.is_settled
        return count_failures(trial) > (0 if has_diverged(trial) else self._retries)

    def _start_next(self, unclaimed: list[Trial], claims: list[Claim]) -> bool:
        """Start the first unclaimed trial that fits, or a new trial of a search. Return True if one was started."""
        for trial in unclaimed:
            gpus = self._machine.reserve(trial, claims)
            if gpus is not None and not trial.folder.is_running and self._start(trial, gpus):
                return True
        if self._study and not unclaimed and not self._study.is_complete():
            gpus = self._machine.reserve(self._sweep.base_trial, claims)
            if gpus is not None and (drawn := self._study.draw()):
                return self._start(drawn, gpus)
        return False

    def _start(self, trial: Trial, gpus: list[str]) -> bool:
        """Claim a trial and start its process. Return False if another worker has it."""
        trial.folder.mark()
        lock = try_lock(trial.claim)
        if lock is None:
            return False
        if trial.is_settled:
            lock.close()
            return False
        claim = Claim(*self._machine.location, pid=None, devices=trial.shape[1], gpus=gpus)
        if find_unrecorded_divergence(trial):
            record_failure(trial, RunError.exit_code)
            lock.close()
            return False
        write_claim(lock, claim)
        write_atomically(trial.folder.config, to_yaml(trial.config))
        if failure := read_failure(trial):
            write_json(trial.failure, failure | {"tried_again": True})
        environment = {"OMP_NUM_THREADS": str(self._machine.threads)} | os.environ
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        with open(trial.log, "a", encoding="utf-8") as log:
            log.write(f"{START_MARK}{time.strftime('%Y-%m-%d %H:%M:%S')} by {claim.host} {claim.job}".rstrip() + "\n")
            log.flush()
            process = subprocess.Popen(
                slurm.build_srun_command(trial) if trial.shape[0] > 1 else trial.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only the worker, and a killed worker does not end its trials
                pass_fds=[lock.fileno()],
            )
        write_claim(lock, dataclasses.replace(claim, pid=process.pid))
        self._running[trial] = process, lock
        self._started[trial] = None
        return True

    # End

    def _collect_ended(self) -> None:
        """Release the claims of the trials that have ended, and record which of them failed.

        A trial that ends while the worker stops has not failed. SIGTERM may have killed it before its signal handlers
        were installed, or a node may have failed.
        """
        for trial, (process, lock) in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            if code < 0:  # a signal killed the trial's first process; the others would wait for it
                _kill_group(process.pid)
            is_stop = code == StoppedError.exit_code or self._signal != 0 or is_stop_requested(self._sweep.folder)
            if code and trial.shape[0] > 1 and not is_stop and not slurm.are_nodes_alive():
                is_stop, self._signal = True, signal.SIGTERM  # the trial resumes on other nodes
            if 128 < code < 193:  # srun's codes for signals
                code = 128 - code
            if not (is_stop or trial.is_settled or code == FolderBusyError.exit_code):
                record_failure(trial, code)
            lock.close()
            del self._running[trial]
            self._recheck_at = 0.0

    def _send_stop(self, trial: Trial) -> None:
        """Request a running trial to save and exit. srun forwards SIGUSR1 to the trial, but SIGTERM would end srun."""
        self._running[trial][0].send_signal(signal.SIGUSR1 if trial.shape[0] > 1 else signal.SIGTERM)

    def _stop(self) -> None:
        """Stop the running trials, wait until they have saved, and requeue a Slurm job that received a signal.

        Raises StoppedError or KeyboardInterrupt.
        """
        folder, number = self._sweep.folder, self._signal
        print("stopping: running trials save a checkpoint and end", flush=True)
        self._signal = self._signal or signal.SIGTERM
        for trial in self._running:
            self._send_stop(trial)
        in_job = self._sweep.config.resources.signal_seconds * 2 // 3  # the rest is for requeuing the job
        deadline = time.monotonic() + (min(GRACE_SECONDS, in_job) if self._is_job else GRACE_SECONDS)
        while self._running:
            if time.monotonic() > deadline:
                for process, _ in self._running.values():
                    _kill_group(process.pid)
            time.sleep(POLL_SECONDS / 5)
            self._collect_ended()
        self._changes.update(self._list_watched())
        if self._is_job and number and not is_stop_requested(folder):
            slurm.requeue_job()
        message = f"{folder}: stopped; resume with: python -m stackexp sweep run {shlex.quote(str(folder))}"
        if number == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise StoppedError(message)

    @contextlib.contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Record SIGINT, SIGTERM and SIGUSR1 for the main loop. A second SIGINT ends the worker, not its trials."""

        def note(number: int, _: Any) -> None:
            self._signal = number
            if number == signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        before = {number: signal.signal(number, note) for number in numbers}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


# Run and stop sweeps


def run_sweep(
    sweep: Sweep,
    *,
    launcher: str = "local",
    max_parallel: int | None = None,
    retries: int | None = None,
    only: Collection[Trial] | None = None,
) -> None:
    """Run the missing trials of a sweep, or `only` some, on this machine; or submit workers for all to Slurm.

    Raises ConfigError before anything is written, then what `Worker.run` or `slurm.submit_workers` raises.
    """
    if sweep.config.search and launcher == "slurm" and not max_parallel:
        raise ConfigError(
            "sweep run: --launcher slurm: a search requires --max-parallel N; it chooses each trial by the results "
            "so far"
        )
    retries = sweep.config.retries if retries is None else retries
    is_local = launcher == "local"
    worker = Worker(sweep, max_parallel=max_parallel, retries=retries, only=only) if is_local else None
    sweep.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(sweep.folder / COPY, sweep.to_yaml())
    (sweep.folder / STOP).unlink(missing_ok=True)
    for trial in sweep.trials if only is None else only:
        if only is None or not has_diverged(trial):  # of a verdict: another process may have just recorded it
            reset_retries(trial)
    print(f"sweep folder  {sweep.folder}", flush=True)
    if worker:
        worker.run()
    else:
        lines = slurm.submit_workers(sweep, max_parallel, retries)
        print("\n".join(lines or ["no more workers are needed; see `sweep status`"]), flush=True)


def run_job(sweep: Sweep, *, max_parallel: int | None, retries: int) -> None:
    """Run the worker of a Slurm job. Raises what `Worker.run` raises, and ConfigError if the trials have changed."""
    slurm.check_worker(sweep)
    Worker(sweep, max_parallel=max_parallel, retries=retries, is_job=True).run()


def run_as_fit(name: str, overrides: Sequence[str]) -> int:
    """Run a small sweep on a formal language as `fit --config NAME`: one trial after the other, then all scores.

    Returns the exit code. Raises what `run_sweep` raises; the same command resumes.
    """
    sweep = load_sweep(name, overrides)
    sweep.check_trials()
    from stackexp.evaluation.accuracy import format_accuracy, parse_accuracy

    run_sweep(sweep, max_parallel=1)
    results = [trial.folder.read_result().to_dict() for trial in sweep.trials]
    curves = {result["model"]: parse_accuracy(result) for result in results}
    print(f"\n{format_accuracy(sweep.trials[0].config.data, curves)}\n")
    print("\n".join(f"run folder: {trial.folder.path}" for trial in sweep.trials))
    print(f"curves:     tensorboard --logdir {sweep.folder}", flush=True)
    return 0


def is_stop_requested(folder: Path) -> bool:
    """Return True between `sweep stop` and the next `sweep run`. On NFS, only a listing finds a new file at once."""
    return STOP in os.listdir(folder)


def stop_sweep(sweep: Sweep) -> None:
    """Stop the workers of a sweep, and trials on this machine without one; wait until the trials have saved.

    Raises RunError if one is still running after STOP_SECONDS.
    """
    folder = sweep.folder
    if not folder.is_dir():
        print(f"{folder}: nothing to stop", flush=True)
        return
    print(f"{folder}: stopping; waiting until running trials have saved a checkpoint", flush=True)
    deadline, signaled = time.monotonic() + STOP_SECONDS, set()
    while True:
        (folder / STOP).touch()  # again, because a `sweep run` that has just started deletes it
        slurm.cancel_pending(sweep)
        claims = {trial: claim for trial in sweep.trials if (claim := read_claim(trial))}
        for claim in claims.values():
            if claim.host == socket.gethostname() and not claim.job and claim.pid and claim.pid not in signaled:
                signaled.add(claim.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(claim.pid, signal.SIGTERM)
        if not (claims or has_worker(folder) or slurm.find_jobs(sweep)):
            return
        if time.monotonic() > deadline:
            raise RunError(f"{folder}: a worker still runs after {STOP_SECONDS} s; run `sweep status` to see where")
        time.sleep(POLL_SECONDS)
