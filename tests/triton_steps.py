"""Checks of both forms of the Triton depth step that run in a process with Triton's interpreter, or on a GPU."""

import functools

import pytest
import torch
from depth_steps import Case, compute, differentiate, make_inputs, unroll
from operators import OperatorRecord
from small_models import make_model, make_tokens
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stackexp import stack
from stackexp.inspection.interventions import Intervention, clear, intervene
from stackexp.stack.triton import coefficients, depth_step


def check_bfloat16_reads_have_float32_gradients() -> None:
    """Rounding R to the dtype of x must not change the gradients through its softmax."""
    case = Case(3, 16, 2, 3, state_dtype=torch.float32)
    exact = [tensor.detach().bfloat16().double().requires_grad_() for tensor in make_inputs(case)]
    dtypes = (torch.bfloat16, torch.float32, torch.float32)
    mixed = [tensor.detach().to(dtype).requires_grad_() for tensor, dtype in zip(exact, dtypes, strict=True)]
    gradients = []
    for name, inputs in (("triton", mixed), ("reference", exact)):
        reads = torch.stack([output.read for output in unroll(name, case, inputs)])
        assert reads.dtype == inputs[0].dtype
        weights = torch.randn(reads.shape, generator=torch.Generator().manual_seed(5)).bfloat16().to(reads)
        gradients.append(torch.autograd.grad((reads * weights).sum(), inputs[1:]))
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() < 2**-14 * theirs.norm()


def check_checkpoint_interval_changes_no_result() -> None:
    case = Case(2, 4, 1, 4, "queue", read_mask="log")
    inputs = make_inputs(case)
    first, *others = (compute("triton", case._replace(segment=segment), inputs) for segment in (1, 2, 3, 5))
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-9, atol=1e-11)


def check_each_output_alone_has_a_gradient(name: str) -> None:
    """Only some outputs have gradients: those of the first layers, of the last, or no read."""
    functionals = [
        lambda outputs: outputs[1].read.square().sum() + outputs[3].entropy.sum(),
        lambda outputs: outputs[-1].read.square().sum(),
        lambda outputs: torch.stack([o.entropy.mean() for o in outputs]).mean(),
        lambda outputs: outputs[2].action[..., 0].sum() + outputs[0].read.sum(),
    ]
    case = Case(3, 4, 1, 6)
    for functional in functionals:
        found = []
        for each in (name, "reference"):
            inputs = make_inputs(case)
            total = functional(unroll(each, case, inputs))
            found.append(torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True))
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def check_recomputed_layers(name: str) -> None:
    """Activation checkpointing saves no stacks. It writes the history again, which higher layers have overwritten."""
    module = {"triton": depth_step, "coefficients": coefficients}[name]
    case, found = Case(3, 4, 2, 5, segment=2), []
    inputs = make_inputs(case)
    for step in (None, functools.partial(checkpoint, module.step, use_reentrant=False)):
        saved = SavedBytes()
        with saved:
            outputs = unroll(name, case, inputs, step)
        found.append((saved.count(), differentiate(outputs, inputs)))
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=0)
    assert found[1][0] < found[0][0]


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Count the bytes that autograd saves in this context, without tensors that have no storage of their own."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        if 0 not in tensor.stride():  # the query, and the tensors that only carry gradients
            self.storages[tensor.data_ptr()] = tensor.nbytes
        return tensor

    def count(self) -> int:
        return sum(self.storages.values())


def list_own_calls(record: OperatorRecord) -> list[tuple[bool, tuple, tuple]]:
    """Return the calls of our operators: whether it is the forward pass, arguments and outputs."""
    forward = torch.ops.stackexp.depth_step.default
    return [(f is forward, args, output) for f, args, _, output in record.calls if f.namespace == "stackexp"]


