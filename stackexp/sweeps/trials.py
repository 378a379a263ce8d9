"""A trial of a sweep: its run folder, claim, state and progress, and the record of its failures."""

import contextlib
import hashlib
import json
import math
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from stackexp.config.affects import AFFECT_RESULTS, find_changed_keys, flatten_config, remove_defaults
from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import ConfigError, RunError
from stackexp.files import is_locked, read_json, read_json_lines, try_lock, write_json
from stackexp.metric_tags import TOKENS_PER_SECOND, TRAIN_LOSS
from stackexp.runs import DATE_FORMAT, RunFolder

PROGRAM = [sys.executable, "-m", "stackexp"]
"""The command line of this program, which workers and Slurm jobs start."""
WORKERS = ".workers"
"""Each worker holds a shared lock on this file in the sweep's folder."""
TAIL_BYTES = 2**16
"""Bytes at the end of metrics.jsonl that `read_tail` reads: some hundred lines."""
START_MARK = "=== started "
"""Begins a line of log.txt before the output of each attempt."""

CLAIM, FAILURE = ".claim", "failure.json"
DIVERGED = re.compile(r"^step \d+: loss \S+ with gradient norm ")
"""The error of a training whose loss or gradient is not finite."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. `values` maps searched keys to values. Trials are equal if their folders are."""

    folder: RunFolder
    config: ExperimentConfig = field(compare=False)
    values: dict[str, Any] = field(compare=False)

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self.folder.path.name

    @property
    def log(self) -> Path:
        """The output of all attempts."""
        return self.folder.path / "log.txt"

    @property
    def claim(self) -> Path:
        """The lock file of the worker that runs the trial; it contains a `Claim`."""
        return self.folder.path / CLAIM

    @property
    def is_settled(self) -> bool:
        """Return True if the trial has a result or was ended by the search."""
        return self.folder.is_finished or self.pruned.exists()

    @property
    def shape(self) -> tuple[int, int]:
        """The nodes, and the devices of each."""
        return self.config.trainer.num_nodes, self.config.trainer.devices

    @property
    def command(self) -> list[str]:
        """The command that starts the trial or resumes it from its checkpoint; it ends at once if it has a result."""
        return [*PROGRAM, "fit", "--run", str(self.folder.path)]

    @property
    def failure(self) -> Path:
        """The record of the last failed attempt; see `stackexp.sweeps.trials.read_failure`."""
        return self.folder.path / FAILURE

    @property
    def pruned(self) -> Path:
        """The record of a search that ended the trial early: step, value, time."""
        return self.folder.path / "pruned.json"


def compute_config_hash(config: ExperimentConfig) -> str:
    """Return 8 hexadecimal digits that identify the options that affect the results.

    Options at their defaults are omitted, so that a trial keeps its hash when the schema gets a new option.
    """
    tree = remove_defaults(config, AFFECT_RESULTS)
    if "warm_start" in tree:
        tree["init"] = tree.pop("warm_start")  # its earlier name, so that trials keep their hash
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:8]


class TrialState(StrEnum):
    """The state of a trial."""

    WAITING = "waiting"  # never started
    RUNNING = "running"  # or claimed by a worker
    STOPPED = "stopped"  # the next `sweep run` resumes from its checkpoint
    FAILED = "failed"
    PRUNED = "pruned"  # ended early by the search
    DONE = "done"


@dataclass(frozen=True)
class TrialStatus:
    """State and progress of a trial.

    `step` counts optimizer steps, `loss` is that of the last step, `seconds_left` assumes the current speed, `cause`
    explains a failure or a missing objective.
    """

    trial: Trial
    state: TrialState
    step: int
    loss: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    objective: float | None
    attempts: int
    cause: str


def read_status(trial: Trial, objective: str) -> TrialStatus:
    """Return the current status of a trial."""
    last: dict[str, Any] = {}
    for line in read_tail(trial.folder.metrics):
        last |= {tag: value for tag, value in line.items() if isinstance(value, int | float)}
    value, problem = read_objective(trial, objective) if trial.folder.is_finished else (None, "")
    state, failure, max_steps = get_state(trial), read_failure(trial), trial.config.trainer.max_steps
    step, speed = last.get("step", 0), last.get(TOKENS_PER_SECOND)
    is_timed = speed and state == TrialState.RUNNING
    return TrialStatus(
        trial=trial,
        state=state,
        step=max_steps if state == TrialState.DONE else step,
        loss=last.get(TRAIN_LOSS),
        tokens_per_second=speed,
        seconds_left=(max_steps - step) * trial.config.data.global_batch_tokens / speed if is_timed else None,
        objective=value,
        attempts=failure.get("attempts", 0) + (state not in (TrialState.WAITING, TrialState.FAILED)),
        cause=failure["cause"] if state == TrialState.FAILED else problem,
    )


