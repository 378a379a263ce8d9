"""The benchmarks that the StackTrans paper (arXiv 2507.15343v2, Table 2) prints, with other models next to them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stackexp.evaluation.benchmarks.results import TaskScores, average_tasks
from stackexp.reports.report import Table
from stackexp.tables import ABSENT

BENCHMARK_TASKS = {
    "HellaSwag": ("smollm2_hellaswag",),
    "ARC": ("smollm2_arc_easy", "smollm2_arc_challenge"),
    "PIQA": ("smollm2_piqa",),
    "MMLU": ("smollm2_mmlu",),
    "CommonsenseQA": ("smollm2_commonsense_qa",),
    "TriviaQA": ("smollm2_trivia_qa",),
    "Winogrande": ("smollm2_winogrande",),
    "OpenBookQA": ("smollm2_openbookqa",),
    "GSM8K (5-shot)": ("smollm2_gsm8k",),
}
"""Our tasks for each of the paper's benchmarks. ARC is the mean of its two tasks."""
TASK_NAMES = tuple(name for names in BENCHMARK_TASKS.values() for name in names)


@dataclass(frozen=True)
class PaperModel:
    """A model of the table: parameters in billions, training tokens in trillions, accuracies in percent."""

    parameters: float
    tokens: float
    accuracies: tuple[float, ...]  # in the order of BENCHMARK_TASKS
    average: float


PAPER_MODELS = {
    "StackTrans": PaperModel(0.36, 1, (59.5, 59.0, 71.7, 36.5, 37.1, 11.2, 52.8, 37.5, 33.6), 44.3),
    "SmolLM": PaperModel(0.36, 0.6, (51.8, 50.1, 71.6, 34.4, 35.3, 9.1, 52.8, 37.2, 1.6), 38.2),
    "SmolLM2": PaperModel(0.36, 4, (54.5, 53.0, 71.7, 35.8, 38.0, 16.9, 52.5, 37.4, 3.2), 40.3),
    "Qwen2.5": PaperModel(0.5, 18, (51.2, 45.4, 69.9, 33.7, 31.6, 4.3, 54.1, 37.4, 33.4), 40.1),
    "OLMo": PaperModel(1.1, 2, (60.7, 44.0, 75.2, 31.9, 40.3, 2.8, 53.2, 38.0, 1.8), 38.7),
    "TinyLLaMA": PaperModel(1.1, 3, (55.2, 43.4, 72.9, 32.2, 37.0, 9.8, 55.7, 33.2, 1.7), 37.9),
}
NOTE = (
    "†: from Table 2 of arXiv 2507.15343v2, scored with lighteval; no standard errors are given. ARC is the mean of "
    "ARC easy and challenge, as in the evaluations of the paper's baselines; the paper does not specify it."
)


Score = tuple[float, float | None] | None  # mean and standard error


def score_benchmark(tasks: Mapping[str, TaskScores], benchmark: str, metric: str = "accuracy") -> Score:
    """Return the mean of a score over the tasks of a benchmark; None if one is not scored."""
    chosen = {task: tasks[task] for task in BENCHMARK_TASKS[benchmark] if task in tasks}
    is_complete = len(chosen) == len(BENCHMARK_TASKS[benchmark]) and all(
        getattr(s, metric) is not None for s in chosen.values()
    )
    return average_tasks(chosen, metric) if is_complete else None


def average_benchmarks(tasks: Mapping[str, TaskScores], metric: str = "accuracy") -> Score:
    """Return the mean of a score over the nine benchmarks; None if one is not scored."""
    scores = [
        score for benchmark in BENCHMARK_TASKS if (score := score_benchmark(tasks, benchmark, metric)) is not None
    ]
    if len(scores) < len(BENCHMARK_TASKS):
        return None
    errors = [error for _, error in scores if error is not None]
    error = math.sqrt(math.fsum(error**2 for error in errors)) / len(scores) if len(errors) == len(scores) else None
    return math.fsum(mean for mean, _ in scores) / len(scores), error


def build_paper_table(models: Mapping[str, Mapping[str, TaskScores]]) -> Table:
    """Return the paper's table with a column for each of `models`, {name: scores by task}, before the paper's."""
    rows = [
        [benchmark]
        + [_format_percent(score_benchmark(tasks, benchmark)) for tasks in models.values()]
        + [f"{model.accuracies[index]:.1f}" for model in PAPER_MODELS.values()]
        for index, benchmark in enumerate(BENCHMARK_TASKS)
    ]
    averages = [_format_percent(average_benchmarks(tasks)) for tasks in models.values()]
    rows.append(["average", *averages, *(f"{model.average:.1f}" for model in PAPER_MODELS.values())])
    header = ["benchmark", *models, *(f"{name}†" for name in PAPER_MODELS)]
    return Table("The paper's benchmarks: accuracy in percent", header, rows)


def _format_percent(score: Score) -> str:
    if score is None:
        return ABSENT
    mean, error = score
    return f"{100 * mean:.1f}" if error is None else f"{100 * mean:.1f} ± {100 * error:.1f}"
