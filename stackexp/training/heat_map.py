"""Heat maps of the memory: for each measurement, a row per layer and a column per probed step."""

import io
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

MAX_COLUMNS = 400
TITLES = {  # measurement -> title, and the end of its color scale; None: the largest value
    "push": ("push probability", 1.0),
    "pop": ("pop probability", 1.0),
    "no_op": ("no-op probability", 1.0),
    "entropy": ("action entropy (nats)", np.log(3)),
    "occupancy": ("occupancy (sum of M)", None),
    "read_share": ("read share of the residual", None),
}


class HeatMaps:
    """Heat maps of the tags memory/<name>/layer_<number> in metrics.jsonl; empty if there are none."""

    def __init__(self) -> None:
        self._probes: dict[int, dict[str, list[float]]] = {}  # step -> measurement -> one value per layer

    def __len__(self) -> int:
        return len(self._probes)

    def add(self, line: dict[str, Any]) -> bool:
        """Add a line of metrics.jsonl. Returns False if its step was not probed."""
        probe: dict[str, list[float]] = {}
        for tag in sorted(tag for tag in line if tag.startswith("memory/")):
            value = line[tag]
            probe.setdefault(tag.split("/")[1], []).append(np.nan if value is None else value)
        if probe:
            self._probes[line["step"]] = probe
        return bool(probe)

    def draw(self) -> Iterator[tuple[str, bytes]]:
        """Yield the name of each measurement and its heat map as PNG. Long runs show evenly spaced probes."""
        steps = sorted(self._probes)
        steps = [steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(len(steps), MAX_COLUMNS))]
        for name in self._probes[steps[0]]:
            values = np.array([self._probes[step][name] for step in steps]).T  # [layers, steps]
            yield name, _draw_map(steps, values, *TITLES.get(name, (name, None)))


def _draw_map(steps: list[int], values: np.ndarray, title: str, largest: float | None) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.8, 3), layout="constrained")
    axes = figure.add_subplot()
    edges = [steps[0] - 0.5, *((a + b) / 2 for a, b in pairwise(steps)), steps[-1] + 0.5]
    mesh = axes.pcolormesh(edges, np.arange(len(values) + 1) - 0.5, values, vmin=0, vmax=largest)
    axes.set(title=title, xlabel="step", ylabel="layer")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(mesh, ax=axes)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100)
    return png.getvalue()
