"""Tests of every scan implementation: no tokens, invalid arguments, forward-mode autograd and torch.compile."""

import logging

import pytest
import torch
from scans import Case, make_inputs
from torch.autograd import forward_ad

from stackexp import stack
from stackexp.stack import StackState, dispatch

ALL = list(stack.IMPLEMENTATIONS)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("discipline", ["queue", "push_only"])
def test_scan_of_no_tokens_returns_its_state(name, discipline):
    x, logits, query, slots, mask, *maps = make_inputs(Case(7, 3, 2, 0, discipline, feedback="tanh", filled=7), "cpu")
    with stack.use_implementation(name):
        output, state = stack.scan(StackState(slots, mask), x, logits, query, tuple(maps), num_slots=7)
    assert state.slots is slots
    assert state.mask is mask
    assert [tuple(value.shape) for value in output] == [(2, 0, 2, 3), (2, 0, 2, 3), (2, 0, 2), (2, 0, 2)]
    assert {value.dtype for value in output} == {torch.float64}


@pytest.mark.parametrize("name", ALL)
def test_state_with_too_many_slots_is_rejected(name):
    x, logits, query, slots, mask = make_inputs(Case(7, 3, 2, 2, filled=7), "cpu")
    with stack.use_implementation(name), pytest.raises((AssertionError, ValueError)):
        stack.scan(StackState(slots, mask), x, logits, query, num_slots=6)


@pytest.mark.parametrize("name", ALL)
def test_unknown_activation_is_rejected(name):
    x, logits, query, slots, mask, *maps = make_inputs(Case(7, 3, 2, 2, feedback="tanh", filled=7), "cpu")
    options = {"num_slots": 7, "feedback_activation": "relu"}
    with stack.use_implementation(name), pytest.raises(AssertionError, match="relu"):
        stack.scan(StackState(slots, mask), x, logits, query, tuple(maps), **options)


def test_forward_mode_tangents_equal_eager():
    x, logits, query, slots, mask = (tensor.detach() for tensor in make_inputs(Case(7, 3, 2, 4, filled=2), "cpu"))
    tangents = []
    for name in ("auto", "eager"):
        with forward_ad.dual_level(), stack.use_implementation(name):
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            output, _ = stack.scan(StackState(slots, mask), dual, logits, query, num_slots=7)
            tangents.append(forward_ad.unpack_dual(output.read).tangent)
    torch.testing.assert_close(*tangents)


def test_torch_compile_warns_about_unrolled_tokens(caplog):
    x, logits, query, slots, mask = (tensor.detach() for tensor in make_inputs(Case(7, 3, 2, 2, filled=2), "cpu"))
    dispatch._warn_about_unrolling_once.cache_clear()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def read(x, logits):
        return stack.scan(StackState(slots, mask), x, logits, query, num_slots=7)[0].read

    with caplog.at_level(logging.WARNING, "stackexp.stack"):
        read(x[:, :1], logits[:, :1])
        assert not caplog.records
        read(x, logits)
    assert ["torch.compile" in record.getMessage() for record in caplog.records] == [True]
