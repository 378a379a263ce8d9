"""Tests of both forms of the Triton depth step against the reference: in Triton's interpreter, and on a GPU."""

import itertools
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import pytest
import torch
import triton_steps
from depth_steps import (
    Case,
    check,
    check_errors,
    differentiate,
    draw_weights,
    make_inputs,
    stack_outputs,
    unroll,
)
from operators import OperatorRecord, list_tensors
from scans import DISCIPLINES, READS
from stack_traffic import compute_traffic

from stackexp import stack
from stackexp.config.compose import compose
from stackexp.models.transformer import Transformer
from stackexp.stack.triton.coefficients import CoefficientState
from stackexp.stack.triton.depth_step import DepthState

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

F32, BF16 = torch.float32, torch.bfloat16
CASES = {
    "triton": [
        Case(1, 1, 1, 1),
        Case(1, 4, 3, 3, "queue", read_mask="log"),
        Case(3, 17, 1, 6, "stack", "top", segment=2),
        Case(2, 4, 3, 6, "stack", scale=1000),
        Case(7, 4, 1, 6, "queue", segment=3),
        Case(7, 1, 8, 3, "push_only", read_mask="additive"),
        Case(24, 16, 4, 3, "stack", leading=(2, 3)),
        Case(33, 64, 1, 3, "queue", read_mask="additive", scale=1000),
        Case(7, 240, 2, 2, "stack", read_mask="log"),
        Case(2, 64, 1, 2, leading=(5,)),
        Case(7, 4, 3, 3, "stack", leading=(2, 0)),
    ],
    "coefficients": [
        Case(1, 1, 1, 1),
        Case(3, 4, 3, 6, "queue", read_mask="log"),
        Case(7, 5, 1, 12, "stack", "top"),
        Case(12, 17, 2, 18, leading=(1, 1)),
        Case(2, 5, 1, 3, leading=(2, 9)),
        Case(9, 3, 1, 4, "queue", scale=1000),
        Case(4, 6, 2, 6, "push_only", read_mask="additive"),
        Case(2, 300, 1, 3),
        Case(3, 4, 2, 2, leading=(2, 0)),
    ],
}
SIZES = [  # S, d_s, H, L
    *[(1, 4, 1, 7), (2, 64, 4, 9), (7, 16, 3, 20), (24, 17, 8, 30), (33, 16, 1, 40), (24, 16, 4, 32)],
    *[(7, 240, 3, 12), (33, 1, 4, 36), (2, 240, 1, 5), (24, 4, 8, 26), (33, 64, 3, 35), (1, 17, 4, 3)],
]
CYCLED = itertools.cycle((d, *read) for read in READS[:3] for d in DISCIPLINES)
COMBINED = zip(SIZES, CYCLED, itertools.cycle([4, 1, 8]))
OPTIONS = [
    {"discipline": discipline, "read": read, "read_mask": read_mask, "scale": scale}
    for discipline, (read, read_mask), scale in itertools.product(DISCIPLINES, READS, [1.0, 1000.0])
]
MORE = {
    "triton": [
        *(Case(3, 4, 1, 6, segment=2, **options) for options in OPTIONS),
        *(Case(*sizes, *options, segment=k) for sizes, options, k in COMBINED),
    ],
    "coefficients": [
        *(Case(5, 3, 2, 9, **options) for options in OPTIONS),
        *(Case(S, D, H, L, leading=(1, 1)) for S, D, H, L in [(24, 240, 4, 32), (33, 5, 1, 40), (1, 9, 2, 70)]),
    ],
}
ROUNDED = [
    Case(7, 17, 3, 9, read_mask="log", dtype=F32, state_dtype=F32),
    Case(5, 240, 1, 8, "queue", dtype=BF16, state_dtype=BF16),
    *(
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
    ),
]
GPU_CASE = Case(24, 16, 4, 32, leading=(4, 300), dtype=BF16, state_dtype=BF16)


def parametrize(cases: Mapping[str, Sequence[Case]]) -> pytest.MarkDecorator:
    """Run a test with the cases of each form."""
    pairs = [(form, case) for form in cases for case in cases[form]]
    return pytest.mark.parametrize(("form", "case"), pairs, ids=lambda value: getattr(value, "name", value))


@parametrize(CASES)
def test_equals_the_reference(triton_interpreter, form, case):
    triton_interpreter.submit(check, form, case).result()


@pytest.mark.slow
@parametrize(MORE)
def test_equals_the_reference_with_all_options_and_sizes(triton_interpreter, form, case):
    triton_interpreter.submit(check, form, case).result()


@parametrize(dict.fromkeys(CASES, ROUNDED[:4]))
def test_rounding_errors_are_at_most_twice_those_of_the_reference(triton_interpreter, form, case):
    triton_interpreter.submit(check_errors, form, case).result()


@pytest.mark.slow
@parametrize(dict.fromkeys(CASES, ROUNDED))
def test_rounding_errors_are_at_most_twice_those_of_the_reference_with_all_options(triton_interpreter, form, case):
    sizes = {"num_slots": 24, "num_layers": 30, "leading": (4,)} if form == "triton" and case.scale == 1 else {}
    triton_interpreter.submit(check_errors, form, case._replace(**sizes)).result()


@pytest.mark.parametrize("form", CASES)
@pytest.mark.parametrize(
    "property_check", [triton_steps.check_each_output_alone_has_a_gradient, triton_steps.check_recomputed_layers]
)
def test_both_forms(triton_interpreter, property_check, form):
    triton_interpreter.submit(property_check, form).result()


