"""State tracking: the word problem of a finite group, with the product of the prefix as the answer at every token.

The groups are those of Merrill et al. 2024, "The Illusion of State in State-Space Models": Z60, A4 x Z5 and A5 of 60
elements, and S3 and S5. Word problems of A5 and S5 are complete for NC1; those of the solvable groups are in TC0.

Merrill et al. train for each length and test at the same one; later work trains on short strings and tests longer
ones. Defaults here: train on 1..40 like all tasks of this package, test to 500. Errors add up along a string, so the
mean accuracy over its positions shows how far a model tracks the state.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import lru_cache

from stackexp.tasks.definition import Drawn, np, task

Permutation = tuple[int, ...]
"""The images of 0 .. n-1. The product p q applies p first, then q: i -> q[p[i]]."""


def is_even(permutation: Permutation) -> bool:
    """Return True if the permutation has an even number of inversions."""
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0


def symmetric(size: int) -> list[Permutation]:
    """Return all permutations of 0 .. size-1; the identity is the first."""
    return list(itertools.permutations(range(size)))


def alternating(size: int) -> list[Permutation]:
    """Return the even permutations of 0 .. size-1; the identity is the first."""
    return list(filter(is_even, symmetric(size)))


def cyclic(size: int) -> list[Permutation]:
    """Return the rotations of 0 .. size-1; the identity is the first."""
    return [tuple((i + shift) % size for i in range(size)) for shift in range(size)]


def multiply_groups(left: Iterable[Permutation], right: Iterable[Permutation]) -> list[Permutation]:
    """Return the direct product: permutations of the points of `left`, then those of `right`."""
    return [(*p, *(len(p) + i for i in q)) for p, q in itertools.product(left, right)]


GROUPS: dict[str, list[Permutation]] = {
    "s3": symmetric(3),
    "z60": cyclic(60),
    "a4_z5": multiply_groups(alternating(4), cyclic(5)),
    "a5": alternating(5),
    "s5": symmetric(5),
}
"""The elements of each group. Task word_problem_s3 and so on; an element's id is its index here."""


@lru_cache
def build_table(name: str) -> np.ndarray:
    """Return the multiplication table of a group: int64 [n, n], entry [a, b] is the id of a b."""
    elements = GROUPS[name]
    ids = {element: i for i, element in enumerate(elements)}
    return np.array([[ids[tuple(q[i] for i in p)] for q in elements] for p in elements])


def register_word_problem(group: str) -> None:
    """Register the word problem of a group; the symbols are named by the images, such as 0-2-1 for a transposition."""
    names = ["-".join(map(str, element)) for element in GROUPS[group]]

    def multiply(strings: np.ndarray) -> np.ndarray:
        table, products, state = build_table(group), np.empty_like(strings), np.zeros(len(strings), np.int64)
        for i, element in enumerate(strings.T):
            state = products[:, i] = table[state, element]
        return products

    options = {"symbols": names, "answer_symbols": names, "answers_every_token": True, "solve": multiply}

    @task("state tracking", name=f"word_problem_{group}", **options)
    def generate(rng: np.random.Generator, batch_size: int, length: int) -> Drawn:
        strings = rng.integers(0, len(names), (batch_size, length))
        return strings, multiply(strings)


for _group in GROUPS:
    register_word_problem(_group)
