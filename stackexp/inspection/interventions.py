"""Interventions on trained stacks: the change of the loss shows whether a stack is used or only adds parameters."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.errors import ConfigError
from stackexp.models.memories.base import Memory
from stackexp.models.memories.residual_stack import ResidualStack
from stackexp.models.memories.stack import IMPOSSIBLE_LOGIT, StackMemory
from stackexp.models.stack_recording import ACTIONS, Stack, find_recorded, record_memories, wrap_method
from stackexp.models.transformer import Transformer
from stackexp.modules.scores import TOO_FEW_CHUNKS, estimate_sampling_error
from stackexp.modules.transduction import compute_answer_losses
from stackexp.reports.interventions import MEAN_ACTION
from stackexp.stack import StackState
from stackexp.tables import format_table
from stackexp.tasks import NO_TARGET

TokenBatch = dict[str, Any]
"""tokens [B, T], and length [B] or, for formal languages, targets [B, answer symbols]."""


@dataclass(frozen=True)
class Intervention:
    """A change of the action logits, of the state or of the read, in all layers or in one.

    Each function receives the memory and a tensor (the state for `state`) and returns the new one: logits [..., H, 3],
    read [..., H, D]. A residual stack has logits [B, T, 3], and its read is the weights of the slots [B, T, S].
    A memory that is not a stack has no logits, and its read is what it adds to the hidden state [B, T, d].
    """

    name: str
    logits: Callable[[Stack, Tensor], Tensor] | None = None
    state: Callable[[Stack, Any], Any] | None = None
    read: Callable[[Any, Tensor], Tensor] | None = None
    layer: int | None = None


def measure_interventions(model: Transformer, batches: list[TokenBatch], heads: bool) -> list[dict[str, Any]]:
    """Return the change of the loss under each intervention, in nats, with the paired 95 % interval over sequences.

    Strings of a formal language are independent. Chunks of text are not: too few of them have no interval (None).
    """
    is_independent = "targets" in batches[0]
    interventions = list_interventions(model, batches, heads)
    losses, counts = compute_losses(model, batches)
    changes: list[dict[str, Any]] = [{"intervention": "none", "loss": float(losses.sum() / counts.sum())}]
    for intervention in interventions:
        differences = _compute_losses_under(model, batches, intervention) - losses
        change = float(differences.sum() / counts.sum())
        error = estimate_sampling_error(differences, counts, is_independent)
        low, high = (None, None) if error is None else (change - error.margin, change + error.margin)
        changes.append({"intervention": intervention.name, "change": change, "low": low, "high": high})
    return changes


def measure_summary(model: Transformer, batches: list[TokenBatch]) -> dict[str, float]:
    """Return the change of the loss with the actions frozen at their mean, and with all reads dropped, in nats.

    Only stacks with actions and without feedback can be frozen. For other memories, what they add to the hidden state
    is dropped.
    """
    memories: list[Any] = model.memories
    is_stack = isinstance(memories[0], Stack)
    interventions = [Intervention("dropped read" if is_stack else "dropped output", read=_drop_read)]
    if is_stack and memories[0].actions is not None and not getattr(memories[0].config, "feedback", False):
        interventions.insert(0, Intervention(MEAN_ACTION, logits=_freeze(model, batches)))
    losses, counts = compute_losses(model, batches)
    changes = {i.name: (_compute_losses_under(model, batches, i) - losses).sum() for i in interventions}
    return {name: float(change / counts.sum()) for name, change in changes.items()}


def _compute_losses_under(model: Transformer, batches: list[TokenBatch], intervention: Intervention) -> np.ndarray:
    with intervene(model, intervention):
        return compute_losses(model, batches)[0]


@torch.no_grad()
def compute_losses(model: nn.Module, batches: Iterable[TokenBatch]) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss in nats and the number of predictions of each sequence, float64 [N]."""
    losses, counts = [], []
    for batch in batches:
        tokens = batch["tokens"]
        if "targets" in batch:
            nats, is_counted = compute_answer_losses(model, batch)[1], batch["targets"] != NO_TARGET
        else:
            logits = model(tokens).logits[:, :-1].float()
            nats = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
            is_counted = torch.arange(1, tokens.shape[1]) < batch["length"][:, None]
        losses.append(nats.double().where(is_counted, 0.0).sum(1))
        counts.append(is_counted.double().sum(1))
    return torch.cat(losses).numpy(), torch.cat(counts).numpy()


def format_changes(changes: list[dict[str, Any]]) -> str:
    """Return a table of the interventions; an asterisk marks an interval that excludes zero."""
    rows = []
    for change in changes[1:]:
        mark, interval = "", TOO_FEW_CHUNKS
        if change["low"] is not None:
            mark = "*" if change["low"] > 0 or change["high"] < 0 else ""
            interval = f"{change['low']:+z.4f} to {change['high']:+z.4f}"
        rows.append([change["intervention"], f"{change['change']:+z.4f}", interval, mark])
    header = ("intervention", "change of the loss", "95 % interval", "")
    return f"loss {changes[0]['loss']:.4f}\n\n{format_table(rows, header=header, align='<>><')}"


