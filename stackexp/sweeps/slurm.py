"""Run the workers of a sweep as Slurm array jobs, with plain sbatch, squeue, scontrol and scancel.

Each task of an array is one worker with the nodes and devices of one trial. submitit is not used: it requires
sacct, and it runs pickled functions, whereas a worker is a command.
"""

import hashlib
import json
import math
import os
import shlex
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import asdict
from typing import Any, NamedTuple

from stackexp.errors import ConfigError, RunError
from stackexp.sweeps.sweep import Sweep
from stackexp.sweeps.trials import PROGRAM, Trial, compute_config_hash, read_claim

ARRAY_SIZE = 1000
"""Most tasks of one array: Slurm's default limit."""
REQUEUE_ATTEMPTS, REQUEUE_SECONDS = 20, 3

Shape = tuple[int, int]
"""The number of nodes of a trial, and of devices per node."""


class Job(NamedTuple):
    """An array task in squeue: the job's name, id (`12_3`), state, and nodes (or the reason why it waits)."""

    name: str
    id: str
    state: str
    reason: str


class Array(NamedTuple):
    """An array of workers to submit. If `is_dependent`, it starts when the earlier arrays have ended."""

    shape: Shape
    workers: int
    is_dependent: bool


# Submit workers


def submit_workers(sweep: Sweep, max_parallel: int | None, retries: int) -> list[str]:
    """Submit workers for the missing trials; return a line for each array. Rerunning adds only missing workers.

    Raises ConfigError if Slurm is not installed, and RunError if it refuses a job or does not answer.
    """
    if not is_available():
        raise ConfigError("--launcher slurm: sbatch not found; run this where Slurm's commands are installed")
    jobs = find_jobs(sweep)
    lines, earlier = [], {job.id.partition("_")[0] for job in jobs}
    for array in plan_arrays(sweep, max_parallel, jobs):
        (sweep.folder / "jobs" / name_job(sweep, array.shape)).mkdir(parents=True, exist_ok=True)
        after = [f"--dependency=afterany:{':'.join(sorted(earlier))}"] if array.is_dependent else []
        script = build_script(sweep, array, max_parallel, retries)
        job = run_slurm("sbatch", "--parsable", *after, input=script).strip().split(";")[0]
        earlier.add(job)
        nodes, devices = array.shape
        lines.append(f"job {job}: {array.workers} workers, each with {nodes} nodes and {devices} devices per node")
    return lines


def plan_arrays(sweep: Sweep, max_parallel: int | None, jobs: list[Job]) -> list[Array]:
    """Return one array for each shape, with the workers that are missing in addition to the queued and running `jobs`.

    At most `max_parallel` trials run at once. An array that would exceed this starts when the earlier ones have ended.
    """
    share = sweep.config.resources.trials_per_gpu
    limit = max(1, max_parallel // share) if max_parallel else ARRAY_SIZE
    room, arrays = limit - len(jobs), []
    unclaimed = Counter(trial.shape for trial in sweep.trials if not (trial.is_settled or read_claim(trial)))
    if sweep.config.search:
        unclaimed[sweep.base_trial.shape] += max(0, sweep.config.search.trials - len(sweep.trials))
    for shape, trials in unclaimed.items():
        same = [job.state for job in jobs if job.name == name_job(sweep, shape)]
        missing = math.ceil(trials / share) - same.count("PENDING")
        workers = min(missing, limit, ARRAY_SIZE) if room <= 0 and not same else min(missing, room, ARRAY_SIZE)
        if workers > 0:
            arrays.append(Array(shape, workers, is_dependent=room <= 0))
            room -= workers
    return arrays


def name_job(sweep: Sweep, shape: Shape) -> str:
    """Return the job name of the workers for a shape. It includes a hash of the sweep's trials and resources."""
    trials = [sweep.base_trial] if sweep.config.search else sweep.trials
    hashes = sorted(compute_config_hash(trial.config) for trial in trials)
    identity = json.dumps([str(sweep.folder.resolve()), shape, hashes, asdict(sweep.config.resources)])
    return f"{sweep.folder.name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


def build_script(sweep: Sweep, array: Array, max_parallel: int | None, retries: int) -> str:
    """Return the batch script of an array of workers."""
    resources, folder, name = sweep.config.resources, sweep.folder.resolve(), name_job(sweep, array.shape)
    options = {
        "job-name": name,
        "array": f"0-{array.workers - 1}",
        "requeue": None,
        "open-mode": "append",
        "output": folder / "jobs" / name / "%a.txt",
        "signal": f"B:USR1@{resources.signal_seconds}",
        "nodes": array.shape[0],
        "ntasks-per-node": array.shape[1],
    }
    for key in ("time", "partition", "account", "qos", "gres", "cpus_per_task"):
        if (value := getattr(resources, key)) is not None:
            options[key.replace("_", "-")] = value
    lines = [f"#SBATCH --{key}" + (f"={shlex.quote(str(v))}" if v is not None else "") for key, v in options.items()]
    parallel = min(resources.trials_per_gpu, max_parallel or resources.trials_per_gpu)
    command = [*PROGRAM, "sweep", "run", folder, "--worker", "--max-parallel", parallel, "--retries", retries]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "trap '' USR1 # until the worker starts",
            f"exec {shlex.join(map(str, command))}\n",
        ]
    )


