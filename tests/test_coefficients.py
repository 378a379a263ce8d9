"""The coefficient form of the stack equals the reference, and keeps and adds up no more than it says."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from depth_steps import DISCIPLINES, USUAL, Case, cases, check, check_rounding, gradients, make_inputs, unroll
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from stackexp.stack import coefficients, eager, reference


@pytest.fixture(params=["few numbers", "many numbers"])
def sizes(request, monkeypatch):
    """Vectors side by side and every C kept; or, as for a large batch, each in a block of its own and few C kept."""
    if request.param == "many numbers":
        monkeypatch.setattr(coefficients, "FEW", 0)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_equals_the_reference(case):
    check(coefficients, case)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_gradients_are_those_of_differences(discipline):
    case = Case(num_slots=2, head_dim=2, num_heads=1, num_layers=5, discipline=discipline, num_tokens=1)
    inputs = [tensor.detach().contiguous().requires_grad_() for tensor in make_inputs(case)]
    assert torch.autograd.gradcheck(lambda *args: tuple(unroll(coefficients, case, list(args))[:3]), inputs)


@pytest.mark.parametrize("head_dim", [16, 240])
@pytest.mark.parametrize(("discipline", "read_mask"), itertools.product(DISCIPLINES, ["multiply", "log"]))
def test_rounds_no_worse_than_the_reference(discipline, read_mask, head_dim):
    """With scores of about 1, as a model's. Scores of 15 and more are sums of larger k, and rounded as these are."""
    case = Case(24, head_dim, 4, 32, discipline, read_mask=read_mask, num_tokens=2)
    check_rounding(coefficients, case, query_scale=head_dim**-0.5, factor=1.5)
    check_rounding(coefficients, case, query_scale=1, factor=4)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_a_state_may_go_two_ways(discipline):
    """As when a run branches: neither way sees the other, and their gradients add up."""
    case = USUAL._replace(discipline=discipline)
    inputs, results = make_inputs(case), []
    for module in (coefficients, reference):
        state = module.empty(inputs[0].shape[1:4], case.num_slots, case.head_dim, inputs[0])
        step = lambda at, state, module=module: module.step(state, *(t[at] for t in inputs), **case.options)  # noqa: E731
        for at in range(4):
            _, state = step(at, state)
        reads = []
        for way in (range(4, 7), range(7, 10)):
            on = state
            for at in way:
                output, on = step(at, on)
                reads.append(output.read)
        results.append((reads, gradients(reads, inputs)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("sizes")
def test_gradients_that_others_hold_are_left_alone():
    """Those to a state between two layers are the same whether or not the pass goes on through the layer before."""
    inputs, middle, total = make_inputs(USUAL), [], 0
    state = coefficients.empty(inputs[0].shape[1:4], USUAL.num_slots, USUAL.head_dim, inputs[0])
    for at in range(6):
        output, state = coefficients.step(state, *(t[at] for t in inputs), **USUAL.options)
        if at == 2:
            middle = [state.coefficients, *state.pushed]
        total = total + output.read.square().sum()
    alone = [gradient.clone() for gradient in torch.autograd.grad(total, middle, retain_graph=True)]
    further = torch.autograd.grad(total, [*middle, *inputs])
    torch.testing.assert_close(list(further[: len(middle)]), alone, rtol=0, atol=0)


@pytest.mark.usefixtures("sizes")
def test_recomputed_steps_are_the_same():
    """Activation checkpointing of each layer; the state goes through as tensors and lists of them."""
    inputs = make_inputs(USUAL)
    plain = unroll(coefficients, USUAL, inputs)

    class Recomputed:
        empty = staticmethod(coefficients.empty)

        @staticmethod
        def step(*args, **options):
            return checkpoint(coefficients.step, *args, use_reentrant=False, **options)

    again = unroll(Recomputed, USUAL, inputs)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
    torch.testing.assert_close(gradients(again, inputs), gradients(plain, inputs), rtol=0, atol=0)
    state = coefficients.empty((1, 2), 3, 4, torch.zeros(()))
    _, state = coefficients.step(state, torch.ones(1, 2, 4), torch.ones(1, 2, 3), torch.ones(2, 4), num_slots=3)
    assert all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(state))
    assert type(tree_map(torch.clone, state)) is coefficients.CoefficientState


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_compiles_without_graph_breaks(discipline, monkeypatch):
    """And with the gradients that torch derives there; the last block has one vector, the one before it two."""
    case = USUAL._replace(discipline=discipline, num_slots=2, num_layers=3, dtype=torch.float32)
    inputs = make_inputs(case)
    monkeypatch.setattr(coefficients, "FEW", 2 * inputs[0][0].numel())
    compiled = torch.compile(lambda *args: unroll(coefficients, case, args), fullgraph=True, backend="aot_eager")
    values, expected = compiled(*inputs), unroll(coefficients, case, inputs)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(gradients(values, inputs), gradients(expected, inputs), rtol=1e-4, atol=1e-5)


def test_transforms_of_torch_go_through():
    inputs = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in make_inputs(USUAL)]
    loss = lambda module: lambda *args: unroll(module, USUAL, args)[0].square().sum()  # noqa: E731
    derived = [torch.func.grad(loss(module), argnums=(0, 1, 2))(*inputs) for module in (coefficients, reference)]
    torch.testing.assert_close(*derived, rtol=1e-9, atol=1e-11)
    tangents = tuple(torch.ones_like(tensor) for tensor in inputs)
    forward = [torch.func.jvp(loss(module), tuple(inputs), tangents)[1] for module in (coefficients, reference)]
    torch.testing.assert_close(*forward, rtol=1e-9, atol=1e-11)


