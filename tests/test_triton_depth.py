"""Tests of the Triton depth step against the reference: in Triton's interpreter, and on a GPU."""

import itertools
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import depths
import pytest
import torch
from depths import Case
from stack_traffic import compute_traffic

from stackexp.stack.triton import depth_step_launch
from stackexp.stack.triton.depth_step_launch import StepBackward, StepForward, StepInputs

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

F32, BF16 = torch.float32, torch.bfloat16
CASES = [
    Case(1, 1, 1, 1),
    Case(1, 4, 3, 3, "queue", read_mask="log"),
    Case(3, 17, 1, 6, "stack", "top", segment=2),
    Case(2, 4, 3, 6, "stack", scale=1000),
    Case(7, 4, 1, 9, "queue", segment=3),
    Case(7, 1, 8, 3, "push_only", read_mask="additive"),
    Case(24, 16, 4, 5, "stack", leading=(2, 3)),
    Case(33, 64, 1, 3, "queue", read_mask="additive", scale=1000),
    Case(7, 240, 4, 2, "stack", read_mask="log"),
    Case(7, 4, 3, 3, "stack", leading=(2, 0)),
]
READS = [("top", "multiply"), ("global", "multiply"), ("global", "log"), ("global", "additive")]
OPTIONS = [
    Case(3, 4, 1, 6, discipline, *read, scale=scale, segment=2)
    for discipline, read, scale in itertools.product(["stack", "queue", "push_only"], READS, [1.0, 1000.0])
]
SIZES = [  # S, d_s, H, L
    *[(1, 4, 1, 7), (2, 64, 4, 9), (7, 16, 3, 20), (24, 17, 8, 30), (33, 16, 1, 40), (24, 16, 4, 32)],
    *[(7, 240, 3, 12), (33, 1, 4, 36), (2, 240, 1, 5), (24, 4, 8, 26), (33, 64, 3, 35), (1, 17, 4, 3)],
]
CYCLED = itertools.cycle((d, *read) for read in READS[1:] for d in ("stack", "queue", "push_only"))
COMBINED = zip(SIZES, CYCLED, itertools.cycle([4, 1, 8]))
MORE = [*OPTIONS, *(Case(*sizes, *options, segment=k) for sizes, options, k in COMBINED)]
ROUNDED = [
    Case(3, 16, 2, 6, discipline, read_mask=read_mask, scale=scale, dtype=dtype, state_dtype=state)
    for discipline, read_mask, scale, dtype, state in (
        ("stack", "multiply", 1, F32, F32),
        ("queue", "log", 1, F32, F32),
        ("queue", "multiply", 1000, F32, F32),
        ("stack", "multiply", 1, BF16, BF16),
        ("queue", "log", 1000, BF16, BF16),
        ("stack", "log", 1, BF16, F32),
    )
]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process with Triton in interpreter mode, which is fixed when Triton is imported."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            executor.submit(os.getpid).result()  # start it now, while the environment is set
            yield executor


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(interpreter, case):
    interpreter.submit(depths.check, case).result()


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_equals_the_reference_with_all_options_and_sizes(interpreter, case):
    interpreter.submit(depths.check, case).result()


@pytest.mark.parametrize("case", ROUNDED[::3], ids=lambda case: case.name)
def test_rounding_errors_are_at_most_twice_those_of_the_reference(interpreter, case):
    interpreter.submit(depths.check_errors, case).result()


@pytest.mark.slow
@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.name)
def test_rounding_errors_are_at_most_twice_those_of_the_reference_with_all_options(interpreter, case):
    sizes = {"num_slots": 24, "num_layers": 30, "leading": (4,)} if case.scale == 1 else {}
    interpreter.submit(depths.check_errors, case._replace(**sizes)).result()


def test_bfloat16_read_has_float32_gradients(interpreter):
    interpreter.submit(depths.check_rounded_read, Case(3, 16, 2, 3, dtype=BF16, state_dtype=F32)).result()


def test_results_do_not_depend_on_the_checkpoint_interval(interpreter):
    interpreter.submit(depths.check_segments, Case(2, 4, 1, 4, "queue", read_mask="log")).result()


def test_one_program_can_process_several_token_blocks(interpreter):
    interpreter.submit(depths.check_few_programs, Case(2, 64, 1, 2, leading=(5,))).result()


def test_each_output_alone_has_a_gradient(interpreter):
    interpreter.submit(depths.check_single_outputs, Case(3, 4, 1, 2)).result()


def test_operators_pass_opcheck(interpreter):
    interpreter.submit(depths.check_operators, Case(2, 4, 1, 2, segment=2, dtype=BF16, state_dtype=F32)).result()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case(2, 4, 1, 3, "push_only", *read, segment=2) for read in READS], ids=lambda case: case.name
)
def test_operators_pass_opcheck_with_all_reads(interpreter, case):
    interpreter.submit(depths.check_operators, case).result()


def test_steps_compile_in_one_graph_and_separately(interpreter):
    interpreter.submit(depths.check_compiled, Case(2, 4, 1, 3, segment=2), "aot_eager").result()


