"""What has come of a trial, read from its folder alone."""

import fcntl
import json
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from stackexp.errors import RunError
from stackexp.sweeps.trials import Trial

TAIL = 2**16
"""Bytes at the end of metrics.jsonl that are read to know where a trial is: some hundred lines."""


class State(StrEnum):
    WAITING = "waiting"  # nothing has come of it yet
    RUNNING = "running"
    STOPPED = "stopped"  # the next `sweep run` goes on from its checkpoint
    FAILED = "failed"
    PRUNED = "pruned"  # given up by the search
    DONE = "done"


@dataclass(frozen=True)
class Status:
    """step: optimizer steps taken; loss: of the last one; seconds_left: at the present speed."""

    trial: Trial
    state: State
    step: int
    loss: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    objective: float | None
    attempts: int
    cause: str  # of a failure, or of a missing objective


def read(trial: Trial, objective: str) -> Status:
    """The present status of a trial."""
    line: dict[str, Any] = {}
    for later in tail(trial.folder.metrics):
        line |= later
    value, problem = reached(trial, objective) if trial.folder.finished else (None, "")
    state, failure, steps = state_of(trial), read_failure(trial), trial.config.trainer.max_steps
    step, speed = line.get("step", 0), line.get("throughput/tokens_per_second")
    left = (steps - step) * trial.config.data.global_batch_tokens / speed if speed else None
    return Status(
        trial=trial,
        state=state,
        step=steps if state == State.DONE else step,
        loss=line.get("loss/train"),
        tokens_per_second=speed,
        seconds_left=left if state == State.RUNNING else None,
        objective=value,
        attempts=failure.get("attempts", 0) + (state not in (State.WAITING, State.FAILED)),
        cause=failure["cause"] if state == State.FAILED else problem,
    )


def state_of(trial: Trial) -> State:
    if trial.folder.finished:
        return State.DONE
    if is_running(trial):
        return State.RUNNING
    if trial.pruned.exists():
        return State.PRUNED
    failure = read_failure(trial)
    if failure and not failure["tried_again"]:
        return State.FAILED
    return State.STOPPED if trial.folder.metrics.exists() else State.WAITING


def is_running(trial: Trial) -> bool:
    """Whether a fit holds the folder, wherever it was started."""
    try:
        with open(trial.folder.path / ".lock") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def read_failure(trial: Trial) -> dict[str, Any]:
    """failure.json, or nothing: exit_code, cause, attempts (that failed, so far), time, tried_again (since then)."""
    return json.loads(trial.failure.read_text()) if trial.failure.exists() else {}


def tail(path: Path) -> list[dict[str, Any]]:
    """The last whole lines of a metrics.jsonl."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL))
            text = file.read().decode()
    except FileNotFoundError:
        return []
    lines = text.splitlines(keepends=True)[size > TAIL :]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def reached(trial: Trial, objective: str) -> tuple[float | None, str]:
    """The objective of a finished trial; or None, and what is in its place."""
    try:
        return figure(json.loads(trial.folder.result.read_text()), objective), ""
    except RunError as error:
        return None, str(error)


def figure(result: dict[str, Any], path: str) -> float:
    """The number at a dotted path of a result.json. Raises RunError naming what there is."""
    node: Any = result
    for part in path.split("."):
        if not isinstance(node, dict) or part not in node:
            known = ", ".join(node) if isinstance(node, dict) else repr(node)
            raise RunError(f"objective {path}: result.json has no {part!r} there, but {known or 'nothing'}")
        node = node[part]
    if isinstance(node, bool) or not isinstance(node, int | float):
        raise RunError(f"objective {path}: expected a number in result.json, found {node!r}")
    return float(node)