def test_every_vector_pushed_has_one_gradient():
    """The later layers' parts come through the layer after it, not one by one to be added up by autograd."""
    case = USUAL._replace(num_layers=12)
    inputs = make_inputs(case)
    pushed = [x.clone() for x in inputs[0]]
    reads = unroll(coefficients, case, [torch.stack(pushed), *inputs[1:]])[0]
    calls = []
    nodes, seen = [reads.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        calls += [next_node for next_node, _ in node.next_functions if next_node is not None]
        nodes += [next_node for next_node, _ in node.next_functions]
    steps = [node for node in seen if "_StepBackward" in node.name()]
    assert len(steps) == case.num_layers
    for step in steps:  # C and the vectors pushed of the layer before it, and nothing of layers further away
        assert sum("_StepBackward" in node.name() for node, _ in step.next_functions if node is not None) <= 2 + 12
    assert all(calls.count(node) == 1 for node in seen if node.name().startswith("CloneBackward"))


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_keeps_less_than_the_state_form(discipline, monkeypatch):
    """Numbers that autograd holds: X once, and per layer k, a, and C of every KEEP_EVERY-th."""
    monkeypatch.setattr(coefficients, "FEW", 0)
    case = Case(24, 240, 4, 32, discipline, num_tokens=8, dtype=torch.float32)
    inputs = make_inputs(case)
    kept = {module: _kept_numbers(module, case, inputs) for module in (coefficients, eager)}
    tokens, columns = 2 * 8 * 4, range(32)
    x = 32 * 240
    per_layer = sum(m + 1 + 3 for m in columns) + sum(min(m, 24) * (m + 1) for m in columns if m % 4 == 0)
    assert kept[coefficients] <= tokens * (x + per_layer) + 32 * 4 * 240
    assert kept[eager] > 20 * kept[coefficients]


def _kept_numbers(module, case, inputs) -> int:
    """In storages of their own, of all tensors saved for the backward pass."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        values = unroll(module, case, inputs)
    del values
    return sum(storages.values())


def test_computes_nothing_by_hand_without_gradients():
    inputs = [tensor.detach() for tensor in make_inputs(USUAL)]
    for context in (nullcontext(), torch.no_grad()):
        with context:
            assert not any(value.requires_grad for value in unroll(coefficients, USUAL, inputs))
