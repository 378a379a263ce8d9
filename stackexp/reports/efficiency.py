"""The paper's efficiency table: training, inference and memory over the Transformer, from `bench efficiency --out`."""

import json
import shlex
from pathlib import Path
from typing import Any

from stackexp.benchmarking.rows import PAPER, name_row
from stackexp.errors import RunError
from stackexp.reports.figures import new_figure
from stackexp.reports.report import PALETTE, Report, Table
from stackexp.tables import ABSENT

QUANTITIES = {"train": "training", "prefill": "inference", "memory": "peak memory"}
"""Keys of the record -> the paper's columns. One token after a filled cache (decode) has no column in the paper."""


def build_efficiency(path: Path) -> Report:
    """Build the report of one file. Raises RunError if `bench efficiency` did not write it."""
    record = read_record(path)
    rows = {name_row(row): row for row in record["rows"]}
    decode = {"decode": "decode"} if any("decode_ratio" in row for row in rows.values()) else {}
    columns = QUANTITIES | decode
    table = [[name, *(_format_ratio(row, key) for key in columns), *_format_paper(name)] for name, row in rows.items()]
    table += [[name, *[ABSENT] * len(columns), *_format_paper(name)] for name in PAPER if name not in rows]
    header = ["model", *columns.values(), *(f"paper: {title}" for title in QUANTITIES.values())]
    environment = record.get("environment", {})
    hardware = ", ".join(environment.get("gpus") or [environment.get("cpu", {}).get("model", "unknown hardware")])
    missing = [name for name in PAPER if name not in rows]
    command = shlex.join(
        ["python", "-m", "stackexp", "bench", "efficiency"]
        + [word for config in record.get("configs") or [] for word in ("--config", config)]
        + list(record.get("overrides", []))
        + ["--only", ",".join(dict.fromkeys([row["model"] for row in record["rows"][1:]] + missing))]
        + ["--out", str(path)]
    )
    notes = [
        "Multiples of the Transformer: medians of alternating rounds, quartiles in parentheses. The first row compares "
        "the Transformer with itself. Inference is one pass over all tokens; decode is one token after them.",
        f"Measured on {hardware}, commit {environment.get('commit')}. The paper's hardware differs.",
    ]
    notes += [f"missing {', '.join(missing)}: `{command}`"] if missing else []
    if not any("memory_ratio" in row for row in rows.values()):
        notes.append(f"missing peak memory, which is measured on a GPU: `{command}`")
    records = [_build_record(name, row) for name, row in rows.items()]
    return Report([Table("Cost over the Transformer", header, table)], notes, records, lambda: _draw(rows))


def _build_record(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the quartiles in columns of their own."""
    record = {"model": name} | {
        key: value for key, value in row.items() if key != "model" and not isinstance(value, list)
    }
    spreads = {key: value for key, value in row.items() if isinstance(value, list)}
    return record | {
        f"{key}_{end}": x for key, ends in spreads.items() for end, x in zip(("low", "high"), ends, strict=True)
    }


def read_record(path: Path) -> dict[str, Any]:
    """Read a file of `bench efficiency --out`. Raises RunError for other files."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunError(f"{path}: {reason}; give a file that `bench efficiency --out` wrote") from None
    rows = record.get("rows") if isinstance(record, dict) else None
    is_valid = rows and all(isinstance(row, dict) and "model" in row for row in rows)
    is_valid = is_valid and all("train_ratio" in row or "error" in row for row in rows)
    if not is_valid or not any("train_ratio" in row for row in rows):
        raise RunError(f"{path}: no rows with train_ratio; give a file that `bench efficiency --out` wrote")
    return record


def _format_ratio(row: dict[str, Any], key: str) -> str:
    if f"{key}_ratio" not in row:
        return row.get("error", ABSENT)
    return "{:.3f} ({:.3f}-{:.3f})".format(row[f"{key}_ratio"], *row[f"{key}_spread"])


def _format_paper(name: str) -> list[str]:
    return [f"{value:.2f}" for value in PAPER[name]] if name in PAPER else [ABSENT] * len(QUANTITIES)


def _draw(rows: dict[str, dict[str, Any]]) -> Any:
    """Draw a bar for each model and quantity with its quartiles, and the paper's value as a diamond."""
    figure, axes = new_figure(6.8, 1.3 + 0.5 * len(rows))
    axes.set_axisbelow(True)
    quantities = [key for key in QUANTITIES if any(f"{key}_ratio" in row for row in rows.values())]
    height = 0.8 / len(quantities)
    for i, key in enumerate(quantities):
        for y, (name, row) in enumerate(rows.items()):
            level = y + (i - (len(quantities) - 1) / 2) * height
            if f"{key}_ratio" in row:
                axes.barh(
                    level, row[f"{key}_ratio"], height * 0.9, color=PALETTE[i], hatch=("", "///", "...")[i], alpha=0.8
                )
                axes.plot(row[f"{key}_spread"], [level, level], color="black", linewidth=1)
            if name in PAPER:
                axes.plot(
                    PAPER[name][list(QUANTITIES).index(key)], level, "D", color="black", mfc="white", markersize=5
                )
        axes.barh(0, 0, color=PALETTE[i], hatch=("", "///", "...")[i], alpha=0.8, label=QUANTITIES[key])
    axes.plot([], [], "D", color="black", markerfacecolor="white", label="paper")
    axes.plot([], [], color="black", linewidth=1, label="quartiles")
    axes.axvline(1, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set(xlabel="Multiple of the Transformer", xlim=(0, None))
    figure.legend(loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    return figure
