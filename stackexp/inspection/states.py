"""Measure how models of formal languages keep their states apart as strings grow, for `report states`."""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stackexp.certification.automata import REGULAR
from stackexp.datamodules.formal_language import LengthSet, build_string_batch
from stackexp.errors import ConfigError, RunError
from stackexp.evaluation.loading import load_run
from stackexp.models.memories.stack import StackMemory
from stackexp.models.memories.stack_attention import StackAttention
from stackexp.models.recurrent import StackRNNLayer, mix_slots, pad_slots
from stackexp.models.stack_recording import update_by_token, wrap_method
from stackexp.reports.formal_runs import collect_cells
from stackexp.reports.report import Report
from stackexp.reports.states import (
    DEPTHS,
    LENGTHS,
    REFERENCE_LENGTH,
    SCORED,
    Measurements,
    StateRun,
    build_state_report,
)
from stackexp.stack import use_implementation
from stackexp.tasks import TASKS, Task, TaskBatch

WINDOW = 5
"""Tokens of each string whose states are compared: the last ones, because a drift grows along the string."""
MAX_TOKENS = 2**14  # in a forward pass
POPPING = ("reverse_string", "stack_manipulation")  # tasks whose answer pops a stack

Traced = dict[str, list[Tensor]]
"""Name -> the values of consecutive tokens. "stack 0 actions" are [B, T, H, 3], "hidden", "stack 0 read" and so on are
vectors [B, T, ...]."""


def build_states(paths: Sequence[Path], num_strings: int = 64) -> Report:
    """Build the report of all runs on formal languages at or below `paths`, on `num_strings` strings of each length.

    Raises RunError if no run can be measured.
    """
    results = collect_cells(paths, SCORED)
    runs, notes = [], list(results.skipped)
    for run in results.runs:
        score, path = run.compute_score(SCORED), run.row["path"]
        if (longest := run.row["data.max_length"]) >= SCORED[0]:
            notes.append(
                f"skipped, trained on up to {longest} symbols, so {SCORED[0]}..{SCORED[1]} are no test: {path}"
            )
            continue
        if score is None or "validation_accuracy" not in run.row:
            notes.append(f"skipped, unfinished or not tested over {SCORED[0]}..{SCORED[1]}: {path}")
            continue
        try:
            loaded = load_run(path)
        except (ConfigError, RunError) as error:
            notes.append(f"skipped, {error}")
            continue
        runs.append(StateRun(run, score, measure(loaded.module, TASKS[run.row["data.task"]], num_strings)))
    if not runs:
        raise RunError(
            f"{', '.join(map(str, paths))}: no run to measure ({'; '.join(notes)}); give runs with checkpoints"
        )
    return build_state_report(runs, notes)


# The states of a task


def label_tokens(task: Task, strings: TaskBatch) -> np.ndarray:
    """Return the state that each token must have reached [B, T], or -1 for tokens that are not compared.

    After a symbol of a regular language, it is the state of the automaton. In other tasks, it is the symbol of the
    answer, at its token; in tasks of a stack, this is the symbol on top.
    """
    labels = np.where(strings.mask, strings.targets, -1)
    if task.family == "regular" and task.name in REGULAR:
        states = REGULAR[task.name]().automaton.run(strings.inputs)
        labels = np.concatenate([states, np.full_like(labels, -1)], 1)
    elif not task.answers_every_token:
        labels = np.concatenate([np.full_like(strings.inputs, -1), labels], 1)
    num_later = (labels >= 0)[:, ::-1].cumsum(1)[:, ::-1]
    return np.where(num_later <= WINDOW, labels, -1)


def measure_depth(task: Task, strings: TaskBatch) -> np.ndarray | None:
    """Return the depth of each answer symbol [B, O]; None for tasks without brackets and without pops.

    It is the deepest nesting of all kinds of brackets in the string, or the position in the stack, from 1 at the top.
    """
    steps = np.array([x.startswith(("(", "[")) - x.endswith((")", "]")) for x in task.symbols])
    if (steps > 0).any():
        depths = steps[strings.inputs].cumsum(1)
        return np.broadcast_to(depths.max(1, keepdims=True), strings.targets.shape)
    if task.name in POPPING:
        return np.broadcast_to(np.arange(1, strings.targets.shape[1] + 1), strings.targets.shape)
    return None


