"""What the paper (StackTrans, arXiv 2507.15343) prints on formal languages, and what it is printed of."""

CLASSES: dict[str, tuple[str, ...]] = {
    "regular": ("even_pairs", "parity_check", "cycle_navigation", "modular_arithmetic"),
    "deterministic context-free": (
        *("stack_manipulation", "reverse_string", "modular_arithmetic_brackets", "solve_equation"),
    ),
    "context-sensitive": (
        *("missing_duplicate", "odds_first", "binary_addition", "binary_multiplication", "compute_sqrt"),
        *("bucket_sort", "duplicate_string"),
    ),
}
"""The tasks by their class in the Chomsky hierarchy (Deletang et al. 2023, table 1), in each the paper's first."""

TASKS: dict[str, str] = {task: name for name, tasks in CLASSES.items() for task in tasks}
"""Task -> its class, in the order of the table."""

MODELS = ("LSTM", "StackRNN", "StackAttn", "Transformer", "StackTrans")

_PRINTED: dict[str, tuple[float | None, ...]] = {
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

TABLE_1: dict[str, dict[str, float]] = {
    task: {model: score for model, score in zip(MODELS, scores, strict=True) if score is not None}
    for task, scores in _PRINTED.items()
}
"""Task -> model -> accuracy on strings longer than those of the training, of the best seed, to two decimals.

Table 1 of the paper. It prints no modular_arithmetic, solve_equation and duplicate_string, and of StackAttn only three.
"""
