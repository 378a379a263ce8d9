"""Accuracy against length: scores, a table and a picture in text. No torch here."""

import math
import statistics
from collections.abc import Mapping

from stackexp.config.formal_language import FormalLanguageConfig
from stackexp.reports.tables import table

Accuracy = Mapping[int, float]  # by length

SHORT = 100  # the end of the shorter of the two ranges scores are over
SHOWN = (10, 20, 30, 40, 60, 80, 100, 150, 200, 300, 400, 500)  # lengths of the table
MARKS = "ox+*#@"
WIDTH, HEIGHT = 64, 10  # characters of the picture; lines of 0.1 each


def ranges(data: FormalLanguageConfig) -> list[tuple[int, int]]:
    """The lengths a score is over, first and last: 41..100 and 41..500 by default."""
    first, last = data.max_length + 1, data.eval_max_length
    return [(first, end) for end in dict.fromkeys([SHORT, last]) if first <= end <= last]


def scores(data: FormalLanguageConfig, accuracy: Accuracy) -> dict[str, float]:
    """`score_41_100` and the like: the mean accuracy over the tested lengths of each of the `ranges`."""
    return {
        f"score_{first}_{end}": statistics.fmean(accuracy[n] for n in accuracy if first <= n <= end)
        for first, end in ranges(data)
    }


def accuracy_table(runs: Mapping[str, Accuracy], data: FormalLanguageConfig) -> str:
    """One line per run: its scores, then its accuracy at some lengths."""
    tested = sorted(set().union(*runs.values()))
    lengths = list(dict.fromkeys(min(tested, key=lambda n, near=near: abs(n - near)) for near in SHOWN))
    lengths = list(dict.fromkeys([*lengths, tested[-1]]))
    rows = [["", *(f"{first}..{end}" for first, end in ranges(data)), *map(str, lengths)]]
    for name, accuracy in runs.items():
        figures = [f"{value:.3f}" for value in scores(data, accuracy).values()]
        rows.append([name, *figures, *(f"{accuracy[n]:.2f}" if n in accuracy else "" for n in lengths)])
    return table(rows, align="<" + ">" * (len(rows[0]) - 1), rules=(1,))


def accuracy_plot(runs: Mapping[str, Accuracy], trained: int) -> str:
    """Accuracy from 0 to 1 against length, a mark for each run; `trained`: the longest string trained on."""
    longest = max(max(accuracy) for accuracy in runs.values())
    width = min(WIDTH, longest)
    lines = [[" "] * width for _ in range(HEIGHT + 1)]
    for mark, accuracy in reversed(list(zip(_marks(len(runs)), runs.values(), strict=True))):  # the first on top
        for place in range(width):
            value = _between(accuracy, 1 + place * (longest - 1) / max(1, width - 1))
            if value is not None:
                lines[HEIGHT - round(value * HEIGHT)][place] = mark
    axis = ["-"] * width
    axis[round((min(trained, longest) - 1) * (width - 1) / max(1, longest - 1))] = "|"
    text = [f"{1 - row / HEIGHT:4.1f} {''.join(line)}".rstrip() for row, line in enumerate(lines)]
    below = f"     1{longest:>{max(1, width - 1)}}"
    legend = "   ".join(f"{mark} {name}" for mark, name in zip(_marks(len(runs)), runs, strict=True))
    caption = f"accuracy against length; | longest string trained on ({trained})"
    return "\n".join([*text, f"     {''.join(axis)}", below, f"     {legend}", f"     {caption}"])


def _between(accuracy: Accuracy, length: float) -> float | None:
    """At a length between those tested, on a straight line between its neighbours."""
    below = max((n for n in accuracy if n <= length), default=None)
    above = min((n for n in accuracy if n >= length), default=None)
    if below is None or above is None:
        return None
    share = (length - below) / (above - below) if above > below else 0.0
    return accuracy[below] + share * (accuracy[above] - accuracy[below])


def _marks(count: int) -> str:
    return (MARKS * math.ceil(count / len(MARKS)))[:count]
