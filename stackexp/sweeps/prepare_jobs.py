"""Prepare a set with Slurm: an array of parts, and a job that merges them."""

import hashlib
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from stackexp.data.prepare import Plan, start_set
from stackexp.errors import ConfigError, RunError
from stackexp.sweeps import slurm
from stackexp.sweeps.schema import Resources


class PreparationJobs(NamedTuple):
    """The ids of the submitted jobs, the size of the array, and the folder of the logs."""

    array: str
    merge: str
    tasks: int
    logs: Path


def submit_preparation(
    plan: Plan, folder: Path, *, tasks: int, resources: Resources, strict: bool = False
) -> PreparationJobs | None:
    """Submit an array of `tasks` parts, and a job that merges when all tasks have ended.

    The merge also writes the units of failed tasks. The paths must be absolute. Returns None if the set is finished.
    Raises ConfigError for invalid resources or a missing sbatch, and RunError if jobs for the folder exist or Slurm
    refuses one.
    """
    for name, problem in resources.find_errors():
        raise ConfigError(f"data prepare: --{name}: {problem}")
    if not slurm.is_available():
        raise ConfigError("data prepare --launcher slurm: sbatch not found; run this where Slurm is installed")
    name = f"prepare-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if found := slurm.find_job_ids(name):
        ids = ",".join(sorted(set(found)))
        raise RunError(f"{folder}: already prepared by Slurm jobs {ids}; wait for them, or run scancel {ids}")
    start_set(plan, folder)
    if (folder / "corpus.json").exists():
        return None
    tasks, logs = min(tasks, len(plan.units)), folder / "jobs"
    logs.mkdir(exist_ok=True)
    command = _build_command(plan, folder, resources.cpus_per_task or 1, strict)
    options = ["--requeue", "--open-mode=append", "--nodes=1", "--ntasks=1", *slurm.format_resource_options(resources)]
    part = f"#!/bin/bash\nexec {command} --part $SLURM_ARRAY_TASK_ID/{tasks}\n"
    array = slurm.submit_job(name, part, f"--array=1-{tasks}", f"--output={logs}/%A_%a.txt", *options)
    after = [f"--dependency=afterany:{array}", f"--output={logs}/%j-merge.txt"]
    try:
        merge = slurm.submit_job(name, f"#!/bin/bash\nexec {command}\n", *after, *options)
    except RunError as error:
        raise RunError(
            f"job {array} with {tasks} tasks is submitted, but the merge job was refused ({error}); when the tasks "
            f"have ended, merge them with: {command}"
        ) from error
    return PreparationJobs(array, merge, tasks, logs)


def _build_command(plan: Plan, folder: Path, workers: int, strict: bool) -> str:
    """Return the command line of `data prepare` for the plan, quoted for the shell."""
    words = [sys.executable, "-m", "stackexp", "data", "prepare", plan.source, "--to", folder, "--workers", workers]
    if plan.tokenizer:
        words += ["--tokenizer", plan.tokenizer.absolute()]
    else:
        words += ["--vocab-size", plan.vocab_size]
    words += ["--context-length", plan.context_length, "--unit-bytes", plan.unit_bytes] + ["--strict"] * strict
    words += ["--text-column", plan.columns.text]
    words += [word for condition in plan.columns.filters for word in ("--filter", condition)]
    return shlex.join(map(str, words))
