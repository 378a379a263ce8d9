"""Scores of named sets: loss, perplexity, bits per byte, intervals, averages. Plain numpy."""

import math

import numpy as np

Scores = dict[str, float]
"""Scores of one set: instances, tokens, loss, perplexity; with known text also bytes and bits_per_byte; with an
interval also loss_low and loss_high."""

MAX_BOOTSTRAP_BLOCKS = 25
"""Few blocks are long blocks: losses of neighboring chunks, such as those of one file, are correlated."""
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 97.5 % quantiles of Student's t with 1 to 30 degrees of freedom."""
NORMAL_QUANTILE = 1.960
TAGGED_SCORES = ("loss", "perplexity", "bits_per_byte")


def compute_set_scores(chunks: np.ndarray, bytes_per_token: float | None = None, with_interval: bool = True) -> Scores:
    """Compute the scores of a set from its chunks.

    Args:
        chunks: [3, N] Loss in nats, predictions and bytes of text of each chunk.
        bytes_per_token: Used where the chunks have no bytes, because those of each token are unknown or not exact.
        with_interval: Add the 95 % interval of the loss if there are two chunks or more.
    """
    total, tokens, num_bytes = (float(math.fsum(row)) for row in chunks)
    loss = total / tokens
    scores: Scores = {
        "instances": chunks.shape[1],
        "tokens": int(tokens),
        "loss": loss,
        "perplexity": compute_perplexity(loss),
    }
    num_bytes = num_bytes or (bytes_per_token or 0) * tokens
    if num_bytes:
        scores["bytes"] = round(num_bytes)
        scores["bits_per_byte"] = total / (math.log(2) * num_bytes)
    if with_interval and chunks.shape[1] > 1:
        scores["loss_low"], scores["loss_high"] = bootstrap_interval(chunks[0], chunks[1])
    return scores


def bootstrap_interval(losses: np.ndarray, counts: np.ndarray, resamples: int = 1000) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of sum(losses) / sum(counts) over N chunks.

    Chunks are resampled as at most MAX_BOOTSTRAP_BLOCKS blocks of neighbors. The percentiles of few blocks are too
    close to the mean, so their distances are widened as for Student's t.
    """
    starts = np.arange(0, len(losses), -(-len(losses) // MAX_BOOTSTRAP_BLOCKS))
    losses, counts = np.add.reduceat(losses, starts), np.add.reduceat(counts, starts)
    size = len(losses)
    drawn = np.random.default_rng(0).integers(size, size=(resamples, size))
    mean, means = losses.sum() / counts.sum(), losses[drawn].sum(1) / counts[drawn].sum(1)
    widening = get_t_quantile(size - 1) / NORMAL_QUANTILE * math.sqrt(size / (size - 1))
    low, high = mean + widening * (np.quantile(means, [0.025, 0.975]) - mean)
    return float(low), float(high)


def get_t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t; more than 30 degrees of freedom count as 30."""
    return T_QUANTILES[min(degrees, len(T_QUANTILES)) - 1]


def compute_perplexity(loss: float) -> float:
    """Return exp(loss), or infinity where that overflows."""
    return math.inf if loss > 700 else math.exp(loss)


def average_scores(sets: dict[str, Scores]) -> Scores:
    """Return unweighted means over sets, of losses and of perplexities separately (Hyper-Connections, section 4).

    `exp_mean_loss`, exp of the mean loss, never exceeds the mean perplexity. bits_per_byte is present if every set has
    it.
    """
    keys = [key for key in TAGGED_SCORES if all(key in scores for scores in sets.values())]
    average = {key: sum(scores[key] for scores in sets.values()) / len(sets) for key in keys}
    return average | {"exp_mean_loss": compute_perplexity(average["loss"])}


def average_groups(sets: dict[str, Scores]) -> dict[str, Scores]:
    """Return the averages of each group, with its number of `sets`: v2/4chan, v2/c4_en, ... form the group v2."""
    groups: dict[str, dict[str, Scores]] = {}
    for name, scores in sets.items():
        if "/" in name:
            groups.setdefault(name.split("/")[0], {})[name] = scores
    return {group: {"sets": len(members)} | average_scores(members) for group, members in groups.items()}


def tag_scores(prefix: str, sets: dict[str, Scores]) -> Scores:
    """Return the scores of sets by tag; see `stackexp.metric_tags`.

    <prefix>/<score>/average          the unweighted mean over all sets
    <prefix>/<score>/<set>            a set without a group
    <prefix>/<group>/<set>            the loss of a set of a group
    <prefix>/<group>/average/<score>  the unweighted mean over a group
    """
    if not sets:
        return {}
    single = {"average": average_scores(sets)} | {name: s for name, s in sets.items() if "/" not in name}
    tags = {f"{prefix}/{key}/{name}": s[key] for name, s in single.items() for key in TAGGED_SCORES if key in s}
    tags |= {f"{prefix}/{name}": scores["loss"] for name, scores in sets.items() if "/" in name}
    for group, average in average_groups(sets).items():
        tags |= {f"{prefix}/{group}/average/{key}": value for key, value in average.items() if key != "sets"}
    return tags
