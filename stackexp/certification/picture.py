"""Draw automata: states on a circle, arrows with symbols. Needs no graphviz."""

from collections import defaultdict
from typing import Any

import numpy as np

from stackexp.certification.automata import ACTION_LABELS, NO_STRING, Automaton, Pushdown
from stackexp.reports.report import PALETTE, new_figure
from stackexp.tasks import TASKS

MAX_ARROWS = 24  # of more, labels cover each other
RADIUS = 0.24  # of a state
BEND = 0.18  # sideways shift of the middle of an arrow, relative to its length
LABEL = {"ha": "center", "va": "center", "fontsize": 8, "color": PALETTE[1]}


def draw_automaton(task: str, automaton: Automaton) -> Any:
    """Return the figure of a Moore machine; each state shows its answer."""
    symbols, answers = TASKS[task].symbols, TASKS[task].answer_symbols
    order = np.argsort(np.argsort(automaton.outputs, kind="stable"))  # states with equal answers are neighbors
    order = (order - order[0]) % automaton.num_states  # the initial state is the first
    edges = defaultdict(list)
    for state, row in enumerate(automaton.transitions):
        for symbol, target in zip(symbols, row, strict=True):
            edges[int(order[state]), int(order[target])].append(symbol)
    names = [answers[automaton.outputs[state]] for state in np.argsort(order)]
    return _draw(f"{task}: states with answers", names, {key: ", ".join(of) for key, of in edges.items()})


def draw_pushdown(task: str, pushdown: Pushdown) -> Any:
    """Return the figure of a pushdown automaton: reading, the first empty token, later ones."""
    symbols, answers = TASKS[task].symbols, TASKS[task].answer_symbols
    first, later = (ACTION_LABELS[action] for action in pushdown.actions[len(symbols) :])
    moves = defaultdict(list)
    for symbol, action in zip(symbols, pushdown.actions, strict=False):
        moves[ACTION_LABELS[action]].append(symbol)
    reading = "\n".join(f"{', '.join(of)}: {action}" for action, of in moves.items())
    title = f"{task}: an answer is the top of the stack"
    if pushdown.empty_answer != NO_STRING:
        title += f", '{answers[pushdown.empty_answer]}' if empty"
    edges = {(0, 0): reading, (0, 1): f"empty token: {first}", (1, 1): f"empty token: {later}"}
    return _draw(title, ["read", "answer"], edges)


def _draw(title: str, names: list[str], edges: dict[tuple[int, int], str]) -> Any:
    from matplotlib.patches import Circle

    count = len(names)
    circle = max(1.0, 0.24 * count)
    angles = np.pi / 2 - 2 * np.pi * np.arange(count) / count if count > 2 else np.pi * (1 - np.arange(count))
    centers = circle * np.column_stack([np.cos(angles), np.sin(angles)])
    figure, axes = new_figure(4, 3.8 if count > 2 else 1.9)
    axes.grid(False)
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set_title(title, fontsize=8)
    for center, name in zip(centers, names, strict=True):
        axes.add_patch(Circle(tuple(center), RADIUS, facecolor="white", edgecolor=PALETTE[0], linewidth=1.6, zorder=2))
        axes.text(*center, name, ha="center", va="center", fontsize=8, zorder=3)
    start = centers[0] - np.array([RADIUS, 0.0])  # of the initial state
    _draw_arrow(axes, start - np.array([RADIUS * 1.2, 0.0]), start, 0.0)
    for (source, target), label in edges.items():
        if source == target:
            _draw_loop(axes, centers[source], label)
        else:
            _draw_edge(axes, centers[source], centers[target], label, bend=BEND if (target, source) in edges else 0.0)
    axes.set_xlim(-circle - 4.5 * RADIUS, circle + 4.5 * RADIUS)
    axes.set_ylim(*((-circle - 3.5 * RADIUS, circle + 3.5 * RADIUS) if count > 2 else (-1.6 * RADIUS, 4 * RADIUS)))
    return figure


def _draw_arrow(axes: Any, start: np.ndarray, end: np.ndarray, bend: float) -> None:
    from matplotlib.patches import FancyArrowPatch

    style: dict[str, Any] = {
        "arrowstyle": "-|>",
        "mutation_scale": 11,
        "color": "0.35",
        "shrinkA": 0,
        "shrinkB": 0,
        "zorder": 1,
    }
    axes.add_patch(FancyArrowPatch(tuple(start), tuple(end), connectionstyle=f"arc3,rad={bend}", **style))


def _draw_edge(axes: Any, source: np.ndarray, target: np.ndarray, label: str, bend: float) -> None:
    """Draw an arrow between two states, bent to its right, with the label near its start."""
    direction = (target - source) / np.linalg.norm(target - source)
    right = np.array([direction[1], -direction[0]])
    start, end = source + RADIUS * (direction + bend * right), target - RADIUS * (direction - bend * right)
    _draw_arrow(axes, start, end, bend)
    t = 0.5 if len(label) > 10 else 0.3  # of the way; in the middle, labels of crossing arrows would overlap
    height = 2 * t * (1 - t) * bend * np.linalg.norm(end - start)  # of the quadratic curve above its chord
    axes.text(*(start + t * (end - start) + (height + 0.09) * right), label, **LABEL)


def _draw_loop(axes: Any, center: np.ndarray, label: str) -> None:
    """Draw an arrow from a state to itself: away from the middle, or up if all states lie on one line."""
    up = center / np.linalg.norm(center) if abs(center[1]) > 1e-9 else np.array([0.0, 1.0])
    side = np.array([-up[1], up[0]])
    _draw_arrow(axes, center + RADIUS * (0.8 * up + 0.6 * side), center + RADIUS * (0.8 * up - 0.6 * side), -1.6)
    axes.text(*(center + up * (RADIUS * 2.25 + 0.05 * (label.count("\n") + 1))), label, **LABEL)