@pytest.mark.parametrize(
    "property_check",
    [
        triton_steps.check_bfloat16_reads_have_float32_gradients,
        triton_steps.check_checkpoint_interval_changes_no_result,
        triton_steps.check_second_backward_pass,
        triton_steps.check_coefficients_in_a_model,
    ],
)
def test_depth_step(triton_interpreter, property_check):
    triton_interpreter.submit(property_check).result()


def test_operators_pass_opcheck(triton_interpreter):
    case = Case(2, 4, 1, 2, segment=2, dtype=BF16, state_dtype=F32)
    triton_interpreter.submit(triton_steps.check_operators, case).result()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case(2, 4, 1, 3, "push_only", *read, segment=2) for read in READS], ids=lambda case: case.name
)
def test_operators_pass_opcheck_with_all_reads(triton_interpreter, case):
    triton_interpreter.submit(triton_steps.check_operators, case).result()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_steps_compile_in_one_graph_and_separately(triton_interpreter, backend):
    triton_interpreter.submit(triton_steps.check_compiled, Case(2, 4, 1, 3, segment=2), backend).result()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_moved_and_saved_bytes_equal_the_computed_traffic(triton_interpreter, dtype):
    case = Case(4, 4, 2, 6, leading=(3,), segment=2, dtype=dtype, state_dtype=BF16)
    sizes = {"num_heads": 2, "head_dim": 4, "num_slots": 4, "segment": 2}
    sizes |= {"x_bytes": dtype.itemsize, "logits_bytes": dtype.itemsize}
    expected = [compute_traffic(layer, **sizes) for layer in range(case.num_layers)]
    forward, backward, saved = triton_interpreter.submit(triton_steps.count_bytes, case).result()
    stack = 4 * 2 * (4 * 2 + 4)  # the last layer's stack is unused and has no gradient
    assert forward == [3 * t.forward for t in expected]
    assert backward == [*(3 * t.backward for t in expected[:-1]), 3 * (expected[-1].backward - stack)]
    assert saved == 3 * (sum(t.stored for t in expected) - stack)


def test_saved_bytes_are_those_of_coefficients_and_not_of_vectors(triton_interpreter):
    """Each layer saves C with 8 columns in float16, u and M in float32, and the logits in bfloat16."""
    case = Case(4, 64, 2, 6, leading=(3,), dtype=BF16, state_dtype=BF16)
    saved = triton_interpreter.submit(triton_steps.count_saved_bytes, case).result()
    slots = [1, 2, 3, 4, 4, 4]
    assert saved == 3 * 2 * sum(n * (8 * 2 + 4) + 8 * 4 + 3 * 2 for n in slots)


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


@pytest.fixture
def compiler(monkeypatch) -> None:
    """Import Triton in compiler mode."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_cpu_tensors_are_rejected(compiler):
    with pytest.raises(ValueError, match="the kernels do not run on cpu; use CUDA"):
        check("triton", Case(1, 1, 1, 1))


def test_steps_that_a_cuda_graph_captures_use_no_cpu_tensors(compiler):
    """The meta device replaces the GPU. Weights that are drawn inside the capture must be found."""
    case = GPU_CASE._replace(num_layers=6, leading=(4, 3))
    inputs = [tensor.detach().to("meta").requires_grad_() for tensor in make_inputs(case)]
    weights = draw_weights(stack_outputs(unroll("triton", case, inputs)))
    found = []
    for given in (weights, None):
        with OperatorRecord() as record:
            differentiate(unroll("triton", case, inputs), inputs, given)
        outputs = [(str(operator), tensor) for operator, *_, output in record.calls for tensor in list_tensors(output)]
        found.append([operator for operator, tensor in outputs if tensor.is_cpu and tensor.ndim])
    assert found[0] == []
    assert found[1].count("aten.randn.generator") == 3


@pytest.mark.gpu
@parametrize({form: [*CASES[form], *MORE[form]] for form in CASES})
def test_equals_the_reference_on_a_gpu(form, case):
    check(form, case, "cuda")


@pytest.mark.gpu
@parametrize(dict.fromkeys(CASES, (*ROUNDED, GPU_CASE, GPU_CASE._replace(head_dim=240))))
def test_rounding_errors_are_at_most_twice_those_of_the_reference_on_a_gpu(form, case):
    check_errors(form, case._replace(leading=(2, 300)), "cuda")


@pytest.mark.gpu
def test_operators_pass_opcheck_on_a_gpu():
    triton_steps.check_operators(Case(3, 16, 4, 5, segment=2, dtype=BF16, state_dtype=BF16, leading=(2, 3)), "cuda")


@pytest.mark.gpu
def test_steps_compile_with_inductor_on_a_gpu():
    triton_steps.check_compiled(Case(3, 16, 4, 5, segment=2, dtype=F32, leading=(2, 3)), "inductor", "cuda")


@pytest.mark.gpu
def test_cuda_graph_replays_the_step_bit_exactly():
    inputs = make_inputs(GPU_CASE, "cuda")
    weights = draw_weights(stack_outputs(unroll("triton", GPU_CASE, inputs)))

    def run() -> list[torch.Tensor]:
        return list(differentiate(unroll("triton", GPU_CASE, inputs), inputs, weights).values())

    expected = run()  # compiles the kernels
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):  # capture fails if an operation waits for the device
        found = run()
    graph.replay()
    assert all(map(torch.equal, found, expected))
