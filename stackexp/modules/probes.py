"""Measurements of the memories on validation sets."""

from typing import Any

import torch
from torch import Tensor, nn

from stackexp.models.memories.base import Stats
from stackexp.models.stack_recording import Stack, record_stacks

PROBED_ROWS = 8  # of each validation set


@torch.no_grad()
def probe_memories(model: nn.Module, tokens: Tensor) -> list[Stats]:
    """Return the statistics of each memory on tokens [B, T].

    Those of stacks over the depth include what `inspect` records of overflow and reads. Stacks over the tokens would
    have to be recorded token by token.
    """
    if model.axis != "depth" or not isinstance(model.memories[0], Stack):
        return model(tokens, probe=True, return_hidden=True).probes or []  # no logits: they would need gigabytes
    with torch.compiler.set_stance("force_eager"), record_stacks(model) as recordings:
        probes = model(tokens, probe=True, return_hidden=True).probes
    names = ("overflow", "read_slot", "read_sharpness")
    recorded = [{name: recording.values[name].mean() for name in names} for recording in recordings]
    return [probe | more for probe, more in zip(probes, recorded, strict=True)]


def read_first_rows(datamodule: Any, dataset: Any) -> Tensor:
    """Return the first PROBED_ROWS rows of a set [N, T], the same for every batch size and on every rank."""
    rows: list[Tensor] = []
    for batch in datamodule.build_eval_loader(dataset, rank=0, world_size=1):
        rows += batch["tokens"][batch["index"] >= 0]
        if len(rows) >= PROBED_ROWS:
            break
    return torch.stack(rows[:PROBED_ROWS])
