"""Cases of layers on the depth axis, and comparisons of the Triton depth step with the reference."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stackexp.stack import StackOutput, reference
from stackexp.stack.triton import depth_step, depth_step_launch

F64 = torch.float64


class Case(NamedTuple):
    """The sizes and options of L layers. `segment` is k, the layers between stored stacks."""

    num_slots: int
    head_dim: int
    num_heads: int
    num_layers: int
    discipline: str = "stack"
    read: str = "global"
    read_mask: str = "multiply"
    scale: float = 1.0  # of the logits; 1000 saturates the actions
    segment: int = depth_step.CHECKPOINT_EVERY
    leading: tuple[int, ...] = (1, 2)
    dtype: torch.dtype = F64  # of x, logits, query
    state_dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        sizes = f"S{self.num_slots}-D{self.head_dim}-H{self.num_heads}-L{self.num_layers}-k{self.segment}"
        how = self.read if self.read == "top" else self.read_mask
        return "-".join([sizes, self.discipline, how, *(["saturated"] if self.scale > 1 else [])])

    @property
    def options(self) -> dict[str, int | str]:
        names = ("num_slots", "discipline", "read", "read_mask")
        return {name: getattr(self, name) for name in names}


def make_inputs(case: Case, device: str = "cpu") -> list[Tensor]:
    """Return x of each layer, the logits of each layer, and the query; none is contiguous."""
    generator = torch.Generator().manual_seed(3)
    num_actions = 2 if case.discipline == "push_only" else 3

    def draw(*sizes: int) -> Tensor:  # with the leading sizes last
        return torch.randn(*sizes, *case.leading, generator=generator, dtype=F64).to(device, case.dtype)

    def arrange(numbers: Tensor) -> Tensor:
        return numbers.movedim((0, 1), (-1, -2))

    xs = [arrange(draw(case.head_dim, case.num_heads)) for _ in range(case.num_layers)]
    logits = [arrange(case.scale * draw(num_actions, case.num_heads)) for _ in range(case.num_layers)]
    query = torch.randn(case.head_dim, generator=generator, dtype=F64).to(device, case.dtype)
    return [t.requires_grad_() for t in (*xs, *logits, query.expand(case.num_heads, -1))]


def unroll(case: Case, inputs: list[Tensor], step: Callable, state: NamedTuple, **options) -> list[StackOutput]:
    """Return the output of each layer's step."""
    xs, logits, query = inputs[: case.num_layers], inputs[case.num_layers : -1], inputs[-1]
    query = query if case.read == "global" else None
    outputs = []
    for x, layer_logits in zip(xs, logits, strict=True):
        output, state = step(state, x, layer_logits, query, **case.options, **options)
        outputs.append(output)
    return outputs


def run_triton(case: Case, inputs: list[Tensor], step: Callable = depth_step.step) -> list[StackOutput]:
    shape = (*case.leading, case.num_heads)
    state = depth_step.empty(shape, case.num_slots, case.head_dim, inputs[0], case.state_dtype)
    return unroll(case, inputs, step, state, checkpoint_every=case.segment)


def run_reference(case: Case, inputs: list[Tensor]) -> list[StackOutput]:
    state = reference.empty((*case.leading, case.num_heads), case.num_slots, case.head_dim, inputs[0])
    return unroll(case, inputs, reference.step, state)


def differentiate(outputs: list[StackOutput], inputs: list[Tensor]) -> dict[str, Tensor]:
    """Return the outputs of all layers, and gradients of a random functional of reads, actions and entropies."""
    values = {name: torch.stack([getattr(o, name) for o in outputs]) for name in StackOutput._fields}
    generator = torch.Generator().manual_seed(4)
    total = 0
    for name in ("read", "action", "entropy"):
        weights = torch.randn(values[name].shape, generator=generator, dtype=F64)
        total = total + (weights.to(values[name]) * values[name]).sum()
    gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    num_layers = len(outputs)
    found = {name: value.detach() for name, value in values.items()}
    found |= {"to_x": torch.stack(gradients[:num_layers]), "to_logits": torch.stack(gradients[num_layers:-1])}
    return found if gradients[-1] is None else found | {"to_query": gradients[-1]}


def check(case: Case, device: str = "cpu") -> None:
    """Check that values and gradients equal those of the reference in float64."""
    inputs = make_inputs(case, device)
    ours, expected = (differentiate(run(case, inputs), inputs) for run in (run_triton, run_reference))
    assert ours.keys() == expected.keys()
    # (1 - M) * 1e9 amplifies the rounding of M in the scores
    tolerance = (1e-5, 1e-6) if case.read_mask == "additive" else (1e-9, 1e-11)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance[0], atol=tolerance[1], msg=lambda m, n=name: n + m)


