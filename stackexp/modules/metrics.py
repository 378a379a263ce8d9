"""Metrics of evaluation sets and of training steps, loss spikes, and measurements of the memories."""

import contextlib
import math
import statistics
from collections import deque
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from stackexp.models.memories.base import Stats
from stackexp.models.stack_recording import Stack, record_memories

_REQUEST = "request/"
SPIKE_WINDOW = 128  # losses
MIN_LOSSES = 32
PROBED_ROWS = 8  # of each validation set


class ItemSums(Metric):
    """Float64 sums for each of N items of an evaluation set, independent of which rank scores an item.

    Each item has its own column and is written once, so the results depend neither on the batch size nor on the number
    of ranks. Column N collects padding (index -1). Subclasses name the three sums.
    """

    full_state_update = False
    sums: Tensor  # [3, N + 1]

    def __init__(self, num_items: int) -> None:
        super().__init__()
        # All ranks but one hold zeros for an item, so the sum over ranks is exact.
        self.add_state("sums", torch.zeros(3, num_items + 1, dtype=torch.float64), dist_reduce_fx="sum")

    def store(self, index: Tensor, *values: Tensor) -> None:
        """Write three values [B] for the items `index` [B]."""
        self.sums[:, index] = torch.stack(values)

    def compute(self) -> np.ndarray:
        """Return the sums of all items [3, N]. Every rank calls this."""
        return self.sums[:, :-1].cpu().numpy()


class ChunkLosses(ItemSums):
    """Loss in nats, number of predictions and bytes of text for each chunk of a set of tokens."""

    def update(self, index: Tensor, lengths: Tensor, losses: Tensor, num_bytes: Tensor) -> None:
        """Add a batch of chunks.

        Args:
            index: [B] Numbers of the chunks; -1 is padding.
            lengths: [B] Tokens of each chunk. The rest of a row is padding.
            losses: [B, T-1] Losses in nats of all tokens but the first.
            num_bytes: [B, T-1] Bytes of text that these tokens represent.
        """
        is_scored = torch.arange(1, losses.shape[1] + 1, device=losses.device) < lengths[:, None]  # [B, T-1]
        parts = (losses.double(), is_scored.double(), num_bytes.double())
        self.store(index, *(part.where(is_scored, 0.0).sum(1) for part in parts))


class SequenceScores(ItemSums):
    """Mean loss, correct symbols and counted symbols for each string of a formal language.

    For arithmetic, the strings are problems, and each whole answer counts as one symbol.
    """

    def update(self, index: Tensor, losses: Tensor, is_correct: Tensor, is_counted: Tensor) -> None:
        """Add a batch of strings.

        Args:
            index: [B] Numbers of the strings; -1 is padding.
            losses: [B, O] Losses in nats of all answer symbols.
            is_correct: [B, O] True for symbols that are correct and counted; [B, 1] for whole answers.
            is_counted: [B, O] True for symbols that accuracy counts; [B, 1] for whole answers.
        """
        self.store(index, losses.double().mean(1), is_correct.double().sum(1), is_counted.double().sum(1))

    def compute(self) -> dict[str, float]:
        """Return accuracy, loss in nats per symbol, and the number of sequences. Every rank calls this."""
        loss, correct, counted = (torch.from_numpy(row) for row in super().compute())
        return {
            "accuracy": (correct.sum() / counted.sum()).item(),
            "loss": loss.mean().item(),
            "sequences": len(loss),
        }


