"""The distribution of document lengths: collected from a stream, shown as a table or a figure."""

from collections import Counter
from pathlib import Path

import numpy as np

from stackexp.reports.figures import new_figure
from stackexp.tables import format_table

BAR_WIDTH = 40  # characters


class LengthHistogram:
    """The number of documents of each length. Lengths below 1 count as 1."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, lengths: np.ndarray) -> None:
        """Count lengths [N]."""
        values, counts = np.unique(np.maximum(lengths, 1), return_counts=True)
        self._counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def __bool__(self) -> bool:
        return bool(self._counts)

    @property
    def total(self) -> int:
        """The number of documents."""
        return self._counts.total()

    @property
    def mean(self) -> float:
        """The mean length."""
        return sum(length * count for length, count in self._counts.items()) / max(self.total, 1)

    @property
    def longest(self) -> int:
        """The largest length."""
        return max(self._counts)

    def quantile(self, share: float) -> int:
        """Return the length that `share` of the documents do not exceed."""
        lengths = sorted(self._counts)
        cumulative = np.cumsum([self._counts[length] for length in lengths])
        return lengths[int(np.searchsorted(cumulative, share * self.total))]

    def rebin(self, bins_per_octave: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return documents [N], their total lengths [N] and the bin edges [N + 1], for bins equal in log length."""
        lengths, counts = np.array(list(self._counts)), np.array(list(self._counts.values()))
        first, last = (int(np.log2(length) * bins_per_octave) for length in (lengths.min(), lengths.max()))
        edges = 2.0 ** (np.arange(first, last + 2) / bins_per_octave)
        documents, _ = np.histogram(lengths, edges, weights=counts)
        totals, _ = np.histogram(lengths, edges, weights=counts * lengths)
        return documents.astype(np.int64), totals, edges

    def summarize(self, unit: str) -> dict:
        """Return the figures for JSON output; `unit` is "tokens" or "bytes"."""
        counts, _, edges = self.rebin()
        figures = {"median": self.quantile(0.5), "mean": self.mean, "longest": self.longest}
        return figures | {"unit": unit, "from": edges[:-1].tolist(), "documents": counts.tolist()}

    def format(self, unit: str) -> str:
        """Return a summary line and a table with one bar per octave."""
        counts, sums, edges = self.rebin()
        summary = (
            f"document length in {unit}: median {self.quantile(0.5):,.0f}, mean {self.mean:,.0f}, "
            f"90 % up to {self.quantile(0.9):,.0f}, longest {self.longest:,}"
        )
        rows = []
        for low, high, count, total in zip(edges[:-1], edges[1:], counts, sums, strict=True):
            bar, share = _draw_bar(count / counts.max()), total / sums.sum()
            rows.append([f"{low:,.0f} - {high - 1:,.0f}", bar, f"{count:,}", f"{share:.0%}"])
        header = [unit, "", "documents", "share of text"]
        return f"{summary}\n{format_table(rows, header=header, align='><>>')}"


class DocumentLengths:
    """A counter of document lengths in a stream of token blocks.

    Each document ends with the token `end`, which counts as part of it.
    """

    def __init__(self, end: int) -> None:
        self._end = end
        self._histogram = LengthHistogram()
        self._open = 0  # tokens of the document that has not ended yet

    def add(self, tokens: np.ndarray) -> None:
        """Count the documents that end in the next tokens [N]."""
        ends = np.flatnonzero(tokens == self._end)
        if len(ends):
            self._histogram.add(np.diff(ends, prepend=-1 - self._open))
            self._open = len(tokens) - 1 - int(ends[-1])
        else:
            self._open += len(tokens)

    def close(self) -> LengthHistogram:
        """Count the last document if it has no end token, and return all lengths."""
        if self._open:
            self._histogram.add(np.array([self._open]))
        return self._histogram


def draw_lengths(
    histogram: LengthHistogram, path: Path, *, title: str, unit: str, context_length: int | None = None
) -> None:
    """Draw the shares of documents and of text over document length."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    counts, sums, edges = histogram.rebin(2)
    figure, axes = new_figure(7, 4)
    documents, text = counts / counts.sum(), sums / sums.sum()
    axes.stairs(documents, edges, fill=True, color="C0", alpha=0.55, label="documents")
    axes.stairs(text, edges, color="C1", linewidth=1.8, label=unit)
    median = histogram.quantile(0.5)
    axes.axvline(median, color="C0", linestyle=":", label=f"median document, {median:,.0f}")
    if context_length:
        axes.axvline(context_length, color="0.3", linestyle="--", label=f"sequence, {context_length:,}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.tick_params(axis="x", labelrotation=45)
    axes.set(xlabel=f"document length ({unit})", ylabel="share per half octave", title=title)
    axes.set_ylim(0, 1.08 * max(documents.max(), text.max()))
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _draw_bar(share: float) -> str:
    """Return a bar of up to BAR_WIDTH characters with a resolution of an eighth, at least one eighth if not empty."""
    eighths = max(round(share * BAR_WIDTH * 8), 1) if share else 0
    return "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
