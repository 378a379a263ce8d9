"""The Triton kernels of the depth axis equal the reference: in Triton's interpreter, and on a GPU."""

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

from stackexp.stack.traffic import traffic
from stackexp.stack.triton import depth_step_launch
from stackexp.stack.triton.arguments import StepBackward, StepForward

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
HOW = [("top", "multiply"), ("global", "multiply"), ("global", "log"), ("global", "additive")]
OPTIONS = [
    Case(3, 4, 1, 6, discipline, *how, scale=scale, segment=2)
    for discipline, how, scale in itertools.product(["stack", "queue", "push_only"], HOW, [1.0, 1000.0])
]
SIZES = [  # S, d_s, H, L
    *[(1, 4, 1, 7), (2, 64, 4, 9), (7, 16, 3, 20), (24, 17, 8, 30), (33, 16, 1, 40), (24, 16, 4, 32)],
    *[(7, 240, 3, 12), (33, 1, 4, 36), (2, 240, 1, 5), (24, 4, 8, 26), (33, 64, 3, 35), (1, 17, 4, 3)],
]
HOWEVER = itertools.cycle((d, *how) for how in HOW[1:] for d in ("stack", "queue", "push_only"))
MORE = [*OPTIONS, *(Case(*sizes, *how, segment=k) for sizes, how, k in zip(SIZES, HOWEVER, itertools.cycle([4, 1, 8])))]
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
    """A process in which Triton interprets kernels: it decides when it is imported, and here it may have been."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            executor.submit(os.getpid).result()  # it has started, and keeps this environment
            yield executor


def name_of(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_the_reference(interpreter, case):
    interpreter.submit(depths.check, case).result()


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=name_of)
def test_equals_the_reference_with_all_options_and_sizes(interpreter, case):
    interpreter.submit(depths.check, case).result()


@pytest.mark.parametrize("case", ROUNDED[::3], ids=name_of)
def test_errs_no_more_than_the_reference(interpreter, case):
    interpreter.submit(depths.check_errors, case).result()


@pytest.mark.slow
@pytest.mark.parametrize("case", ROUNDED, ids=name_of)
def test_errs_no_more_than_the_reference_with_all_options(interpreter, case):
    sizes = {"num_slots": 24, "num_layers": 30, "leading": (4,)} if case.scale == 1 else {}
    interpreter.submit(depths.check_errors, case._replace(**sizes)).result()


def test_a_rounded_read_costs_its_gradients_nothing(interpreter):
    interpreter.submit(depths.check_rest, Case(3, 16, 2, 3, dtype=BF16, state_dtype=F32)).result()


def test_where_stacks_are_kept_makes_no_difference(interpreter):
    interpreter.submit(depths.check_segments, Case(2, 4, 1, 4, "queue", read_mask="log")).result()


def test_a_program_may_take_several_blocks_of_tokens(interpreter):
    interpreter.submit(depths.check_few_programs, Case(2, 64, 1, 2, leading=(5,))).result()


def test_any_output_alone_has_its_gradient(interpreter):
    interpreter.submit(depths.check_parts, Case(3, 4, 1, 2)).result()


def test_the_operators_pass_opcheck(interpreter):
    interpreter.submit(depths.check_operators, Case(2, 4, 1, 2, segment=2, dtype=BF16, state_dtype=F32)).result()


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(2, 4, 1, 3, "push_only", *how, segment=2) for how in HOW], ids=name_of)
def test_the_operators_pass_opcheck_with_all_reads(interpreter, case):
    interpreter.submit(depths.check_operators, case).result()


def test_compiles_in_one_graph_and_in_several(interpreter):
    interpreter.submit(depths.check_compiled, Case(2, 4, 1, 3, segment=2), "aot_eager").result()


@pytest.mark.slow
def test_compiles_with_inductor(interpreter):
    interpreter.submit(depths.check_compiled, Case(2, 4, 1, 3, segment=2), "inductor").result()


def test_recomputed_layers_keep_no_stack(interpreter):
    interpreter.submit(depths.check_recomputed, Case(3, 4, 2, 5, segment=2)).result()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_moves_and_keeps_what_it_says(interpreter, dtype):
    case = Case(4, 4, 2, 6, leading=(3,), segment=2, dtype=dtype, state_dtype=BF16)
    sizes = {"num_heads": 2, "head_dim": 4, "num_slots": 4, "segment": 2}
    sizes |= {"x_bytes": dtype.itemsize, "logits_bytes": dtype.itemsize}
    expected = [traffic(layer, **sizes) for layer in range(case.num_layers)]
    moved, kept = interpreter.submit(depths.count_bytes, case).result()
    stack = 4 * 2 * (4 * 2 + 4)  # nobody needs that of the last layer, nor has a gradient to it
    backward = [t.backward for t in expected]
    assert moved == [[3 * t.forward for t in expected], [*(3 * b for b in backward[:-1]), 3 * (backward[-1] - stack)]]
    assert kept == 3 * (sum(t.kept for t in expected) - stack)


@pytest.fixture
def compiler(monkeypatch) -> None:
    """Triton is imported, if it is now, to compile, whatever the fixture above has set for another process."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_says_what_it_needs(compiler):
    with pytest.raises(ValueError, match="the kernels do not run on cpu; use CUDA"):
        depths.check(Case(1, 1, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 4])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_compiles_for_an_h100_without_spilling_registers(compiler, name, num_stages):
    """At the sizes of 360m, H = 4 and d_s = 16, in bfloat16; a warp's barriers would be another sign of trouble."""
    import triton
    from triton.backends.compiler import GPUTarget

    from stackexp.stack.triton import depth_step_kernels

    function = getattr(depth_step_kernels, name)
    options = depth_step_launch.make_options((4, 16), 3, F32, ("stack", "global", "multiply"), is_capped=True)
    arguments = StepForward if name == "forward" else StepBackward
    halves = {"query", "slots", "read", "rest", "new_slots", "grad_read", "grad_slots", "to_x", "to_logits", "to_slots"}
    kinds = {field: "*bf16" if field in halves else "*fp32" for field in arguments._fields}
    missing = {"grad_action"} & kinds.keys()
    kinds |= dict.fromkeys(missing, "constexpr")
    layers = ("*bf16",) * num_stages
    signature = {"xs": layers, "logits": layers, "tensors": arguments(**kinds)}
    signature |= dict.fromkeys(function.arg_names[3:-1], "i32") | {"options": "constexpr"}
    constants = {"options": options} | {(2, arguments._fields.index(field)): None for field in missing}
    places = [(i, j) for i in (0, 1) for j in range(num_stages)]
    places += [(2, i) for i, field in enumerate(kinds) if field not in missing]
    aligned = {place: [["tt.divisibility", 16]] for place in places}
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
@pytest.mark.parametrize("case", [*CASES, *MORE], ids=name_of)
def test_equals_the_reference_on_a_gpu(case):
    depths.check(case, "cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("case", [*ROUNDED, GPU_CASE], ids=name_of)
def test_errs_no_more_than_the_reference_on_a_gpu(case):
    depths.check_errors(case._replace(leading=(4, 300)), "cuda")


@pytest.mark.gpu
@on_gpu
def test_the_operators_pass_opcheck_on_a_gpu():
    depths.check_operators(Case(3, 16, 4, 5, segment=2, dtype=BF16, state_dtype=BF16, leading=(2, 3)), "cuda")


@pytest.mark.gpu
@on_gpu
def test_compiles_with_inductor_on_a_gpu():
    depths.check_compiled(Case(3, 16, 4, 5, segment=2, dtype=F32, leading=(2, 3)), "inductor", "cuda")


@pytest.mark.gpu
@on_gpu
def test_a_graph_replays_it_without_waiting_and_to_the_bit():
    inputs = depths.make_inputs(GPU_CASE, "cuda")

    def run() -> list[torch.Tensor]:
        outputs = depths.triton(GPU_CASE, inputs)
        total = sum(o.read.float().square().sum() + o.entropy.sum() for o in outputs)
        return [o.read for o in outputs] + list(torch.autograd.grad(total, inputs))

    expected = run()  # and compiles
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):  # refuses whatever waits for the device
        found = run()
    graph.replay()
    assert all(map(torch.equal, found, expected))
