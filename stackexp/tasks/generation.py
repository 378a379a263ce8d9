"""Language modeling: Dyck-(k, m), and five context-free languages against the entropy of their source.

Dyck-(k, m) has k types of brackets nested at most m deep (Hewitt et al. 2020, arXiv 2010.07515). The model predicts the
next symbol. As published, accuracy counts closing brackets: an answer is correct if the model gives the right one at
least 80 % of the probability of all closing brackets. Here strings have a given length; each bracket opens or closes
with equal probability where both are possible.

The context-free languages are those of DuSell & Chiang 2020 (arXiv 2010.04674), with their grammars and mean lengths.
The model reads a start symbol and the string, and predicts each next symbol and the end. A string of a given length is
drawn from the grammar's distribution over strings of that length. `Task.entropy` is, as published, the cross entropy of
the source: the entropy of the string given its length plus the log of the number of training lengths, per predicted
symbol. The grammar of the hardest language is ambiguous: its source has no closed form, so `entropy` is None and its
loss can only be compared between models.
Differences: trained on up to 80 symbols (published: 40 to 80), so that a curriculum is possible; tested to 200
(published: 100).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from functools import cache
from typing import NamedTuple

from stackexp.tasks.definition import NO_TARGET, Drawn, fit_length, np, task

MAX_LENGTH, VALIDATION_MAX_LENGTH, EVAL_MAX_LENGTH = 80, 90, 200


def register_dyck(num_types: int, max_depth: int) -> None:
    """Register Dyck-(k, m): id i opens type i, id k + i closes it."""
    names = [f"({i}" for i in range(num_types)] + [f"{i})" for i in range(num_types)]

    @task(
        "bracket generation",
        name=f"dyck_{num_types}_{max_depth}",
        symbols=names,
        answer_symbols=names,
        answers_every_token=True,
        min_length=2,
        length_step=2,
        required_slots=lambda length: max_depth,
        rivals=range(num_types, 2 * num_types),
    )
    def generate(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
        rows, depth = np.arange(batch_size), np.zeros(batch_size, np.int64)
        stack = np.zeros((batch_size, max_depth + 1), np.int64)
        strings = np.empty((batch_size, length), np.int64)
        for i in range(length):
            can_open = depth < min(max_depth, length - i - 1)
            opens = can_open & ((depth == 0) | (rng.random(batch_size) < 0.5))
            types = rng.integers(0, num_types, batch_size)
            strings[:, i] = np.where(opens, types, num_types + stack[rows, depth - 1])
            stack[rows[opens], depth[opens]] = types[opens]
            depth += np.where(opens, 1, -1)
        targets = np.concatenate([strings[:, 1:], np.full((batch_size, 1), NO_TARGET)], 1)
        return strings, targets, targets >= num_types


Rule = tuple[str, float]
"""The right side of a rule, one character a symbol, and its probability. Keys of a grammar are nonterminals."""
Grammar = dict[str, list[Rule]]


class GrammarSource:
    """The distribution of a grammar over the derivations of each length. `S` is the start symbol."""

    def __init__(self, grammar: Grammar, max_length: int):
        self.grammar = grammar
        # total[x][n]: probability that x derives a string of n symbols; x is a symbol or a suffix of a right side
        # log_total[x][n]: sum over those derivations of p log p
        self.total: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(max_length + 1))
        self.log_total: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(max_length + 1))
        suffixes = {right[i:] for rules in grammar.values() for right, _ in rules for i in range(len(right) + 1)}
        self.total[""][0] = 1.0
        for symbol in {symbol for suffix in suffixes for symbol in suffix} - grammar.keys():
            self.total[symbol][1] = 1.0
        ordered = sorted((suffix for suffix in suffixes if len(suffix) > 1), key=len)
        for n in range(max_length + 1):
            for _ in range(len(grammar) + 1):  # rules without terminals and empty rules: no cycles, so this suffices
                for suffix in ordered:
                    self._update_suffix(suffix, n)
                for symbol, rules in grammar.items():
                    parts = [(p * self.total[r][n], p * self.log_total[r][n], p) for r, p in rules]
                    self.total[symbol][n] = sum(total for total, _, _ in parts)
                    self.log_total[symbol][n] = sum(log + total * math.log(p) for total, log, p in parts)

    def _update_suffix(self, suffix: str, n: int) -> None:
        first, rest = suffix[0], suffix[1:]
        left, right = self.total[first][: n + 1], self.total[rest][n::-1]
        self.total[suffix][n] = left @ right
        self.log_total[suffix][n] = self.log_total[first][: n + 1] @ right + left @ self.log_total[rest][n::-1]

    def compute_entropy(self, length: int) -> float:
        """Return the entropy in nats of the derivation of a string of this length."""
        total = self.total["S"][length]
        return float(math.log(total) - self.log_total["S"][length] / total)

    def draw(self, rng: np.random.Generator, length: int) -> str:
        """Draw a string of this length."""
        text, pending = [], [("S", length)]
        while pending:
            suffix, n = pending.pop()
            if suffix in self.grammar:
                weights = [p * self.total[right][n] for right, p in self.grammar[suffix]]
                pending.append((self.grammar[suffix][self._choose(rng, weights)][0], n))
            elif len(suffix) == 1:
                text.append(suffix)
            elif suffix:
                first, rest = suffix[0], suffix[1:]
                split = self._choose(rng, self.total[first][: n + 1] * self.total[rest][n::-1])
                pending += [(rest, n - split), (first, split)]
        return "".join(text)

    def _choose(self, rng: np.random.Generator, weights: np.ndarray | list[float]) -> int:
        cumulative = np.cumsum(weights)
        return int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))


def to_probability(mean: float) -> float:
    """Return the probability to continue for a geometric number of repetitions with this mean."""
    return mean / (1 + mean)


def build_reversal(center: str, mean_length: float = 60) -> Grammar:
    """Return the grammar of w, a center and w reversed."""
    p = to_probability(mean_length)
    return {"S": [("0S0", p / 2), ("1S1", p / 2), (center, 1 - p)]}


def build_padded_reversal(mean_content: float = 60, mean_padding: float = 30) -> Grammar:
    """Return the grammar of w, a repeated symbol and w reversed."""
    p, q = to_probability(mean_content), to_probability(mean_padding)
    start = [("0S0", p / 2), ("1S1", p / 2), ("A", (1 - p) / 2), ("B", (1 - p) / 2)]
    return {"S": start, "A": [("0A", q), ("", 1 - q)], "B": [("1B", q), ("", 1 - q)]}


def build_dyck(mean_splits: float = 1, mean_depth: float = 40) -> Grammar:
    """Return the grammar of nonempty balanced strings of two types of brackets."""
    p, q = to_probability(mean_splits), to_probability(mean_depth - 1)
    pairs = [("(S)", q / 2), ("[S]", q / 2), ("()", (1 - q) / 2), ("[]", (1 - q) / 2)]
    return {"S": [("ST", p), ("T", 1 - p)], "T": pairs}


def build_hardest() -> Grammar:
    """Return the grammar of Greibach's hardest context-free language: Dyck-2 strings cut into pieces among decoys.

    S, L, K, R, P, U, V, W, Q, D and T are S', L, L', R, R', U, V, W, Q, S and T of DuSell & Chiang. Means: 0.5 further
    commas, fillers of 0.5 and 2 symbols, semicolons with 0.25, 1.5 splits, depth 3.
    """
    commas, short, long, splits, depth = map(to_probability, (0.5, 0.5, 1, 1.5, 3))
    semicolon = 0.25
    return {
        "S": [("R$QDL;", 1.0)],
        "L": [("K,U", 1.0)],
        "K": [(",VK", commas), ("", 1 - commas)],
        "R": [("U,P", 1.0)],
        "P": [("PV,", commas), ("", 1 - commas)],
        "U": [("WU", short), ("", 1 - short)],
        "V": [("WV", long), ("W", 1 - long)],
        "W": [(symbol, 0.2) for symbol in "()[]$"],
        "Q": [("L;R", semicolon), ("", 1 - semicolon)],
        "D": [("DQT", splits), ("T", 1 - splits)],
        "T": [
            *(("(QDQ)", depth / 2), ("[QDQ]", depth / 2)),
            *(("(Q)", (1 - depth) / 2), ("[Q]", (1 - depth) / 2)),
        ],
    }


def compute_padded_entropy(length: int) -> float:
    """Return the entropy of padded reversal: a string has a derivation for each possible length of its padding.

    A string whose middle run of equal symbols is maximal with m symbols outside on each side can be derived with
    m, m + 1, ... symbols outside. There are 2 such strings for m = 0 and 2^m otherwise.
    """
    grammar = build_padded_reversal()
    half, p, q = length // 2, grammar["S"][0][1], grammar["A"][0][1]
    outside = np.arange(half + 1)
    derivation = outside * math.log(p) + (length - 2 * outside) * math.log(q)  # log probability, up to a constant
    if length % 2 == 0:
        derivation[half] += math.log(2)  # both symbols derive an empty padding
    string = np.logaddexp.accumulate(derivation[::-1])[::-1]  # m or more symbols outside
    count = np.maximum(outside, 1) * math.log(2)
    if length % 2 == 0:  # the middle run has at least two symbols
        string, count = string[:half], count[:half]
    total = np.logaddexp.reduce(string + count)
    return float(total - np.exp(string + count - total) @ string)


@cache
def load_source(name: str, max_length: int) -> GrammarSource:
    """Return the source of a language."""
    return GrammarSource(LANGUAGES[name].grammar, max_length)


def find_source(name: str, length: int) -> GrammarSource:
    """Return the source of a language with tables for this length."""
    return load_source(name, max(256, 1 << length.bit_length()))


class ContextFreeLanguage(NamedTuple):
    """A context-free language; `step` is 2 if its strings have lengths of one parity."""

    grammar: Grammar
    alphabet: str
    min_length: int
    step: int

    def fit(self, length: int) -> int:
        """Return the largest length of a string up to this one."""
        return fit_length(length, self.min_length, self.step)


LANGUAGES = {
    "generate_marked_reversal": ContextFreeLanguage(build_reversal("#"), "01#", 1, 2),
    "generate_unmarked_reversal": ContextFreeLanguage(build_reversal(""), "01", 2, 2),
    "generate_padded_reversal": ContextFreeLanguage(build_padded_reversal(), "01", 1, 1),
    "generate_dyck_2": ContextFreeLanguage(build_dyck(), "()[]", 2, 2),
    "generate_hardest": ContextFreeLanguage(build_hardest(), "()[],;$", 6, 1),
}


def compute_source_entropy(name: str, length: int) -> float:
    """Return the entropy in nats of a string given its length. The derivation is unique except of padded reversal."""
    if name == "generate_padded_reversal":
        return compute_padded_entropy(length)
    return find_source(name, length).compute_entropy(length)


def register_context_free(name: str, language: ContextFreeLanguage) -> None:
    """Register the language model of a context-free language."""

    def compute_bound(length: int, max_length: int) -> float:
        draws = Counter(language.fit(n) for n in range(language.min_length, max_length + 1))
        length = language.fit(length)
        share = draws[length] / draws.total() if length in draws else 1 / len(draws)
        return (compute_source_entropy(name, length) - math.log(share)) / (length + 1)

    @task(
        "context-free generation",
        name=name,
        symbols=(*language.alphabet, "start"),
        answer_symbols=(*language.alphabet, "end"),
        answers_every_token=True,
        output_length=lambda length: length + 1,
        min_length=language.min_length,
        length_step=language.step,
        max_length=MAX_LENGTH,
        validation_max_length=VALIDATION_MAX_LENGTH,
        eval_max_length=EVAL_MAX_LENGTH,
        entropy=None if name == "generate_hardest" else compute_bound,
    )
    def generate(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
        source, ids = find_source(name, length), {symbol: i for i, symbol in enumerate(language.alphabet)}
        strings = np.array([[ids[x] for x in source.draw(rng, length)] for _ in range(batch_size)])
        edge = np.full((batch_size, 1), len(ids))
        return np.concatenate([edge, strings], 1), np.concatenate([strings, edge], 1)


for _depth in (3, 5):
    for _types in (2, 8, 32, 128):
        register_dyck(_types, _depth)
for _name, _language in LANGUAGES.items():
    register_context_free(_name, _language)
