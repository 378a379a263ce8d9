"""Mean metrics of one optimizer step, reduced over all ranks in one all-reduce."""

from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_REQUEST = "request/"


class StepMetrics:
    """A collection of scalars of one optimizer step: means over micro-batches and ranks.

    Values stay where they are until `drain`. Requests such as "stop" travel in the same all-reduce.
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
        numbers = {tag: fmean(v) for tag, v in self._values.items() if tag not in means}
        device = next(iter(means.values())).device if means else torch.device("cpu")
        copied = torch.tensor(list(numbers.values()), dtype=torch.float32).to(device, non_blocking=True)
        means |= zip(numbers, copied, strict=True)
        return torch.stack([means[tag] for tag in self._values])
