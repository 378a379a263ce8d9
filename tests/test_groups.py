"""Word problems of groups: products of permutation matrices, and the properties of the groups."""

import numpy as np
import pytest

from stackexp.datamodules.formal_language import build_string_batch
from stackexp.tasks import TASKS

ORDERS = {"s3": (6, False), "z60": (60, True), "a4_z5": (60, False), "a5": (60, False), "s5": (120, False)}


def to_matrix(name: str) -> np.ndarray:
    """Return the permutation matrix of a symbol such as 0-2-1: row i has its 1 in the column of the image of i."""
    return np.eye(name.count("-") + 1, dtype=int)[[int(image) for image in name.split("-")]]


@pytest.mark.parametrize("group", ORDERS)
def test_answers_are_products_of_permutation_matrices(group):
    task = TASKS[f"word_problem_{group}"]
    matrices = np.stack([to_matrix(name) for name in task.symbols])
    batch = task.sample(np.random.default_rng(0), 4, 200)
    for string, answer in zip(batch.inputs, batch.targets, strict=True):
        product = np.eye(len(matrices[0]), dtype=int)
        for symbol, found in zip(string, answer, strict=True):
            product = product @ matrices[symbol]
            assert (product == matrices[found]).all()
    assert batch.mask.all()


@pytest.mark.parametrize(("group", "order", "commutes"), [(name, *rest) for name, rest in ORDERS.items()])
def test_groups_have_their_order_and_commutators(group, order, commutes):
    """The commutators generate a proper subgroup of every group but A5, which is not solvable."""
    names = TASKS[f"word_problem_{group}"].symbols
    matrices = np.stack([to_matrix(name) for name in names]).astype(np.float32)
    assert len(set(names)) == len(matrices) == order
    commutators = (matrices @ b @ matrices.transpose(0, 2, 1) @ b.T for b in matrices)
    reached = {matrix.argmax(1).tobytes() for batch in commutators for matrix in batch}
    assert (len(reached) == 1) == commutes
    assert (len(reached) == order) == (group == "a5")


def test_a_task_with_answers_at_every_token_has_no_empty_tokens():
    task = TASKS["word_problem_s3"]
    strings = task.sample(np.random.default_rng(1), 3, 7)
    batch = build_string_batch(strings, task)
    assert (batch["tokens"].numpy() == strings.inputs).all()
    assert batch["targets"].shape == batch["mask"].shape == batch["tokens"].shape == (3, 7)
    assert (task.vocab_size, task.count_tokens(7)) == (6, 7)
