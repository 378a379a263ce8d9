"""The benchmark of the depth axis runs, and compares what it says it compares."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "depth.py"
SMALL = ["model.hidden_size=16", "model.intermediate_size=16", "model.num_heads=4", "model.num_kv_heads=2"]


def test_prints_and_writes_multiples_of_the_transformer(tmp_path):
    sizes = ["--layers", "2", "--tokens", "8", "--rounds", "2", "--implementations", "reference", "eager"]
    command = [sys.executable, BENCHMARK, *sizes, "--json", tmp_path / "out.json", *SMALL, "data.vocab_size=512"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    named = [("stacktrans", "reference"), ("stacktrans", "eager"), ("full_dim", "reference")]
    named += [("full_dim", "eager")]
    assert [tuple(line.split()[:2]) for line in done.stdout.splitlines()[3:]] == named
    base, *rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["memory"], row["implementation"]) for row in rows] == named
    for what in ("train", "prefill", "decode"):
        assert base[f"{what}_ratio"] == 1
        assert all(row[f"{what}_ratio"] == row[what] / base[what] and row[f"{what}_added"] > 1 for row in rows)
