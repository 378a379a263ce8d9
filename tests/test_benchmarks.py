"""The benchmarks run, and compare what they say they compare. What they measure is no test's business."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_variants_prints_and_writes_multiples_of_the_transformer(tmp_path):
    small = ["model.hidden_size=16", "model.num_layers=2", "model.intermediate_size=16", "model.vocab_size=4096"]
    small += ["data.context_length=8", "data.global_batch_tokens=32", "model.num_heads=4", "model.num_kv_heads=2"]
    command = [sys.executable, BENCHMARKS / "variants.py", "--steps", "2", "--only", "stacktrans", "full_dim"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "out.json", *small], capture_output=True, text=True, check=True
    )
    names = ["transformer", "stacktrans", "full_dim"]
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == names
    record = json.loads((tmp_path / "out.json").read_text())
    assert [row["model"] for row in record["rows"]] == names
    assert [record["rows"][0][f"{what}_ratio"] for what in ("train", "prefill", "decode")] == [1, 1, 1]
    assert record["rows"][1]["parameters"] > record["rows"][0]["parameters"]
    assert record["environment"]["versions"]["torch"]


def test_cross_entropy_compares_chunks_with_the_whole(tmp_path):
    small = ["--tokens=24", "--batch_size=2", "--hidden_size=8", "--vocab_size=50", "--chunk=7", "--steps=1"]
    command = [sys.executable, BENCHMARKS / "cross_entropy.py", *small, "--out", tmp_path / "out.json"]
    subprocess.run(command, capture_output=True, text=True, check=True)
    record = json.loads((tmp_path / "out.json").read_text())
    assert [row["loss"] for row in record["rows"]][:2] == ["whole", "chunked"]
    assert record["rows"][0]["of the whole"] == 1
    assert record["options"]["chunk"] == 7


def test_every_step_for_a_gpu_is_a_command_that_composes():
    code = (
        "import gpu, pathlib; from stackexp.config.compose import compose\n"
        "for name, command in gpu.steps(pathlib.Path('out')).items():\n"
        "    if '--config' in command:\n"
        "        at = command.index('--config')\n"
        "        compose([command[at + 1]], [x for x in command[at + 2 :] if '=' in x and not x.startswith('--')])\n"
        "        print(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 10, "two tables, seven models, one of them sharded as well"
