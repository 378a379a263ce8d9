"""Recognition: the languages of FLaRe (Butoi et al. 2024, arXiv 2411.07107), "Training Neural Networks as Recognizers".

The answer is 1 if the string is in the language. Half of the strings are positive. A negative string is either random
or a positive string with K random edits (insert, replace or delete a symbol; K is geometric with p = 0.5), with equal
probability, redrawn until it is not in the language. Training lengths are 0 to 40 and test lengths up to 500, as
published; validation lengths go to 80.

Differences: all strings of a batch have one length, so edits are followed by insertions or deletions that restore the
length. If positive strings have only even or only odd lengths, strings of other lengths are one symbol shorter. Strings
that are shorter than all positive ones, and the empty string, have one label. Positive strings are drawn uniformly
where FLaRe samples an automaton; for Dyck-(2, 3) each step is uniform over the possible symbols.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from stackexp.tasks.definition import Drawn, np, task

MAX_DEPTH = 3  # of Dyck-(2, 3)
MODULUS = 5


class Language(NamedTuple):
    """A language over single-character symbols."""

    alphabet: str
    draw: Callable[[np.random.Generator, int], str]  # a positive string of a length that has one
    contains: Callable[[str], bool]
    min_length: int = 1  # of positive strings, the empty one apart
    step: int = 1  # 2 if positive strings have lengths of one parity


def draw_text(rng: np.random.Generator, length: int, alphabet: str = "01") -> str:
    """Return a uniformly random string."""
    return "".join(alphabet[i] for i in rng.integers(0, len(alphabet), length))


# Regular


def draw_even_pairs(rng: np.random.Generator, length: int) -> str:
    """Draw a string whose first and last symbols are equal."""
    text = draw_text(rng, length)
    return text[:-1] + text[0]


def draw_parity(rng: np.random.Generator, length: int) -> str:
    """Draw a string with an odd number of ones."""
    text = draw_text(rng, length - 1)
    return text + str((text.count("1") + 1) % 2)


def draw_cycle(rng: np.random.Generator, length: int) -> str:
    """Draw moves on a circle of five, and the final position."""
    moves = draw_text(rng, length - 1, "<=>")
    return moves + str(find_position(moves))


def find_position(moves: str) -> int:
    """Return the position on the circle after these moves."""
    return (moves.count(">") - moves.count("<")) % MODULUS


def is_cycle(text: str) -> bool:
    """Return True if the string is moves and their final position."""
    return text[-1:].isdigit() and not set(text[:-1]) - set("<=>") and int(text[-1]) == find_position(text[:-1])


def draw_modular(rng: np.random.Generator, length: int) -> str:
    """Draw digits joined by + - *, an equals sign and the value mod 5, computed from left to right."""
    digits, operators = draw_text(rng, length // 2, "01234"), draw_text(rng, length // 2 - 1, "+-*")
    terms = "".join(a + b for a, b in zip(digits, operators + "=", strict=True))
    return terms + str(evaluate_left_to_right(terms[:-1]))


def evaluate_left_to_right(expression: str) -> int:
    """Return the value mod 5 of digits joined by operators without precedence."""
    value = int(expression[0])
    for operator, digit in zip(expression[1::2], expression[2::2], strict=True):
        right = int(digit)
        value = {"+": value + right, "-": value - right, "*": value * right}[operator] % MODULUS
    return value


def is_modular(text: str) -> bool:
    """Return True for an expression followed by its value."""
    if len(text) < 3 or len(text) % 2 == 0 or text[-2] != "=":
        return False
    is_digit = [symbol.isdigit() for symbol in text]
    if is_digit != [i % 2 == 0 for i in range(len(text))] or "=" in text[:-2]:
        return False
    return evaluate_left_to_right(text[:-2]) == int(text[-1])


def draw_dyck(rng: np.random.Generator, length: int) -> str:
    """Draw a string of two bracket types nested at most three deep."""
    text, stack = [], ""
    for remaining in range(length, 0, -1):
        choices = "([" if len(stack) < min(MAX_DEPTH, remaining - 1) else ""
        if stack:
            choices += ")]"["([".index(stack[-1])]
        symbol = draw_text(rng, 1, choices)
        stack = stack + symbol if symbol in "([" else stack[:-1]
        text.append(symbol)
    return "".join(text)


def is_dyck(text: str) -> bool:
    """Return True for balanced brackets of depth up to three."""
    stack: list[str] = []
    for symbol in text:
        if symbol in "([":
            stack.append(symbol)
        elif not stack or stack.pop() + symbol not in ("()", "[]"):
            return False
        if len(stack) > MAX_DEPTH:
            return False
    return not stack


# Context-free and context-sensitive


def draw_majority(rng: np.random.Generator, length: int) -> str:
    """Draw a string with more ones than zeros; their number is uniform."""
    ones = int(rng.integers(length // 2 + 1, length + 1))
    return "".join(rng.permutation(list("1" * ones + "0" * (length - ones))))


def draw_stack(rng: np.random.Generator, length: int) -> str:
    """Draw a stack from bottom to top, instructions (+0, +1: push; -: pop), # and the final stack from top to bottom.

    The numbers of symbols and of pushes are drawn; pops follow from the length, at random positions where the stack is
    not empty.
    """
    while True:
        # Symbols: n + 2 p + q + 1 + (n + p - q) = 2 n + 3 p + 1, whatever the number q of pops.
        pushes = int(rng.integers(0, (length - 1) // 3 + 1))
        if (length - 1 - 3 * pushes) % 2 == 0:
            break
    text = draw_text(rng, (length - 1 - 3 * pushes) // 2)
    stack = text
    while True:
        if stack and rng.integers(2):
            text, stack = text + "-", stack[:-1]
        elif pushes:
            symbol, pushes = draw_text(rng, 1), pushes - 1
            text, stack = text + "+" + symbol, stack + symbol
        else:
            return text + "#" + stack[::-1]


def is_stack(text: str) -> bool:
    """Return True if the part after # is the stack that the instructions leave. A pop of an empty stack is an error."""
    program, mark, result = text.partition("#")
    start = min((i for i in (program.find("+"), program.find("-")) if i >= 0), default=len(program))
    stack, position = list(program[:start]), start
    while position < len(program):
        instruction, argument = program[position], program[position + 1 : position + 2]
        if instruction == "+" and argument in ("0", "1"):
            stack.append(argument)
            position += 2
        elif instruction == "-" and stack:
            stack.pop()
            position += 1
        else:
            return False
    return bool(mark) and result == "".join(reversed(stack))


