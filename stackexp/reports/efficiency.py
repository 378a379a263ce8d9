"""The paper's efficiency table: training, inference and memory over the Transformer.

`bench efficiency` measures it, or on a GPU `benchmarks/gpu.py`, whose rows have variants of the same models.
"""

from pathlib import Path
from typing import Any

from stackexp.errors import RunError
from stackexp.files import read_json
from stackexp.reports.report import PALETTE, Report, Table, new_figure
from stackexp.tables import ABSENT

PAPER = {"stacktrans": (1.16, 1.09, 1.12), "single_head": (1.03, 1.04, 1.00), "full_dim": (3.78, 3.30, 1.73)}
"""Training, inference and memory over the Transformer in arXiv 2507.15343, on the paper's GPUs."""
QUANTITIES = {"train": "training", "prefill": "inference", "memory": "peak memory"}
"""Keys of the record -> the paper's columns. One token after a filled cache (decode) has no column in the paper."""
MAX_CONTROL_ERROR = 0.05
"""Largest difference of a control, the Transformer against itself, from 1."""
LEGEND = (
    "Parameters and FLOPs per token: difference from the Transformer. Training, inference and peak memory: multiples "
    "of the Transformer, medians of alternating rounds, quartiles in parentheses. The first row compares the "
    "Transformer with itself. Inference is one pass over all tokens.",
    "Share of peak: the model's FLOP/s in training over those of a large matrix product on the same device. MFU: over "
    "the vendor's figure.",
)
DECODE_LEGEND = (
    "Decode: one token after all others, as a multiple of the Transformer. Share of bandwidth: the time in which a "
    "copy moves the weights, keys and values, over that of a token."
)
VARIANTS_LEGEND = (
    "Each variant keeps the changes of those above it. A Transformer is compared with the first row, a memory with the "
    "Transformer of its variant."
)


def build_efficiency(path: Path) -> Report:
    """Build the report of one file. Raises RunError if `bench efficiency` did not write it."""
    try:
        return build_cost_report(read_efficiency(path))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise RunError(f"{path}: damaged; give a file that `bench efficiency --out` wrote") from None


def build_cost_report(record: dict[str, Any]) -> Report:
    """Build the report of a record."""
    measured = [row for row in record["rows"] if "model" in row]
    rows = {_name_row(row): row for row in measured}
    base, missing = measured[0], [name for name in PAPER if name not in {row["model"] for row in measured}]
    control = base.get("decode_ratio")
    has_decode = control is not None and abs(control - 1) <= MAX_CONTROL_ERROR
    ratios = QUANTITIES | ({"decode": "decode"} if has_decode else {})
    speeds = {"tokens_per_second": "tokens/s", "peak_share": "share of peak", "mfu": "MFU"}
    speeds |= {"bandwidth_share": "decode: share of bandwidth"} if has_decode else {}
    speeds = {key: title for key, title in speeds.items() if any(key in row for row in rows.values())}
    sizes = ("parameters", "flops_per_token")
    table = []
    for name, row in (rows | {name: {} for name in missing}).items():
        cells = [f"{row[key] / base[key] - 1:+.1%}" if key in row and key in base else ABSENT for key in sizes]
        for key in speeds:
            style = ",.0f" if key == "tokens_per_second" else ".1%"
            cells.append(format(row[key], style) if key in row else ABSENT)
        for key in ratios:
            if f"{key}_ratio" in row:
                cells.append("{:.3f} ({:.3f}-{:.3f})".format(row[f"{key}_ratio"], *row[f"{key}_spread"]))
            else:
                cells.append(row.get("error", ABSENT))
        model = row.get("model", name)
        has_paper = model in PAPER and row.get("implementation") != "reference"
        paper = [f"{value:.2f}" for value in PAPER[model]] if has_paper else [ABSENT] * len(QUANTITIES)
        table.append([name, *cells, *paper])
    header = ["model", "parameters", "FLOPs/token", *speeds.values(), *ratios.values()]
    header += [f"paper: {title}" for title in QUANTITIES.values()]
    environment = record.get("environment", {})
    hardware = ", ".join(environment.get("gpus") or [environment.get("cpu", {}).get("model", "unknown hardware")])
    when = f"{environment.get('started', '')[:10]}, commit {environment.get('commit')}"
    notes = [*LEGEND, f"Measured on {hardware}, {when}. The paper's hardware differs."]
    if has_decode:
        notes.insert(2, DECODE_LEGEND)
    elif control is not None:
        notes.insert(2, f"Decode is left out: the Transformer measured {control:.2f} times its own time.")
    if any("variant" in row for row in measured):
        notes.insert(1, VARIANTS_LEGEND)
    elif missing:
        notes.append(f"missing: {', '.join(missing)}")
    records = [_build_record(name, row) for name, row in rows.items()]
    return Report([Table("Cost over the Transformer", header, table)], notes, records, lambda: _draw(rows))


