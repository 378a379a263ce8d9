"""Run trials as Slurm array jobs, with plain sbatch, squeue, scontrol and scancel.

submitit is not used, because it needs sacct's accounting and runs pickled functions, but a trial is a command.
"""

import itertools
import logging
import secrets
import shlex
import signal
import time
from pathlib import Path
from typing import IO

from stackexp.errors import ConfigError, StoppedError
from stackexp.files import try_lock
from stackexp.sweeps import slurm
from stackexp.sweeps.launchers import Command, build_fit_command, slurm_jobs
from stackexp.sweeps.launchers.slurm_jobs import Task, TaskState
from stackexp.sweeps.schema import Resources
from stackexp.sweeps.trials import Trial

log = logging.getLogger(__name__)

ARRAY_SIZE = 1000  # tasks of one job; Slurm's limit where its administrator has set none
POLL_SECONDS = 1
SQUEUE_SECONDS = 15  # between two searches for jobs that have vanished

SCRIPT = """\
folder=${folders[SLURM_ARRAY_TASK_ID]}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

# srun starts fit directly: on many clusters signals reach the tasks alone, not their children.
# When one process has exited with 75, others are still saving, and --kill-on-bad-exit=1 would kill them.
# fit itself ends processes that would wait for a failed one.
options=(--kill-on-bad-exit=0 --wait=300 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK})
eval srun "${options[@]}" "${commands[SLURM_ARRAY_TASK_ID]}"
code=$? # the highest exit code of the tasks; 138: SIGUSR1 came before fit handled signals
((code == 138)) && code=75

# A failed node is not a failed trial: it resumes from its checkpoint on another node.
((code == 0 || code == 75)) || srun --ntasks-per-node=1 true || code=75

# Not SLURM_JOB_ID: for one of the tasks that is the id of the whole array.
id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
if ((code == 75)); then
  # "disabled": the driver has ended this job. Any other refusal: Slurm does not answer, or it has requeued the job
  # itself after a node failure and is about to kill this script; a record would then claim that the job has ended.
  for _ in {1..20}; do
    answer=$(scontrol requeue "$id" 2>&1) && exit
    echo "$answer"
    [[ $answer == *disabled* ]] && break
    sleep 3
  done
fi
((code > 128 && code < 193)) && code=$((128 - code))
printf '{"exit_code": %d, "job": "%s", "id": "%s", "attempt": %d}\\n' \\
  "$code" "$SLURM_JOB_NAME" "$id" "$((SLURM_RESTART_COUNT + 1))" >"$folder/.exit.json" &&
  mv "$folder/.exit.json" "$folder/exit.json"
"""


