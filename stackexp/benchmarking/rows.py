"""The rows of `bench efficiency`: their names, and the paper's figures next to them. Imports nothing heavy."""

from typing import Any

PAPER = {"stacktrans": (1.16, 1.09, 1.12), "single_head": (1.03, 1.04, 1.00), "full_dim": (3.78, 3.30, 1.73)}
"""Training, inference and memory over the Transformer in arXiv 2507.15343, on the paper's GPUs."""


def name_row(row: dict[str, Any]) -> str:
    """Return the model of a row, and that it ran with the reference implementation if so."""
    return row["model"] + (" (reference)" if row.get("implementation") == "reference" else "")
