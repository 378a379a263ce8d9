"""Scores of named sets: loss, perplexity, bits per byte, intervals, noise, averages. Numpy and scipy."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Scores = dict[str, float]
"""Scores of one set: instances, tokens, loss, perplexity; with known text also bytes and bits_per_byte; with an
interval also loss_low and loss_high."""

NORMAL_QUANTILE = 1.960
MAX_COSINES, CHUNKS_PER_COSINE = 8, 30
"""More cosines narrow an interval by at most 18 %, but miss correlations over more than a few chunks."""
NUM_BLOCKS, MAX_BIAS = 60, 0.1
"""The correlation of this many blocks or more limits the relative bias of the variance."""
TOO_FEW_CHUNKS = "too few chunks"
TAGGED_SCORES = ("loss", "perplexity", "bits_per_byte")


def compute_set_scores(chunks: np.ndarray, bytes_per_token: float | None = None, with_interval: bool = True) -> Scores:
    """Compute the scores of a set from its chunks.

    Args:
        chunks: [3, N] Loss in nats, predictions and bytes of text of each chunk.
        bytes_per_token: Used where the chunks have no bytes, because those of each token are unknown or not exact.
        with_interval: Add the 95 % interval of the loss, unless there are too few chunks.
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
    error = estimate_sampling_error(chunks[0], chunks[1]) if with_interval else None
    if error is not None:
        scores |= {"loss_low": loss - error.margin, "loss_high": loss + error.margin}
    return scores


class SamplingError(NamedTuple):
    """The standard error of a mean, and the degrees of freedom of its estimate."""

    standard_error: float
    degrees: float

    @property
    def margin(self) -> float:
        """Return half the width of the 95 % interval."""
        return get_t_quantile(self.degrees) * self.standard_error


def get_t_quantile(degrees: float, level: float = 0.05) -> float:
    """Return the value that Student's t exceeds in absolute value with probability `level`."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - level / 2))


def estimate_sampling_error(
    losses: np.ndarray, counts: np.ndarray, is_independent: bool = False
) -> SamplingError | None:
    """Estimate the error of sum(losses) / sum(counts) over N chunks in their order; None for too few or infinite ones.

    Neighboring chunks, such as those of one file, are correlated. So the variance is that of slow variations: the mean
    square of the chunks' projections on the B slowest cosines (equal-weighted cosine estimator, Lazarus et al. 2018),
    which has B degrees of freedom. With `is_independent`, it is that of all variations, with N - 1.
    """
    if not np.isfinite(losses).all():
        return None
    size = len(losses)
    influence = (losses - losses.sum() / counts.sum() * counts) / counts.mean()  # of each chunk on the ratio
    if is_independent:
        variance, degrees = influence @ influence / max(size - 1, 1), size - 1
    else:
        degrees = _choose_num_cosines(influence)
        phases = math.pi * (np.arange(size) + 0.5) / size
        cosines = math.sqrt(2 / size) * np.cos(np.arange(1, degrees + 1)[:, None] * phases)
        variance = np.mean((cosines @ influence) ** 2) if degrees else 0.0
    return SamplingError(math.sqrt(variance / size), degrees) if degrees else None


def _choose_num_cosines(influence: np.ndarray) -> int:
    """Return the number of cosines that are slower than the correlation; 0 if there are none.

    The correlation of neighboring blocks, corrected for its bias, gives that of an AR(1) process. For the relative bias
    b of the variance from B of N cosines, b = correlation / 3 * (pi * B / N / (1 - correlation))^2.
    """
    length = len(influence) // NUM_BLOCKS
    limit = min(len(influence) // CHUNKS_PER_COSINE, MAX_COSINES)
    if limit < 2:
        return 0
    size = len(influence) // length
    blocks = influence[: size * length].reshape(size, length).sum(1)
    blocks -= blocks.mean()
    correlation = blocks[1:] @ blocks[:-1] / max(blocks @ blocks, 1e-300)
    correlation += (1 + 3 * correlation) / size
    if correlation <= 0:
        return limit
    slow = size / math.pi * (1 - correlation) * math.sqrt(3 * MAX_BIAS / correlation)
    return max(2, min(limit, int(slow))) if slow >= 1 else 0


def average_errors(errors: Sequence[SamplingError]) -> SamplingError:
    """Return the error of the unweighted mean of independent means; degrees of freedom by Welch and Satterthwaite."""
    variances = [error.standard_error**2 for error in errors]
    total = sum(variances)
    spread = sum(v**2 / error.degrees for v, error in zip(variances, errors, strict=True))
    degrees = total**2 / spread if spread else min(error.degrees for error in errors)
    return SamplingError(math.sqrt(total) / len(errors), degrees)


class Noise(NamedTuple):
    """Standard deviations of one paired difference: over seeds, and over the sampling of `num_chunks` chunks."""

    seed: float
    chunk: float
    num_chunks: int

    @property
    def chunks_needed(self) -> float:
        """Return the number of chunks at which chunk noise is a third of the seed noise."""
        return self.num_chunks * (3 * self.chunk / self.seed) ** 2 if self.seed else math.inf


def split_noise(sets: Sequence[tuple[np.ndarray, np.ndarray]]) -> Noise | None:
    """Split the variance of paired differences, averaged over sets, into seed noise and chunk noise.

    A difference is effect + seed + chunks + seed x chunks. All pairs have the same chunks, so the variance over the
    pairs contains the first and the last; the last is known from the chunks of each pair minus their mean.

    Args:
        sets: Differences of the summed losses [S, N] of S >= 2 pairs, and numbers of predictions [N], of each set.

    Returns None for too few chunks.
    """

    def average_variance(rows: Sequence[np.ndarray]) -> float | None:
        """Return the mean over the pairs of the variance from sampling chunks."""
        errors = [
            [estimate_sampling_error(row, counts) for row in d] for d, (_, counts) in zip(rows, sets, strict=True)
        ]
        known = [error.standard_error**2 for pairs in errors for error in pairs if error is not None]
        return sum(known) / num_pairs / len(sets) ** 2 if len(known) == num_pairs * len(sets) else None

    differences, num_pairs = [d for d, _ in sets], len(sets[0][0])
    means = np.mean([d.sum(1) / counts.sum() for d, counts in sets], 0)
    chunk, interaction = average_variance(differences), average_variance([d - d.mean(0) for d in differences])
    if chunk is None or interaction is None:
        return None
    seed = max(means.var(ddof=1) - interaction * num_pairs / (num_pairs - 1), 0.0)
    return Noise(math.sqrt(seed), math.sqrt(chunk), sum(len(counts) for _, counts in sets))


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
