"""Steps along the depth of eager and numba, compared with the reference."""

import functools
import itertools

import pytest
import torch
from depth_steps import USUAL, Case, cases, check, check_errors, compute, make_inputs
from scans import DISCIPLINES
from torch.utils.checkpoint import checkpoint

from stackexp.stack import eager
from stackexp.stack.numba import time_scan


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_steps_equal_the_reference(case):
    check("numba", case)
    check("eager", case)


@pytest.mark.parametrize(("discipline", "head_dim"), itertools.product(DISCIPLINES, [16, 240]))
def test_rounding_errors_are_at_most_twice_those_of_the_reference(discipline, head_dim):
    for name in ("numba", "eager"):
        check_errors(name, Case(24, head_dim, 4, 12, discipline, leading=(2, 2), dtype=torch.float32))


def test_steps_exchange_states():
    """A model under torch.compile uses eager steps, and may switch from one layer to the next."""
    calls, inputs = itertools.cycle([time_scan, eager]), make_inputs(USUAL)
    mixed = compute("eager", USUAL, inputs, lambda *args, **options: next(calls).step(*args, **options))
    torch.testing.assert_close(mixed, compute("eager", USUAL, inputs))


def test_recomputed_steps_are_bit_exact():
    inputs = make_inputs(USUAL)
    again = compute("numba", USUAL, inputs, functools.partial(checkpoint, time_scan.step, use_reentrant=False))
    torch.testing.assert_close(again, compute("numba", USUAL, inputs), rtol=0, atol=0)


def test_eager_state_holds_only_occupied_slots():
    state = eager.empty((3, 2), 4, 3, torch.zeros(()))
    for expected in [1, 2, 3, 4, 4, 4]:
        _, state = eager.step(state, torch.ones(3, 2, 3), torch.zeros(3, 2, 3), torch.ones(2, 3), num_slots=4)
        assert state.slots.shape == (3, 2, expected, 3)
        assert state.mask.shape == (3, 2, expected)


@pytest.mark.parametrize("implementation", ["eager", "numba"])
def test_the_additive_mask_keeps_the_contents_of_full_slots(implementation):
    """M is exactly 0 or 1, so nothing is lost in float32, if (1 - M) * 1e9 is computed before the sum."""
    case = Case(7, 16, 2, 6, read_mask="additive", scale=1e6, leading=(2, 3), dtype=torch.float32)
    inputs = make_inputs(case)
    torch.testing.assert_close(
        compute(implementation, case, inputs), compute("reference", case, inputs), rtol=1e-5, atol=1e-5
    )