def find_jobs(sweep: Sweep) -> list[Job]:
    """Return the queued and running workers of a sweep. Raises RunError if Slurm does not answer."""
    folder = sweep.folder / "jobs"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not names or not is_available():
        return []
    output = run_slurm("squeue", "--noheader", "--array", f"--name={','.join(names)}", "--format=%j|%i|%T|%R")
    return [Job(*line.split("|", 3)) for line in output.splitlines()]


def cancel_pending(sweep: Sweep) -> None:
    """Remove the pending workers of a sweep from the queue."""
    if pending := [job.id for job in find_jobs(sweep) if job.state == "PENDING"]:
        call_slurm("scancel", "--state=PENDING", *pending)


# Inside a job


def get_job() -> str:
    """Return the id of the Slurm job of this process, or "" outside Slurm.

    SLURM_JOB_ID is not enough: for one of the tasks of an array, it is the id of the whole array.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID", "")


def get_shape() -> Shape:
    """Return the shape of the Slurm job of this process."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", 1)), int(os.environ.get("SLURM_NTASKS_PER_NODE", 1))


def check_worker(sweep: Sweep) -> None:
    """Raise ConfigError if the trials have changed since this job was submitted."""
    if os.environ.get("SLURM_JOB_NAME") != name_job(sweep, get_shape()):
        raise ConfigError(
            f"{sweep.folder}: its trials or resources have changed since this worker was submitted, in the sweep or "
            "in a base config; repeat `sweep run --launcher slurm`"
        )


def build_srun_command(trial: Trial) -> list[str]:
    """Return the command that runs a trial on all nodes of the job.

    --kill-on-bad-exit=1 would kill processes that still save when the first one exits with code 75. `fit` itself ends
    processes that would wait for a failed one.
    """
    nodes, devices = trial.shape
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    options = ["--kill-on-bad-exit=0", "--wait=300", f"--nodes={nodes}", f"--ntasks-per-node={devices}"]
    return ["srun", *options, *([f"--cpus-per-task={cpus}"] if cpus else []), *trial.command]


def are_nodes_alive() -> bool:
    """Return True if a process can still be started on all nodes of the job."""
    return subprocess.run(["srun", "--ntasks-per-node=1", "true"], capture_output=True).returncode == 0


def requeue_job() -> None:
    """Requeue this job. Returns if Slurm has cancelled the job, or is about to requeue it itself."""
    job = get_job()
    for _ in range(REQUEUE_ATTEMPTS):
        state = call_slurm("squeue", "--noheader", "--array", f"--jobs={job}", "--format=%T")
        if state.returncode == 0 and state.stdout.strip() != "RUNNING":
            return
        if state.returncode == 0 and call_slurm("scontrol", "requeue", job).returncode == 0:
            return
        time.sleep(REQUEUE_SECONDS)
    raise RunError(f"job {job}: Slurm refuses to requeue it; repeat `sweep run --launcher slurm`")


# Commands


def is_available() -> bool:
    """Return True if this machine has Slurm's commands."""
    return shutil.which("sbatch") is not None


def run_slurm(*command: str, **options: Any) -> str:
    """Run a command and return its output. Raises RunError if Slurm refuses or does not answer."""
    result = call_slurm(*command, **options)
    if result.returncode:
        message = " ".join(result.stderr.splitlines()) or f"exit code {result.returncode}"
        raise RunError(f"{command[0]}: {message}")
    return result.stdout


def call_slurm(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command without the SLURM_ variables of the current job, because sbatch would read options from them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    if "SLURM_CONF" in os.environ:
        environment["SLURM_CONF"] = os.environ["SLURM_CONF"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)
