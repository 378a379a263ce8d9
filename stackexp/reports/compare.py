"""Tables of runs for `runs list`, `runs show` and `report compare`, and a plot of their losses."""

import math
import statistics
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stackexp.errors import RunError
from stackexp.frame import Row, get_scores, name_runs, read_rows
from stackexp.metric_tags import AVERAGE_LOSS, TRAIN_LOSS
from stackexp.reports.arms import group_bigrams
from stackexp.reports.report import Report, Table, abbreviate_thousands, new_figure, smooth_losses
from stackexp.reports.training_data import check_same_data
from stackexp.runs import RunFolder
from stackexp.tables import ABSENT, format_table

SMOOTHED_STEPS = 10
"""Training losses are plotted as moving averages over this many steps."""


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


def format_list(rows: Sequence[Row]) -> str:
    """Return a table with a line for each run. `best` is the lowest mean validation loss."""
    lines = [
        (
            row["state"],
            f"{row['step']}/{row.get('max_steps', ABSENT)}",
            format_loss(row.get("train_loss")),
            format_loss(row.get("best_loss")),
            format_size(row["bytes"]),
            row["path"],
        )
        for row in rows
    ]
    return format_table(lines, header=("state", "step", "loss", "best", "size", "run"), align="<>>>><")


def format_run(row: Row, details: dict[str, Any]) -> str:
    """Return the details of one run: sessions, checkpoints, origin and, if it is unfinished, the command to resume."""
    lines = [
        ("run", row["path"]),
        ("state", row["state"] + (f": {row['problem']}" if row["problem"] else "")),
        ("step", f"{row['step']} of {row.get('max_steps', ABSENT)}"),
        ("tokens", f"{row.get('tokens', 0):,}"),
        (
            "loss",
            f"{format_loss(row.get('train_loss'))} training, {format_loss(row.get('best_loss'))} best validation",
        ),
        ("size", format_size(row["bytes"])),
        ("changed", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["last_change"]))),
        ("checkpoints", ", ".join(details["checkpoints"]) or "none"),
    ]
    if origin := details["origin"]:
        step = "" if origin.get("step") is None else f", step {origin['step']}"
        lines.append(("origin", f"{origin.get('path')}{step}, SHA-256 {origin.get('sha256')}"))
    for session in details["sessions"]:
        host = f" on {session['host']}" if session.get("host") else ""
        lines += [("session", f"{session['started']}{host}"), ("", str(session["command"]))]
    lines += [("resume", details["resume"])] if "resume" in details else []
    return format_table(lines)


def build_comparison(paths: Sequence[Path], different_data: bool = False) -> Report:
    """Build a table with one row per run: its state, steps and sizes, its training loss and its final scores.

    Runs on tokens have loss / perplexity on every set; runs on formal languages have their task and scores. Runs
    without a result have no scores. Small models get a last row: the scores of bigram counts of their training tokens.
    Raises RunError if there are no runs, or if their training data differ and `different_data` is false.
    """
    rows = read_rows(paths)
    if not rows:
        raise RunError(f"{', '.join(map(str, paths))}: no run folders; give run folders or folders of them")
    notes = [f"damaged: {row['problem']}" for row in rows if row["problem"]]
    notes += [] if different_data else check_same_data(rows)
    return Report([_build_table(rows)], notes, rows, lambda: draw_losses(rows))


def _build_table(rows: Sequence[Row]) -> Table:
    names = name_runs([Path(row["path"]) for row in rows])
    sets = list(dict.fromkeys(name for row in rows for name in get_scores(row)))
    named = ("task", "operation", "held_out_accuracy")
    formal = list(dict.fromkeys(key for row in rows for key in row if key in named or key.startswith("score_")))
    header = ["run", "state", "steps", "tokens", "parameters", "in the memory", "training loss", *formal]
    header += [*sets, "average", "bits/byte"] if sets else []
    lines = []
    for row, name in zip(rows, names, strict=True):
        counts = (row.get(key) for key in ("step", "tokens", "parameters", "memory_parameters"))
        progress = [row["state"], *(ABSENT if count is None else f"{count:,}" for count in counts)]
        values = [row.get(key, ABSENT) for key in formal]
        scores = [value if isinstance(value, str) else f"{value:.3f}" for value in values]
        lines.append([name, *progress, format_loss(row.get("train_loss")), *scores, *_format_sets(row, "val", sets)])
    intact = [(name, row) for name, row in zip(names, rows, strict=True) if not row["problem"]]
    for label, runs in group_bigrams(intact):
        columns = [key for key in runs[0] if key.startswith("bigrams/")]
        means = {key: statistics.fmean(run[key] for run in runs if key in run) for key in columns}
        cells = [ABSENT, ABSENT, f"{runs[0]['tokens']:,}", *[ABSENT] * (3 + len(formal))]
        lines.append([label, *cells, *_format_sets(means, "bigrams", sets)])
    return Table("Runs", header, lines, num_labels=2)


def _format_sets(row: Row, kind: str, sets: Sequence[str]) -> list[str]:
    """Return loss / perplexity of each set and of their average, and bits per byte, as far as there are figures."""
    if not sets:
        return []
    has_perplexity = any(key.startswith(f"{kind}/") and key.endswith("/perplexity") for key in row)
    names = [f"{kind}/{name}" for name in [*sets, "average"]]
    pairs = [(row.get(f"{n}/loss"), row.get(f"{n}/perplexity", math.inf if has_perplexity else None)) for n in names]
    bits = row.get(f"{kind}/average/bits_per_byte")
    return [*(format_loss(*pair) for pair in pairs), ABSENT if bits is None else f"{bits:.3f}"]


def read_curve(folder: RunFolder, tag: str) -> tuple[array, array]:
    """Return the tokens and the values of a tag in metrics.jsonl, without lines that lack it. Takes 16 bytes a line."""
    tokens, values = array("q"), array("d")
    for line in folder.read_metrics():
        if line.get(tag) is not None and "tokens" in line:
            try:
                tokens.append(line["tokens"])
                values.append(line[tag])
            except (TypeError, OverflowError) as error:
                raise RunError(f"{folder.metrics}: step {line['step']}: {error}; delete the line") from None
    return tokens, values


def draw_losses(rows: Sequence[Row]) -> Any:
    """Plot the training loss and the mean validation loss of each run against tokens, in one color per run."""
    folders = [RunFolder(Path(row["path"])) for row in rows]
    if not any(folder.metrics.exists() for folder in folders):
        raise RunError(f"{folders[0].path}: no metrics.jsonl to draw, as in copies; give the runs themselves")
    figure, axes = new_figure(7, 4.2)
    for folder, name in zip(folders, name_runs([folder.path for folder in folders]), strict=True):
        tokens, losses = read_curve(folder, TRAIN_LOSS)
        (curve,) = axes.plot(tokens, smooth_losses(losses, SMOOTHED_STEPS), label=name)
        tokens, losses = read_curve(folder, AVERAGE_LOSS)
        axes.plot(tokens, losses, "o--", color=curve.get_color())
    axes.set(xlabel="Tokens", ylabel="Loss (nats per token)")
    axes.plot([], [], color="black", label=f"training (centered mean of {SMOOTHED_STEPS} steps)")
    axes.plot([], [], "o--", color="black", label="validation (mean over sets)")
    axes.legend(fontsize=8)
    abbreviate_thousands(axes.xaxis)
    return figure
