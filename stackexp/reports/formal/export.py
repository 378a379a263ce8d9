"""The formal-language table for papers and other programs: LaTeX, and CSV with one line per run."""

from stackexp.reports.formal.cells import Report
from stackexp.reports.formal.paper import COLUMNS
from stackexp.reports.formal.recipes import name_recipe
from stackexp.reports.formal.runs import FormalRun, Lengths
from stackexp.reports.formal.tables import (
    RECIPE_HEADER,
    build_header,
    build_recipe_rows,
    build_rows,
    describe_commands,
    describe_marks,
    format_legend,
)
from stackexp.reports.latex import format_float
from stackexp.reports.report import format_csv
from stackexp.tasks import TASKS


def format_latex(report: Report) -> str:
    """Return two tables for a document with booktabs and graphicx; commands for missing cells are comments."""
    far, near = r"@{\hspace{10pt}}", r"@{\hspace{3pt}}"  # the paper's score is nearer to ours than the next model
    columns = f"l{far}" + f"l{near}r{far}" * (len(COLUMNS) - 2) + f"l{far}l{far}r"
    lines = ["% Needs \\usepackage{booktabs,graphicx}."]
    lines += [f"% missing cells: {line}" for line in describe_commands(report)]
    lines += format_float(format_legend(report), columns, build_header(), build_rows(report), describe_marks(report))
    columns = r"lp{0.5\textwidth}rp{0.6\textwidth}"
    lines += format_float("Recipes.", columns, RECIPE_HEADER, build_recipe_rows(report))
    return "\n".join(lines) + "\n"


# CSV

MEMORY_OPTIONS = (
    *("axis", "read", "read_mask", "feedback", "feedback_activation", "num_slots", "eval_num_slots"),
    *("feedback_hidden_size", "action_sharpness", "action_noise", "action_noise_warmup_steps", "entropy_weight"),
)
MODEL_OPTIONS = ("num_layers", "positional", "attention_window", "attention_log_base")
DATA_OPTIONS = (
    *("max_length", "curriculum_start", "curriculum_steps", "batch_size", "longest_fraction", "label_smoothing"),
)
RANGES: tuple[Lengths, ...] = ((41, 100), (41, 500))
"""The CSV has scores over these lengths and over those of the table."""


def format_runs(report: Report) -> str:
    """Return the CSV: a line for each run found, also without scores; `in_table` is True if it counts in a cell."""
    cells = list(report.cells)
    runs = sorted(report.runs, key=lambda run: (cells.index((run.task, run.column)), run.seed, str(run.path)))
    return format_csv([_build_record(report, run) for run in runs])


def _build_record(report: Report, run: FormalRun) -> dict[str, object]:
    cell, config, evaluation = report.cells[run.task, run.column], run.config, run.evaluation
    sections = {"model.memory": MEMORY_OPTIONS, "model": MODEL_OPTIONS, "data": DATA_OPTIONS}
    scores = {f"score_{a}_{b}": run.compute_score((a, b)) for a, b in dict.fromkeys((*RANGES, report.lengths))}
    return {
        **{"task": run.task, "class": TASKS[run.task].chomsky_class, "model": run.column, "seed": run.seed},
        **{key: config.get(f"{section}.{key}") for section, keys in sections.items() for key in keys},
        **{"lr": config["optimizer.lr"], "steps": run.step, "max_steps": config["trainer.max_steps"]},
        **{key: run.result.get(key) for key in ("parameters", "memory_parameters", "train_accuracy")},
        **{"validation_accuracy": run.validation_accuracy, **scores, "paper": cell.paper},
        "sequences_per_length": evaluation and evaluation.sequences,
        "length_stride": evaluation and evaluation.stride,
        "tested_in": evaluation and evaluation.file,
        **{"finished": run.is_finished, "in_table": run in cell.runs, "recipe": name_recipe(run), "run": str(run.path)},
    }
