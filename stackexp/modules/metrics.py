"""Figures of a run: means over one optimizer step, and the loss of a named set of tokens."""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

WISH = "wish/"


class StepMetrics:
    """Means over the micro-batches of one optimizer step and over the ranks, on the device until they are drained."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}
        self.wishes: set[str] = set()  # what one process or more wished for at the last drain

    def wish(self, name: str, whether: bool) -> None:
        """What this process wants all of them to do after this step; every rank says, whether it does or not."""
        self.add(WISH + name, torch.tensor(float(whether), device=self._device))

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
        wishes = {tag: drained.pop(tag) for tag in tags if tag.startswith(WISH)}
        self.wishes = {tag.removeprefix(WISH) for tag, share in wishes.items() if share}
        return drained


class CorpusLoss(Metric):
    """Loss of one set: sums over its tokens and over all ranks, so batch size and rank count change no figure."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("bytes", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, num_bytes: Tensor, counts: Tensor) -> None:
        """losses [B, T] in nats; num_bytes [B, T] of text each target stands for; counts [B] False for padding rows."""
        self.loss += losses[counts].double().sum()
        self.tokens += losses[counts].numel()
        self.bytes += num_bytes[counts].sum()

    def compute(self) -> dict[str, float]:
        """loss in nats per token, perplexity, bits_per_byte, and the counts of tokens and bytes they are over."""
        loss = (self.loss / self.tokens).item()
        return {
            "loss": loss,
            "perplexity": perplexity(loss),
            "bits_per_byte": (self.loss / (math.log(2) * self.bytes)).item(),
            "tokens": self.tokens.item(),
            "bytes": self.bytes.item(),
        }


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that overflows."""
    return math.inf if loss > 700 else math.exp(loss)


def macro_average(sets: dict[str, dict[str, float]]) -> dict[str, float]:
    """Unweighted means over sets, of losses and of perplexities separately (Hyper-Connections, section 4)."""
    return {key: sum(s[key] for s in sets.values()) / len(sets) for key in ("loss", "perplexity", "bits_per_byte")}
