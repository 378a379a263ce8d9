"""The table of scores on named sets."""

from stackexp.modules.scores import Scores, average_groups, average_scores
from stackexp.tables import ABSENT, RULE, Style, format_table

_SCORE_HEADER = ("set", "chunks", "tokens", "loss", "95 % interval", "perplexity", "bits/byte")


def format_scores(sets: dict[str, Scores], style: Style = "terminal") -> str:
    """Return a table of the scores on each named set, the averages of each group, and the mean over all sets."""
    if not sets:
        return "no validation sets; name some in data.validation"
    rows, averages = [_score_row(name, [scores], scores) for name, scores in sets.items()], []
    for group, average in average_groups(sets).items():
        members = [scores for name, scores in sets.items() if name.startswith(f"{group}/")]
        averages.append(_score_row(f"{group}: means of {len(members)} set{'s' * (len(members) > 1)}", members, average))
        exp_mean_loss = _format_perplexity(average["exp_mean_loss"])
        averages.append([f"{group}: exp of the mean loss", *[""] * 4, exp_mean_loss, ""])
    if not averages or any("/" not in name for name in sets) or len(averages) > 2:
        averages.append(_score_row("average of sets", list(sets.values()), average_scores(sets)))
    return format_table([*rows, RULE, *averages], header=_SCORE_HEADER, align="<>>>>>>", style=style)


def _score_row(name: str, sets: list[Scores], scores: Scores) -> list[str]:
    instances, tokens = (sum(s.get(key, 0) for s in sets) for key in ("instances", "tokens"))
    interval = f"{scores['loss_low']:.4f}-{scores['loss_high']:.4f}" if "loss_low" in scores else ABSENT
    bits = f"{scores['bits_per_byte']:.4f}" if "bits_per_byte" in scores else ABSENT
    perplexity = _format_perplexity(scores["perplexity"])
    return [name, f"{instances:,}", f"{tokens:,}", f"{scores['loss']:.4f}", interval, perplexity, bits]


def _format_perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 1e6 else f"{value:.3g}"  # a diverged model would need three lines