def relate(function: Callable[[str], str], mark: str = "#", alphabet: str = "01") -> Language:
    """Return the language of strings w, a mark, and function(w), where function keeps the length."""

    def draw(rng: np.random.Generator, length: int) -> str:
        text = draw_text(rng, length // 2, alphabet)
        return text + mark + function(text)

    def contains(text: str) -> bool:
        half = len(text) // 2
        left, middle, right = text[:half], text[half : half + 1], text[half + 1 :]
        return middle == mark and mark not in left and right == function(left)

    return Language(alphabet + mark, draw, contains, step=2)


def draw_palindrome(rng: np.random.Generator, length: int) -> str:
    """Draw a string of even length that equals its reverse."""
    half = draw_text(rng, length // 2)
    return half + half[::-1]


def draw_missing(rng: np.random.Generator, length: int) -> str:
    """Draw a string written twice, with a one replaced by _."""
    half = draw_text(rng, length // 2)
    position = int(rng.integers(length // 2))
    half = half[:position] + "1" + half[position + 1 :]
    ones = [i for i, symbol in enumerate(half * 2) if symbol == "1"]
    hole = int(rng.choice(ones))
    return (half * 2)[:hole] + "_" + (half * 2)[hole + 1 :]


def is_missing(text: str) -> bool:
    """Return True for a string written twice in which _ replaces a one."""
    full = text.replace("_", "1")
    half = len(text) // 2
    return len(text) % 2 == 0 and text.count("_") == 1 and full[:half] == full[half:]


def read_number(bits: str) -> int:
    """Return the number of these bits, lowest bit first."""
    return int(bits[::-1], 2)


def draw_number(rng: np.random.Generator, limit: int) -> int:
    """Return a uniformly random number from 0 to limit."""
    num_bits = limit.bit_length()
    while True:
        number = int.from_bytes(rng.bytes(-(-num_bits // 8) or 1), "little") & ((1 << num_bits) - 1)
        if number <= limit:
            return number


def write_number(number: int, length: int) -> str:
    """Return bits, lowest bit first, padded with zeros."""
    return f"{number:b}"[::-1].ljust(length, "0")


def split_length(rng: np.random.Generator, total: int, weights: tuple[int, ...]) -> list[int]:
    """Split a total into positive parts in Dirichlet proportions."""
    cuts = np.floor(np.cumsum(rng.dirichlet(weights))[:-1] * (total - len(weights))).astype(int).tolist()
    ends = [*cuts, total - len(weights)]
    return [end - start + 1 for start, end in zip([0, *cuts], ends, strict=True)]


def build_arithmetic(operator: str, function: Callable[[int, int], int], weights: tuple[int, ...]) -> Language:
    """Return the language of x operator y = z, all lowest bit first; z may have leading zeros."""

    def draw(rng: np.random.Generator, length: int) -> str:
        first, second, result = split_length(rng, length - 2, weights)
        small, large = sorted([first, second])
        highest = (1 << result) - 1
        x = draw_number(rng, min((1 << small) - 1, highest if operator == "+" else (1 << small) - 1))
        rest = highest - x if operator == "+" else highest // x if x else (1 << large) - 1
        y = draw_number(rng, min((1 << large) - 1, rest))
        terms = [write_number(x, small), write_number(y, large)]
        if rng.integers(2):
            terms.reverse()
        return terms[0] + operator + terms[1] + "=" + write_number(function(x, y), result)

    def contains(text: str) -> bool:
        left, equals, result = text.partition("=")
        x, sign, y = left.partition(operator)
        is_formed = equals and sign and all(part and not part.strip("01") for part in (x, y, result))
        return bool(is_formed) and function(read_number(x), read_number(y)) == read_number(result)

    return Language("01" + operator + "=", draw, contains, 5)


def draw_root(rng: np.random.Generator, length: int) -> str:
    """Draw x = z with z the square root of x rounded down, lowest bit first."""
    first, result = split_length(rng, length - 1, (2, 1))
    x = draw_number(rng, min((1 << first) - 1, (1 << 2 * result) - 1))
    return write_number(x, first) + "=" + write_number(math.isqrt(x), result)


def is_root(text: str) -> bool:
    """Return True if the second number is the square root of the first, rounded down."""
    x, equals, z = text.partition("=")
    if not equals or not all(part and not part.strip("01") for part in (x, z)):
        return False
    return math.isqrt(read_number(x)) == read_number(z)


LANGUAGES: dict[str, Language] = {
    "even_pairs": Language("01", draw_even_pairs, lambda text: text[:1] == text[-1:]),
    "repeat_01": Language("01", lambda rng, n: "01" * (n // 2), lambda text: text == "01" * (len(text) // 2), 2, 2),
    "parity": Language("01", draw_parity, lambda text: text.count("1") % 2 == 1),
    "cycle_navigation": Language("<=>01234", draw_cycle, is_cycle),
    "modular_arithmetic_simple": Language("01234+-*=", draw_modular, is_modular, 3, 2),
    "dyck_2_3": Language("()[]", draw_dyck, is_dyck, 2, 2),
    "first": Language("01", lambda rng, n: "1" + draw_text(rng, n - 1), lambda text: text[:1] == "1"),
    "majority": Language("01", draw_majority, lambda text: 2 * text.count("1") > len(text)),
    "stack_manipulation": Language("01+-#", draw_stack, is_stack, 3),
    "marked_reversal": relate(lambda text: text[::-1]),
    "unmarked_reversal": Language("01", draw_palindrome, lambda text: len(text) % 2 == 0 and text == text[::-1], 2, 2),
    "marked_copy": relate(lambda text: text),
    "missing_duplicate": Language("01_", draw_missing, is_missing, 2, 2),
    "odds_first": relate(lambda text: text[::2] + text[1::2]),
    "binary_addition": build_arithmetic("+", lambda x, y: x + y, (1, 1, 1)),
    "binary_multiplication": build_arithmetic("*", lambda x, y: x * y, (1, 1, 2)),
    "compute_sqrt": Language("01=", draw_root, is_root, 3),
    "bucket_sort": relate(lambda text: "".join(sorted(text)), alphabet="12345"),
}
"""The 18 languages in the order of the paper. Task recognize_parity and so on."""


def edit(rng: np.random.Generator, text: str, alphabet: str) -> str:
    """Apply a geometric number of random edits, then insertions or deletions that restore the length."""
    symbols, length = list(text), len(text)
    for _ in range(rng.geometric(0.5)):
        kind, position = int(rng.integers(3)), int(rng.integers(len(symbols) + 1))
        if kind == 0 or position == len(symbols):
            symbols.insert(position, draw_text(rng, 1, alphabet))
        elif kind == 1:
            symbols[position] = draw_text(rng, 1, alphabet.replace(symbols[position], ""))
        else:
            del symbols[position]
    while len(symbols) > length:
        del symbols[int(rng.integers(len(symbols)))]
    while len(symbols) < length:
        symbols.insert(int(rng.integers(len(symbols) + 1)), draw_text(rng, 1, alphabet))
    return "".join(symbols)


def draw_negative(rng: np.random.Generator, language: Language, length: int) -> str:
    """Draw a string that is not in the language: random or an edited positive string, redrawn until it is negative."""
    while True:
        if length >= language.min_length and rng.integers(2):
            text = edit(rng, language.draw(rng, length), language.alphabet)
        else:
            text = draw_text(rng, length, language.alphabet)
        if not language.contains(text):
            return text


def register_language(name: str, language: Language) -> None:
    """Register the recognition of a language."""

    @task(
        "recognition",
        name=f"recognize_{name}",
        symbols=language.alphabet,
        answer_symbols="01",
        min_length=0,
        length_step=language.step,
        length_start=language.min_length,
        validation_max_length=80,
    )
    def generate(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
        labels = rng.integers(0, 2, (batch_size, 1))
        if length < language.min_length:
            labels[:] = not length and language.contains("")
        elif name == "even_pairs" and length == 1:  # all strings are positive
            labels[:] = 1
        texts = [
            draw_negative(rng, language, length) if not label else language.draw(rng, length) if length else ""
            for label in labels[:, 0]
        ]
        ids = {symbol: i for i, symbol in enumerate(language.alphabet)}
        return np.array([[ids[symbol] for symbol in text] for text in texts], np.int64), labels


for _name, _language in LANGUAGES.items():
    register_language(_name, _language)
