"""Prove that a network of one layer is the pushdown automaton of its task, for strings of every length.

If a token attends to at most one earlier token and nothing is fed back, then the hidden state h, the pushed vectors x
and the action probabilities a depend only on the context c = (token before, token). There are few contexts, so all of
them are computed, in float64. Three facts make the proof:

- If each context's most probable action is that of the automaton, then with one-hot actions, both stacks hold elements
  that were pushed by the same symbols. The network may push each symbol with the token after it.
- The update of the stack is linear in a. So its top is a mean of the tops that sequences of one-hot actions leave,
  weighted by their probabilities. The most probable actions have at least the weight 1 - sum of the leaks, where the
  leak of a context is 1 - max(a). All other tops are pushed vectors or zeros.
- Before the last normalization, which keeps the order of the logits, they are linear in the top.
"""

import bisect
import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stackexp.certification.automata import NO_OP, NO_STRING, POP, PUSH, Pushdown, StackTask
from stackexp.config.model import TransformerConfig
from stackexp.models.memories.stack import StackMemory
from stackexp.models.stack_recording import wrap_method

START = UNKNOWN = -1
"""The token before the first one, and the action of the first token if pushes are late."""
LONGEST = 10**9
"""Lengths are tried up to here."""


@dataclass(frozen=True)
class StackProof:
    """The heads that are the stack of the automaton, and the lengths for which the network's answers are proved.

    With `is_late`, they push each symbol with the token after it. As trained, the network is right up to `longest`
    symbols, and with one-hot actions on all strings.
    """

    heads: list[int]
    is_late: bool
    longest: int
    largest_leak: float  # of a token in these heads
    largest_error: float  # weight of other action sequences that no answer depends on


def find_obstacle(model: TransformerConfig) -> str | None:
    """Return why no proof is tried for models with this config; None if one is."""
    memory = model.memory
    if model.num_layers != 1 or model.attention_window not in (1, 2) or model.positional not in ("none", "alibi"):
        return "requires one layer, attention_window: 1 or 2, and positional: alibi or none"
    if (memory.axis, memory.read, memory.discipline, memory.site) != ("time", "top", "stack", "after_block"):
        return "requires axis: time, read: top, discipline: stack and site: after_block"
    return "requires feedback: false" if memory.feedback else None


def prove(network: Any, task: StackTask, num_empty: Callable[[int], int]) -> StackProof | None:
    """Return the proof that the answers of a network equal those of a task's automaton; None if there is none.

    `num_empty` is the length of the answer by the length of the string. `find_obstacle` must be None.
    """
    model = copy.deepcopy(network).double()
    contexts = list_contexts(task)
    recorded = [_record_last(model, context) for context in contexts]
    h, x, probabilities = map(torch.stack, zip(*recorded, strict=True))  # [C, d], [C, H, D], [C, H, 3]
    chosen = probabilities.argmax(-1).numpy()
    proofs, empty = [], len(task.is_last)
    is_empty = np.array([token == empty for _, token in contexts])
    for is_late in (False, True):
        actions = np.array([_choose_action(task.pushdown, context, is_late) for context in contexts])
        known = actions != UNKNOWN
        heads = np.flatnonzero((chosen == actions[:, None])[known].all(0)).tolist()
        for part in (list(part) for count in range(len(heads)) for part in itertools.combinations(heads, count + 1)):
            error = _bound_error(model, task.pushdown, contexts, actions, is_late, part, h, x)
            if error > 0:
                leaks = (1 - probabilities.max(-1).values)[:, part].sum(1).numpy() * known
                of_symbol, of_empty = float(leaks[~is_empty].max()), float(leaks[is_empty].max())
                lengths = range(LONGEST)
                first = bisect.bisect_left(lengths, error, key=lambda n: of_symbol * n + of_empty * num_empty(n))
                proofs.append(StackProof(part, is_late, max(0, first - 1), max(of_symbol, of_empty), error))
    return max(proofs, key=lambda proof: proof.longest, default=None)


