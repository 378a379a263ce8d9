"""Summarize a run folder in a few figures, for `runs list`, `runs show` and `report compare`."""

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from stackexp.errors import ConfigError, RunError
from stackexp.metric_tags import AVERAGE_LOSS, AVERAGED_STEPS, TRAIN_LOSS
from stackexp.runs import RunFolder
from stackexp.tables import ABSENT, format_table


class RunStatus(StrEnum):
    """The state of a run."""

    FINISHED = "finished"
    RUNNING = "running"
    UNFINISHED = "unfinished"
    DAMAGED = "damaged"


@dataclass(frozen=True)
class RunSummary:
    """State, progress and losses of a run. Losses are in nats per token; None if not measured yet."""

    path: str
    state: RunStatus
    step: int
    max_steps: int | None
    tokens: int | None
    train_loss: float | None  # mean of the last 20 steps
    best_loss: float | None  # lowest mean validation loss
    bytes: int  # on disk
    last_change: float  # seconds since 1970
    problem: str = ""  # why the state is damaged


def summarize(run: RunFolder) -> RunSummary:
    """Read the summary of a run folder. Damage is reported in `problem`, not raised."""
    sizes = list(_stat_files(run.path))
    lines: list[dict[str, Any]] = []
    max_steps, result, problem = None, None, ""
    try:
        max_steps = run.read_options().get("trainer.max_steps")
        lines = list(run.read_metrics())
        if run.is_finished:
            result = run.read_result()
    except (RunError, ConfigError, OSError) as error:
        problem = str(error)
    losses = [line[TRAIN_LOSS] for line in lines if line.get(TRAIN_LOSS) is not None][-AVERAGED_STEPS:]
    validation = [line[AVERAGE_LOSS] for line in lines if line.get(AVERAGE_LOSS) is not None]
    summary = RunSummary(
        path=str(run.path),
        state=_get_state(run, problem),
        step=max((line["step"] for line in lines), default=0),
        max_steps=max_steps if isinstance(max_steps, int) else None,
        tokens=lines[-1].get("tokens") if lines else None,
        train_loss=math.fsum(losses) / len(losses) if losses else None,
        best_loss=min(validation, default=None),
        bytes=sum(size.st_size for size in sizes),
        last_change=max((size.st_mtime for size in sizes), default=0.0),
        problem=problem,
    )
    if result is None or lines:
        return summary
    train_loss, average = result.train_loss or {}, result.figures.get("average", {})  # a copy without metrics.jsonl
    return replace(
        summary,
        step=result.steps or 0,
        tokens=result.tokens,
        train_loss=train_loss.get("last_20_steps"),
        best_loss=average.get("loss"),
    )


def _stat_files(folder: Path) -> Iterator[os.stat_result]:
    """Yield the properties of all files; a running training may delete some in the meantime."""
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                yield os.stat(os.path.join(root, name))


def format_summaries(summaries: list[RunSummary]) -> str:
    """Return a table with a row for each run. `best` is the lowest mean validation loss."""
    header = ("state", "step", "loss", "best", "size", "run")
    rows = [
        (
            summary.state.value,
            f"{summary.step}/{ABSENT if summary.max_steps is None else summary.max_steps}",
            format_loss(summary.train_loss),
            format_loss(summary.best_loss),
            format_size(summary.bytes),
            summary.path,
        )
        for summary in summaries
    ]
    return format_table(rows, header=header, align="<>>>><")


def format_loss(loss: float | None, perplexity: float | None = None) -> str:
    """Format a loss with three decimals, and after a slash its perplexity, if it is given."""
    if loss is None:
        return ABSENT
    return f"{loss:.3f}" if perplexity is None else f"{loss:.3f} / {perplexity:.2f}"


def format_size(size: float) -> str:
    """Format a number of bytes: 1234567 -> 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _get_state(run: RunFolder, problem: str) -> RunStatus:
    if problem:
        return RunStatus.DAMAGED
    if run.is_running:
        return RunStatus.RUNNING
    return RunStatus.FINISHED if run.is_finished else RunStatus.UNFINISHED
