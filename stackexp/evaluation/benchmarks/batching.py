"""Batches of requests: continuations with the prefix they share, and prompts of equal length. Imports no torch."""

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from more_itertools import constrained_batches  # required by lm-eval

MAX_NEW_TOKENS = 256  # lm-eval's default for tasks that set no limit
MAX_NEW_TOKENS_OPTIONS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # lm-eval's order


@dataclass(frozen=True)
class Pair:
    """Request number `index`: the tokens of a context and of the continuation to be scored."""

    index: int
    context: Sequence[int]
    continuation: Sequence[int]


@dataclass(frozen=True)
class Group:
    """Pairs with a common prefix, which may be empty; `inputs` are the tokens after it that predict."""

    prefix: tuple[int, ...]
    inputs: Sequence[Sequence[int]]
    pairs: list[Pair]


@dataclass(frozen=True)
class Batch:
    """Rows whose prefixes have the same length: one forward pass for the prefixes, and one for the rest.

    Row i has `inputs[i]` after `prefixes[owners[i]]`, and predicts the continuation of `pairs[i]`.
    """

    prefixes: list[tuple[int, ...]]
    owners: list[int]
    inputs: list[Sequence[int]]
    pairs: list[Pair]

    def list_predictions(self) -> tuple[list[int], list[int], list[int]]:
        """Return row, column and target of every prediction, row by row."""
        rows: list[int] = []
        columns: list[int] = []
        targets: list[int] = []
        for number, (row, pair) in enumerate(zip(self.inputs, self.pairs, strict=True)):
            count = len(pair.continuation)
            rows += [number] * count
            columns += range(len(row) - count, len(row))
            targets += pair.continuation
        return rows, columns, targets


def plan_batches(pairs: Sequence[Pair], batch_size: int, max_length: int, shares_prefixes: bool = True) -> list[Batch]:
    """Return the batches for these pairs, the most expensive first.

    Pairs with the same context form a group whose context is computed once, if this saves at least half of the tokens.
    A sequence of more than `max_length` inputs loses its first tokens. A group of more than `batch_size` pairs is a
    batch of its own.
    """
    by_context: dict[Hashable, list[Pair]] = {}
    for pair in pairs:
        by_context.setdefault(tuple(pair.context) if shares_prefixes else pair.index, []).append(pair)
    groups: list[Group] = []
    for members in by_context.values():
        groups += _build_groups(members, max_length)
    groups.sort(key=lambda group: (-len(group.prefix), -max(map(len, group.inputs)), group.pairs[0].index))
    return [
        _merge(part)
        for _, same in itertools.groupby(groups, key=lambda group: len(group.prefix))
        for part in constrained_batches(same, batch_size, get_len=lambda group: len(group.pairs), strict=False)
    ]


def _build_groups(pairs: list[Pair], max_length: int) -> Iterator[Group]:
    """Yield one group of pairs with a common context, or one group for each pair."""
    prefix, last = tuple(pairs[0].context[:-1]), list(pairs[0].context[-1:])
    rows = [[*last, *pair.continuation[:-1]] for pair in pairs]
    whole, rest = len(prefix) * len(pairs), sum(map(len, rows))
    saved = whole - len(prefix)
    if 2 * saved >= whole + rest and len(prefix) + max(map(len, rows)) <= max_length:
        yield Group(prefix, rows, pairs)
        return
    for pair in pairs:
        if len(pair.continuation) > max_length:
            pair = replace(pair, continuation=pair.continuation[-max_length:])
        yield Group((), [[*pair.context, *pair.continuation[:-1]][-max_length:]], [pair])


def _merge(groups: Sequence[Group]) -> Batch:
    return Batch(
        prefixes=[group.prefix for group in groups],
        owners=[number for number, group in enumerate(groups) for _ in group.pairs],
        inputs=[row for group in groups for row in group.inputs],
        pairs=[pair for group in groups for pair in group.pairs],
    )


def limit_new_tokens(options: Mapping[str, Any], max_length: int) -> int:
    """Return the most tokens to generate with a task's options: at most half of the model's context."""
    given = (options[name] for name in MAX_NEW_TOKENS_OPTIONS if options.get(name) is not None)
    return min(int(next(given, MAX_NEW_TOKENS)), max_length // 2)


def plan_generation(prompts: Sequence[Sequence[int]], options: Sequence[Hashable], batch_size: int) -> list[list[int]]:
    """Return batches of prompt numbers with equal length and options, the longest prompts first."""
    by_kind: dict[Hashable, list[int]] = {}
    for number, (prompt, choice) in enumerate(zip(prompts, options, strict=True)):
        by_kind.setdefault((len(prompt), choice), []).append(number)
    ordered = sorted(by_kind.values(), key=lambda numbers: (-len(prompts[numbers[0]]), numbers[0]))
    return [numbers[i : i + batch_size] for numbers in ordered for i in range(0, len(numbers), batch_size)]
