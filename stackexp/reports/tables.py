"""Tables for the terminal and in Markdown."""

from collections.abc import Sequence

HEADER = ["set", "instances", "tokens", "loss", "95 % interval", "perplexity", "bits/byte"]
ALIGN = "<>>>>>>"
ABSENT = "\u2013"  # bits per byte of token ids without a tokenizer, the interval of a single chunk


def set_table(sets: dict[str, dict[str, float]]) -> str:
    """Every figure of each named set, the averages of each group, then the unweighted means of all."""
    if not sets:
        return "no validation sets (name some in data.validation)"
    rows, averages = set_rows(sets)
    return table([HEADER, *rows, *averages], align=ALIGN, rules=(1, 1 + len(rows)))


def set_markdown(sets: dict[str, dict[str, float]]) -> str:
    """The same table in Markdown."""
    rows, averages = set_rows(sets)
    lines = [HEADER, ["---" + ":" * (a == ">") for a in ALIGN], *rows, *averages]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def set_rows(sets: dict[str, dict[str, float]]) -> tuple[list[list[str]], list[list[str]]]:
    """The rows of the sets, and those of their averages."""
    from stackexp.modules.metrics import group_averages, macro_average  # imports torch, which tables of text do without

    rows, averages = [_row(name, [s], s) for name, s in sets.items()], []
    for group, average in group_averages(sets).items():
        members = [s for name, s in sets.items() if name.startswith(f"{group}/")]
        averages.append(_row(f"{group}: means of {len(members)} set{'s' * (len(members) > 1)}", members, average))
        exp = _perplexity(average["exp_mean_loss"])
        averages.append([f"{group}: exp of the mean loss", *[""] * 4, exp, ""])
    if not averages or any("/" not in name for name in sets) or len(averages) > 2:
        averages.append(_row("average of sets", list(sets.values()), macro_average(sets)))
    return rows, averages


def _row(name: str, sets: list[dict[str, float]], figures: dict[str, float]) -> list[str]:
    instances, tokens = (sum(s.get(key, 0) for s in sets) for key in ("instances", "tokens"))
    interval = f"{figures['loss_low']:.4f}-{figures['loss_high']:.4f}" if "loss_low" in figures else ABSENT
    bits = f"{figures['bits_per_byte']:.4f}" if "bits_per_byte" in figures else ABSENT
    perplexity = _perplexity(figures["perplexity"])
    return [name, f"{instances:,}", f"{tokens:,}", f"{figures['loss']:.4f}", interval, perplexity, bits]


def _perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 1e6 else f"{value:.3g}"  # a diverged model's would fill three lines


def table(rows: list[Sequence[str]], align: str = "", rules: Sequence[int] = ()) -> str:
    """Rows of text in columns, each aligned by its < or > (default: all <), with a rule before each row in `rules`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = list(zip(align or "<" * len(widths), widths, strict=True))
    lines = ["  ".join(f"{cell:{a}{w}}" for cell, (a, w) in zip(row, columns, strict=True)).rstrip() for row in rows]
    for before in sorted(rules, reverse=True):
        lines.insert(before, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
