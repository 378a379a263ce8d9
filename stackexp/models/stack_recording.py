"""Record what every memory does in a forward pass: actions, occupancy and reads of stacks, reports of the others."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stackexp.errors import RunError
from stackexp.models.memories.base import Memory
from stackexp.models.memories.residual_stack import ResidualStack, ResidualStackOutput, compute_lower_share
from stackexp.models.memories.stack import StackMemory
from stackexp.stack import eager, reference, use_implementation
from stackexp.stack.reference import StackOutput, StackState

ACTIONS = ("push", "pop", "no_op")
MEASUREMENTS = {
    "push": "probability of a push",
    "pop": "probability of a pop",
    "no_op": "probability of a no-op",
    "entropy": "entropy of the actions, in nats",
    "occupancy": "occupied slots: the sum of M",
    "overflow": "mass that this push moves past the last slot",
    "read_slot": "occupied slot that is read most, 0 is the top",
    "read_sharpness": "weight of that slot in the read",
    "read_share": "norm of the read / that of the hidden state; residual_stack: share of the slots below the top",
}
"""A residual stack has one head and no empty slots."""
OCCUPIED = 0.01  # a slot with a smaller M counts as empty in read_slot and read_sharpness

Stack = StackMemory | ResidualStack


@dataclass
class Recording:
    """The measurements of one memory, {name: [B, T, H]}. `read_share` of a head is that of its own read.

    `meanings` explains each name.
    """

    layer: int
    site: str
    meanings: dict[str, str] = field(default_factory=MEASUREMENTS.copy)
    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, values: dict[str, Tensor]) -> None:
        """Append the values of the next tokens."""
        for name, value in values.items():
            self.values[name] = torch.cat([self.values[name], value], 1) if name in self.values else value


def find_recorded(model: nn.Module) -> list[Memory]:
    """Return the memories of a model that can be recorded: stacks, and those that state what they report.

    Raises RunError if there are none.
    """
    memories = [memory for memory in getattr(model, "memories", ()) if isinstance(memory, Stack) or memory.reports]
    if not memories:
        raise RunError(
            "inspect: the model has no stack, and no memory that reports values; give a run with "
            "model.memory.kind=stack or residual_stack, or see Memory.report in stackexp/models/memories/base.py"
        )
    return memories


@contextlib.contextmanager
def wrap_method(name: str, wrappers: Mapping[Any, Callable]) -> Iterator[None]:
    """Call `wrapper(memory, method, ...)` in place of the method `name` of each memory within this context."""
    outer = {memory: memory.__dict__.get(name) for memory in wrappers}
    for memory, wrapper in wrappers.items():
        memory.__dict__[name] = functools.partial(wrapper, memory, getattr(memory, name))
    try:
        yield
    finally:
        for memory, method in outer.items():
            memory.__dict__[name] = method
            if method is None:  # the method of the class again
                del memory.__dict__[name]


@contextlib.contextmanager
def record_memories(model: nn.Module) -> Iterator[list[Recording]]:
    """Record every memory in the forward passes within this context; each pass replaces the previous one's values.

    Raises RunError if a memory reports other values than it states.
    """
    recordings, wrappers = [], {}
    memories = find_recorded(model)
    for memory in memories:
        if isinstance(memory, Stack):
            recording = Recording(memory.layer, memory.site)
            wrappers[memory] = functools.partial(_update_recorded, recording)
        else:
            recording = Recording(memory.layer, memory.site, memory.reports)
            memory.reporter = functools.partial(_add_reported, recording, type(memory).__name__)
        recordings.append(recording)

    def clear(*_: Any) -> None:
        for recording in recordings:
            recording.values = {}

    def check(*_: Any) -> None:
        for memory, recording in zip(memories, recordings, strict=True):
            if missing := recording.meanings.keys() - recording.values.keys():
                raise RunError(f"{type(memory).__name__}.forward: reports no {', '.join(sorted(missing))}; call report")

    hooks = [model.register_forward_pre_hook(clear), model.register_forward_hook(check)]
    try:
        with wrap_method("update", wrappers), use_implementation("eager"), torch.no_grad():
            yield recordings
    finally:
        for hook in hooks:
            hook.remove()
        for memory in memories:
            memory.reporter = None


def _add_reported(recording: Recording, name: str, values: dict[str, Tensor]) -> None:
    """Append the values [B, T] or [B, T, H] of the next tokens. Raises RunError for other names or shapes."""
    if unknown := values.keys() - recording.meanings.keys():
        raise RunError(f"{name}.report: {', '.join(sorted(unknown))}: not in {name}.reports; add it there")
    for key, value in values.items():
        if value.ndim not in (2, 3):
            raise RunError(f"{name}.report: {key} is {list(value.shape)}; expected [B, T] or [B, T, H]")
    recording.add({key: value.float().reshape(*value.shape[:2], -1) for key, value in values.items()})


def _update_recorded(
    recording: Recording, memory: Stack, update: Callable, state: Any, *inputs: Tensor
) -> tuple[Any, Any]:
    """Update the memory as usual and record it."""
    if isinstance(memory, ResidualStack):
        output, slots = update(state, *inputs)
        recording.add(_measure_residual_stack(output, slots))
        return output, slots
    observe = functools.partial(_measure, memory)
    return update_by_token(memory, update, state, inputs, lambda *parts: recording.add(observe(*parts)))


def update_by_token(
    memory: StackMemory, update: Callable, state: StackState, inputs: Sequence[Tensor], observe: Callable
) -> tuple[StackOutput, StackState]:
    """Update a stack with x, logits and h, on axis time token by token.

    Calls `observe(before, after, output, h)` with the states of all tokens, or of each one, as [B, T, ...].
    """
    if memory.axis == "depth":
        output, new = update(state, *inputs)
        observe(state, new, output, inputs[2])
        return output, new
    outputs = []
    for parts in zip(*(tensor.split(1, 1) for tensor in inputs), strict=True):
        output, new = update(state, *parts)
        observe(*(StackState(*(part.unsqueeze(1) for part in s)) for s in (state, new)), output, parts[2])
        outputs.append(output)
        state = new
    return StackOutput(*(torch.cat(tensors, 1) for tensors in zip(*outputs, strict=True))), state


def _measure(
    memory: StackMemory, before: StackState, after: StackState, output: StackOutput, h: Tensor
) -> dict[str, Tensor]:
    push, pop, no_op = output.action.float().unbind(-1)  # [B, T, H]
    is_full = before.mask.shape[-1] == memory.num_slots
    weights = compute_occupied_weights(memory, after) * (after.mask > OCCUPIED)  # [B, T, H, n]
    sharpness, slot = weights.max(-1)
    return {
        "push": push,
        "pop": pop,
        "no_op": no_op,
        "entropy": output.entropy.float(),
        "occupancy": output.occupancy.float(),
        "overflow": push * before.mask[..., -1] if is_full else torch.zeros_like(push),
        "read_slot": slot.float(),
        "read_sharpness": sharpness.float(),
        "read_share": _compute_read_shares(memory, output.read, h),
    }


def _measure_residual_stack(output: ResidualStackOutput, slots: Tensor) -> dict[str, Tensor]:
    weights = output.read.abs()  # [B, T, S]
    action = output.action
    if action is None:  # no-op
        action = weights.new_tensor([0.0, 0.0, 1.0]).expand(*weights.shape[:-1], -1)
    push, pop, no_op = action.unbind(-1)
    sharpness, slot = (weights / weights.sum(-1, keepdim=True)).max(-1)
    values = {
        "push": push,
        "pop": pop,
        "no_op": no_op,
        "entropy": torch.special.entr(action).sum(-1),
        "occupancy": torch.full_like(push, weights.shape[-1]),
        "overflow": push,
        "read_slot": slot.float(),
        "read_sharpness": sharpness,
        "read_share": compute_lower_share(output.read, slots),
    }
    return {name: value.unsqueeze(-1) for name, value in values.items()}


def compute_occupied_weights(memory: StackMemory, state: StackState) -> Tensor:
    """Return the read weights of the occupied slots [..., H, n]; empty slots have the remainder to 1."""
    num_occupied = state.mask.shape[-1]
    if memory.config.read == "top":
        return torch.nn.functional.one_hot(torch.zeros_like(state.mask[..., 0], dtype=torch.int64), num_occupied)
    mask = memory.config.read_mask
    scores = reference.compute_scores(state, memory.get_query().to(state.slots.dtype), mask)
    empty = scores.new_full(
        (*scores.shape[:-1], memory.num_slots - num_occupied), eager.get_empty_score(mask, scores.dtype)
    )
    empty_score = getattr(memory, "empty_score", None)
    return reference.add_score(torch.cat([scores, empty], -1), empty_score).softmax(-1)[..., :num_occupied]


def _compute_read_shares(memory: StackMemory, read: Tensor, h: Tensor) -> Tensor:
    """Return the read share [B, T, H] of each head, with the reads of the other heads set to 0."""
    shares = []
    for head in range(read.shape[-2]):
        alone = torch.zeros_like(read)
        alone[..., head, :] = read[..., head, :]
        added = memory.scale_read(memory.project_up(alone.to(h.dtype)))
        shares.append(added.float().norm(dim=-1) / h.float().norm(dim=-1))
    return torch.stack(shares, -1)