def get_state(trial: Trial) -> TrialState:
    """Return the current state of a trial."""
    if trial.folder.is_finished:
        return TrialState.DONE
    if trial.folder.is_running or is_locked(trial.claim):
        return TrialState.RUNNING
    if trial.pruned.exists():
        return TrialState.PRUNED
    failure = read_failure(trial)
    if failure and not failure.get("tried_again"):
        return TrialState.FAILED
    return TrialState.STOPPED if trial.folder.metrics.exists() else TrialState.WAITING


def read_tail(path: Path) -> list[dict[str, Any]]:
    """Return the last complete lines of a metrics.jsonl. Skips damaged lines, so that one does not end a display."""
    return list(read_json_lines(path, skip_damaged=True, last_bytes=TAIL_BYTES))


# Claims


def has_worker(folder: Path) -> bool:
    """Return True if a worker runs trials of the sweep in this folder."""
    return is_locked(folder / WORKERS, count_shared=True)


@dataclass(frozen=True)
class Claim:
    """The host, Slurm job ("" without Slurm), process (None until it has started) and devices of a running trial."""

    host: str
    job: str
    pid: int | None
    devices: int
    gpus: list[str]

    def __str__(self) -> str:
        return f"{self.host}, job {self.job}" if self.job else f"{self.host}, process {self.pid}"


def write_claim(lock: IO[str], claim: Claim) -> None:
    """Write the contents of a lock file that this process holds."""
    lock.truncate(0)
    lock.write(json.dumps(asdict(claim)))
    lock.flush()


def read_claim(trial: Trial) -> Claim | None:
    """Return the claim of a trial, or None if no living process holds it."""
    if not is_locked(trial.claim):
        return None
    try:
        return Claim(**read_json(trial.claim))
    except (OSError, RunError, TypeError):  # this worker has not written it yet
        return Claim("an unknown host", "", None, 0, [])


# Objective


def read_objective(trial: Trial, objective: str) -> tuple[float | None, str]:
    """Return the objective of a finished trial, or None and the reason, such as a resume with other options."""
    try:
        result = trial.folder.read_result()
        if changed := find_changed_option(trial, result.steps or 0):
            return None, f"was resumed with another {changed} than the sweep's; move the folder elsewhere"
        return get_number(result.to_dict(), objective), ""
    except (RunError, ConfigError) as error:
        return None, str(error)


def find_changed_option(trial: Trial, steps: int) -> str:
    """Return the option that a finished run of `steps` steps has changed from its trial's config, "" if none."""
    ours, is_longer = flatten_config(trial.config), steps > trial.config.trainer.max_steps
    changed = [*find_changed_keys(trial.folder.read_options(), ours, AFFECT_RESULTS)]
    for options in trial.folder.read_earlier_options().values():  # of the first steps, whose validations do not count
        changed += find_changed_keys(options, ours, ("training", "continuation", "location"))
    return next(iter(changed), "trainer.max_steps" if is_longer else "")


def get_number(result: dict[str, Any], path: str, missing: float | None = None) -> float:
    """Return the number at a dotted path of a result.json. Raises RunError that lists the keys found.

    `missing`, if any, is returned for null, which `write_json` writes for numbers that are not finite.
    """
    node: Any = result
    for part in path.split("."):
        if not isinstance(node, dict) or part not in node:
            keys = ", ".join(node) if isinstance(node, dict) else repr(node)
            raise RunError(f"objective {path}: result.json has no {part!r}; it has {keys or 'nothing'}")
        node = node[part]
    if node is None and missing is not None:
        return missing
    if node is None:
        raise RunError(f"objective {path}: null in result.json, for a number that is not finite")
    if isinstance(node, bool) or not isinstance(node, int | float):
        raise RunError(f"objective {path}: expected a number in result.json, found {node!r}")
    return float(node)


