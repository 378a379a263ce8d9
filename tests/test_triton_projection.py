"""Tests of the fused projections against the reference and PyTorch: in Triton's interpreter, and on a GPU."""

from importlib.util import find_spec
from typing import NamedTuple

import pytest
import small_models
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from stackexp import stack
from stackexp.models.cross_entropy import NextTokenLoss
from stackexp.planning.memory_use import track_pass
from stackexp.stack import dispatch, projection, reference

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
NAMES = ("new_h", "entropy", "h", "down", "actions", "query", "up", "gate")


class Case(NamedTuple):
    """The sizes of one memory layer, and the dtypes of h, of the weights and of the products."""

    tokens: tuple[int, ...]
    hidden: int
    heads: int
    size: int  # D
    h_dtype: torch.dtype = F32
    weight_dtype: torch.dtype = F32
    dtype: torch.dtype = F32
    device: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.tokens}-{self.hidden}-{self.heads}x{self.size}-{self.h_dtype}-{self.weight_dtype}-{self.dtype}"


CASES = [
    Case((1,), 16, 1, 1),
    Case((37,), 48, 2, 8),
    Case((2, 150), 200, 3, 5),
    Case((2, 0), 24, 2, 4),
    Case((5, 60), 130, 8, 16),
    Case((3, 70), 72, 40, 3),
    Case((2, 33), 96, 1, 128),
]
ROUNDED = [
    Case((2, 150), 200, 4, 16, F32, F32, BF16),
    Case((2, 150), 200, 4, 16, BF16, F32, BF16),
    Case((2, 150), 200, 4, 16, F32, BF16, BF16),
    Case((2, 150), 70, 1, 5, BF16, BF16, BF16),
]
MEMORIES = {
    "paper": {},
    "queue": {"discipline": "queue", "site": "after_attention", "read": "top"},
    "push_only": {"discipline": "push_only", "site": "each_sublayer"},
    "time": {"axis": "time", "read_mask": "log"},
    "token_major": {"axis": "token_major", "site": "before_attention"},
    "normalized": {"push_norm": "head", "action_bias": 1.0},
    "sharp": {"action_sharpness": 2.0},
    "feedback": {"axis": "time", "feedback": True, "feedback_activation": "gated", "feedback_hidden_size": 6},
}
SLOW = ("queue", "token_major", "sharp", "feedback")
OTHERS = {
    "slices": {"projection": "shared_slices"},
    "full": {"projection": "none", "head_dim": 8},
    "gated_read": {"residual_gate": "read"},
    "hidden_actions": {"action_input": "hidden"},
    "wide": {"head_dim": 65},
    "noise": {"action_noise": 0.5},
}


def fix_interpreter() -> None:
    """Let the interpreter round to bfloat16 as a GPU does, and multiply bfloat16.

    It would round toward zero, and multiply the bits as integers.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    class Builder(interpreter.InterpreterBuilder):
        def create_fp_trunc(self, x, dtype):
            if dtype.scalar != tl.bfloat16:
                return super().create_fp_trunc(x, dtype)
            bits = torch.from_numpy(x.data.astype("float32")).bfloat16().view(torch.int16).numpy().view("uint16")
            return interpreter.TensorHandle(bits, tl.bfloat16)

        def create_dot(self, a, b, *rest):
            a, b = (self.create_fp_ext(x, tl.float32) if x.dtype.is_bf16() else x for x in (a, b))
            return super().create_dot(a, b, *rest)

    interpreter.interpreter_builder.__class__ = Builder


def make_inputs(case: Case) -> tuple[dict[str, Tensor], reference.StackState, Tensor]:
    """Return h and the weights in float64, rounded to their dtypes; a state; and the weights of the loss."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=F64)

    heads, size, hidden, num_slots = case.heads, case.size, case.hidden, 3
    width = heads * size
    weights = {"down": draw(heads, size, hidden, scale=hidden**-0.5), "actions": draw(heads, 3, size)}
    weights |= {"query": draw(heads, size), "up": draw(hidden, heads, size, scale=width**-0.5)}
    weights["gate"] = torch.tensor([0.7], dtype=F64)
    inputs = {"h": draw(*case.tokens, hidden).to(case.h_dtype).double()}
    inputs |= {name: weight.to(case.weight_dtype).double() for name, weight in weights.items()}
    slots, mask = draw(*case.tokens, heads, num_slots, size), draw(*case.tokens, heads, num_slots).sigmoid()
    state = reference.StackState(slots.to(case.device), mask.to(case.device))
    inputs = {name: value.to(case.device) for name, value in inputs.items()}
    return inputs, state, draw(*case.tokens, hidden).to(case.device)


def run_reference(h, down, actions, query, up, gate, state) -> tuple[Tensor, Tensor]:
    return reference.memory_layer(h, state, reference.LayerWeights(down, actions, query, up, gate))[:2]


