"""Tables for the terminal."""

from collections.abc import Sequence


def set_table(sets: dict[str, dict[str, float]]) -> str:
    """Loss, perplexity and bits per byte of each named set, then their unweighted means."""
    from stackexp.modules.metrics import macro_average  # imports torch, which tables of text do without

    if not sets:
        return "no validation sets (name some in data.validation)"
    rows = [["set", "tokens", "loss", "perplexity", "bits/byte"]]
    rows += [[name, f"{s['tokens']:,}", *_figures(s)] for name, s in sets.items()]
    rows.append(["average of sets", f"{sum(s['tokens'] for s in sets.values()):,}", *_figures(macro_average(sets))])
    return table(rows, align="<>>>>", rules=(1, len(rows) - 1))


def _figures(values: dict[str, float]) -> list[str]:
    return [f"{values['loss']:.4f}", f"{values['perplexity']:.2f}", f"{values['bits_per_byte']:.4f}"]


def table(rows: list[Sequence[str]], align: str = "", rules: Sequence[int] = ()) -> str:
    """Rows of text in columns, each aligned by its < or > (default: all <), with a rule before each row in `rules`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = list(zip(align or "<" * len(widths), widths, strict=True))
    lines = ["  ".join(f"{cell:{a}{w}}" for cell, (a, w) in zip(row, columns, strict=True)).rstrip() for row in rows]
    for before in sorted(rules, reverse=True):
        lines.insert(before, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
