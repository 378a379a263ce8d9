"""Moore machines and pushdown automata: those of the tasks, their comparison and their text."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from stackexp.tasks import TASKS
from stackexp.tasks.context_sensitive import HOLE
from stackexp.tasks.expressions import MODULUS
from stackexp.tasks.groups import GROUPS

NO_STRING = -1  # the output for a string that is no input of the task, and its padding
FORBIDDEN = -1  # the state of a grammar after a symbol that may not follow
PUSH, POP, NO_OP = range(3)  # the order of a stack's action logits
ACTION_LABELS = ("push", "pop", "no-op")


@dataclass(frozen=True)
class Automaton:
    """A Moore machine. State 0 is the initial state, and the states are numbered by breadth-first search."""

    transitions: np.ndarray  # int64 [states, symbols]
    outputs: np.ndarray  # int64 [states]: an answer symbol, or NO_STRING

    @property
    def num_states(self) -> int:
        """The number of states."""
        return len(self.outputs)

    def run(self, strings: np.ndarray) -> np.ndarray:
        """Return the states after each symbol of strings [B, L]: int64 [B, L]."""
        states = np.empty(strings.shape, np.int64)
        current: np.ndarray | int = 0
        for i, symbols in enumerate(strings.T):
            states[:, i] = current = self.transitions[current, symbols]
        return states


def build_automaton(start: Hashable, move: Callable, answer: Callable, num_symbols: int) -> Automaton:
    """Return the machine of a rule: `move(state, symbol)` is the next state, `answer(state)` the output."""
    numbers = {start: 0}
    transitions = []
    for state in (states := [start]):  # grows within the loop
        row = []
        for symbol in range(num_symbols):
            target = move(state, symbol)
            if target not in numbers:
                numbers[target] = len(states)
                states.append(target)
            row.append(numbers[target])
        transitions.append(row)
    return Automaton(np.array(transitions), np.array([answer(state) for state in states]))


def find_difference(first: Automaton, second: Automaton) -> tuple[int, ...] | None:
    """Return the shortest string with different outputs, None if there is none.

    Searches the product of both automata breadth first. The empty string does not count: it is no input of a task.
    """
    found: dict[tuple[int, int], tuple] = {(0, 0): ()}  # (string without its last symbol, as here, last symbol)
    for pair in (pairs := [(0, 0)]):  # grows within the loop
        for symbol in range(first.transitions.shape[1]):
            target = int(first.transitions[pair[0], symbol]), int(second.transitions[pair[1], symbol])
            string: tuple = found[pair], symbol
            if first.outputs[target[0]] != second.outputs[target[1]]:
                symbols: list[int] = []
                while string:
                    string, last = string
                    symbols.append(last)
                return tuple(reversed(symbols))
            if target not in found:
                found[target] = string
                pairs.append(target)
    return None


@dataclass(frozen=True)
class Grammar:
    """The strings of a task, as a finite automaton. State 0 is the initial state."""

    follow: np.ndarray  # int64 [states, symbols]: the state after a symbol, or FORBIDDEN
    is_string: np.ndarray  # bool [states]: may a string end here, except for the empty one

    @property
    def num_symbols(self) -> int:
        """The size of the alphabet."""
        return self.follow.shape[1]

    def run(self, strings: np.ndarray) -> np.ndarray:
        """Return the states after strings [B, L], FORBIDDEN after a symbol that may not follow: int64 [B]."""
        state = np.zeros(len(strings), np.int64)
        for symbols in strings.T:
            state = np.where(state == FORBIDDEN, FORBIDDEN, self.follow[state, symbols])
        return state

    def are_strings(self, prefixes: np.ndarray) -> np.ndarray:
        """Return True for prefixes [B, L] that are strings of the task, L > 0: bool [B]."""
        state = self.run(prefixes)
        return (state != FORBIDDEN) & self.is_string[state]

    def build_automaton(self) -> Automaton:
        """Return the machine whose output is 0 for strings and NO_STRING for others."""
        follow = np.concatenate([self.follow, np.full((1, self.num_symbols), FORBIDDEN)])
        return Automaton(
            np.where(follow == FORBIDDEN, len(self.follow), follow),
            np.where([*self.is_string, False], 0, NO_STRING),
        )

    def draw(self, rng: np.random.Generator, count: int, length: int) -> np.ndarray:
        """Draw prefixes [count, length], each symbol uniform among those after which others may follow."""
        goes_on = (self.follow != FORBIDDEN).any(1)
        choices = (self.follow != FORBIDDEN) & goes_on[self.follow]
        strings, state = np.empty((count, length), np.int64), np.zeros(count, np.int64)
        for column in strings.T:
            column[:] = np.where(choices[state], rng.random((count, self.num_symbols)), -1).argmax(1)
            state = self.follow[state, column]
        return strings


# The automata of the regular tasks, from their definitions and not from their generators


@dataclass(frozen=True)
class RegularTask:
    """The automaton of a task, whose output is NO_STRING after prefixes that are no strings, and its strings."""

    automaton: Automaton
    grammar: Grammar
    contains: Callable[[tuple[int, ...]], bool] = lambda string: True  # is a string of the grammar one of the task?
    strings: str = ""  # the strings of the grammar in words, if the task has fewer


def _allow_all(automaton: Automaton) -> RegularTask:
    return RegularTask(automaton, _allow_symbols(automaton.transitions.shape[1]))


def _allow_symbols(count: int) -> Grammar:
    return Grammar(np.zeros((1, count), np.int64), np.ones(1, bool))


def _build_modular_arithmetic() -> RegularTask:
    """Build the automaton of digits joined by + - *: a state is (total, factor or term, is the last one a digit)."""
    symbols = TASKS["modular_arithmetic"].symbols
    is_digit = np.array([symbol.isdigit() for symbol in symbols])
    is_operator = np.array([symbol in "+-*" for symbol in symbols])
    follow = np.where([is_digit, is_operator], [[1], [0]], FORBIDDEN)  # before and after a digit

    def move(state: tuple[int, int, bool] | None, symbol: int) -> tuple[int, int, bool] | None:
        if state is None or not (is_operator if state[2] else is_digit)[symbol]:
            return None  # digits and operators alternate
        total, factor, _ = state
        if symbol < MODULUS:
            return total, factor * symbol % MODULUS, True
        if symbol == MODULUS + 2:  # *
            return total, factor, False
        return (total + factor) % MODULUS, (1, MODULUS - 1)[symbol - MODULUS], False

    def answer(state: tuple[int, int, bool] | None) -> int:
        return (state[0] + state[1]) % MODULUS if state and state[2] else NO_STRING

    automaton = build_automaton((0, 1, False), move, answer, len(symbols))
    return RegularTask(automaton, Grammar(follow, np.array([False, True])))


def _build_missing_duplicate() -> RegularTask:
    """Build the parity of the ones. In a string written twice without one symbol, it is that symbol.

    The halves of a string may differ here, unlike in the task. A state is (parity, state of the grammar).
    """
    # After an even and odd number of symbols, odd and even with the hole, and after the pad; columns 0 1 _ and the pad
    follow = np.array([[1, 1, 2, -1], [0, 0, 3, -1], [3, 3, -1, -1], [2, 2, -1, 4], [-1, -1, -1, -1]])
    is_string = np.array([False, False, False, True, True])

    def move(state: tuple[int, int], symbol: int) -> tuple[int, int]:
        after = FORBIDDEN if state[1] == FORBIDDEN else int(follow[state[1], symbol])
        return (0 if after == FORBIDDEN else state[0] ^ (symbol == 1), after)

    def answer(state: tuple[int, int]) -> int:
        return state[0] if state[1] != FORBIDDEN and is_string[state[1]] else NO_STRING

    def contains(string: tuple[int, ...]) -> bool:
        first, second = np.split(np.array(string[: len(string) // 2 * 2]), 2)
        return bool(((first == second) | (first == HOLE) | (second == HOLE)).all())

    strings = "an even number of symbols, one of them a hole, then a pad or none; the task has those with equal halves"
    return RegularTask(build_automaton((0, 0), move, answer, 4), Grammar(follow, is_string), contains, strings)


def _build_word_problem(group: str) -> RegularTask:
    """Build the automaton of a group: the states are its elements, composed here as maps of points."""
    elements = GROUPS[group]
    points = range(len(elements[0]))

    def move(state: tuple[int, ...], symbol: int) -> tuple[int, ...]:
        return tuple(elements[symbol][state[i]] for i in points)

    return _allow_all(build_automaton(tuple(points), move, elements.index, len(elements)))


REGULAR: dict[str, Callable[[], RegularTask]] = {
    "even_pairs": lambda: _allow_all(
        build_automaton((), lambda s, x: (s[0] if s else x, x), lambda s: int(bool(s) and s[0] != s[1]), 2)
    ),
    "parity_check": lambda: _allow_all(build_automaton(0, lambda state, symbol: (state + symbol) % 2, int, 2)),
    "cycle_navigation": lambda: _allow_all(build_automaton(0, lambda state, symbol: (state + symbol - 1) % 5, int, 3)),
    "modular_arithmetic": _build_modular_arithmetic,
    "missing_duplicate": _build_missing_duplicate,
    **{f"word_problem_{group}": functools.partial(_build_word_problem, group) for group in GROUPS},
}


@dataclass(frozen=True)
class Pushdown:
    """A pushdown automaton whose action depends on the token only, and whose answer on the top of the stack only.

    Tokens are the symbols, the first empty token and later empty tokens, in this order. A push pushes its own token. A
    pop of an empty stack does nothing. After each empty token, the answer is that of the top of the stack.
    """

    actions: tuple[int, ...]  # of each token: PUSH, POP or NO_OP
    answers: tuple[int, ...]  # of each symbol on top; NO_STRING for symbols that are never pushed
    empty_answer: int  # of an empty stack; NO_STRING if the answer has ended before

    def run(self, strings: np.ndarray, num_empty: int) -> np.ndarray:
        """Return the answers [B, num_empty] of strings [B, L]. Nothing follows the answer of an empty stack."""
        num_symbols, (rows, length) = len(self.answers), strings.shape
        empty = np.full((rows, num_empty), num_symbols + 1)
        empty[:, :1] = num_symbols
        stack = np.full((rows, length + num_empty + 1), -1)  # the first element is below the bottom
        height, every = np.zeros(rows, np.int64), np.arange(rows)
        labels = np.array([*self.answers, self.empty_answer])
        output = np.full((rows, num_empty), NO_STRING)
        for i, tokens in enumerate(np.concatenate([strings, empty], 1).T):
            actions = np.array(self.actions)[tokens]
            height = np.maximum(height + (actions == PUSH) - (actions == POP), 0)
            stack[every, height] = np.where(actions == PUSH, tokens, stack[every, height])
            if i >= length:
                output[:, i - length] = labels[stack[every, height]]
        ended = np.cumsum(output == self.empty_answer, 1) - (output == self.empty_answer) > 0
        return np.where(ended, NO_STRING, output)


@dataclass(frozen=True)
class StackTask:
    """The pushdown automaton of a task and the strings that the task has."""

    pushdown: Pushdown
    grammar: Grammar


STACK_TASKS: dict[str, StackTask] = {
    "reverse_string": StackTask(Pushdown((PUSH, PUSH, NO_OP, POP), (0, 1), NO_STRING), _allow_symbols(2)),
    "stack_manipulation": StackTask(
        Pushdown((PUSH, PUSH, POP, PUSH, PUSH, NO_OP, POP), (0, 1, NO_STRING, 0, 1), 2),
        # symbols, then actions; a string of one symbol has no action
        Grammar(
            np.array([[1, 1, -1, -1, -1], [2, 2, 3, 3, 3], [2, 2, 3, 3, 3], [-1, -1, 3, 3, 3]]),
            np.array([False, True, False, True]),
        ),
    ),
}


# Text


def format_string(symbols: Sequence[str], string: tuple[int, ...]) -> str:
    """Return a string with runs of ten or more equal symbols written as (symbol x length)."""
    separator = "" if all(len(symbol) == 1 for symbol in symbols) else " "
    parts, start = [], 0
    for end in range(1, len(string) + 1):
        if end == len(string) or string[end] != string[start]:
            symbol, count = symbols[string[start]], end - start
            parts += [f"({symbol} x {count})"] if count >= 10 else [symbol] * count
            start = end
    return separator.join(parts)


def describe_automaton(task: str, automaton: Automaton) -> dict[str, object]:
    """Return the automaton for JSON, with the names of symbols and answers."""
    answers = (*TASKS[task].answer_symbols, None)
    rows = [dict(zip(TASKS[task].symbols, map(int, row), strict=True)) for row in automaton.transitions]
    return {"initial": 0, "answers": [answers[i] for i in automaton.outputs], "transitions": rows}


def describe_pushdown(task: str, automaton: Pushdown) -> dict[str, object]:
    """Return the pushdown automaton for JSON, with the names of tokens and answers."""
    symbols, answers = TASKS[task].symbols, (*TASKS[task].answer_symbols, None)
    names = [ACTION_LABELS[action] for action in automaton.actions]
    return {
        "actions": dict(zip((*symbols, "first empty token", "later empty tokens"), names, strict=True)),
        "answer_by_top": {
            name: answers[i] for name, i in zip(symbols, automaton.answers, strict=True) if i != NO_STRING
        },
        "answer_of_the_empty_stack": answers[automaton.empty_answer],
    }
