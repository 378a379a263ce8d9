"""The figure of the loss by position: does a model extrapolate beyond its training context?"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stackexp.reports.figures import new_figure, smooth_losses
from stackexp.reports.report import LINE_STYLES, PALETTE

WINDOWS_PER_CONTEXT = 16  # an average covers this part of the training context


def draw_by_position(context: int, curves: Sequence[tuple[str, Any]]) -> Any:
    """Draw one curve for each set, (name, losses [T - 1]), averaged over neighboring positions."""
    figure, axes = new_figure(6.8, 3.6)
    window = max(1, context // WINDOWS_PER_CONTEXT)
    for i, (name, losses) in enumerate(curves):
        style = {"color": PALETTE[i % len(PALETTE)], "linestyle": LINE_STYLES[i // len(PALETTE) % len(LINE_STYLES)]}
        axes.plot(np.arange(1, len(losses) + 1), smooth_losses(losses, window), linewidth=1.2, label=name, **style)
    axes.axvline(context, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="Position (tokens before)", ylabel="Loss (nats per token)")
    axes.set_title(f"dotted: training context; averages of {window} positions", fontsize=8, loc="right")
    axes.legend(fontsize=7)
    return figure
