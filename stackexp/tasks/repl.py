"""Permutations as text: a Python session that swaps variables and prints them, for next-token prediction.

The idea is that of Siems et al. 2026, "Learning State-Tracking from Code Using Linear RNNs" (arXiv 2602.14814). Their
abstract describes traces that interleave variable transformations and prints; the exact format was not available, so
this one is ours:

    >>> a, b, c = 1, 2, 3
    >>> c, a = a, c
    >>> print(b)
    2

A string has L statements after the first line. Two thirds of them, rounded down, swap two random variables, at random
places; the others print one. The last one is a print. The loss covers every next symbol, as in a language model; the
accuracy covers the printed values alone. Lengths count statements: trained on 1..20, tested to 100.
"""

from __future__ import annotations

from stackexp.tasks.definition import NO_TARGET, Drawn, np, task

PUNCTUATION = (">>> ", ", ", " = ", "print(", ")", "\n")
PROMPT, COMMA, EQUALS, PRINT, CLOSE, NEWLINE = range(6)
SWAP_TOKENS, PRINT_TOKENS = 9, 7


def count_prints(length: int) -> int:
    """Return the number of prints among L statements."""
    return length - 2 * length // 3


def register_trace(size: int) -> None:
    """Register the traces of `size` variables, whose swaps generate the symmetric group of that size."""
    symbols = (*PUNCTUATION, *"abcde"[:size], *"12345"[:size])
    first_variable, first_value = len(PUNCTUATION), len(PUNCTUATION) + size
    heading = [PROMPT, *_join(range(first_variable, first_value)), EQUALS, *_join(range(first_value, len(symbols)))]
    heading.append(NEWLINE)

    def count_tokens(length: int) -> int:
        prints = count_prints(length)
        return len(heading) + SWAP_TOKENS * (length - prints) + PRINT_TOKENS * prints

    @task(
        "state tracking in code",
        name=f"repl_s{size}",
        symbols=symbols,
        answer_symbols=symbols,
        answers_every_token=True,
        output_length=count_tokens,
        max_length=20,
        validation_max_length=25,
        eval_max_length=100,
    )
    def generate(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
        strings, printed = [], np.zeros((batch_size, count_tokens(length)), bool)
        is_print = np.arange(length) < count_prints(length) - 1
        for row in range(batch_size):
            values, text = list(range(first_value, len(symbols))), list(heading)
            for prints in [*rng.permutation(is_print[:-1]).tolist(), True]:
                x, y = rng.permutation(size)[:2].tolist()
                if prints:
                    printed[row, len(text) + 4] = True  # the newline before the value
                    text += [PROMPT, PRINT, first_variable + x, CLOSE, NEWLINE, values[x], NEWLINE]
                else:
                    values[x], values[y] = values[y], values[x]
                    names = [first_variable + x, first_variable + y]
                    text += [PROMPT, *_join(names), EQUALS, *_join(names[::-1]), NEWLINE]
            strings.append(text)
        inputs = np.array(strings)
        targets = np.concatenate([inputs[:, 1:], np.full((batch_size, 1), NO_TARGET)], 1)
        return inputs, targets, printed


def _join(ids: range | list[int]) -> list[int]:
    """Return the ids with a comma between neighbors."""
    return [part for i in ids for part in (COMMA, i)][1:]


for _size in (3, 5):
    register_trace(_size)
