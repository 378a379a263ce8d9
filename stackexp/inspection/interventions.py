"""Interventions on trained stacks: the change of the loss shows whether a stack is used or only adds parameters."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stackexp.errors import ConfigError
from stackexp.models.memories.residual_stack import ResidualStack
from stackexp.models.memories.stack import NEVER
from stackexp.models.stack_recording import ACTIONS, Recording, Stack, find_stacks, wrap_updates


@dataclass(frozen=True)
class Intervention:
    """A change of the action logits, of the state or of the read, in all layers or in one.

    Each function receives the memory and a tensor (the state for `state`) and returns the new one: logits [..., H, 3],
    read [..., H, D]. A residual stack has logits [B, T, 3], and its read is the weights of the slots [B, T, S].
    """

    name: str
    logits: Callable[[Stack, Tensor], Tensor] | None = None
    state: Callable[[Stack, Any], Any] | None = None
    read: Callable[[Stack, Tensor], Tensor] | None = None
    layer: int | None = None


def check_heads(model: nn.Module) -> None:
    """Raise ConfigError if the stacks have no heads to intervene on separately."""
    stack = find_stacks(model)[0]
    if _count_heads(stack) == 1:
        found = "a residual stack has no heads" if isinstance(stack, ResidualStack) else "the stacks have one head"
        raise ConfigError(f"inspect: --heads: {found}; omit --heads")


def _count_heads(stack: Stack) -> int:
    return 1 if isinstance(stack, ResidualStack) else stack.config.num_heads


def list_interventions(model: nn.Module, means: list[Recording], heads: bool = False) -> list[Intervention]:
    """Return all interventions for a model. Those with frozen actions use the mean actions of the recordings `means`.

    Actions are forced to 0 or 1, frozen at their mean over the tokens, or hardened. Stacks are cleared before a layer.
    Reads are dropped in all layers, in one layer, or (with `heads`) in one head; or exchanged between the heads.
    A residual stack without its reads still reads its top. It is cleared after the attention of the layer has read it.
    Feedback changes the logits after the intervention. So with feedback, actions are neither frozen nor hardened, and
    a dropped read is still fed back.
    """
    stacks = find_stacks(model)
    num_heads, found = _count_heads(stacks[0]), []
    has_feedback = getattr(stacks[0].config, "feedback", False)
    suffix = ", but fed back" if has_feedback else ""
    if stacks[0].actions is not None:
        found = [
            Intervention(f"{action} = {value}", logits=functools.partial(_force, index=i, value=value))
            for i, action in enumerate(ACTIONS)
            for value in (0, 1)
        ]
        if not has_feedback:
            found.append(Intervention("actions frozen at their mean", logits=_freeze(stacks, means)))
            found.append(Intervention("actions hardened", logits=_harden))
    if num_heads > 1:
        found.append(Intervention("reads of the heads exchanged", read=lambda _, read: read.roll(1, -2)))
    found.append(Intervention(f"reads dropped{suffix}", read=_drop_read))
    layers = sorted({memory.layer for memory in stacks})
    found += [Intervention(f"read of layer {layer} dropped{suffix}", read=_drop_read, layer=layer) for layer in layers]
    if stacks[0].axis == "depth":
        found += [
            Intervention(f"stack cleared before layer {layer}", state=lambda _, state: clear(state), layer=layer)
            for layer in layers[1:]
        ]
    if heads and num_heads > 1:
        found += [
            Intervention(
                f"read of layer {layer}, head {head} dropped{suffix}",
                read=functools.partial(_drop_head, head),
                layer=layer,
            )
            for layer in layers
            for head in range(num_heads)
        ]
    return found


@contextlib.contextmanager
def intervene(model: nn.Module, intervention: Intervention) -> Iterator[None]:
    """Apply an intervention in the forward passes within this context."""
    stacks = [m for m in find_stacks(model) if intervention.layer in (None, m.layer)]
    if intervention.state:
        stacks = stacks[:1]  # the first memory of the layer
    with wrap_updates(dict.fromkeys(stacks, functools.partial(_update_changed, intervention))):
        yield


def _update_changed(
    intervention: Intervention,
    memory: Stack,
    update: Callable,
    state: Any,
    x: Tensor,
    logits: Tensor,
    h: Tensor,
) -> tuple[Any, Any]:
    if intervention.state:
        state = intervention.state(memory, state)
    if intervention.logits:
        logits = intervention.logits(memory, logits)
    output, state = update(state, x, logits, h)
    if intervention.read:
        output = output._replace(read=intervention.read(memory, output.read))
    return output, state


def clear(state: Any) -> Any:
    """Return the state with all slots empty; that of a residual stack keeps its top, the hidden state."""
    if isinstance(state, Tensor):
        return torch.cat([state[..., :1, :], torch.zeros_like(state[..., 1:, :])], -2)
    return type(state)(*(torch.zeros_like(tensor) for tensor in state))


def _force(memory: Stack, logits: Tensor, index: int, value: int) -> Tensor:
    """Set the probability of an action to 0 or 1; with 0 the others keep their ratio."""
    is_chosen = torch.arange(logits.shape[-1], device=logits.device) == index
    return logits.masked_fill(is_chosen if value == 0 else ~is_chosen, NEVER)


def _freeze(stacks: list[Stack], means: list[Recording]) -> Callable[[Stack, Tensor], Tensor]:
    frozen = {}
    for memory, recording in zip(stacks, means, strict=True):
        actions = torch.stack([recording.values[name] for name in ACTIONS], -1)  # [B, T, H, 3]
        frozen[memory] = actions.flatten(0, -3).mean(0).clamp_min(1e-30).log()
    return lambda memory, logits: frozen[memory].to(logits.dtype).expand_as(logits)


def _harden(memory: Stack, logits: Tensor) -> Tensor:
    """Set the probability of the most probable action to 1."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True), NEVER)


def _drop_read(memory: Stack, read: Tensor) -> Tensor:
    if isinstance(memory, ResidualStack):
        return torch.cat([read[..., :1], torch.zeros_like(read[..., 1:])], -1)
    return torch.zeros_like(read)


def _drop_head(head: int, memory: Stack, read: Tensor) -> Tensor:
    kept = torch.ones(read.shape[-2], 1, dtype=read.dtype, device=read.device)
    kept[head] = 0
    return read * kept
