"""Prove a one-layer network equal to its task's pushdown automaton: with one-hot actions, or as trained up to a length.

If a token attends to at most one earlier token and nothing is fed back, then the hidden state h, the pushed vectors x
and the action probabilities a depend only on the context c = (token before, token). There are few contexts, so all of
them are computed, in float64 and without bounds on rounding. Three facts make the proof, if there is a slot for each
symbol:

- If each context's most probable action is that of the automaton, then with one-hot actions, both stacks hold elements
  that were pushed by the same symbols. The network may act one token late, until the first empty token. Then its
  first token, which looks like the same token twice, pushes one element more, below all others.
- The update of the stack is linear in a. So its top is a mean of the tops that sequences of one-hot actions leave,
  weighted by their probabilities. The most probable actions have at least the weight 1 - sum of the leaks, where the
  leak of a context is the probability of its other actions. All other tops are pushed vectors or zeros.
- The last normalization divides the logits of a token by one positive number. Without it, they are linear in the top.
"""

import bisect
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stackexp.certification.automata import FORBIDDEN, NO_STRING, PUSH, Pushdown, StackTask
from stackexp.config.model import TransformerConfig
from stackexp.models.memories.stack import StackMemory
from stackexp.models.stack_recording import wrap_method

START = -1
"""The token before the first one."""
MIN_GAP = 2e-3
"""Actions whose log probability is larger by less than this do not count as chosen."""
LONGEST = 10**9
"""Lengths are tried up to here."""


@dataclass(frozen=True)
class StackProof:
    """The heads that are the stack of the automaton, and the lengths for which the network's answers are proved.

    With `is_late`, they act one token late. As trained, the network is right up to `longest` symbols, and with one-hot
    actions on all strings.
    """

    heads: list[int]
    is_late: bool
    longest: int
    largest_leak: float  # of a token, added over these heads
    tolerance: float  # answers are right while the probabilities of other actions add up to less


def find_obstacle(model: TransformerConfig) -> str | None:
    """Return why no proof is tried for models with this config; None if one is."""
    memory = model.memory
    if (model.kind, memory.kind) != ("transformer", "stack"):
        return "requires model.kind: transformer and memory.kind: stack"
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
    sorted_probabilities, order = probabilities.sort(-1, descending=True)
    is_clear = (sorted_probabilities[..., 0].log() - sorted_probabilities[..., 1].log() > MIN_GAP).numpy()  # [C, H]
    leaks = sorted_probabilities[..., 1:].sum(-1).numpy()
    proofs, empty = [], task.grammar.num_symbols
    is_empty = np.array([token == empty for _, token in contexts])
    for is_late in (False, True) if task.pushdown.empty_answer == NO_STRING else (False,):
        tokens = [empty + 1 if c[0] == empty else _select_token(c, is_late) for c in contexts]
        actions = np.array([task.pushdown.actions[token] for token in tokens])
        heads = np.flatnonzero(((order[..., 0].numpy() == actions[:, None]) & is_clear).all(0))
        heads = heads[leaks[:, heads].max(0).argsort()]  # the sharpest first
        for part in (heads[: count + 1].tolist() for count in range(len(heads))):
            tolerance = _compute_tolerance(model, task.pushdown, contexts, actions, is_late, part, h, x)
            if tolerance > 0:
                leak = leaks[:, part].sum(1)
                of_symbol, of_empty = float(leak[~is_empty].max()), float(leak[is_empty].max())
                lengths = range(LONGEST)
                first = bisect.bisect_left(lengths, tolerance, key=lambda n: of_symbol * n + of_empty * num_empty(n))
                proofs.append(StackProof(sorted(part), is_late, max(0, first - 1), max(of_symbol, of_empty), tolerance))
    return max(proofs, key=lambda proof: proof.longest, default=None)


def list_contexts(task: StackTask) -> list[tuple[int, int]]:
    """Return the pairs (token before, token) that occur in strings and their answers; see `Pushdown`."""
    grammar, empty = task.grammar, task.grammar.num_symbols
    contexts: dict[tuple[int, int], None] = {}
    reached = [(0, START)]  # (state of the grammar, last symbol)
    for state, last in reached:  # grows within the loop
        for symbol in np.flatnonzero(grammar.follow[state] != FORBIDDEN).tolist():
            contexts[last, symbol] = None
            if (target := (int(grammar.follow[state, symbol]), symbol)) not in reached:
                reached.append(target)
    ends = {last: None for state, last in reached if last != START and grammar.is_string[state]}
    return [*contexts, *((last, empty) for last in ends), (empty, empty)]


def _select_token(context: tuple[int, int], is_late: bool) -> int:
    """Return the token that the network acts on."""
    before, token = context
    return before if is_late and before != START else token


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
def _compute_tolerance(
    model: Any,
    pushdown: Pushdown,
    contexts: list[tuple[int, int]],
    actions: np.ndarray,
    is_late: bool,
    heads: list[int],
    h: Tensor,
    x: Tensor,
) -> float:
    """Return the weight of other action sequences below which every answer is right; 0 or less if an answer is wrong.

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
    ratios = [x.new_ones(1)]
    for number, (_, token) in enumerate(contexts):
        for answer, possible in _list_tops(pushdown, contexts, actions, is_late, number) if token == empty else ():
            for other in set(range(len(weight))) - {answer}:
                gaps = tops[..., answer] - tops[..., other]  # [C + 1, H]
                gap = base[number, answer] - base[number, other] + gaps[:, others].min(0).values.sum()
                right, worst = gaps[possible][:, heads].sum(1), gaps[:, heads].min(0).values.sum()
                ratios.append((gap + right) / (right - worst).clamp_min(torch.finfo(x.dtype).tiny))
    return float(torch.cat(ratios).min())  # nan if a weight is not finite


def _list_tops(
    pushdown: Pushdown, contexts: list[tuple[int, int]], actions: np.ndarray, is_late: bool, number: int
) -> list[tuple[int, list[int]]]:
    """Return each answer that an empty token may have, with the contexts that may have pushed the top of the heads.

    The number after the last context means an empty stack.
    """
    empty, last = len(pushdown.answers), contexts[number][0]  # the token before this empty token
    pushed: dict[int, list[int]] = {symbol: [] for symbol in range(empty) if pushdown.actions[symbol] == PUSH}
    for i, context in enumerate(contexts):
        if actions[i] == PUSH and context[1] != empty:
            pushed[_select_token(context, is_late)].append(i)
    if last in pushed:
        return [(pushdown.answers[last], [number] if is_late else pushed[last])]
    tops = [(pushdown.answers[symbol], possible) for symbol, possible in pushed.items()]
    return tops if pushdown.empty_answer == NO_STRING else [*tops, (pushdown.empty_answer, [len(contexts)])]
