"""The formal-language table for papers and for other programs: LaTeX, and CSV with one line per run."""

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path

from stackexp.reports.formal.collect import COLUMNS, FormalRun, Range, Report, paper
from stackexp.reports.formal.recipes import Sweeps, missing, name_of
from stackexp.reports.formal.tables import (
    COARSE,
    RECIPE_HEADER,
    SHORT,
    UNFINISHED,
    Text,
    header,
    legend,
    notes,
    recipes,
    rows,
)
from stackexp.reports.tables import ABSENT

MEMORY_OPTIONS = ("axis", "read", "read_mask", "feedback", "feedback_activation", "num_slots", "eval_num_slots")
MEMORY_OPTIONS += ("feedback_hidden_size", "action_sharpness", "action_noise", "action_noise_steps")
"""Columns of the CSV, in this order, from `model.memory`."""

RANGES: tuple[Range, ...] = ((41, 100), (41, 500))
"""What the CSV has scores over, besides the range of the table."""

NUMBERED = " [n]: seeds are missing; the command of that number, a comment in this table's source, runs them."

# LaTeX

_SYMBOLS = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}"},
    **{SHORT: r"$\downarrow$", COARSE: r"$\dagger$", UNFINISHED: r"$\ddagger$", ABSENT: "--"},
}


def escape(text: str) -> str:
    """Text as LaTeX prints it; what stands between backticks as code, which may be broken after / _ = . and -."""
    parts = text.split("`")
    for i, part in enumerate(parts):
        parts[i] = "".join(_SYMBOLS.get(character, character) for character in part)
        if i % 2:
            parts[i] = r"\texttt{" + re.sub(r"(/|\\_|=|\.|-)", r"\1\\allowbreak{}", parts[i]) + "}"
    return "".join(parts)


def latex(report: Report, paths: Iterable[Path | str]) -> str:
    """Two tables for a document with the packages booktabs and graphicx; commands for missing cells are comments."""
    sweeps = Sweeps(report, paths)
    numbers, commands = missing(report, sweeps)
    far, near = r"@{\hspace{10pt}}", r"@{\hspace{3pt}}"  # the paper's figure is nearer to ours than the next model
    columns = f"l{far}" + f"l{near}r{far}" * (len(COLUMNS) - 2) + f"l{far}l{far}r"
    lines = [
        "% Needs \\usepackage{booktabs,graphicx}.",
        *(f"% [{number}] missing cells: {command}" for number, command in enumerate(commands, 1)),
        *(r"\begin{table}", r"\centering", rf"\caption{{{escape(legend(report) + NUMBERED * bool(commands))}}}"),
        rf"\resizebox{{\textwidth}}{{!}}{{\begin{{tabular}}{{{columns}}}",
        *(r"\toprule", " & ".join(escape(name) for name in header()) + r" \\"),
    ]
    kind = ""
    for task, cells in rows(report, numbers):
        if paper.TASKS[task] != kind:
            kind = paper.TASKS[task]
            lines += [r"\midrule", rf"\multicolumn{{{len(cells) + 1}}}{{l}}{{\emph{{{kind}}}}} \\"]
        lines.append(" & ".join([escape(task), *map(_typeset, cells)]) + r" \\")
    marked = [escape(line) for line in notes(report, sweeps) if line[0] in (COARSE, UNFINISHED)]
    lines += [
        r"\bottomrule",
        r"\end{tabular}}",
        *(rf"\par\raggedright\footnotesize {x}" for x in marked),
        r"\end{table}",
    ]
    if found := recipes(report):
        lines += [r"\begin{table}", r"\centering", r"\caption{Recipes of StackTrans.}"]
        lines += [rf"\resizebox{{\textwidth}}{{!}}{{\begin{{tabular}}{{{'l' * len(RECIPE_HEADER)}}}", r"\toprule"]
        body = [" & ".join(map(escape, row)) + r" \\" for row in [list(RECIPE_HEADER), *found]]
        lines += [body[0], r"\midrule", *body[1:], r"\bottomrule", r"\end{tabular}}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _typeset(cell: Text) -> str:
    best = rf"\textbf{{{escape(cell.best)}}}" if cell.bold else escape(cell.best)
    return best + escape(cell.rest)


# CSV


def comma_separated(report: Report, _: Iterable[Path | str] = ()) -> str:
    """One line for each run found, those without figures too; `in_table` says whether it is in a cell."""
    text = io.StringIO()
    lines = [_csv_row(report, run) for run in sorted(report.runs, key=lambda run: _place(report, run))]
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _place(report: Report, run: FormalRun) -> tuple[int, int, int, str]:
    return list(paper.TASKS).index(run.task), COLUMNS.index(run.column), run.seed, str(run.path)


def _csv_row(report: Report, run: FormalRun) -> dict[str, object]:
    cell, config, tested = report.cells[run.task, run.column], run.config, run.tested(report.among)
    memory = {key: config.get(f"model.memory.{key}") for key in MEMORY_OPTIONS}
    options = ("num_layers", "positional", "attention_window", "attention_log_base")
    model = {key: config.get(f"model.{key}") for key in options}
    data = {key: config[f"data.{key}"] for key in ("max_length", "curriculum_start", "curriculum_steps", "batch_size")}
    data |= {key: config.get(f"data.{key}") for key in ("longest_fraction", "label_smoothing")}
    scores = {f"score_{a}_{b}": run.score((a, b)) for a, b in dict.fromkeys((*RANGES, report.among))}
    return {
        **{"task": run.task, "class": paper.TASKS[run.task], "model": run.column, "seed": run.seed},
        **memory,
        "entropy_weight": config.get("model.memory.entropy_weight"),
        **model,
        **data,
        **{"lr": config["optimizer.lr"], "steps": run.step, "max_steps": config["trainer.max_steps"]},
        **{key: run.result.get(key) for key in ("parameters", "memory_parameters", "train_accuracy")},
        **{"validation_accuracy": run.validation, **scores, "paper": cell.paper},
        "sequences_per_length": tested and tested.sequences,
        "length_stride": tested and tested.stride,
        "tested_in": tested and tested.file,
        **{"finished": run.finished, "in_table": run in cell.runs, "recipe": name_of(run), "run": str(run.path)},
    }