def check_operators(case: Case, device: str = "cpu") -> None:
    """Run torch.library.opcheck on both operators at each layer."""
    inputs = make_inputs(case, device)
    with OperatorRecord() as record:
        compute("triton", case, inputs)
    calls = list_own_calls(record)
    assert len(calls) == 2 * case.num_layers
    for is_forward, args, _ in calls:
        args = [_detach(arg) for arg in args]
        operators = torch.ops.stackexp
        torch.library.opcheck((operators.depth_step if is_forward else operators.depth_step_backward).default, args)


def _detach(arg: object) -> object:
    if isinstance(arg, list):
        return [_detach(each) for each in arg]
    return arg.detach() if isinstance(arg, Tensor) else arg


def check_compiled(case: Case, backend: str, device: str = "cpu") -> None:
    """Check torch.compile of all layers in one graph, and of each layer alone."""
    inputs = make_inputs(case, device)
    whole = torch.compile(unroll, fullgraph=True, backend=backend)
    step = torch.compile(depth_step.step, fullgraph=True, backend=backend)
    expected = compute("triton", case, inputs)
    torch.testing.assert_close(differentiate(whole("triton", case, inputs), inputs), expected)
    torch.testing.assert_close(compute("triton", case, inputs, step), expected)


def count_bytes(case: Case) -> tuple[list[int], list[int], int]:
    """Return the bytes that forward and backward of each layer read and write, and that autograd saves."""
    inputs = make_inputs(case)
    with OperatorRecord() as record:
        saved = SavedBytes()
        with saved:
            outputs = unroll("triton", case, inputs)
        sum(o.read.square().float().sum() + o.entropy.mean() for o in outputs).backward()
    moved: tuple[list[int], list[int]] = [], []
    for is_forward, args, results in list_own_calls(record):
        query = args[2].shape  # its gradient has a row for each program, here one
        moved[not is_forward].append(_count_tensor_bytes([*args, *results], skip=(query, (1, *query))))
    return moved[0], moved[1][::-1], saved.count()


def _count_tensor_bytes(found: object, skip: tuple[tuple[int, ...], ...]) -> int:
    if isinstance(found, list):
        return sum(_count_tensor_bytes(each, skip) for each in found)
    if not isinstance(found, Tensor) or found.shape in skip or 0 in found.stride():
        return 0
    return found.nbytes


def check_second_backward_pass() -> None:
    """Only the coefficient form refuses it: its first backward pass overwrites the pushed vectors."""
    case = Case(3, 4, 1, 3)
    inputs = make_inputs(case)
    outputs = unroll("coefficients", case, inputs)
    total = sum(output.read.sum() for output in outputs)
    torch.autograd.grad(total, inputs, retain_graph=True)
    for again in (total, outputs[1].read.sum()):
        with pytest.raises(RuntimeError, match="the backward pass runs once for each forward pass"):
            torch.autograd.grad(again, inputs, retain_graph=True)


def count_saved_bytes(case: Case) -> int:
    """Return the bytes that autograd saves in all layers in coefficient form."""
    inputs, saved = make_inputs(case), SavedBytes()
    with saved:
        unroll("coefficients", case, inputs)
    return saved.count()


def check_coefficients_in_a_model() -> None:
    """Check a model with long vectors against the eager implementation, also recomputed, evaluated and changed."""
    memory = {"projection": "none", "num_heads": 1, "head_dim": 128, "eval_num_slots": 5}
    model, tokens, found = make_model(memory, hidden_size=128, num_layers=4), make_tokens(3), []
    cleared = Intervention("x", state=lambda _, state: clear(state), layer=2)
    for name, recompute in (("eager", False), ("triton", False), ("triton", True)):
        model.checkpoint_blocks = recompute
        with stack.use_implementation(name):
            state = model.memories[0].empty_state(model.embedding(tokens))
            assert isinstance(state, coefficients.CoefficientState) == (name == "triton")
            output = model.train()(tokens)
            total = output.logits.logsumexp(-1).sum() + output.entropy
            found.append([output.logits, *torch.autograd.grad(total, list(model.parameters()))])
            with torch.no_grad(), intervene(model.eval(), cleared):
                found[-1].append(model(tokens).logits)
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], rtol=1e-10, atol=1e-10)
