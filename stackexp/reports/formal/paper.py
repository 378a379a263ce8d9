"""The scores that the StackTrans paper (arXiv 2507.15343) prints for formal languages, and the columns of its table."""

from collections.abc import Mapping
from typing import Any

from stackexp.config.data import get_model_label
from stackexp.tasks import TASKS

MODELS = ("LSTM", "StackRNN", "StackAttn", "Transformer", "StackTrans")
DEPTH = "StackTrans depth"
COLUMNS = {
    "LSTM": "lstm",
    "StackRNN": "stack_rnn",
    "StackAttn": "stack_attention",
    "Transformer": "transformer",
    "StackTrans": "stacktrans",
    DEPTH: "stacktrans-depth",
}
"""Column of our table -> model label: the paper's models, and a separate column for StackTrans on the depth axis.

The shipped config of a column is `formal/<label>`. StackTrans has one for each task in a folder of that name.
"""

CLASSES: dict[str, list[str]] = {}
"""Class in the Chomsky hierarchy (Deletang et al. 2023, table 1) -> its tasks, in the order of the table."""
for _task in TASKS.values():
    CLASSES.setdefault(_task.chomsky_class, []).append(_task.name)

TABLE_1: dict[str, tuple[float | None, ...]] = {
    "even_pairs": (1.00, 1.00, None, 0.49, 1.00),
    "parity_check": (1.00, 1.00, None, 0.50, 1.00),
    "cycle_navigation": (0.89, 1.00, None, 0.20, 1.00),
    "stack_manipulation": (0.66, 0.85, 0.93, 0.53, 0.92),
    "reverse_string": (0.71, 0.80, 1.00, 0.55, 1.00),
    "modular_arithmetic_brackets": (0.43, 0.42, 0.30, 0.30, 0.60),
    "missing_duplicate": (0.68, 0.67, None, 0.53, 1.00),
    "odds_first": (0.60, 0.55, None, 0.51, 0.53),
    "binary_addition": (0.56, 0.51, None, 0.48, 0.48),
    "binary_multiplication": (0.56, 0.53, None, 0.50, 0.48),
    "compute_sqrt": (0.64, 0.63, None, 0.51, 0.57),
    "bucket_sort": (0.79, 0.75, None, 0.79, 0.89),
}
"""Table 1 of the paper: task -> accuracy of each of MODELS, best seed, on strings longer than the training strings.

It has two decimals, lacks modular_arithmetic, solve_equation and duplicate_string, and has StackAttn on three tasks.
"""


def get_printed_score(task: str, column: str) -> float | None:
    """Return the paper's score, or None. The depth axis is compared with the paper's StackTrans."""
    model = "StackTrans" if column == DEPTH else column
    return dict(zip(MODELS, TABLE_1.get(task, ()), strict=False)).get(model)


def find_column(config: Mapping[str, Any]) -> str | None:
    """Return the column of a config given as {full key: value}, or None if the table has none for its model."""
    label = get_model_label(config)
    return next((column for column in COLUMNS if COLUMNS[column] == label), None)