def run_plain(h, down, actions, query, up, gate, state, dtype) -> tuple[Tensor, Tensor]:
    """Run the layer with products in `dtype`, as under autocast."""
    x = F.linear(h.to(dtype), down.flatten(0, 1).to(dtype)).unflatten(-1, down.shape[:2])
    logits = torch.einsum("...hd,had->...ha", x, actions.to(dtype))
    state = reference.StackState(*(value.float() for value in state))
    output, _ = reference.step(state, x.float(), logits.float(), query.float(), num_slots=3)
    read = F.linear(output.read.to(dtype).flatten(-2), up.flatten(1).to(dtype))
    return torch.addcmul(read, h, gate).to(h.dtype), output.entropy


def run_fused(h, down, actions, query, up, gate, state, dtype, products=None) -> tuple[Tensor, Tensor]:
    if products is None:
        from stackexp.stack.triton import projection as products

    weights = down.flatten(0, 1), actions, up.flatten(1), gate
    x, logits, link = projection.project_down(products, h, *weights, down.shape[0], dtype)
    wide = torch.promote_types(dtype, F32)
    state = reference.StackState(*(value.to(wide) for value in state))
    output, _ = reference.step(state, x.to(wide), logits.to(wide), query.to(wide), num_slots=3)
    return projection.project_up(link, output.read.to(dtype)), output.entropy


def differentiate(run, case: Case, *options, dtypes: bool = True) -> dict[str, Tensor]:
    """Return h', the entropy and the gradients of all inputs."""
    inputs, state, weights = make_inputs(case)
    if dtypes:
        inputs = {k: v.to(case.h_dtype if k == "h" else case.weight_dtype) for k, v in inputs.items()}
    inputs = {name: value.requires_grad_() for name, value in inputs.items()}
    new_h, entropy = run(*inputs.values(), state, *options)
    grads = torch.autograd.grad((new_h * weights).sum() + entropy.sum(), list(inputs.values()))
    return dict(zip(NAMES, (new_h, entropy, *grads), strict=True))


def relative_errors(case: Case, run) -> dict[str, float]:
    exact = differentiate(run_reference, case, dtypes=False)
    found = differentiate(run, case, case.dtype)
    for name, value in found.items():
        expected = case.h_dtype if name in ("new_h", "h") else F32 if name == "entropy" else case.weight_dtype
        assert value.dtype == expected, name
        assert value.shape == exact[name].shape
    return {k: ((v.double() - exact[k]).norm() / exact[k].norm().clamp(min=1e-9)).item() for k, v in found.items()}


def check_reference(case: Case) -> None:
    fix_interpreter()
    errors = relative_errors(case, run_fused)
    assert all(error < 1e-5 for error in errors.values()), errors


def check_rounding(case: Case) -> None:
    """The errors are those of PyTorch's products, except for dg, because h is saved in bfloat16."""
    fix_interpreter()
    fused, plain = relative_errors(case, run_fused), relative_errors(case, run_plain)
    assert all(error < 0.05 for error in plain.values()), plain
    for name in NAMES:
        assert fused[name] < 1.1 * plain[name] + (2e-3 if name == "gate" else 1e-6), (name, fused, plain)


def check_memory(options: dict, implementation: str = "triton", dtype: torch.dtype = F32) -> None:
    """Compare decoders with fused projections and with PyTorch's, also with recomputed layers."""
    model = small_models.make_model(options, dtype, num_layers=2)
    assert all(has_products(memory, dtype, implementation) for memory in model.memories)
    found, expected = (run_model(model, name) for name in (implementation, "eager"))
    tolerance = {"rtol": 1e-3, "atol": 2e-6} if dtype == F32 else {"rtol": 1e-6, "atol": 1e-9}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **tolerance, msg=lambda text, name=name: name + text)
    model.checkpoint_blocks = True
    recomputed = run_model(model, implementation)
    assert all(torch.equal(recomputed[name], value) for name, value in found.items())


def has_products(memory, dtype: torch.dtype = F32, implementation: str = "triton") -> bool:
    with stack.use_implementation(implementation):
        return memory.choose_products(torch.zeros(1, 2, memory.model.hidden_size, dtype=dtype)) is not None


def run_model(model, implementation: str) -> dict[str, Tensor]:
    """Return logits, entropy, probes and the gradients of all parameters."""
    model.zero_grad()
    with stack.use_implementation(implementation):
        output = model(small_models.make_tokens(5), probe=True)
        (output.logits.square().mean() + output.entropy).backward()
    probes = {f"{i}.{name}": value for i, probe in enumerate(output.probes) for name, value in probe.items()}
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": output.logits.detach(), "entropy": output.entropy.detach()} | probes | grads


def check_choice() -> None:
    """The kernels do not run in float64, while operations are traced, or with the other implementations."""
    for options in OTHERS.values():
        assert not has_products(small_models.make_model(options, F32).memories[0]), options
    memory = small_models.make_model({}, F32).memories[0]
    assert has_products(memory)
    assert has_products(memory, BF16)
    assert not has_products(memory, F64)
    h = torch.zeros(1, 2, 16)
    with stack.use_implementation("triton"), FlopCounterMode(display=False):
        assert dispatch.choose_products(h, BF16) is None


