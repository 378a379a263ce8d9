"""How long documents are: counted as they pass by, shown as bars in the terminal and as a figure."""

from pathlib import Path

import numpy as np

FINE = 16  # bins of an octave: quantiles are within 4 %
OCTAVES = 48
BAR = 40  # characters


class Lengths:
    """A histogram of lengths >= 1 in fine bins of their logarithm; lengths below 1 count as 1."""

    def __init__(self):
        self.counts = np.zeros(FINE * OCTAVES, np.int64)
        self.sums = np.zeros(FINE * OCTAVES)
        self.longest = 0

    def add(self, lengths: np.ndarray) -> None:
        """Count lengths [N]."""
        if len(lengths):
            lengths = np.maximum(np.asarray(lengths, np.int64), 1)
            bins = (np.log2(lengths) * FINE + 1e-9).astype(np.int64)
            self.counts += np.bincount(bins, minlength=len(self.counts))
            self.sums += np.bincount(bins, lengths, minlength=len(self.counts))
            self.longest = max(self.longest, int(lengths.max()))

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        return float(self.sums.sum()) / max(self.total, 1)

    def quantile(self, share: float) -> float:
        """The length that `share` of the documents do not exceed, within 4 %."""
        place = int(np.searchsorted(np.cumsum(self.counts), share * self.total, side="left"))
        return self.sums[place] / max(self.counts[place], 1)

    def coarse(self, bins: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Documents and their summed length in `bins` bins of each octave, and the bins' edges; empty ends cut off."""
        counts = self.counts.reshape(-1, FINE // bins).sum(axis=1)
        sums = self.sums.reshape(-1, FINE // bins).sum(axis=1)
        used = np.flatnonzero(counts)
        part = slice(used[0], used[-1] + 1)
        return counts[part], sums[part], 2.0 ** (np.arange(used[0], used[-1] + 2) / bins)

    def summary(self, unit: str) -> str:
        return (
            f"document length in {unit}: median {self.quantile(0.5):,.0f}, mean {self.mean:,.0f}, "
            f"90 % up to {self.quantile(0.9):,.0f}, longest {self.longest:,}"
        )

    def bars(self) -> list[str]:
        """A line for each octave: its range, a bar, its documents, its share of the text."""
        counts, sums, edges = self.coarse()
        lows = [f"{low:,.0f}" for low in edges[:-1]]
        highs = [f"{high - 1:,.0f}" for high in edges[1:]]
        numbers = [f"{count:,}" for count in counts]
        low_width, high_width, width = (max(map(len, column)) for column in (lows, highs, numbers))
        lines = []
        for low, high, number, count, total in zip(lows, highs, numbers, counts, sums, strict=True):
            bar = _bar(count / counts.max())
            share = f"{total / sums.sum():4.0%} of the text"
            lines.append(f"{low:>{low_width}} - {high:>{high_width}}  {bar:{BAR}}  {number:>{width}}  {share}")
        return lines

    def draw(self, path: Path, title: str, unit: str, context_length: int | None) -> None:
        """Draw documents, and where their text lies, over their length."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        counts, sums, edges = self.coarse(2)
        drawing = Figure(figsize=(7, 4), layout="constrained")
        axes = drawing.add_subplot()
        documents, text = counts / counts.sum(), sums / sums.sum()
        axes.stairs(documents, edges, fill=True, color="C0", alpha=0.55, label="documents")
        axes.stairs(text, edges, color="C1", linewidth=1.8, label=unit)
        median = self.quantile(0.5)
        axes.axvline(median, color="C0", linestyle=":", label=f"median document, {median:,.0f}")
        if context_length:
            axes.axvline(context_length, color="0.3", linestyle="--", label=f"sequence, {context_length:,}")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.tick_params(axis="x", labelrotation=45)
        axes.set(xlabel=f"length of a document ({unit})", ylabel="share of each half octave", title=title)
        axes.set_ylim(0, 1.08 * max(documents.max(), text.max()))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, dpi=160)


def _bar(share: float) -> str:
    """A bar of up to BAR characters, in eighths of one; what is there is seen."""
    eighths = max(round(share * BAR * 8), 1) if share else 0
    return "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]


class Documents:
    """The lengths of documents in a stream of tokens that comes in blocks; each ends with `end`, which is counted."""

    def __init__(self, end: int):
        self.end, self.lengths, self.open = end, Lengths(), 0

    def add(self, tokens: np.ndarray) -> None:
        """The next tokens [N]."""
        ends = np.flatnonzero(tokens == self.end)
        if len(ends):
            self.lengths.add(np.diff(ends, prepend=-1 - self.open))
            self.open = len(tokens) - 1 - int(ends[-1])
        else:
            self.open += len(tokens)

    def close(self) -> None:
        """The stream ends: so does the document, if there is one without its end."""
        if self.open:
            self.lengths.add(np.array([self.open]))
        self.open = 0