# Measurements


@torch.no_grad()
def measure(module: Any, task: Task, num_strings: int) -> Measurements:
    """Return all measurements of a `Transduction` module in evaluation mode."""
    found: Measurements = defaultdict(dict)
    samples: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = defaultdict(dict)
    for length in LENGTHS:
        if length < task.min_length:
            continue
        strings = LengthSet(task, "validate", length, num_strings).sample()
        labels, (logits, traced) = label_tokens(task, strings), run_model(module.model, task, strings)
        is_used = np.ones(labels.shape, bool)
        is_used[:, -strings.mask.shape[1] :] = strings.mask | task.answers_every_token
        for place, values in traced.items():
            if place.endswith("actions"):
                found[place, length] = measure_sharpness(values[is_used])
            else:
                compared = values[labels >= 0]  # [N, ...]
                samples[place][length] = compared.reshape(len(compared), -1), labels[labels >= 0]
        is_right = module.predict(logits).numpy() == strings.targets
        found["answers", length] = {"accuracy": float(is_right[strings.mask].mean())}
        if (depth := measure_depth(task, strings)) is not None:
            for first, last in DEPTHS:
                chosen = is_right[strings.mask & (first <= depth) & (depth <= last)]
                if chosen.size:
                    found[f"depth {first}-{last}", length] = {"accuracy": chosen.mean(), "answers": chosen.size}
    for place, by_length in samples.items():
        for length, distances in compare_states(by_length).items():
            found[place, length] = distances
    return dict(found)


def measure_sharpness(actions: np.ndarray) -> dict[str, float]:
    """Return means over tokens and heads, of actions [..., H, 3]; the entropy is in nats."""
    largest = actions.max(-1)
    entropy = -(actions * np.log(actions, where=actions > 0, out=np.zeros_like(actions))).sum(-1)
    return {
        "max_probability": float(largest.mean()),
        "below_0.9": float((largest < 0.9).mean()),
        "below_0.99": float((largest < 0.99).mean()),
        "entropy": float(entropy.mean()),
    }


def compare_states(samples: dict[int, tuple[np.ndarray, np.ndarray]]) -> dict[int, dict[str, float]]:
    """Return the distances of states at each length, of {length: (vectors [N, D], states [N])}.

    `within_between` is the root mean square distance of two tokens in one state, over that of two tokens in different
    states; states and pairs of states have equal weight. It is 0 if each state is a point, and 1 if the states cannot
    be separated. For two states, its square is 2 V / (2 V + 1), where V is their class-distance normalized variance
    (Galanti et al. 2022, arXiv 2112.15121).

    `shift` is the root mean square distance of the center of a state from its center at lengths up to
    REFERENCE_LENGTH, over the distance of two centers there.

    States with one token are left out, as are lengths with fewer than two states, and vectors that are constant. A
    length none of whose states occurs up to REFERENCE_LENGTH has no `shift`.
    """
    near = [sample for length, sample in samples.items() if length <= REFERENCE_LENGTH]
    reference, _ = find_centers(*(np.concatenate(parts) for parts in zip(*near, strict=True)))
    found = {}
    for length, (vectors, states) in samples.items():
        centers, variance = find_centers(vectors, states)
        if len(centers) > 1 and len(reference) > 1 and square_distances(reference) > 0:
            between = 2 * variance + square_distances(centers)
            moves = [np.square(centers[state] - reference[state]).sum() for state in centers.keys() & reference]
            found[length] = {"within_between": float(np.sqrt(2 * variance / between))}
            if moves:
                found[length]["shift"] = float(np.sqrt(np.mean(moves) / square_distances(reference)))
    return found


def find_centers(vectors: np.ndarray, states: np.ndarray) -> tuple[dict[int, np.ndarray], float]:
    """Return the center of each state that has two tokens or more, and the mean of their total variances."""
    groups = {state: vectors[states == state] for state in np.unique(states) if np.sum(states == state) > 1}
    variances = [group.var(0, ddof=1).sum() for group in groups.values()]
    return {state: group.mean(0) for state, group in groups.items()}, float(np.mean(variances)) if variances else 0.0


