"""Tables for the terminal."""

from stackexp.modules.metrics import macro_average


def set_table(sets: dict[str, dict[str, float]]) -> str:
    """Loss, perplexity and bits per byte of each named set, then their unweighted means."""
    if not sets:
        return "no validation sets (name some in data.validation)"
    rows = [[name, f"{s['tokens']:,}", *_figures(s)] for name, s in sets.items()]
    rows.append(["average of sets", f"{sum(s['tokens'] for s in sets.values()):,}", *_figures(macro_average(sets))])
    return table(["set", "tokens", "loss", "perplexity", "bits/byte"], rows, rule_before_last=True)


def _figures(values: dict[str, float]) -> list[str]:
    return [f"{values['loss']:.4f}", f"{values['perplexity']:.2f}", f"{values['bits_per_byte']:.4f}"]


def table(header: list[str], rows: list[list[str]], rule_before_last: bool = False) -> str:
    """Columns padded to their widest cell; the first column is text, the others are numbers."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: list[str]) -> str:
        return "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))

    rule = "  ".join("-" * width for width in widths)
    lines = [line(header), rule, *map(line, rows)]
    if rule_before_last:
        lines.insert(-1, rule)
    return "\n".join(lines)
