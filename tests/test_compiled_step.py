"""A step of the depth axis in numba equals the reference: a scan of one token in many sequences."""

import itertools

import pytest
import torch
from depth_steps import DISCIPLINES, USUAL, Case, cases, check, check_rounding, gradients, make_inputs, unroll
from torch.utils.checkpoint import checkpoint

from stackexp.stack import eager
from stackexp.stack.numba import time_scan as compiled


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_equals_the_reference(case):
    check(compiled, case)


@pytest.mark.parametrize(("discipline", "head_dim"), itertools.product(DISCIPLINES, [16, 240]))
def test_rounds_no_worse_than_the_reference(discipline, head_dim):
    case = Case(24, head_dim, 4, 32, discipline, num_tokens=2)
    check_rounding(compiled, case, query_scale=head_dim**-0.5, factor=2)


def test_takes_and_gives_the_states_of_eager():
    """Under torch.compile the steps run in eager mode, so states must be interchangeable between layers."""

    class Mixed:
        empty = staticmethod(eager.empty)
        calls = itertools.cycle([compiled, eager])

        @classmethod
        def step(cls, *args, **options):
            return next(cls.calls).step(*args, **options)

    check(Mixed, USUAL)


def test_recomputed_steps_are_the_same():
    inputs = make_inputs(USUAL)
    plain = unroll(compiled, USUAL, inputs)

    class Recomputed:
        empty = staticmethod(compiled.empty)

        @staticmethod
        def step(*args, **options):
            return checkpoint(compiled.step, *args, use_reentrant=False, **options)

    again = unroll(Recomputed, USUAL, inputs)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    torch.testing.assert_close(gradients(again, inputs), gradients(plain, inputs), rtol=0, atol=0)


def test_two_threads_do_what_one_does():
    case = Case(24, 16, 4, 6, num_tokens=300)
    inputs, threads = make_inputs(case), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = unroll(compiled, case, inputs)
        one_back = gradients(one, inputs)
        torch.set_num_threads(2)
        two = unroll(compiled, case, inputs)
        two_back = gradients(two, inputs)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(two, one, rtol=0, atol=0)
    torch.testing.assert_close(two_back, one_back, rtol=0, atol=0)
