"""Tests of the projections that share a gradient, on CPUs."""

import functools

import pytest
import small_models
import torch
from test_triton_projection import (
    CASES,
    F64,
    MEMORIES,
    NAMES,
    OTHERS,
    check_memory,
    check_parts_of_the_gradient,
    differentiate,
    has_products,
    run_fused,
    run_reference,
)
from torch.utils.flop_counter import FlopCounterMode

from stackexp import stack
from stackexp.stack import dispatch, projection

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layer_equals_the_reference(case):
    case = case._replace(h_dtype=F64, weight_dtype=F64, dtype=F64)
    found = differentiate(functools.partial(run_fused, products=projection), case, F64)
    expected = differentiate(run_reference, case)
    for name in NAMES:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)


def test_parts_of_the_gradient():
    check_parts_of_the_gradient(projection)


@pytest.mark.parametrize("name", MEMORIES)
def test_models_equal_those_with_separate_products(name):
    check_memory(MEMORIES[name], "auto", F64)


def test_unsuitable_options_and_transformed_tensors_use_separate_products():
    for options in OTHERS.values():
        assert not has_products(small_models.make_model(options, F64).memories[0], F64, "auto"), options
    h = torch.zeros(1, 2, 16)
    assert dispatch.choose_products(h, F32) is projection
    assert dispatch.choose_products(h, BF16) is None  # under autocast
    assert dispatch.choose_products(h.bfloat16(), BF16) is None
    for implementation in ("eager", "reference"):
        with stack.use_implementation(implementation):
            assert dispatch.choose_products(h, F32) is None
    with FlopCounterMode(display=False):
        assert dispatch.choose_products(h, F32) is None
    torch.func.jvp(lambda x: _check_transformed(x), (h,), (h,))


def _check_transformed(x: torch.Tensor) -> torch.Tensor:
    assert dispatch.choose_products(x, F32) is None
    return x
