"""Measurements of the memories on validation sets."""

import torch
from torch import Tensor, nn

from stackexp.models.memories.base import Stats
from stackexp.models.stack_recording import Stack, record_stacks


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
