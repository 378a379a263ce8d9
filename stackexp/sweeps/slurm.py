"""Run Slurm's commands sbatch, squeue, scontrol and scancel, for sweeps and `data prepare`."""

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

from stackexp.errors import RunError
from stackexp.sweeps.schema import Resources

log = logging.getLogger(__name__)

RETRY_SECONDS = 20
NO_ANSWER = ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted")

T = TypeVar("T")


class NoAnswerError(RunError):
    """Raised while Slurm's controller does not answer, for instance because it restarts."""


def is_available() -> bool:
    """Return True if this machine has Slurm's commands."""
    return shutil.which("sbatch") is not None


def format_resource_options(resources: Resources) -> list[str]:
    """Return sbatch's options for all resources except the numbers of nodes and devices."""
    names = ("time", "partition", "account", "qos", "gres", "cpus_per_task")
    values = {name: getattr(resources, name) for name in names}
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


def submit_job(name: str, script: str, *options: str) -> str:
    """Submit a job and return its id. Raises RunError if Slurm refuses, NoAnswerError if the job may exist."""
    return run_slurm("sbatch", "--parsable", f"--job-name={name}", *options, input=script).strip().split(";")[0]


def find_job_ids(name: str) -> list[str]:
    """Return the ids of the waiting and running jobs of this name."""
    return run_slurm("squeue", "--noheader", f"--name={name}", "--format=%A").split()


def run_slurm(*command: str, **options: Any) -> str:
    """Run a command and return its output. Raises NoAnswerError, or RunError if Slurm refuses."""
    result = call_slurm(*command, **options)
    if result.returncode == 0:
        return result.stdout
    message = " ".join(result.stderr.splitlines()) or f"exit code {result.returncode}"
    kind = NoAnswerError if any(text in message for text in NO_ANSWER) else RunError
    raise kind(f"{command[0]}: {message}")


def call_slurm(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command without the environment variables of a surrounding job, which would change what it submits."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    if "SLURM_CONF" in os.environ:
        environment["SLURM_CONF"] = os.environ["SLURM_CONF"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


def retry_until_answer(call: Callable[[], T]) -> T:
    """Return the result of `call`, repeated for as long as Slurm does not answer."""
    while True:
        try:
            return call()
        except NoAnswerError as error:
            log.warning("%s; trying again", error)
            time.sleep(RETRY_SECONDS)