@pytest.mark.slow
def test_steps_compile_with_inductor(interpreter):
    interpreter.submit(depths.check_compiled, Case(2, 4, 1, 3, segment=2), "inductor").result()


def test_recomputed_layers_save_no_stack(interpreter):
    interpreter.submit(depths.check_recomputed, Case(3, 4, 2, 5, segment=2)).result()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_moved_and_saved_bytes_equal_the_computed_traffic(interpreter, dtype):
    case = Case(4, 4, 2, 6, leading=(3,), segment=2, dtype=dtype, state_dtype=BF16)
    sizes = {"num_heads": 2, "head_dim": 4, "num_slots": 4, "segment": 2}
    sizes |= {"x_bytes": dtype.itemsize, "logits_bytes": dtype.itemsize}
    expected = [compute_traffic(layer, **sizes) for layer in range(case.num_layers)]
    moved, saved = interpreter.submit(depths.count_bytes, case).result()
    stack = 4 * 2 * (4 * 2 + 4)  # the last layer's stack is unused and has no gradient
    backward = [t.backward for t in expected]
    assert moved == [[3 * t.forward for t in expected], [*(3 * b for b in backward[:-1]), 3 * (backward[-1] - stack)]]
    assert saved == 3 * (sum(t.stored for t in expected) - stack)


@pytest.fixture
def compiler(monkeypatch) -> None:
    """Import Triton in compiler mode, whatever the fixture above has set for its process."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_cpu_tensors_are_rejected(compiler):
    with pytest.raises(ValueError, match="the kernels do not run on cpu; use CUDA"):
        depths.check(Case(1, 1, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 4])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_kernels_compile_for_an_h100_without_spilling(compiler, name, num_stages):
    """The sizes are those of 360m in bfloat16: H = 4, D = 16. One warp needs no barriers."""
    import triton
    from triton.backends.compiler import GPUTarget

    from stackexp.stack.triton import depth_step_kernels

    function = getattr(depth_step_kernels, name)
    x, logits, slots = (torch.empty(shape, dtype=BF16) for shape in [(1, 4, 16), (1, 4, 3), (24, 1, 4, 16)])
    inputs = StepInputs(x, logits, None, slots, slots.float(), [], [], x, x, 24, "stack", "global", "multiply", False)
    options = depth_step_launch.make_options(inputs)
    arguments = StepForward if name == "forward" else StepBackward
    halves = {"query", "slots", "read", "rest", "new_slots", "grad_read", "grad_slots", "to_x", "to_logits", "to_slots"}
    kinds = {field: "*bf16" if field in halves else "*fp32" for field in arguments._fields}
    missing = {"grad_action"} & kinds.keys()
    kinds |= dict.fromkeys(missing, "constexpr")
    layers = ("*bf16",) * num_stages
    signature = {"xs": layers, "logits": layers, "tensors": arguments(**kinds)}
    signature |= dict.fromkeys(function.arg_names[3:-1], "i32") | {"options": "constexpr"}
    constants = {"options": options} | {(2, arguments._fields.index(field)): None for field in missing}
    paths = [(i, j) for i in (0, 1) for j in range(num_stages)]
    paths += [(2, i) for i, field in enumerate(kinds) if field not in missing]
    aligned = {path: [["tt.divisibility", 16]] for path in paths}
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options=depth_step_launch.compiler_options(16))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "-res-usage", "-sass", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "STACK:0 " in found
    assert "LOCAL:0 " in found
    assert "BAR.SYNC" not in found


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU_CASE = Case(24, 16, 4, 32, leading=(4, 300), dtype=BF16, state_dtype=BF16)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("case", [*CASES, *MORE], ids=lambda case: case.name)
def test_equals_the_reference_on_a_gpu(case):
    depths.check(case, "cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("case", [*ROUNDED, GPU_CASE], ids=lambda case: case.name)
def test_rounding_errors_are_at_most_twice_those_of_the_reference_on_a_gpu(case):
    depths.check_errors(case._replace(leading=(4, 300)), "cuda")


@pytest.mark.gpu
@on_gpu
def test_operators_pass_opcheck_on_a_gpu():
    depths.check_operators(Case(3, 16, 4, 5, segment=2, dtype=BF16, state_dtype=BF16, leading=(2, 3)), "cuda")


@pytest.mark.gpu
@on_gpu
def test_steps_compile_with_inductor_on_a_gpu():
    depths.check_compiled(Case(3, 16, 4, 5, segment=2, dtype=F32, leading=(2, 3)), "inductor", "cuda")


@pytest.mark.gpu
@on_gpu
def test_cuda_graph_replays_the_step_bit_exactly():
    inputs = depths.make_inputs(GPU_CASE, "cuda")

    def run() -> list[torch.Tensor]:
        outputs = depths.run_triton(GPU_CASE, inputs)
        total = sum(o.read.float().square().sum() + o.entropy.sum() for o in outputs)
        return [o.read for o in outputs] + list(torch.autograd.grad(total, inputs))

    expected = run()  # compiles the kernels
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):  # capture fails if an operation waits for the device
        found = run()
    graph.replay()
    assert all(map(torch.equal, found, expected))