# Failures


def read_failure(trial: Trial) -> dict[str, Any]:
    """Return the last failure, empty if none: exit_code, cause, attempts, forgiven, time, tried_again.

    `attempts` counts the failed ones. Those up to `forgiven` were before the last `sweep run`, and do not count as
    retries.
    """
    if not trial.failure.exists():
        return {}
    try:
        failure = read_json(trial.failure)
        counts = {"attempts": int(failure["attempts"]), "forgiven": int(failure["forgiven"])}
        return failure | counts | {"cause": str(failure["cause"])}
    except (RunError, KeyError, TypeError, ValueError):
        cause = f"{trial.failure}: damaged; the next sweep run retries the trial"
        return {"cause": cause, "attempts": 0, "forgiven": 0, "tried_again": False}


def has_failed(folder: RunFolder) -> bool:
    """Return True if the last attempt of a trial failed and none has begun since."""
    failure = folder.path / FAILURE
    if folder.is_finished or not failure.exists() or folder.is_running:
        return False
    with contextlib.suppress(RunError):  # a damaged file: the next `sweep run` retries the trial
        return not read_json(failure).get("tried_again")
    return False


def count_failures(trial: Trial) -> int:
    """Return the failed attempts since the last `sweep run`."""
    failure = read_failure(trial)
    return failure["attempts"] - failure["forgiven"] if failure else 0


def read_score(trial: Trial, objective: str) -> float:
    """Return the score of a finished trial. Raises RunError if the run was resumed with another config."""
    path, result, steps = trial.folder.path, trial.folder.read_result(), trial.config.trainer.max_steps
    if result.steps is None:
        raise RunError(f"{path}: result.json has no steps; it is not that of a finished run, so remove the folder")
    if changed := find_changed_option(trial, result.steps):
        raise RunError(f"{path}: was resumed with another {changed} than the verdict's; move the folder elsewhere")
    if result.steps < steps:
        raise RunError(f"{path}: ended at step {result.steps} of {steps}; remove the callback that ended it")
    try:
        return get_number(result.to_dict(), objective, missing=math.inf)
    except RunError as error:
        raise RunError(f"{path}: {error}") from None


def has_diverged(trial: Trial) -> bool:
    """Return True if the last attempt ended because its loss or gradient was not finite."""
    return bool(DIVERGED.search(read_failure(trial).get("cause", "")))


def find_unrecorded_divergence(trial: Trial) -> bool:
    """Return True if the last attempt diverged, but its worker was killed or stopped before it recorded that."""
    failure = read_failure(trial)
    return (not failure or failure.get("tried_again", False)) and bool(DIVERGED.search(find_cause(trial, 1)))


def reset_retries(trial: Trial) -> None:
    """Count the retries of a failed trial from 0 again, unless a worker runs it."""
    if count_failures(trial) and (lock := try_lock(trial.claim)):
        with lock:
            failure = read_failure(trial)
            write_json(trial.failure, failure | {"forgiven": failure["attempts"]})


def record_failure(trial: Trial, exit_code: int) -> None:
    """Record the failure of the last attempt in failure.json."""
    before = read_failure(trial)
    failure = {
        "exit_code": exit_code,
        "cause": find_cause(trial, exit_code),
        "attempts": before.get("attempts", 0) + 1,
        "forgiven": before.get("forgiven", 0),
        "time": time.strftime(DATE_FORMAT),
        "tried_again": False,
    }
    write_json(trial.failure, failure)


def find_cause(trial: Trial, exit_code: int) -> str:
    """Return why the last attempt failed: the signal, the last `error:` line of its log, or the last line."""
    if -exit_code in list(signal.Signals):
        return f"killed by {signal.Signals(-exit_code).name}"
    log = trial.log.read_text(encoding="utf-8", errors="replace") if trial.log.exists() else ""
    lines = [line.strip() for line in log.rpartition(START_MARK)[2].splitlines()[1:] if line.strip()]
    errors = [re.sub(r"^error: (rank \d+: )?", "", line) for line in lines if line.startswith("error: ")]
    last = re.sub(r"\s+", " ", (errors or lines or ["no output"])[-1])
    return last if errors else f"exit code {exit_code} without a result: {last}"
