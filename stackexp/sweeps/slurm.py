"""Trials as Slurm array jobs, by plain sbatch, squeue, scontrol and scancel: submitit would need sacct's accounting,
and pickles functions where a trial is a command.

What Slurm forgets stands in files. jobs.jsonl in the sweep's folder has a line for each array job, written before it is
submitted: its unique name, and its trials in the order of the tasks. exit.json in a trial's folder says how its job
ended. So every driver, also one that starts later, knows which trials have a job.
"""

import contextlib
import fcntl
import itertools
import json
import logging
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from stackexp.errors import ConfigError, RunError
from stackexp.files import write_atomically
from stackexp.sweeps.launchers import fit_command
from stackexp.sweeps.schema import Resources
from stackexp.sweeps.trials import Trial

log = logging.getLogger(__name__)

ARRAY_SIZE = 1000  # of one job; Slurm's limit where its administrator has set none
POLL_SECONDS = 1
SQUEUE_SECONDS = 15  # between two questions for jobs that have vanished
RETRY_SECONDS = 20
NO_ANSWER = ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted")

SCRIPT = """\
folder=${folders[SLURM_ARRAY_TASK_ID]}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

# Nothing stands between srun and fit: on many clusters signals reach the tasks alone, not their children.
# When one process has ended with 75, others are still saving: --kill-on-bad-exit=1 would kill them. That none hangs
# after another has failed is seen to by fit itself.
options=(--kill-on-bad-exit=0 --wait=300 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK})
eval srun "${options[@]}" "${commands[SLURM_ARRAY_TASK_ID]}"
code=$? # the highest of the tasks'; 138: warned by SIGUSR1 before it could listen
((code == 138)) && code=75

# Where a node has failed, the trial has not: it goes on from its checkpoint on another.
((code == 0 || code == 75)) || srun --ntasks-per-node=1 true || code=75

# Not SLURM_JOB_ID: that of one of the tasks is the whole array's.
id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
if ((code == 75)); then
  # Refused for good is what the driver has told to end. Else Slurm does not answer, or has itself requeued the job,
  # since a node has failed, and is about to kill this script: a record would say that the job has ended.
  for _ in {1..20}; do
    answer=$(scontrol requeue "$id" 2>&1) && exit
    echo "$answer"
    [[ $answer == *disabled* ]] && break
    sleep 3
  done
fi
((code > 128)) && code=$((128 - code))
printf '{"exit_code": %d, "job": "%s", "id": "%s", "attempt": %d}\\n' \\
  "$code" "$SLURM_JOB_NAME" "$id" "$((SLURM_RESTART_COUNT + 1))" >"$folder/.exit.json"
mv "$folder/.exit.json" "$folder/exit.json"
"""


class NoAnswer(RunError):
    """Slurm's controller does not answer: it may be starting again."""


class Task(NamedTuple):
    """A trial's place in an array job."""

    job: str  # its unique name
    index: int


class State(NamedTuple):
    """What squeue says of a task."""

    id: str  # 12_3
    state: str  # PENDING, RUNNING ...
    reason: str  # why it waits, or the nodes it runs on

    def __str__(self) -> str:
        return f"{self.state.lower()} {self.reason}, job {self.id}"


