"""Tests of the depth axis in coefficient form against the reference: in Triton's interpreter, and on a GPU."""

import itertools
from importlib.util import find_spec

import coefficient_steps
import pytest
import torch
from depth_steps import DISCIPLINES, READS, Case, check_errors

from stackexp import stack
from stackexp.config.compose import compose
from stackexp.models.transformer import Transformer
from stackexp.stack.triton.coefficients import CoefficientState
from stackexp.stack.triton.depth_step import DepthState

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

F32, BF16 = torch.float32, torch.bfloat16
CASES = [
    Case(1, 1, 1, 1),
    Case(3, 4, 3, 6, "queue", read_mask="log"),
    Case(7, 5, 1, 12, "stack", "top"),
    Case(12, 17, 2, 18, leading=(1, 1)),
    Case(2, 5, 1, 3, leading=(2, 9)),
    Case(9, 3, 1, 4, "queue", scale=1000),
    Case(4, 6, 2, 6, "push_only", read_mask="additive"),
    Case(2, 300, 1, 3),
    Case(3, 4, 2, 2, leading=(2, 0)),
]
MORE = [
    Case(5, 3, 2, 9, discipline, *read, scale=scale)
    for discipline, read, scale in itertools.product(DISCIPLINES, READS, [1.0, 1000.0])
]
MORE += [Case(24, 240, 4, 32, leading=(1, 1)), Case(33, 5, 1, 40, leading=(1, 1)), Case(1, 9, 2, 70, leading=(1, 1))]
ROUNDED = [
    Case(6, 20, 2, 10, discipline, read_mask=read_mask, scale=scale, dtype=dtype, state_dtype=state)
    for discipline, read_mask, scale, dtype, state in (
        ("stack", "multiply", 1, F32, F32),
        ("stack", "multiply", 1, BF16, BF16),
        ("queue", "log", 1, F32, F32),
        ("queue", "multiply", 1000, F32, F32),
        ("queue", "log", 1000, BF16, BF16),
        ("stack", "log", 1, BF16, F32),
        ("push_only", "multiply", 1, BF16, BF16),
    )
]
GPU_CASE = Case(24, 240, 4, 32, leading=(2, 300), dtype=BF16, state_dtype=BF16)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(triton_interpreter, case):
    triton_interpreter.submit(coefficient_steps.check, case).result()


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_equals_the_reference_with_all_options_and_sizes(triton_interpreter, case):
    triton_interpreter.submit(coefficient_steps.check, case).result()


@pytest.mark.parametrize("case", ROUNDED[:2], ids=lambda case: case.name)
def test_rounding_errors_are_at_most_twice_those_of_the_reference(triton_interpreter, case):
    triton_interpreter.submit(check_errors, "coefficients", case).result()


@pytest.mark.slow
@pytest.mark.parametrize("case", ROUNDED[2:], ids=lambda case: case.name)
def test_rounding_errors_are_at_most_twice_those_of_the_reference_with_all_options(triton_interpreter, case):
    triton_interpreter.submit(check_errors, "coefficients", case).result()


@pytest.mark.parametrize(
    "property_check",
    [
        coefficient_steps.check_layers_without_gradients,
        coefficient_steps.check_recomputed_layers,
        coefficient_steps.check_second_backward_pass,
        coefficient_steps.check_model,
    ],
)
def test_coefficients(triton_interpreter, property_check):
    triton_interpreter.submit(property_check).result()


def test_saved_bytes_are_those_of_coefficients_and_not_of_vectors(triton_interpreter):
    """Each layer saves C with 8 columns in float16, u and M in float32, and the logits in bfloat16."""
    case = Case(4, 64, 2, 6, leading=(3,), dtype=BF16, state_dtype=BF16)
    saved, history = triton_interpreter.submit(coefficient_steps.count_saved_bytes, case).result()
    slots = [1, 2, 3, 4, 4, 4]
    assert saved == 3 * 2 * sum(n * (8 * 2 + 4) + 8 * 4 + 3 * 2 for n in slots)
    assert history == 6 * 3 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        ("pretrain/stacktrans-360m", ["model.memory=full_dim"], CoefficientState),
        ("pretrain/stacktrans-360m", ["model.memory=full_dim", "model.num_layers=80"], DepthState),
        ("pretrain/stacktrans-360m", ["model.memory=full_dim", "model.memory.site=each_sublayer"], DepthState),
        ("pretrain/stacktrans-360m", [], DepthState),
    ],
)
def test_the_form_that_moves_fewer_bytes_is_chosen(config, overrides, expected):
    model_config = compose([config], overrides).model
    with torch.device("meta"):
        memory = Transformer(model_config).memories[0]
    h = torch.zeros(1, 2, model_config.hidden_size)
    with stack.use_implementation("triton"):
        assert type(memory.empty_state(h)) is expected
        compiled = torch.compile(lambda h: memory.empty_state(h)[0], backend="eager", fullgraph=True)
        assert compiled(h).shape[0] == 0, "a compiled model has a DepthState"


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("case", [*CASES, *MORE], ids=lambda case: case.name)
def test_equals_the_reference_on_a_gpu(case):
    coefficient_steps.check(case, "cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("case", [*ROUNDED, GPU_CASE], ids=lambda case: case.name)
def test_rounding_errors_are_at_most_twice_those_of_the_reference_on_a_gpu(case):
    check_errors("coefficients", case, "cuda")
