"""Figures of a run: means over one optimizer step, and the loss of a named set of tokens."""

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

REQUEST = "request/"
BLOCKS = 10_000  # most that a bootstrap draws from


class StepMetrics:
    """Means over the micro-batches of one optimizer step and over the ranks, on the device until they are drained."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}
        self.requests: set[str] = set()  # requested by at least one rank at the last drain

    def request(self, name: str, is_requested: bool) -> None:
        """Share with all ranks whether this rank requests an action after this step. Every rank calls it."""
        self.add(REQUEST + name, torch.tensor(float(is_requested), device=self._device))

    def add(self, tag: str, value: Tensor) -> None:
        """One 0-d value of a micro-batch. Every rank adds the same tags in the same order."""
        self._values.setdefault(tag, []).append(value.detach().float())

    @property
    def _device(self) -> torch.device:
        return next(iter(self._values.values()))[0].device if self._values else torch.device("cpu")

    def drain(self) -> dict[str, float]:
        """The means since the last drain, with one transfer from the device, and one reduction over the ranks."""
        if not self._values:
            return {}
        tags = list(self._values)
        means = torch.stack([torch.stack(self._values[tag]).mean() for tag in tags])
        self._values.clear()
        if dist.is_initialized():
            dist.all_reduce(means)
            means /= dist.get_world_size()
        drained = dict(zip(tags, means.tolist(), strict=True))
        requests = {tag: drained.pop(tag) for tag in tags if tag.startswith(REQUEST)}
        self.requests = {tag.removeprefix(REQUEST) for tag, share in requests.items() if share}
        return drained


class ChunkLosses:
    """What each chunk of one set adds up to, whichever rank evaluates it; row -1 of a batch is padding.

    The figures of a set are sums over its chunks in their order, so batch size and rank count change none.
    """

    def __init__(self, chunks: int, device: torch.device | str = "cpu"):
        self._sums = torch.zeros(3, chunks + 1, dtype=torch.float64, device=device)  # loss in nats, predictions, bytes

    def update(self, index: Tensor, lengths: Tensor, losses: Tensor, num_bytes: Tensor) -> None:
        """index [B] of the chunks, their lengths [B] in ids; losses [B, T-1] in nats of the ids after the first, and
        num_bytes [B, T-1] of text these stand for; T is the batch's, beyond a chunk's length nothing counts."""
        scored = torch.arange(1, losses.shape[1] + 1, device=losses.device) < lengths[:, None]
        parts = (losses.double(), scored.double(), num_bytes.double())
        self._sums[:, index] = torch.stack([part.where(scored, 0.0).sum(1) for part in parts])

    def gather(self) -> np.ndarray:
        """[3, N]: loss, predictions and bytes of each chunk, from all ranks. Every rank calls it."""
        if dist.is_initialized():
            dist.all_reduce(self._sums)  # exact: all ranks but one add zero to a chunk
        return self._sums[:, :-1].cpu().numpy()


def set_figures(chunks: np.ndarray, bytes_per_token: float | None = None, interval: bool = True) -> dict[str, float]:
    """The figures of a set from its chunks [3, N]: loss in nats, predictions, bytes of text.

    instances, tokens (predictions), loss in nats per token, perplexity; with two chunks or more also the 95 %
    `interval` loss_low, loss_high. Where bytes are known, from the tokenizer or else from `bytes_per_token` of the
    set's record: bytes, bits_per_byte.
    """
    total, tokens, num_bytes = (float(math.fsum(row)) for row in chunks)
    loss = total / tokens
    figures = {"instances": chunks.shape[1], "tokens": int(tokens), "loss": loss, "perplexity": perplexity(loss)}
    if num_bytes or bytes_per_token:
        figures["bytes"] = int(num_bytes or bytes_per_token * tokens)
        figures["bits_per_byte"] = total / (math.log(2) * figures["bytes"])
    if interval and chunks.shape[1] > 1:
        figures["loss_low"], figures["loss_high"] = bootstrap_interval(chunks[0], chunks[1])
    return figures


def bootstrap_interval(
    losses: np.ndarray, counts: np.ndarray, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of sum(losses) / sum(counts) over N chunks, each resample N of them with replacement.

    Of more than BLOCKS chunks, blocks of neighbours are drawn, as long as leaves at most BLOCKS of them.
    """
    starts = np.arange(0, len(losses), -(-len(losses) // BLOCKS))
    losses, counts = np.add.reduceat(losses, starts), np.add.reduceat(counts, starts)
    rng, size = np.random.default_rng(seed), len(losses)
    block = max(1, (1 << 22) // size)
    means = []
    for begin in range(0, resamples, block):
        drawn = rng.integers(size, size=(min(block, resamples - begin), size))
        means.append(losses[drawn].sum(1) / counts[drawn].sum(1))
    tail = (1 - level) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that overflows."""
    return math.inf if loss > 700 else math.exp(loss)


def macro_average(sets: dict[str, dict[str, float]]) -> dict[str, float]:
    """Unweighted means over sets, of losses and of perplexities separately (Hyper-Connections, section 4).

    `exp_mean_loss`, exp of the mean loss, is never above the mean perplexity. bits_per_byte only if all sets have it.
    """
    keys = [key for key in ("loss", "perplexity", "bits_per_byte") if all(key in s for s in sets.values())]
    average = {key: sum(s[key] for s in sets.values()) / len(sets) for key in keys}
    return average | {"exp_mean_loss": perplexity(average["loss"])}


def group_averages(sets: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """The macro average of each group: of the sets v2/4chan, v2/c4_en ... under "v2", with their number, `sets`."""
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for name, figures in sets.items():
        if "/" in name:
            groups.setdefault(name.split("/")[0], {})[name] = figures
    return {group: {"sets": len(members)} | macro_average(members) for group, members in groups.items()}


def finite(value: Any) -> Any:
    """The same for JSON, which has no infinity and no NaN: None in their place."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


FIGURES = ("loss", "perplexity", "bits_per_byte")


def set_tags(prefix: str, sets: dict[str, dict[str, float]], lead: str | None = None) -> dict[str, float]:
    """`<prefix>/<figure>/<set>` for every set, and first their unweighted mean, as the set `average`.

    The sets of a group such as v2 have `<lead>v2/<set>`, the loss, and the group `<lead>v2/average/<figure>`; `lead`
    is `<prefix>/` by default.
    """
    if not sets:
        return {}
    lead = f"{prefix}/" if lead is None else lead
    plain = {"average": macro_average(sets)} | {name: s for name, s in sets.items() if "/" not in name}
    tags = {f"{prefix}/{figure}/{name}": s[figure] for name, s in plain.items() for figure in FIGURES if figure in s}
    tags |= {lead + name: s["loss"] for name, s in sets.items() if "/" in name}
    for group, average in group_averages(sets).items():
        tags |= {f"{lead}{group}/average/{key}": value for key, value in average.items() if key != "sets"}
    return tags
