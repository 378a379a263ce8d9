"""Activation checkpointing: the backward pass recomputes activations that the forward pass did not save."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from stackexp.errors import RunError

Recompute = bool | Literal["selective"]

aten = torch.ops.aten
SAVED_OPERATORS = {
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default),
    *(aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default),
    *(aten._scaled_dot_product_fused_attention_overrideable.default, aten._flash_attention_forward.default),
}
"""Operators whose outputs selective checkpointing saves: matrix products and attention."""
SAVED_OPERATOR_PREFIXES = ("flex_attention", "torch_attn._varlen_attn", "flash_attn._flash_attn")
"""Name prefixes of attention operators that exist only once their module is imported."""


def run_recomputed(layer: Callable, *args: Any, selective: bool, preserve_rng: bool = False) -> Any:
    """Return layer(*args) without saving its activations; the backward pass recomputes them.

    Args:
        layer: The module or function to run.
        args: Its arguments, which are kept for the backward pass.
        selective: Save the outputs of matrix products and attention, and recompute the rest. Do not use it for layers
            with a Python loop over tokens: its dispatch mode adds time to each operator of the loop.
        preserve_rng: Restore the random state before recomputing, for layers that use random numbers.

    Raises:
        RunError: With `selective`, the layer changes a saved output in place (noticed by torch >= 2.14).
    """
    options = {"context_fn": _build_contexts} if selective else {}
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=preserve_rng, **options)


class _Policy:
    """Saves the outputs of matrix products and attention. Raises RunError if one is changed in place afterwards.

    The backward pass would use the changed values. Torch notices this only for tensors that share a version counter,
    but a matrix product of [B, T, d] and its reshaped result share only their storage.
    """

    def __init__(self) -> None:
        self._saved: set[int] = set()  # the storages of the saved outputs, which live until the backward pass

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in SAVED_OPERATORS or str(operator).startswith(SAVED_OPERATOR_PREFIXES):
            # torch < 2.14 may not pass the output, and changes in place are then not noticed
            outputs = [x for x in tree_leaves(getattr(context, "op_output", None)) if isinstance(x, torch.Tensor)]
            self._saved.update(x.untyped_storage()._cdata for x in outputs)
            return CheckpointPolicy.MUST_SAVE
        is_mutable = isinstance(operator, torch._ops.OpOverload) and operator._schema.is_mutable
        if is_mutable and args and args[0].untyped_storage()._cdata in self._saved:
            raise RunError(
                f"trainer.recompute: selective: {operator} changes the output of a matrix product in place; use an "
                "operation that returns a new tensor"
            )
        return CheckpointPolicy.PREFER_RECOMPUTE


def _build_contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_Policy())
