"""`bench efficiency` and the scripts in benchmarks/ run on small sizes; speed is not tested."""

import functools
import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stackexp import benchmarking, cli, stack
from stackexp.config.compose import compose
from stackexp.reports import efficiency
from stackexp.stack import dispatch
from stackexp.tables import ABSENT

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import stack_step  # noqa: E402

SMALL = ["model.hidden_size=16", "model.num_layers=3", "model.intermediate_size=16", "model.num_heads=4"]
SMALL += ["model.num_kv_heads=2", "model.vocab_size=4096", "data.context_length=8", "data.micro_batch_size=2"]
SMALL += ["data.global_batch_tokens=16"]


@pytest.fixture
def run_benchmark(monkeypatch, capsys):
    """`run_benchmark(name, *arguments)` runs a script in this process and returns what it prints."""
    threads = torch.get_num_threads()

    def run_benchmark(name: str, *arguments: str | Path) -> str:
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        return capsys.readouterr().out

    yield run_benchmark
    torch.set_num_threads(threads)


@pytest.fixture
def known_ceilings(monkeypatch) -> None:
    """Replace the measured speed of the device by known figures."""
    monkeypatch.setattr(benchmarking, "measure_peak_flops", lambda device, dtype: 1e12)
    monkeypatch.setattr(benchmarking, "measure_bandwidth", lambda device: 1e10)


