"""The scripts in benchmarks/ run on small sizes and compare the stated implementations; speed is not tested."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stackexp.config.compose import compose

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import gpu  # noqa: E402

GPU = re.compile(r"pytest\.mark\.gpu")


def run_benchmark(name: str, *arguments: str | Path) -> str:
    command = [sys.executable, BENCHMARKS / name, *arguments]
    return subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("name", "command"), gpu.list_steps(Path("out")).items(), ids=lambda value: value[:20])
def test_every_gpu_step_names_files_and_configs_that_exist(name, command):
    if "--config" in command:
        config, *rest = command[command.index("--config") + 1 :]
        compose([config], [word for word in rest if "=" in word and not word.startswith("--")])
    else:
        script = next(word for word in command if word.endswith(".py") or word == "pytest")
        assert script == "pytest" or (BENCHMARKS.parent / script).is_file()


def test_gpu_steps_run_every_gpu_test_except_slow_ones():
    folder = Path(__file__).parent
    files = {str(path.relative_to(folder.parent)) for path in folder.rglob("test_*.py") if GPU.search(path.read_text())}
    command = gpu.list_steps(Path("out"))["correctness"]
    assert {word for word in command if word.endswith(".py")} == files
    assert command[:6] == [sys.executable, "-m", "pytest", "-v", "-m", "gpu and not slow"]


def test_log_of_a_step_that_is_ended_names_the_finished_tests(tmp_path, monkeypatch):
    file = tmp_path / "test_it.py"
    file.write_text("import time\n\ndef test_quick():\n    pass\n\ndef test_slow():\n    time.sleep(100)\n")
    monkeypatch.setattr(gpu, "STEP_SECONDS", 8)
    command = [sys.executable, *gpu.PYTEST[1:4], "-p", "no:cacheprovider", str(file)]
    assert gpu.run_step("tests", command, tmp_path)["exit_code"] == 124
    log = (tmp_path / "tests.log").read_text()
    assert re.search(r"::test_quick PASSED", log)
    assert re.search(r"::test_slow $", log), "the test that was running"


def test_cross_entropy_compares_whole_and_chunked():
    sizes = {"tokens": 64, "batch_size": 2, "vocab_size": 50, "hidden_size": 16, "chunk": 16, "rounds": 2}
    output = run_benchmark("cross_entropy.py", *(f"--{name}={value}" for name, value in sizes.items()))
    assert [line.split()[0] for line in output.splitlines()[2:]] == ["whole", "chunked"]


def test_depth_compares_implementations_with_the_transformer(tmp_path):
    sizes = ["model.num_layers=2", "data.context_length=8", "--rounds=2", "--implementations", "eager", "numba"]
    small = ["model.hidden_size=16", "model.intermediate_size=16", "model.num_heads=4", "model.num_kv_heads=2"]
    run_benchmark("depth.py", *sizes, "--out", tmp_path / "out.json", *small, "data.vocab_size=512")
    base, *rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    expected = [(memory, name) for memory in ("stacktrans", "full_dim") for name in ("eager", "numba")]
    assert [(row["memory"], row["implementation"]) for row in rows] == expected
    for which in ("train", "prefill", "decode"):
        assert base[f"{which}_ratio"] == 1
        assert all(row[f"{which}_ratio"] == row[which] / base[which] and row[f"{which}_added"] > 1 for row in rows)


def test_scan_compares_kernels_with_loops(tmp_path):
    run_benchmark("scan.py", "--cases", "2,3,2,1,4", "--rounds=1", "--out", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["feedback"], row["read"]) for row in rows][:2] == [("none", "top"), ("none", "global")]
    assert all({"reference_ms", "eager_ms", "numba_ms"} <= row.keys() for row in rows)


def test_prepare_measures_both_on_the_same_text(tmp_path):
    options = ["--megabytes=0.3", "--rounds=1", "--vocab-size=300", "--out", tmp_path / "out.json"]
    assert "data prepare reaches" in run_benchmark("prepare.py", *options)
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["bytes"] >= 300_000
    assert record["tokens"] > record["documents"] > 1
    assert {"alone", "prepare"} <= record["rows"][0].keys()


def test_the_trace_of_a_profile_is_divided_among_operations(tmp_path):
    names = ["aten::mul", "aten::linear", "_Step", "aten::addcmul", "aten::mean", "aten::add"]
    events = [build_event("cpu_op", name, 1, 10 * i, **{"Sequence number": i}) for i, name in enumerate(names)]
    events += [build_event("cpu_op", "autograd::engine::evaluate_function: Mm", 2, 90, **{"Sequence number": 3})]
    events += [
        build_event("cuda_runtime", "launch", e["tid"], e["ts"] + 1, correlation=i) for i, e in enumerate(events)
    ]
    events += [build_event("kernel", "k", 7, 0, dur=1000 * (i + 1), correlation=i) for i in range(7)]
    events += [build_event("user_annotation", "Optimizer.step#AdamW.step", 1, 0)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    output = run_benchmark("profile_parts.py", tmp_path / "trace.json")
    printed = [line.split(maxsplit=2) for line in output.splitlines()]
    assert printed[0] == ["7.00", "ms", "backward Mm"]
    assert printed[-1] == ["21.00", "ms", "the memory, of 28.0 ms"], "2 + 3 + 4 + 5 forward and 7 backward"


def build_event(category: str, name: str, thread: int, start: int, dur: int = 5, **arguments) -> dict:
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": start, "dur": dur, "args": arguments}
