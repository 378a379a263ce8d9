"""Tests of the numba depth step against the reference: a scan of one token in many sequences."""

import itertools

import pytest
import torch
from depth_steps import DISCIPLINES, USUAL, Case, cases, check, check_rounding, differentiate, make_inputs, unroll
from torch.utils.checkpoint import checkpoint

from stackexp.stack import eager
from stackexp.stack.numba import time_scan


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_equals_the_reference(case):
    check(time_scan, case)


@pytest.mark.parametrize(("discipline", "head_dim"), itertools.product(DISCIPLINES, [16, 240]))
def test_rounding_errors_are_at_most_twice_those_of_the_reference(discipline, head_dim):
    case = Case(24, head_dim, 4, 32, discipline, num_tokens=2)
    check_rounding(time_scan, case, query_scale=head_dim**-0.5, factor=2)


def test_steps_exchange_states_with_eager():
    """A model under torch.compile uses eager steps, and may switch from one layer to the next."""

    class Mixed:
        empty = staticmethod(eager.empty)
        calls = itertools.cycle([time_scan, eager])

        @classmethod
        def step(cls, *args, **options):
            return next(cls.calls).step(*args, **options)

    check(Mixed, USUAL)


def test_recomputed_steps_are_bit_exact():
    inputs = make_inputs(USUAL)
    plain = unroll(time_scan, USUAL, inputs)

    class Recomputed:
        empty = staticmethod(time_scan.empty)

        @staticmethod
        def step(*args, **options):
            return checkpoint(time_scan.step, *args, use_reentrant=False, **options)

    again = unroll(Recomputed, USUAL, inputs)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    torch.testing.assert_close(differentiate(again, inputs), differentiate(plain, inputs), rtol=0, atol=0)


def test_two_threads_equal_one():
    case = Case(24, 16, 4, 6, num_tokens=300)
    inputs, threads = make_inputs(case), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = unroll(time_scan, case, inputs)
        one_back = differentiate(one, inputs)
        torch.set_num_threads(2)
        two = unroll(time_scan, case, inputs)
        two_back = differentiate(two, inputs)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(two, one, rtol=0, atol=0)
    torch.testing.assert_close(two_back, one_back, rtol=0, atol=0)