def square_distances(centers: dict[int, np.ndarray]) -> float:
    """Return the mean square distance of two different centers."""
    return float(2 * np.var(list(centers.values()), axis=0, ddof=1).sum())


# Traces


def run_model(model: Any, task: Task, strings: TaskBatch) -> tuple[Tensor, dict[str, np.ndarray]]:
    """Return the logits of the answers [B, O, V], and the values that `trace_stacks` records, with "hidden"."""
    num_rows = max(1, MAX_TOKENS // task.count_tokens(strings.inputs.shape[1]))
    logits, traces = [], []
    for start in range(0, len(strings.inputs), num_rows):
        batch = build_string_batch(TaskBatch(*(part[start : start + num_rows] for part in strings)), task)
        with trace_stacks(model) as traced:
            hidden = model(batch["tokens"], return_hidden=True).hidden
        logits.append(F.linear(hidden[:, -batch["targets"].shape[1] :], *model.output_head))
        traces.append({"hidden": hidden} | {name: torch.cat(values, 1) for name, values in traced.items()})
    return torch.cat(logits), {name: torch.cat([t[name] for t in traces]).float().numpy() for name in traces[0]}


@contextlib.contextmanager
def trace_stacks(model: Any) -> Iterator[Traced]:
    """Record the actions and the read of each stack in the forward passes within this context.

    Stacks that read all slots also have "top", the slot on top. The top of a StackRNN is what the next token reads.
    """
    traced: Traced = defaultdict(list)
    names = {memory: f"stack {i}" for i, memory in enumerate([*model.memories, *model.layers])}
    stacks = [memory for memory in model.memories if isinstance(memory, StackMemory)]
    hooks = [
        module.register_forward_hook(functools.partial(trace, traced, names[module]))
        for kind, trace in ((StackAttention, _trace_attention), (StackRNNLayer, _trace_rnn))
        for module in names
        if isinstance(module, kind)
    ]
    wrappers = {memory: functools.partial(_trace_update, traced, names[memory]) for memory in stacks}
    needs_slots = any(memory.config.read != "top" for memory in stacks)
    try:
        with wrap_method("update", wrappers), use_implementation("eager") if needs_slots else contextlib.nullcontext():
            yield traced
    finally:
        for hook in hooks:
            hook.remove()


def _trace_update(
    traced: Traced, name: str, memory: StackMemory, update: Callable, state: Any, *inputs: Tensor
) -> tuple[Any, Any]:
    """Update a stack as usual; token by token where the slot on top is not what it reads."""
    if memory.config.read == "top":
        output, state = update(state, *inputs)
    else:
        tops = traced[f"{name} top"]
        output, state = update_by_token(
            memory, update, state, inputs, lambda _, after, *rest: tops.append(after.slots[..., 0, :])
        )
    traced[f"{name} actions"].append(output.action)
    traced[f"{name} read"].append(output.read)
    return output, state


def _trace_attention(traced: Traced, name: str, memory: StackAttention, inputs: Any, output: Any) -> None:
    traced[f"{name} actions"].append(memory.actions(inputs[0]).softmax(-1).unsqueeze(2))
    traced[f"{name} read"].append(output[0] - inputs[0])


def _trace_rnn(traced: Traced, name: str, layer: StackRNNLayer, inputs: Any, output: Any) -> None:
    """Repeat the scan with the hidden states that are known."""
    logits, values = layer.stack_input(output[0]).split([3, layer.config.slot_size], -1)
    actions, values = logits.softmax(-1), values.sigmoid()
    slots, tops = values[:, :0], []
    for action, value in zip(actions.unbind(1), values.unbind(1), strict=True):
        slots = mix_slots(pad_slots(value, slots, layer.num_slots), action)
        tops.append(slots[:, 0])
    traced[f"{name} actions"].append(actions.unsqueeze(2))
    traced[f"{name} read"].append(torch.stack(tops, 1))