def check_heads(model: nn.Module) -> None:
    """Raise ConfigError if the stacks have no heads to intervene on separately."""
    memory = find_recorded(model)[0]
    if _count_heads(memory) == 1:
        name = type(memory).__name__
        found = "the stacks have one head" if isinstance(memory, StackMemory) else f"{name} has no heads"
        raise ConfigError(f"inspect: --heads: {found}; omit --heads")


def _count_heads(memory: Memory) -> int:
    return memory.config.num_heads if isinstance(memory, StackMemory) else 1


def list_interventions(model: Transformer, batches: list[TokenBatch], heads: bool = False) -> list[Intervention]:
    """Return all interventions for a model.

    Actions are forced to 0 or 1, frozen at their mean over the tokens of `batches`, or hardened. Stacks are cleared
    before a layer. Reads are dropped in all layers, in one layer, or (with `heads`) in one head; or exchanged between
    the heads. A residual stack without its reads still reads its top. It is cleared after the attention of the layer
    has read it.

    Feedback changes the logits after the intervention. So with feedback, actions are neither frozen nor hardened, and
    a dropped read is still fed back. For other memories, the output (what they add to the hidden state) is dropped, or
    the state is cleared.
    """
    memories = find_recorded(model)
    num_heads, found = _count_heads(memories[0]), []
    has_feedback = getattr(memories[0].config, "feedback", False)
    suffix = ", but fed back" if has_feedback else ""
    read, noun = ("read", "stack") if isinstance(memories[0], Stack) else ("output", "state")
    if isinstance(memories[0], Stack) and memories[0].actions is not None:
        found = [
            Intervention(f"{action} = {value}", logits=functools.partial(_force, index=i, value=value))
            for i, action in enumerate(ACTIONS)
            for value in (0, 1)
        ]
        if not has_feedback:
            found.append(Intervention("actions frozen at their mean", logits=_freeze(model, batches)))
            found.append(Intervention("actions hardened", logits=_harden))
    if num_heads > 1:
        found.append(Intervention("reads of the heads exchanged", read=lambda _, read: read.roll(1, -2)))
    found.append(Intervention(f"{read}s dropped{suffix}", read=_drop_read))
    layers = sorted({memory.layer for memory in memories})
    found += [
        Intervention(f"{read} of layer {layer} dropped{suffix}", read=_drop_read, layer=layer) for layer in layers
    ]
    if memories[0].axis == "depth":
        found += [
            Intervention(f"{noun} cleared before layer {layer}", state=lambda _, state: clear(state), layer=layer)
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
def intervene(model: Transformer, intervention: Intervention) -> Iterator[None]:
    """Apply an intervention in the forward passes within this context."""
    memories = [m for m in model.memories if intervention.layer in (None, m.layer)]
    if intervention.state:
        memories = memories[:1]  # the first memory of the layer
    method, change = ("update", _update_changed) if isinstance(memories[0], Stack) else ("forward", _forward_changed)
    with wrap_method(method, dict.fromkeys(memories, functools.partial(change, intervention))):
        yield


def _forward_changed(
    intervention: Intervention, memory: Memory, forward: Callable, h: Tensor, state: Any, **options: Any
) -> Any:
    """Run a memory that is not a stack. Its state is cleared to that before the first layer."""
    if intervention.state:
        state = memory.empty_state(h)
    output, state, stats = forward(h, state, **options)
    if intervention.read:
        output = h + intervention.read(memory, output - h)
    return output, state, stats


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
        is_plain = isinstance(state, Tensor | StackState)  # other states are private to their implementation
        state = intervention.state(memory, state) if is_plain else memory.empty_state(h)
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
    return logits.masked_fill(is_chosen if value == 0 else ~is_chosen, IMPOSSIBLE_LOGIT)


def _freeze(model: Transformer, batches: list[TokenBatch]) -> Callable[[Stack, Tensor], Tensor]:
    """Return the change that gives every token the mean actions of the memory over all tokens of the batches."""
    memories = find_recorded(model)
    sums = [torch.zeros(())] * len(memories)
    for batch in batches:
        with record_memories(model) as recordings:
            model(batch["tokens"])
        actions = [torch.stack([recording.values[name] for name in ACTIONS], -1) for recording in recordings]
        sums = [total + part.double().sum((0, 1)) for total, part in zip(sums, actions, strict=True)]  # [H, 3]
    count = sum(batch["tokens"].numel() for batch in batches)
    frozen = {m: (total / count).clamp_min(1e-30).log() for m, total in zip(memories, sums, strict=True)}
    return lambda memory, logits: frozen[memory].to(logits.dtype).expand_as(logits)


def _harden(memory: Stack, logits: Tensor) -> Tensor:
    """Set the probability of the most probable action to 1."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True), IMPOSSIBLE_LOGIT)


def _drop_read(memory: Memory, read: Tensor) -> Tensor:
    if isinstance(memory, ResidualStack):
        return torch.cat([read[..., :1], torch.zeros_like(read[..., 1:])], -1)
    return torch.zeros_like(read)


def _drop_head(head: int, memory: Stack, read: Tensor) -> Tensor:
    kept = torch.ones(read.shape[-2], 1, dtype=read.dtype, device=read.device)
    kept[head] = 0
    return read * kept