def check_errors(case: Case, device: str = "cpu") -> None:
    """Check that root mean square errors are at most twice those of the reference in the same dtype.

    Errors below the rounding of the result, plus that of a few float32 operations, always pass.
    """
    inputs = make_inputs(case, device)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = differentiate(run_reference(case, exact_inputs), exact_inputs)
    ours, theirs = (differentiate(run(case, inputs), inputs) for run in (run_triton, run_reference))
    for name, value in exact.items():
        errors = [(found[name].double() - value).square().mean().sqrt().item() for found in (ours, theirs)]
        rounding = torch.finfo(case.dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps
        rounding = rounding * value.square().mean().sqrt().item() + torch.finfo(F64).eps
        assert errors[0] <= max(2 * errors[1], rounding), (name, errors, rounding)


def check_rounded_read(case: Case) -> None:
    """Check that rounding R to the dtype of x does not change the gradients through its softmax."""
    inputs = [t.detach().to(case.dtype).double().requires_grad_() for t in make_inputs(case)]
    mixed = [t.detach().to(case.dtype if i < case.num_layers else torch.float32) for i, t in enumerate(inputs)]
    mixed = [t.requires_grad_() for t in mixed]
    float32_inputs = slice(case.num_layers, None)  # logits and query are in float32
    gradients = []
    for run, tensors in ((run_triton, mixed), (run_reference, inputs)):
        reads = torch.stack([o.read for o in run(case, tensors)])
        assert reads.dtype == tensors[0].dtype
        weights = torch.randn(reads.shape, generator=torch.Generator().manual_seed(5)).to(case.dtype).to(reads)
        gradients.append(torch.autograd.grad((reads * weights).sum(), tensors[float32_inputs]))
    for ours, exact in zip(*gradients, strict=True):
        assert (ours - exact).norm() < 2**-14 * exact.norm()


def check_segments(case: Case) -> None:
    """Check that the layers between stored stacks do not change results."""
    inputs, found = make_inputs(case), []
    for segment in (1, 2, 3, case.num_layers + 1):
        case = case._replace(segment=segment)
        found.append(differentiate(run_triton(case, inputs), inputs))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-11)


def check_few_programs(case: Case) -> None:
    """Check programs that process several token blocks, the last one past the end."""
    before, depth_step_launch.MAX_PROGRAMS = depth_step_launch.MAX_PROGRAMS, 2
    try:
        check(case)
        assert depth_step_launch.compute_grid("backward", make_inputs(case)[0]) == (2, 1, 2)
    finally:
        depth_step_launch.MAX_PROGRAMS = before


def check_single_outputs(case: Case) -> None:
    """Check gradients of some outputs alone: the entropies, the last read, and one action with one read."""
    functionals = [
        lambda outputs: torch.stack([o.entropy.mean() for o in outputs]).mean(),
        lambda outputs: outputs[-1].read.square().sum(),
        lambda outputs: outputs[1].action[..., 0].sum() + outputs[0].read.sum(),
    ]
    for functional in functionals:
        inputs = make_inputs(case)
        ours, expected = (
            torch.autograd.grad(functional(run(case, inputs)), inputs, allow_unused=True, materialize_grads=True)
            for run in (run_triton, run_reference)
        )
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


def check_recomputed(case: Case) -> None:
    """Check that activation checkpointing changes no result and saves no stacks."""

    def recomputed(*args, **options):
        return checkpoint(depth_step.step, *args, use_reentrant=False, **options)

    inputs = make_inputs(case)
    plain, expected = measure_saved_bytes(lambda: run_triton(case, inputs))
    saved, outputs = measure_saved_bytes(lambda: run_triton(case, inputs, recomputed))
    torch.testing.assert_close(differentiate(outputs, inputs), differentiate(expected, inputs), rtol=0, atol=0)
    assert saved < plain


def measure_saved_bytes(run: Callable[[], list]) -> tuple[int, list]:
    """Return the bytes that autograd saves in `run`, and its result."""
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        if 0 not in tensor.stride():  # the query, and the tensors that only carry gradients
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = run()
    return sum(storages.values()), outputs


def check_operators(case: Case, device: str = "cpu") -> None:
    """Run torch.library.opcheck on both operators at each layer."""
    inputs, calls = make_inputs(case, device), []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "stackexp":
                calls.append((function, args))
            return function(*args, **kwargs or {})

    with Recorder():
        differentiate(run_triton(case, inputs), inputs)
    assert len(calls) == 2 * case.num_layers
    for function, args in calls:
        is_forward = function is torch.ops.stackexp.depth_step.default
        args = [_detached(arg, is_forward and i in (0, 1, 2, 7, 8)) for i, arg in enumerate(args)]
        torch.library.opcheck(function, args)


def _detached(arg: object, requires_grad: bool) -> object:
    if isinstance(arg, list | tuple):
        return [_detached(a, requires_grad) for a in arg]
    if not isinstance(arg, Tensor):
        return arg
    return arg.detach().requires_grad_(requires_grad)


def check_compiled(case: Case, backend: str, device: str = "cpu") -> None:
    """Check torch.compile of all layers in one graph, and of each layer alone."""
    inputs = make_inputs(case, device)
    expected = differentiate(run_triton(case, inputs), inputs)
    whole = torch.compile(run_triton, fullgraph=True, backend=backend)
    step = torch.compile(depth_step.step, fullgraph=True, backend=backend)
    for outputs in (whole(case, inputs), run_triton(case, inputs, step)):
        torch.testing.assert_close(differentiate(outputs, inputs), expected)


def count_bytes(case: Case) -> tuple[list[list[int]], int]:
    """Return the bytes that forward and backward of each layer read and write, and that autograd saves."""
    inputs, moved = make_inputs(case), [[], []]

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            outputs = function(*args, **kwargs or {})
            if function.namespace == "stackexp":
                is_forward = function is torch.ops.stackexp.depth_step.default
                moved[not is_forward].append(_count_tensor_bytes([*args, *outputs], skip=args[2]))
            return outputs

    with Counter():
        saved, outputs = measure_saved_bytes(lambda: run_triton(case, inputs))
        sum(o.read.square().float().sum() + o.entropy.mean() for o in outputs).backward()
    return [moved[0], moved[1][::-1]], saved


def _count_tensor_bytes(found: object, skip: Tensor) -> int:
    if isinstance(found, list | tuple):
        return sum(_count_tensor_bytes(each, skip) for each in found)
    if not isinstance(found, Tensor) or found is skip or found.shape == skip.shape or 0 in found.stride():
        return 0
    return found.nbytes
