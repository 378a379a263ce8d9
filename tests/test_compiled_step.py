"""A step of the depth axis in numba equals the reference: a scan of one token in many sequences."""

import itertools
import random

import pytest
import torch
from depth_steps import Case, check, check_rounding, gradients, make_inputs, unroll
from torch.utils.checkpoint import checkpoint

from stackexp.stack import compiled, eager

DISCIPLINES = ["stack", "queue", "push_only"]
READS = [("global", "multiply"), ("global", "log"), ("global", "additive"), ("top", "multiply")]
SIZES = {"num_slots": [1, 2, 7, 24, 33], "head_dim": [1, 4, 16, 17, 64, 240], "num_heads": [1, 3, 4, 8]}
SIZES |= {"num_layers": [1, 2, 5, 12, 26, 40], "num_tokens": [1, 3]}
USUAL = Case(num_slots=7, head_dim=5, num_heads=2, num_layers=10)


def cases():
    """All options with sizes drawn from all, and each size by itself."""
    rng = random.Random(0)
    for discipline, (read, read_mask), scale in itertools.product(DISCIPLINES, READS, [1.0, 1000.0]):
        sizes = {name: rng.choice(values) for name, values in SIZES.items()}
        yield Case(**sizes, discipline=discipline, read=read, read_mask=read_mask, scale=scale)
    for name, values in SIZES.items():
        yield from (USUAL._replace(**{name: value}) for value in values)
    yield USUAL._replace(num_tokens=0)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_equals_the_reference(case):
    check(compiled, case)


@pytest.mark.parametrize(("discipline", "head_dim"), itertools.product(DISCIPLINES, [16, 240]))
def test_rounds_no_worse_than_the_reference(discipline, head_dim):
    case = Case(24, head_dim, 4, 32, discipline, num_tokens=2)
    check_rounding(compiled, case, query_scale=head_dim**-0.5, factor=2)


def test_takes_and_gives_the_states_of_eager():
    """So that a model may be compiled by torch, where the steps are `eager`'s, from one layer to the next."""

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
