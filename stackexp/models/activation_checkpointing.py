"""Activation checkpointing: a layer computed again in the backward pass, all of it or what costs little."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = bool | Literal["selective"]

aten = torch.ops.aten
KEPT = {
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default),
    *(aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default),
    *(aten._scaled_dot_product_fused_attention_overrideable.default, aten._flash_attention_forward.default),
}
"""What selective checkpointing does not compute twice: matrix products and attention."""
KEPT_BY_NAME = ("flex_attention", "torch_attn._varlen_attn", "flash_attn._flash_attn")
"""The same of those that are not there until their module is imported, by how their names begin."""


def recomputed(layer: Callable, *args: Any, selective: bool, draws: bool = False) -> Any:
    """layer(*args), whose activations are not kept for the backward pass but computed again from `args`.

    `selective`: but for the outputs of matrix products and attention, so that only cheap operations are repeated:
    norms, rotations, activations, casts, the update of a memory. Not for a layer that scans the tokens: it is run
    under a dispatch mode, where a scan is taken apart. `draws`: whether the layer draws random numbers, which must be
    the same again.
    """
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    options = {"context_fn": contexts} if selective else {}
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=draws, **options)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator in KEPT or str(operator).startswith(KEPT_BY_NAME):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
