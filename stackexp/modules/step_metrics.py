"""Mean metrics of one optimizer step, reduced over all ranks in one all-reduce."""

import torch
import torch.distributed as dist
from torch import Tensor

_REQUEST = "request/"


class StepMetrics:
    """A collection of scalars of one optimizer step: means over micro-batches and ranks.

    Values stay on the device until `drain`. Requests such as "stop" travel in the same all-reduce.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}
        self.requests: set[str] = set()  # requests of any rank at the last drain

    def add(self, tag: str, value: Tensor) -> None:
        """Add a 0-d value of one micro-batch. Every rank adds the same tags in the same order."""
        self._values.setdefault(tag, []).append(value.detach().float())

    def request(self, name: str, condition: bool) -> None:
        """Request an action of all ranks after this step if `condition` is true; every rank must call this."""
        self.add(_REQUEST + name, torch.tensor(float(condition), device=self._device))

    @property
    def _device(self) -> torch.device:
        return next(iter(self._values.values()))[0].device if self._values else torch.device("cpu")

    def drain(self) -> dict[str, float]:
        """Return the means since the last drain and update `requests`. Every rank calls this."""
        if not self._values:
            return {}
        tags = list(self._values)
        means = torch.stack([torch.stack(self._values[tag]).mean() for tag in tags])
        self._values.clear()
        if dist.is_initialized():
            dist.all_reduce(means)
            means /= dist.get_world_size()
        drained = dict(zip(tags, means.tolist(), strict=True))
        shares = {tag: drained.pop(tag) for tag in tags if tag.startswith(_REQUEST)}
        self.requests = {tag.removeprefix(_REQUEST) for tag, share in shares.items() if share}
        return drained