class SlurmLauncher:
    """Submits one array job for each call of `start` and each shape (nodes, devices per node) of its trials.

    At most `max_parallel` tasks run at once: an array is throttled, and waits for earlier ones if it would exceed that.
    Raises ConfigError if Slurm is not installed.
    """

    def __init__(
        self,
        folder: Path,
        trials: list[Trial],
        resources: Resources,
        max_parallel: int | None = None,
        command: Command = build_fit_command,
    ) -> None:
        if not slurm.is_available():
            raise ConfigError("--launcher slurm: sbatch not found; run this where Slurm's commands are installed")
        self._folder = folder.resolve()
        self._resources = resources
        self._max_parallel = max_parallel
        self._command = command
        self._started: dict[Trial, Task] = {}  # and not known to have ended
        self._ending: set[Task] = set()
        self._checked_at = 0.0  # time of the last squeue

    def start(self, trials: list[Trial]) -> None:
        """Submit the trials that have no waiting or running job of any driver. Raises RunError if Slurm refuses."""
        with self._lock_jobs() as lock:
            states = self._wait_for_states()
            tasks = slurm_jobs.find_newest_tasks(self._folder)
            new = [trial for trial in trials if tasks.get(trial.name) not in states]
            for _, group in itertools.groupby(sorted(new, key=_get_shape), key=_get_shape):
                self._submit(list(group), self._wait_for_states(), lock)
            tasks = slurm_jobs.find_newest_tasks(self._folder)
            self._started |= {trial: tasks[trial.name] for trial in trials}

    def collect_ended(self) -> list[tuple[Trial, int]]:
        """Return the ended trials and their exit codes. A job that has vanished without a record was killed."""
        states = self._read_states_if_due()  # before the records: a job that ends in between has one
        ended = []
        for trial, task in list(self._started.items()):
            code = slurm_jobs.read_exit_code(trial.folder.path, task)
            if code is None and states is not None and task not in states:
                code = -signal.SIGKILL
            if code == -signal.SIGTERM and task in self._ending:  # stopped before it handled signals
                code = StoppedError.exit_code
            if code is not None:
                ended.append((trial, code))
                del self._started[trial]
        return ended

    def count_free(self) -> int:
        """Return how many more trials may be submitted; Slurm queues what it cannot run yet."""
        return ARRAY_SIZE - len(self._started)

    def cancel(self, trial: Trial) -> None:
        """Remove a waiting job from the queue, or let a running one save; both end with 75. Returns at once."""
        task = slurm_jobs.find_newest_tasks(self._folder).get(trial.name)
        state = self._wait_for_states().get(task) if task else None
        if task and state:
            self._end(trial.name, task, state)

    def stop(self) -> None:
        """End all jobs of the sweep, started by any driver; kill jobs that have not saved after `signal_seconds`."""
        deadline = time.monotonic() + self._resources.signal_seconds
        while states := self._wait_for_states():
            is_late = time.monotonic() > deadline
            for name, task in slurm_jobs.find_newest_tasks(self._folder).items():
                if task in states and task not in self._ending:
                    self._end(name, task, states[task])
            if is_late:
                slurm.call_slurm("scancel", *(state.id for state in states.values()))
            time.sleep(POLL_SECONDS)

    @staticmethod
    def find_jobs(folder: Path) -> dict[str, str]:
        """Return trial name -> state and reason of its job. Prints a line and finds none if Slurm does not answer."""
        if not slurm.is_available():
            return {}
        try:
            states = slurm_jobs.find_task_states(folder)
        except slurm.NoAnswerError as error:
            print(f"{error}\n")
            return {}
        newest = slurm_jobs.find_newest_tasks(folder)
        return {name: str(states[task]) for name, task in newest.items() if task in states}

    def _end(self, name: str, task: Task, state: TaskState) -> None:
        """End a job. Slurm may refuse while it is about to start or to end; then the task is not in `_ending`."""
        if state.state == "PENDING":
            record = slurm_jobs.write_exit_code(self._folder / name, task, state.id, StoppedError.exit_code)
            if slurm.call_slurm("scancel", state.id).returncode:
                record.unlink()
        elif slurm.call_slurm("scontrol", "update", f"JobId={state.id}", "Requeue=0").returncode == 0:
            self._ending.add(task)
            if slurm.call_slurm("scancel", "--signal=TERM", state.id).returncode:
                self._ending.remove(task)

    def _submit(self, trials: list[Trial], states: dict[Task, TaskState], lock: IO[str]) -> None:
        """Submit one array job. sbatch inherits the lock, so the next driver finds the job if this one is killed."""
        job = f"{self._folder.name}-{secrets.token_hex(4)}"
        logs = self._folder / "jobs" / job
        logs.mkdir(parents=True)
        for index, trial in enumerate(trials):  # Slurm's own messages about the job go to the trial's log, too
            (logs / f"{index}.txt").symlink_to(trial.log.resolve())
        slurm_jobs.add_job(self._folder, job, trials)
        options = [f"--job-name={job}", f"--output={logs}/%a.txt", *self._build_options(trials, states)]
        script = self._build_script(trials)

        def submit_once() -> None:
            if not any(task.job == job for task in slurm_jobs.find_task_states(self._folder)):
                slurm.run_slurm("sbatch", *options, input=script, pass_fds=[lock.fileno()])

        slurm.retry_until_answer(submit_once)  # Slurm may have accepted the job without an answer

    def _build_options(self, trials: list[Trial], states: dict[Task, TaskState]) -> list[str]:
        """Return sbatch's options for trials of one shape, while the jobs in `states` wait or run."""
        array = f"0-{len(trials) - 1}"
        options = ["--requeue", "--open-mode=append", f"--signal=USR1@{self._resources.signal_seconds}"]
        if self._max_parallel:
            array += f"%{self._max_parallel}"
            if states and len(states) + len(trials) > self._max_parallel:
                ids = {state.id.split("_")[0] for state in states.values()}
                options.append("--dependency=afterany:" + ":".join(sorted(ids)))
        nodes, devices = _get_shape(trials[0])
        options += [f"--array={array}", f"--nodes={nodes}", f"--ntasks-per-node={devices}"]
        return options + slurm.format_resource_options(self._resources)

    def _build_script(self, trials: list[Trial]) -> str:
        folders = shlex.join(str(trial.folder.path.resolve()) for trial in trials)
        commands = shlex.join(shlex.join(self._command(trial)) for trial in trials)
        return f"#!/bin/bash\nfolders=({folders})\ncommands=({commands})\n{SCRIPT}"

    def _wait_for_states(self) -> dict[Task, TaskState]:
        """Return the states of the waiting and running tasks; wait until Slurm answers."""
        return slurm.retry_until_answer(lambda: slurm_jobs.find_task_states(self._folder))

    def _read_states_if_due(self) -> dict[Task, TaskState] | None:
        """Return the states of tasks, or None if they were read a short while ago or Slurm does not answer."""
        if time.monotonic() < self._checked_at + SQUEUE_SECONDS:
            return None
        self._checked_at = time.monotonic()
        try:
            return slurm_jobs.find_task_states(self._folder)
        except slurm.NoAnswerError as error:
            log.warning("%s", error)
            return None

    def _lock_jobs(self) -> IO[str]:
        """Return the open lock file that lets one driver at a time read the jobs and submit new ones."""
        while (lock := try_lock(self._folder / ".jobs.lock")) is None:
            time.sleep(0.2)
        return lock


def _get_shape(trial: Trial) -> tuple[int, int]:
    """Return the nodes, and the devices of each."""
    return trial.config.trainer.num_nodes, trial.config.trainer.devices