def list_contexts(task: StackTask) -> list[tuple[int, int]]:
    """Return the pairs (token before, token) that occur in strings and their answers; see `StackTask`."""
    empty = len(task.is_last)
    contexts = [(START, symbol) for symbol in np.flatnonzero(task.may_follow[-1]).tolist()]
    contexts += [(first, second) for first, second in np.argwhere(task.may_follow[:-1]).tolist()]
    may_end = task.is_last | task.may_follow[-1]  # a string of one symbol is always complete
    return [*contexts, *((symbol, empty) for symbol in np.flatnonzero(may_end).tolist()), (empty, empty)]


def _choose_action(pushdown: Pushdown, context: tuple[int, int], is_late: bool) -> int:
    """Return the action of the automaton in a context; if its pushes are late, UNKNOWN for the first token."""
    (before, token), empty = context, len(pushdown.answers)
    if before == empty or not is_late:
        return pushdown.actions[empty + 1 if before == empty else token]
    if before == START:
        return UNKNOWN
    change = (pushdown.actions[before] == PUSH) - (pushdown.actions[token] == POP)
    return {1: PUSH, 0: NO_OP, -1: POP}[change]


@torch.no_grad()
def _record_last(model: Any, context: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return h [d], x [H, D] and the action probabilities [H, 3] of the last token of a context."""
    (memory,), found = model.memories, []

    def record(memory: StackMemory, update: Any, state: Any, x: Tensor, logits: Tensor, h: Tensor) -> Any:
        found.append((h[0, -1], x[0, -1], logits[0, -1].softmax(-1)))
        return update(state, x, logits, h)

    with wrap_method("update", {memory: record}):
        model(torch.tensor([[token for token in context if token != START]]))
    return found[0]


@torch.no_grad()
def _bound_error(
    model: Any,
    pushdown: Pushdown,
    contexts: list[tuple[int, int]],
    actions: np.ndarray,
    is_late: bool,
    heads: list[int],
    h: Tensor,
    x: Tensor,
) -> float:
    """Return the weight of other action sequences below which every answer is right; negative if an answer is wrong.

    The read of a head outside `heads` may be any mean of pushed vectors and zeros.
    """
    memory, weight = model.memories[0], model.norm.weight * model.output_head.weight  # [A, d]
    empty, num_heads = len(pushdown.answers), x.shape[1]
    alone = x[:, None] * torch.eye(num_heads)[:, :, None]  # [C, H, H, D]: the vector of one head, zeros in the others
    tops = torch.cat(
        [memory.add_read(torch.zeros_like(h[0]), alone) @ weight.T, x.new_zeros(1, num_heads, len(weight))]
    )
    base = memory.add_read(h, torch.zeros_like(x)) @ weight.T  # [C, A]
    others = [head for head in range(num_heads) if head not in heads]
    error = 1.0
    for number, (_, token) in enumerate(contexts):
        for answer, possible in _list_tops(pushdown, contexts, actions, is_late, number) if token == empty else ():
            for other in set(range(len(weight))) - {answer}:
                gaps = tops[..., answer] - tops[..., other]  # [C + 1, H]
                gap = base[number, answer] - base[number, other] + gaps[:, others].min(0).values.sum()
                right, worst = gaps[possible][:, heads].sum(1), gaps[:, heads].min(0).values.sum()
                ratios = (gap + right) / (right - worst).clamp_min(torch.finfo(x.dtype).tiny)
                error = min(error, float(ratios.min()))
    return error


def _list_tops(
    pushdown: Pushdown, contexts: list[tuple[int, int]], actions: np.ndarray, is_late: bool, number: int
) -> list[tuple[int, list[int]]]:
    """Return each answer that an empty token may have, with the contexts that may have pushed the top of the heads.

    The number after the last context means an empty stack.
    """
    empty, last = len(pushdown.answers), contexts[number][0]  # the token before this empty token
    pushed: dict[int, list[int]] = {symbol: [] for symbol in range(empty) if pushdown.actions[symbol] == PUSH}
    for i, (before, token) in enumerate(contexts):
        if actions[i] == PUSH and token != empty:
            pushed[before if is_late else token].append(i)
    if last in pushed:
        return [(pushdown.answers[last], [number] if is_late else pushed[last])]
    tops = [(pushdown.answers[symbol], possible) for symbol, possible in pushed.items()]
    bottom = [len(contexts), *np.flatnonzero(actions == UNKNOWN).tolist()]
    return tops if pushdown.empty_answer == NO_STRING else [*tops, (pushdown.empty_answer, bottom)]