class SlurmLauncher:
    """One array job for each call of `start` and shape (nodes, devices of each) of its trials.

    At most `max_parallel` tasks run at once: an array is throttled, and waits for those before if it would exceed it.
    Raises ConfigError where there is no Slurm.
    """

    def __init__(
        self,
        sweep_folder: Path,
        resources: Resources,
        max_parallel: int | None,
        command: Callable[[Trial], list[str]] = fit_command,
    ):
        if not available():
            raise ConfigError("--launcher slurm: there is no sbatch here; start the sweep where Slurm's commands are")
        self.folder = sweep_folder.resolve()
        self.resources = resources
        self.max_parallel = max_parallel
        self.command = command
        self.started: dict[Trial, Task] = {}  # and not ended, as far as this driver knows
        self.told: set[Task] = set()  # to end
        self.asked = 0.0  # when squeue was

    def start(self, trials: list[Trial]) -> None:
        """Submit those that have no waiting or running job, whoever submitted it.

        Raises RunError for what Slurm refuses.
        """
        with self._only_driver() as lock:
            alive = self._alive()
            tasks = newest_tasks(self.folder)
            new = [trial for trial in trials if tasks.get(trial.name) not in alive]
            for _, group in itertools.groupby(sorted(new, key=_shape), key=_shape):
                self._submit(list(group), self._alive(), lock)
            tasks = newest_tasks(self.folder)
            self.started |= {trial: tasks[trial.name] for trial in trials}

    def ended(self) -> list[tuple[Trial, int]]:
        """A job without a record that squeue does not show was killed: code -SIGKILL."""
        alive = self._alive_if_due()  # before the records are read: what ends in between has one
        ended = []
        for trial, task in list(self.started.items()):
            code = _exit_code(trial.folder.path, task)
            if code is None and alive is not None and task not in alive:
                code = -signal.SIGKILL
            if code == -signal.SIGTERM and task in self.told:  # by which it ends while it starts
                code = 75
            if code is not None:
                ended.append((trial, code))
                del self.started[trial]
        return ended

    def free(self) -> int:
        """Slurm queues what is too much."""
        return ARRAY_SIZE - len(self.started)

    def cancel(self, trial: Trial) -> None:
        """Take the trial's job from the queue, or have it save; either ends with 75. Returns at once."""
        task = newest_tasks(self.folder).get(trial.name)
        state = self._alive().get(task)
        if state:
            self._end(trial.name, task, state)

    def stop(self) -> None:
        """End all jobs of the sweep, whoever submitted them; what has not saved after `signal_seconds` is killed."""
        deadline = time.monotonic() + self.resources.signal_seconds
        while alive := self._alive():
            late = time.monotonic() > deadline
            for name, task in newest_tasks(self.folder).items():
                if task in alive and task not in self.told:
                    self._end(name, task, alive[task])
            if late:
                _call("scancel", *(state.id for state in alive.values()))
            time.sleep(POLL_SECONDS)

    def _end(self, name: str, task: Task, state: State) -> None:
        """Slurm may refuse while the job is about to start or to end; then the task is not in `told`."""
        if state.state == "PENDING":
            record = self.folder / name / "exit.json"
            write_atomically(record, json.dumps({"exit_code": 75, "job": task.job, "id": state.id}))
            if _call("scancel", state.id).returncode:
                record.unlink()
        elif _call("scontrol", "update", f"JobId={state.id}", "Requeue=0").returncode == 0:
            self.told.add(task)
            if _call("scancel", "--signal=TERM", state.id).returncode:
                self.told.remove(task)

    def _submit(self, trials: list[Trial], alive: dict[Task, State], lock: IO[str]) -> None:
        """One array job. A driver killed meanwhile leaves the lock to sbatch, so that the next one sees the job."""
        job = f"{self.folder.name}-{secrets.token_hex(4)}"
        logs = self.folder / "jobs" / job
        logs.mkdir(parents=True)
        for index, trial in enumerate(trials):  # what Slurm itself says of the job goes to the trial's log, too
            (logs / f"{index}.txt").symlink_to(trial.log.resolve())
        line = json.dumps({"job": job, "trials": [trial.name for trial in trials]}) + "\n"
        jobs = self.folder / "jobs.jsonl"
        write_atomically(jobs, (jobs.read_text() if jobs.exists() else "") + line)
        options = [f"--job-name={job}", f"--output={logs}/%a.txt", *self._options(trials, alive)]
        while not any(task.job == job for task in self._alive()):
            try:
                return _slurm("sbatch", *options, input=self._script(trials), pass_fds=[lock.fileno()])
            except NoAnswer as error:  # it may have the job all the same
                _wait(error)

    def _options(self, trials: list[Trial], alive: dict[Task, State]) -> list[str]:
        """sbatch's, for trials of one shape, while the jobs `alive` wait or run."""
        array = f"0-{len(trials) - 1}"
        options = ["--requeue", "--open-mode=append", f"--signal=USR1@{self.resources.signal_seconds}"]
        if self.max_parallel:
            array += f"%{self.max_parallel}"
            if alive and len(alive) + len(trials) > self.max_parallel:
                ids = {state.id.split("_")[0] for state in alive.values()}
                options.append("--dependency=afterany:" + ":".join(sorted(ids)))
        nodes, devices = _shape(trials[0])
        options += [f"--array={array}", f"--nodes={nodes}", f"--ntasks-per-node={devices}"]
        return options + resource_options(self.resources)

    def _script(self, trials: list[Trial]) -> str:
        folders = shlex.join(str(trial.folder.path.resolve()) for trial in trials)
        commands = shlex.join(shlex.join(self.command(trial)) for trial in trials)
        return f"#!/bin/bash\nfolders=({folders})\ncommands=({commands})\n{SCRIPT}"

    def _alive(self) -> dict[Task, State]:
        """`states`, however long it takes until Slurm answers."""
        while True:
            try:
                return states(self.folder)
            except NoAnswer as error:
                _wait(error)

    def _alive_if_due(self) -> dict[Task, State] | None:
        """`states`; None if that was asked a short while ago, or Slurm does not answer."""
        if time.monotonic() < self.asked + SQUEUE_SECONDS:
            return None
        self.asked = time.monotonic()
        try:
            return states(self.folder)
        except NoAnswer as error:
            log.warning("%s", error)
            return None

    @contextlib.contextmanager
    def _only_driver(self) -> Iterator[IO[str]]:
        """Look at the jobs and submit new ones one driver at a time."""
        with open(self.folder / ".jobs.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock


def available() -> bool:
    """Whether Slurm's commands are on this machine."""
    return shutil.which("sbatch") is not None


def resource_options(resources: Resources) -> list[str]:
    """sbatch's options for all but the shape of a job."""
    values = {
        name: getattr(resources, name) for name in ("time", "partition", "account", "qos", "gres", "cpus_per_task")
    }
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


def submit(name: str, script: str, *options: str) -> str:
    """Submit a job that is no trial; its id. Raises RunError for what Slurm refuses, NoAnswer if it may have it."""
    return _slurm("sbatch", "--parsable", f"--job-name={name}", *options, input=script).strip().split(";")[0]


def jobs_named(name: str) -> list[str]:
    """The ids of the jobs of this name that wait or run."""
    return _slurm("squeue", "--noheader", f"--name={name}", "--format=%A").split()


def jobs(sweep_folder: Path) -> dict[str, State]:
    """Name of the trial -> its job, for those whose job waits or runs. Raises NoAnswer while Slurm does not answer."""
    found = states(sweep_folder)
    return {name: found[task] for name, task in newest_tasks(sweep_folder).items() if task in found}


def newest_tasks(sweep_folder: Path) -> dict[str, Task]:
    """Name of the trial -> the task it was last submitted as."""
    path = sweep_folder / "jobs.jsonl"
    jobs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {name: Task(job["job"], index) for job in jobs for index, name in enumerate(job["trials"])}


def states(sweep_folder: Path) -> dict[Task, State]:
    """What waits or runs of the sweep's newest tasks. Raises NoAnswer while Slurm does not answer."""
    tasks = newest_tasks(sweep_folder)
    left = {task for name, task in tasks.items() if _exit_code(sweep_folder / name, task) is None}
    if not left:
        return {}
    names = ",".join({task.job for task in left})
    lines = _slurm("squeue", "--noheader", "--array", f"--name={names}", "--format=%j|%K|%i|%T|%R").splitlines()
    shown = {Task(job, int(index)): State(*rest) for job, index, *rest in (line.split("|") for line in lines)}
    return {task: state for task, state in shown.items() if task in left}


def _shape(trial: Trial) -> tuple[int, int]:
    """Nodes, and devices of each."""
    return trial.config.trainer.num_nodes, trial.config.trainer.devices


def _exit_code(folder: Path, task: Task) -> int | None:
    """What the job of a trial left behind in its folder; None if that is not there, or of an earlier one."""
    try:
        record = json.loads((folder / "exit.json").read_text())
    except FileNotFoundError:
        return None
    return record["exit_code"] if record["job"] == task.job else None


def _slurm(*command: str, **options: Any) -> str:
    """What the command prints. Raises NoAnswer, and RunError for what Slurm refuses."""
    result = _call(*command, **options)
    if result.returncode == 0:
        return result.stdout
    complaint = " ".join(result.stderr.splitlines()) or f"exit code {result.returncode}"
    kind = NoAnswer if any(text in complaint for text in NO_ANSWER) else RunError
    raise kind(f"{command[0]}: {complaint}")


def _call(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Without the variables of a job that this process may itself be in, which would shape what it submits."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    if "SLURM_CONF" in os.environ:
        environment["SLURM_CONF"] = os.environ["SLURM_CONF"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


def _wait(error: NoAnswer) -> None:
    log.warning("%s; trying again", error)
    time.sleep(RETRY_SECONDS)