def _name_row(row: dict[str, Any]) -> str:
    detail = row.get("variant") or ("reference" if row.get("implementation") == "reference" else "")
    return f"{row['model']} ({detail})" if detail else str(row["model"])


def _build_record(name: str, row: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for key, value in (row | {"model": name}).items():
        record |= {f"{key}_low": value[0], f"{key}_high": value[1]} if isinstance(value, list) else {key: value}
    return record


def read_efficiency(path: Path) -> dict[str, Any]:
    """Read a file of `bench efficiency --out`. Raises RunError for other files."""
    try:
        record = read_json(path)
    except (OSError, RunError) as error:
        reason = f"{path}: {error.strerror}" if isinstance(error, OSError) else error
        raise RunError(f"{reason}; give a file that `bench efficiency --out` wrote") from None
    rows = record.get("rows") if isinstance(record, dict) else None
    is_valid = rows and all(isinstance(row, dict) and ("model" in row or "section" in row) for row in rows)
    is_valid = is_valid and all("train_ratio" in row or "error" in row or "model" not in row for row in rows)
    if not is_valid or not any("train_ratio" in row for row in rows):
        raise RunError(f"{path}: no rows with train_ratio; give a file that `bench efficiency --out` wrote")
    return record


def _draw(rows: dict[str, dict[str, Any]]) -> Any:
    """Draw a bar for each model and quantity with its quartiles, and the paper's value as a diamond."""
    rows = {name: row for name, row in rows.items() if "error" not in row or row["model"] in PAPER}
    figure, axes = new_figure(6.8, 1.3 + 0.5 * len(rows))
    axes.set_axisbelow(True)
    quantities = [key for key in QUANTITIES if any(f"{key}_ratio" in row for row in rows.values())]
    height = 0.8 / len(quantities)
    for i, key in enumerate(quantities):
        style = {"color": PALETTE[i], "hatch": ("", "///", "...")[i], "alpha": 0.8}
        axes.barh(0, 0, label=QUANTITIES[key], **style)
        for y, row in enumerate(rows.values()):
            level = y + (i - (len(quantities) - 1) / 2) * height
            if f"{key}_ratio" in row:
                axes.barh(level, row[f"{key}_ratio"], height * 0.9, **style)
                axes.plot(row[f"{key}_spread"], [level, level], color="black", linewidth=1)
            elif i == 0 and "error" in row:
                axes.text(0.02, y, row["error"], va="center", fontsize=8)
            if row["model"] in PAPER and row.get("implementation") != "reference":
                value = PAPER[row["model"]][list(QUANTITIES).index(key)]
                axes.plot(value, level, "D", color="black", markerfacecolor="white", markersize=5)
    axes.plot([], [], "D", color="black", markerfacecolor="white", label="paper")
    axes.plot([], [], color="black", linewidth=1, label="quartiles")
    axes.axvline(1, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set(xlabel="Multiple of the Transformer", xlim=(0, None))
    figure.legend(loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    return figure
