"""The record of a sweep's Slurm jobs, kept in files because Slurm deletes finished jobs from its queue.

jobs.jsonl in the sweep's folder has one line per array job, written before submission: the job's unique name and its
trials in task order. exit.json in a trial's folder has the exit code of its job. A driver that starts later reads both
files to find the trials that already have a job.
"""

import os
from pathlib import Path
from typing import NamedTuple

from stackexp.errors import RunError
from stackexp.files import read_json, read_json_lines, write_json, write_json_lines
from stackexp.sweeps.slurm import run_slurm
from stackexp.sweeps.trials import Trial


class Task(NamedTuple):
    """The task of a trial in an array job: the job's unique name, and the index in the array."""

    job: str
    position: int


class TaskState(NamedTuple):
    """The state of a task in squeue: id (`12_3`), state, and why it waits or the nodes it runs on."""

    id: str
    state: str
    reason: str

    def __str__(self) -> str:
        return f"{self.state.lower()} {self.reason}, job {self.id}"


def add_job(folder: Path, job: str, trials: list[Trial]) -> None:
    """Record an array job before it is submitted."""
    path = folder / "jobs.jsonl"
    write_json_lines(path, [*read_json_lines(path), {"job": job, "trials": [trial.name for trial in trials]}])


def find_newest_tasks(folder: Path) -> dict[str, Task]:
    """Return {trial name: the task of its last submission}."""
    jobs = read_json_lines(folder / "jobs.jsonl")
    return {name: Task(job["job"], index) for job in jobs for index, name in enumerate(job["trials"])}


def read_exit_code(trial_folder: Path, task: Task) -> int | None:
    """Return the exit code that a task has recorded, or None. A record cut off by a full disk counts as missing."""
    try:
        os.listdir(trial_folder)  # NFS caches that a file is missing until its folder is read
        record = read_json(trial_folder / "exit.json")
    except (FileNotFoundError, RunError):
        return None
    return record["exit_code"] if record["job"] == task.job else None


def write_exit_code(trial_folder: Path, task: Task, task_id: str, exit_code: int) -> Path:
    """Record the exit code of a task, and return the path of the record."""
    path = trial_folder / "exit.json"
    write_json(path, {"exit_code": exit_code, "job": task.job, "id": task_id})
    return path


def find_task_states(folder: Path) -> dict[Task, TaskState]:
    """Return the waiting and running tasks among the newest ones. Raises NoAnswerError while Slurm does not answer."""
    newest = find_newest_tasks(folder)
    open_tasks = {task for name, task in newest.items() if read_exit_code(folder / name, task) is None}
    if not open_tasks:
        return {}
    names = ",".join({task.job for task in open_tasks})
    lines = run_slurm("squeue", "--noheader", "--array", f"--name={names}", "--format=%j|%K|%i|%T|%R").splitlines()
    states = {Task(job, int(index)): TaskState(*rest) for job, index, *rest in (line.split("|") for line in lines)}
    return {task: state for task, state in states.items() if task in open_tasks}