def check_parts_of_the_gradient(products=None) -> None:
    """Each input may lack a gradient, and the loss may use h', x or the logits alone."""
    if products is None:
        from stackexp.stack.triton import projection as products

    case = Case((3, 7), 24, 2, 4)
    inputs, _, weights = make_inputs(case)
    inputs.pop("query")
    inputs = {name: value.float() for name, value in inputs.items()}
    names = list(inputs)

    def run(needed: list[str], use) -> tuple[Tensor | None, ...]:
        h, down, actions, up, gate = given = [value.clone().requires_grad_(n in needed) for n, value in inputs.items()]
        x, logits, link = projection.project_down(products, h, down.flatten(0, 1), actions, up.flatten(1), gate, 2, F32)
        new_h = projection.project_up(link, x.tanh())
        use(new_h, x, logits).backward()
        return tuple(value.grad for value in given)

    def run_torch(use) -> tuple[Tensor, ...]:
        h, down, actions, up, gate = given = [value.double().requires_grad_() for value in inputs.values()]
        x = torch.einsum("...m,hdm->...hd", h, down)
        new_h = gate * h + torch.einsum("...hd,mhd->...m", x.tanh(), up)
        loss = use(new_h, x, torch.einsum("...hd,had->...ha", x, actions))
        return torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)

    losses = [
        lambda new_h, x, logits: (new_h * weights).sum() + logits.square().sum(),
        lambda new_h, x, logits: (new_h * weights).sum(),
        lambda new_h, x, logits: x.square().sum(),
        lambda new_h, x, logits: logits.square().sum(),
    ]
    for use in losses:
        expected = run_torch(use)
        for needed in (names, ["h"], names[1:], ["down"], ["actions"], ["up", "h"], ["gate"]):
            if use is not losses[0] and needed != names:
                continue
            for name, grad, value in zip(names, run(needed, use), expected, strict=True):
                assert (grad is None) == (name not in needed), (name, needed)
                if grad is not None:
                    torch.testing.assert_close(grad, value.float(), rtol=1e-4, atol=1e-4)


def check_saved_bytes() -> None:
    """Under autocast, the memory saves one tensor [tokens, d], in bfloat16; without gradients it saves nothing."""
    fix_interpreter()
    model = small_models.make_model({}, F32)
    saved: list[Tensor] = []
    h, memory = torch.randn(2, 9, 16), model.memories[0]
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with hooks, stack.use_implementation("triton"), torch.autocast("cpu", BF16):
        new_h, _, _ = memory(h.requires_grad_(), memory.empty_state(h))
        assert [x.dtype for x in saved if x.shape == h.shape and x.stride() == h.stride()] == [BF16]
        saved.clear()
        with torch.no_grad():
            assert torch.equal(memory(h, memory.empty_state(h))[0], new_h)
    assert saved == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layer_equals_the_reference(triton_interpreter, case):
    triton_interpreter.submit(check_reference, case).result()


@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.name)
def test_rounding_errors_are_those_of_separate_products(triton_interpreter, case):
    triton_interpreter.submit(check_rounding, case).result()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MEMORIES]
)
def test_models_equal_those_with_separate_products(triton_interpreter, name):
    triton_interpreter.submit(check_memory, MEMORIES[name]).result()


@pytest.mark.parametrize("check", [check_choice, check_parts_of_the_gradient, check_saved_bytes])
def test_projections(triton_interpreter, check):
    triton_interpreter.submit(check).result()


def test_predicted_memory_counts_the_kernels(monkeypatch):
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_layers": 8}

    def count(precision: str) -> int:
        model = small_models.make_model({}, F32, **sizes).to("meta")
        with stack.use_implementation("triton"):
            return track_pass(model, (2, 64), precision == "bf16-mixed", NextTokenLoss()).total()

    mixed, full = count("bf16-mixed"), count("32-true")
    monkeypatch.setattr(dispatch, "choose_products", lambda h, dtype: None)
    assert count("32-true") == full
    assert count("bf16-mixed") - mixed > 8 * 2 * 64 * 256 * 3  # h in float32 and half of the rest


@pytest.mark.gpu
@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.name)
def test_rounding_errors_on_a_gpu(case):
    case = case._replace(tokens=(2, 3000), device="cuda")
    fused, plain = relative_errors(case, run_fused), relative_errors(case, run_plain)
    for name in NAMES:
        assert fused[name] < 1.3 * plain[name] + 2e-3, (name, fused, plain)


@pytest.mark.gpu
def test_autocast_selects_the_kernels_on_a_gpu():
    h = torch.zeros(1, 2, 16, device="cuda")
    assert dispatch.choose_products(h, BF16) is not None
    assert dispatch.choose_products(h, F32) is None