@pytest.mark.process
def test_gpu_measures_every_section_and_continues_after_a_failure(run_benchmark, tmp_path, monkeypatch, invoke):
    """On a CPU with small sizes and the eager backend; the inductor takes a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(stack_step, "compiled_step", torch.compile(stack.step))
    build = benchmarking.registry.build

    def fail(kind: str, config: object, *args: object, **options: object) -> object:
        if kind == "model" and getattr(config.memory, "projection", "") == "none":  # full_dim
            raise torch.OutOfMemoryError("CUDA out of memory.\nDetails")
        return build(kind, config, *args, **options)

    monkeypatch.setattr(benchmarking.registry, "build", fail)
    out = tmp_path / "gpu.json"
    run_benchmark("gpu.py", "--tiny", "--out", out)
    record = json.loads(out.read_text())
    rows = {(row["section"], row["name"]): row for row in record["rows"]}
    sections = {"correctness", "ceilings", "attention", "training", "kernels", "projections", "decoding"}
    assert {section for section, _ in rows} == sections
    assert rows["correctness", "all"]["passed"] == 6
    assert rows["training", "full_dim, bfloat16 residual"]["error"] == "OutOfMemoryError: CUDA out of memory."
    failed = ["model full_dim, float32", "model full_dim, bfloat16", "full_dim, bfloat16 residual"]
    assert [name for (_, name), row in rows.items() if "error" in row] == failed
    assert rows["decoding", "stacktrans"]["ratio"] > 0
    assert rows["training", "stacktrans, bfloat16 residual"]["train_ratio"] > 0
    assert rows["training", "transformer, eager"]["train_ratio"] == pytest.approx(1, abs=0.01)
    table = {row[0]: row for row in split_cells(invoke("report efficiency", out, "--markdown"))}
    assert table["stacktrans (bfloat16 residual)"][-3:] == ["1.16", "1.09", "1.12"]
    assert "OutOfMemoryError" in table["full_dim (bfloat16 residual)"][-4]


def test_gpu_stops_in_time(run_benchmark, tmp_path):
    output = run_benchmark("gpu.py", "--tiny", "--budget", "1", "--out", tmp_path / "gpu.json")
    assert output.count("error=TimeoutError: no time left") == 7


def test_depth_compares_implementations_with_the_transformer(run_benchmark, tmp_path):
    sizes = ["model.num_layers=2", "data.context_length=8", "--rounds=2", "--implementations", "eager", "numba"]
    small = ["model.hidden_size=16", "model.intermediate_size=16", "model.num_heads=4", "model.num_kv_heads=2"]
    run_benchmark("depth.py", *sizes, "--out", tmp_path / "out.json", *small, "data.vocab_size=512")
    base, *rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    expected = [(memory, name) for memory in ("stacktrans", "full_dim") for name in ("eager", "numba")]
    assert [(row["memory"], row["implementation"]) for row in rows] == expected
    run_benchmark("depth.py", *sizes[:3], *small, "model.memory.site=each_sublayer", "--implementations", "numba")
    for which in ("train", "prefill", "decode"):
        assert base[f"{which}_ratio"] == 1
        assert all(row[f"{which}_ratio"] == row[which] / base[which] and row[f"{which}_added"] > 1 for row in rows)


def test_scan_compares_kernels_with_loops(run_benchmark, tmp_path):
    run_benchmark("scan.py", "--cases", "2,3,2,1,4", "--rounds=1", "--out", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["feedback"], row["read"]) for row in rows][:2] == [("none", "top"), ("none", "global")]
    assert all({"reference_ms", "eager_ms", "numba_ms"} <= row.keys() for row in rows)


@pytest.mark.process
def test_prepare_measures_both_on_the_same_text(tmp_path):
    """In a process of its own, because it sets variables of the environment and starts workers."""
    options = ["--megabytes=0.3", "--rounds=1", "--vocab-size=300", "--out", tmp_path / "out.json"]
    command = [sys.executable, "prepare.py", *options]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert "data prepare reaches" in done.stdout
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["bytes"] >= 300_000
    assert record["tokens"] > record["documents"] > 1
    assert {"alone", "prepare"} <= record["rows"][0].keys()


def split_cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_efficiency_reports_multiples_of_the_transformer(known_ceilings, tmp_path, capsys):
    out = tmp_path / "out.json"
    only = ["--only", "stacktrans,single_head", "--steps", "2", "--markdown", "--out", str(out)]
    assert cli.main(["bench", "efficiency", *only, *SMALL]) == 0
    record = json.loads(out.read_text())
    expected = [("transformer", "auto"), ("stacktrans", "auto"), ("stacktrans", "reference"), ("single_head", "auto")]
    assert [(row["model"], row["implementation"]) for row in record["rows"]] == expected
    for row in record["rows"]:
        for quantity in ("train", "prefill", "decode"):
            low, high = row[f"{quantity}_spread"]
            assert 0 < low <= row[f"{quantity}_ratio"] <= high
        assert row["tokens_per_second"] == pytest.approx(16 / row["train"])
        assert 0 < row["peak_share"] < 1
        assert row["bandwidth_share"] == pytest.approx(row["decode_bound"] / row["decode"])
    for quantity in ("parameters", "flops_per_token"):
        assert record["rows"][1][quantity] > record["rows"][0][quantity]
    assert record["environment"]["versions"]["torch"]
    header, _, *rows = split_cells(capsys.readouterr().out)
    assert header[:5] == ["model", "parameters", "FLOPs/token", "tokens/s", "share of peak"]
    names = ["transformer", "stacktrans", "stacktrans (reference)", "single_head", "full_dim"]
    assert [row[0] for row in rows] == names
    assert rows[0][1:3] == ["+0.0%", "+0.0%"]
    assert rows[1][-3:] == ["1.16", "1.09", "1.12"]


def test_efficiency_continues_after_a_model_that_does_not_fit(known_ceilings, tmp_path, capsys, invoke, monkeypatch):
    def train(subject: benchmarking.BenchmarkedModel) -> None:
        if subject.name == "stacktrans":
            raise torch.OutOfMemoryError("CUDA out of memory")
        original(subject)

    original, out = benchmarking.BenchmarkedModel.train, tmp_path / "out.json"
    monkeypatch.setattr(benchmarking.BenchmarkedModel, "train", train)
    monkeypatch.setattr(efficiency, "MAX_CONTROL_ERROR", math.inf)
    only = ["--only", "stacktrans,single_head", "--steps", "1", "--markdown", "--out", str(out)]
    assert cli.main(["bench", "efficiency", *only, *SMALL]) == 0
    rows = json.loads(out.read_text())["rows"]
    failed = {"model": "stacktrans", "implementation": "auto", "error": "out of memory"}
    assert rows[1:3] == [failed, failed | {"implementation": "reference"}]
    assert rows[3]["model"] == "single_head"
    assert rows[3]["train_ratio"] > 0
    row = split_cells(capsys.readouterr().out)[3]
    assert row == ["stacktrans", *[ABSENT] * 5, *["out of memory"] * 4, "1.16", "1.09", "1.12"]
    (line,) = [line for line in invoke("report efficiency", out).splitlines() if line.startswith("stacktrans  ")]
    assert line.count("out of memory") == 4


@pytest.mark.process
def test_efficiency_compiles_the_sublayers_once_for_all_models(known_ceilings, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    options, graphs = [*SMALL, "model.num_layers=2", "trainer.compile=true"], []
    for _ in benchmarking.measure_efficiency(["single_head", "queue"], ["quickstart"], options, 1, torch.device("cpu")):
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] == graphs[-1]


def test_decoding_reads_weights_keys_and_values_once():
    for options, unread in (["model.tie_embeddings=true"], 0), (["model.tie_embeddings=false"], 4096 * 16):
        subject = benchmarking.BenchmarkedModel("single_head", ["quickstart"], [*SMALL, *options], torch.device("cpu"))
        keys_and_values = 2 * 2 * 8 * 3 * 2 * 4  # batch, tokens, layers, heads, head size
        assert subject.count_decode_bytes() == 4 * (subject.model.num_parameters() - unread + keys_and_values)


def test_precision_and_recomputation_are_those_of_the_config():
    options = [*SMALL, "trainer.activation_checkpointing=true"]
    for precision, weights, dtype in (
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("64-true", torch.float64, torch.float64),
        ("bf16-mixed", torch.float32, torch.bfloat16),
    ):
        overrides = [*options, f"trainer.precision={precision}"]
        subject = benchmarking.BenchmarkedModel("stacktrans", ["quickstart"], overrides, torch.device("cpu"))
        assert (subject.model.embedding.weight.dtype, subject.dtype) == (weights, dtype)
        assert subject.model.checkpoint_blocks is True


def test_a_case_runs_with_its_own_implementation(monkeypatch):
    used = []
    select = dispatch._select
    monkeypatch.setattr(dispatch, "_select", lambda automatic: used.append(select(automatic)) or used[-1])
    device = torch.device("cpu")
    subject = benchmarking.BenchmarkedModel("stacktrans", ["quickstart"], SMALL, device, "reference")
    subject.train()
    subject.prefill()
    subject.measure_decode()
    assert set(used) == {"reference"}


def test_rounds_alternate_and_warmup_does_not_count():
    order = []
    results = benchmarking.alternate(["A", "B"], lambda subject: order.append(subject) or len(order), rounds=2)
    assert order == ["A", "B", "B", "A", "A", "B", "B", "A", "A", "B"]
    assert results == [[8, 9], [7, 10]]


def test_ratio_is_the_median_of_paired_ratios():
    assert benchmarking.compare([2, 6, 4], [1, 2, 1]) == (3, 2.5, 3.5)
    assert benchmarking.compare([2], [1]) == (2, 2, 2)


@pytest.mark.parametrize("options", [["model.memory=push_only"], ["model.memory.site=each_sublayer"]], ids=str)
def test_flops_of_the_stack_steps_are_those_of_the_model(options):
    config = compose(["quickstart"], [*SMALL, *options])
    model = benchmarking.registry.build("model", config.model)
    matmuls = sum(w.numel() for m in model.memories for w in (m.down, m.up, m.actions) if w is not None)
    expected = sum(memory.flops_per_token(8) for memory in model.memories) - 2 * matmuls
    assert stack_step.count_flops(config, 1) == expected
    steps = stack_step.StackSteps(config, torch.device("cpu"))
    assert len(steps.pushed) == len(model.memories)


def test_lower_bound_counts_the_tensors_of_the_eager_step():
    config = compose(["quickstart"], [*SMALL, "model.memory.num_slots=2"])
    layers, tokens = stack_step.StackSteps(config, torch.device("cpu")), 2 * 8
    head_dim, num_bytes = config.model.memory.head_dim, 0
    with stack.use_implementation("eager"):
        state = stack.empty(layers.shape, layers.options["num_slots"], head_dim, like=layers.pushed[0], axis="depth")
        for x, logits in zip(layers.pushed, layers.logits, strict=True):
            output, after = stack.step(state, x, logits, layers.query, **layers.options)
            num_bytes += sum(t.numel() * 4 for t in (*state, *after, x, logits, output.read))
            state = after
    assert stack_step.count_lower_bound_bytes(config, tokens) == num_bytes
    assert stack_step.count_flops(config, tokens) == 10 * tokens * 4 * head_dim * (1 + 2 + 2)


def test_stack_measures_both_passes_and_implementations(run_benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    out = tmp_path / "out.json"
    options = ["--implementations", "auto", "compiled", "--rounds=2"]
    printed = run_benchmark("stack_step.py", *options, "--out", out, *SMALL, "model.num_layers=1")
    rows = json.loads(out.read_text())["rows"]
    passes = [(row["implementation"], row["pass"]) for row in rows]
    assert passes == [(i, p) for p in ("forward", "forward + backward") for i in ("auto", "compiled")]
    assert rows[2]["bytes"] == 3 * rows[0]["bytes"]
    for row in rows:
        assert row["gigabytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
    assert len(printed.splitlines()) == 6