class StepMetrics:
    """A collection of scalars of one optimizer step: means over micro-batches and ranks.

    Values stay on their devices until `drain`, whose all-reduce also shares requests such as "stop".
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor] | list[float]] = {}
        self.requests: set[str] = set()  # requests of any rank at the last drain

    def add(self, tag: str, value: Tensor | float) -> None:
        """Add a 0-d value of one micro-batch. Every rank adds the same tags in the same order.

        A float is copied to the device in `drain`, in one transfer with all others. A tag has one type of value.
        """
        values: list[Any] = self._values.setdefault(tag, [])
        values.append(value.detach().float() if isinstance(value, Tensor) else value)

    def request(self, name: str, condition: bool) -> None:
        """Request an action of all ranks after this step if `condition` is true; every rank must call this."""
        self.add(_REQUEST + name, float(condition))

    def drain(self) -> dict[str, float]:
        """Return the means since the last drain and update `requests`. Every rank calls this."""
        if not self._values:
            return {}
        tags = list(self._values)
        means = self._compute_means()
        self._values.clear()
        if dist.is_initialized():
            dist.all_reduce(means)
            means /= dist.get_world_size()
        drained = dict(zip(tags, means.tolist(), strict=True))
        shares = {tag: drained.pop(tag) for tag in tags if tag.startswith(_REQUEST)}
        self.requests = {tag.removeprefix(_REQUEST) for tag, share in shares.items() if share}
        return drained

    def _compute_means(self) -> Tensor:
        """Return the mean of each tag, float32, on the device of the tensors."""
        means = {tag: torch.stack(v).mean() for tag, v in self._values.items() if isinstance(v[0], Tensor)}
        numbers = {tag: statistics.fmean(v) for tag, v in self._values.items() if tag not in means}
        device = next(iter(means.values())).device if means else torch.device("cpu")
        copied = torch.tensor(list(numbers.values()), dtype=torch.float32).to(device, non_blocking=True)
        means |= zip(numbers, copied, strict=True)
        return torch.stack([means[tag] for tag in self._values])


class SpikeDetector:
    """A window of recent losses; it measures by how many standard deviations a new loss exceeds their mean."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def measure_deviation(self, loss: float) -> float:
        """Return (loss - mean) / standard deviation; 0.0 while there are fewer than MIN_LOSSES."""
        if len(self.losses) < MIN_LOSSES:
            return 0.0
        mean, spread = statistics.fmean(self.losses), statistics.pstdev(self.losses)
        return (loss - mean) / spread if spread else 0.0

    def add(self, loss: float, max_deviations: float = math.inf) -> None:
        """Add a loss, clipped to `max_deviations`, so that the window adapts to a loss that stays higher."""
        if self.measure_deviation(loss) > max_deviations:
            loss = statistics.fmean(self.losses) + max_deviations * statistics.pstdev(self.losses)
        self.losses.append(loss)


@torch.no_grad()
def probe_memories(model: nn.Module, tokens: Tensor) -> list[Stats]:
    """Return the statistics of each memory on tokens [B, T].

    Those of stacks over the depth include what `inspect` records of overflow and reads. Stacks over the tokens would
    have to be recorded token by token.
    """
    records = model.axis == "depth" and isinstance(model.memories[0], Stack)
    with (
        torch.compiler.set_stance("force_eager"),  # a batch of another shape is not worth compiling for
        record_memories(model) if records else contextlib.nullcontext([]) as recordings,
    ):
        probes = model(tokens, probe=True, return_hidden=True).probes or []  # no logits: they would need gigabytes
    if not records:
        return probes
    names = ("overflow", "read_slot", "read_sharpness")
    recorded = [{name: recording.values[name].mean() for name in names} for recording in recordings]
    return [probe | more for probe, more in zip(probes, recorded, strict=True)]


def read_first_rows(datamodule: Any, dataset: Any) -> Tensor:
    """Return the first PROBED_ROWS rows of a set [N, T], the same for every batch size and on every rank.

    An incomplete last chunk is left out, or cut at its end if it is the only one; so are strings of other lengths than
    the first.
    """
    rows: list[Tensor] = []
    for batch in datamodule.build_eval_loader(dataset, rank=0, world_size=1):
        is_real = batch["index"] >= 0
        if isinstance(lengths := batch.get("length"), Tensor):  # of text; strings of a language have no padding
            rows += [row[:n] for row, n in zip(batch["tokens"][is_real], lengths[is_real].tolist(), strict=True)]
        else:
            rows += batch["tokens"][is_real]
        if len(rows) >= PROBED_ROWS:
            break
    return torch.stack([row for row in rows[:PROBED_ROWS] if len(row) == len(rows[0])])
