"""The formal-language runs for other programs: one CSV record per run."""

from stackexp.reports.formal.cells import Results
from stackexp.reports.formal.recipes import name_recipe
from stackexp.reports.formal.runs import FormalRun, Lengths
from stackexp.tasks import TASKS

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


def build_records(results: Results) -> list[dict[str, object]]:
    """Return a record for each run found, also without scores; `in_table` is True if it counts in a cell."""
    cells = list(results.cells)
    runs = sorted(results.runs, key=lambda run: (cells.index((run.task, run.column)), run.seed, str(run.path)))
    return [_build_record(results, run) for run in runs]


def _build_record(results: Results, run: FormalRun) -> dict[str, object]:
    cell, config, evaluation = results.cells[run.task, run.column], run.config, run.evaluation
    sections = {"model.memory": MEMORY_OPTIONS, "model": MODEL_OPTIONS, "data": DATA_OPTIONS}
    scores = {f"score_{a}_{b}": run.compute_score((a, b)) for a, b in dict.fromkeys((*RANGES, results.lengths))}
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
