"""The ablation that the StackTrans paper (arXiv 2507.15343) prints, and which of its variants a model is."""

import math
from typing import Any

PAPER = {
    "Transformer": ((2.411, None), (3.518, 34.38), (3.195, 25.33)),
    "StackTrans": ((2.359, None), (3.432, 32.89), (3.092, 24.50)),
    "Queue": ((2.679, None), (3.679, 35.14), (3.211, 25.97)),
    "Push-Only": ((2.875, None), (4.032, 39.02), (3.407, 27.13)),
    "Single-Head": ((2.493, None), (3.552, 33.56), (3.130, 24.91)),
    "Full-Dimension": ((2.370, None), (3.457, 33.05), (3.105, 24.73)),
}
"""The paper's ablation: variant -> (loss, perplexity) in training, on V2 and on V3."""
CHOICES = dict(zip(PAPER, ("transformer", "stacktrans", "queue", "push_only", "single_head", "full_dim"), strict=True))
"""The paper's variants -> names of the trials of the shipped sweep."""
PAPER_STACK = {
    **{"axis": "depth", "discipline": "stack", "projection": "low_rank", "read": "global", "read_mask": "multiply"},
    **{"push_norm": "none", "action_input": "head", "action_bias": None, "site": "after_block", "feedback": False},
    "residual_gate": "hidden",
}


def find_variant(config: dict[str, Any]) -> str | None:
    """Return the paper's variant that a model is, or None."""
    kind = config.get("model.memory.kind")
    if config.get("model.kind") != "transformer" or kind not in (None, "stack"):
        return None
    if kind is None:
        return "Transformer"
    changes = find_stack_changes(config)
    if config.get("model.memory.num_heads") == 1:
        return None if changes else "Single-Head"
    known = {"StackTrans": {}, "Queue": {"discipline": "queue"}, "Push-Only": {"discipline": "push_only"}}
    known["Full-Dimension"] = {"projection": "none"}
    return next((variant for variant, expected in known.items() if changes == expected), None)


def find_stack_changes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a stack memory that differ from the paper's stack."""
    options = {key: config.get(f"model.memory.{key}", default) for key, default in PAPER_STACK.items()}
    return {key: value for key, value in options.items() if value != PAPER_STACK[key]}


def contradicts_itself(loss: float, perplexity: float | None) -> bool:
    """Return True if a printed mean perplexity is below exp(mean loss), which no average can be."""
    return perplexity is not None and perplexity < math.exp(loss - 0.0005)
