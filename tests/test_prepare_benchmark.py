"""The benchmark of `data prepare`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "prepare.py"


def test_benchmark_records_both_speeds(tmp_path):
    options = ["--megabytes", "0.3", "--turns", "1", "--vocab-size", "300", "--out", tmp_path / "out.json"]
    done = subprocess.run([sys.executable, BENCHMARK, *options], capture_output=True, text=True, check=True)
    record = json.loads((tmp_path / "out.json").read_text())
    [turn] = record["turns"]
    assert record["ratios"] == [pytest.approx(turn["alone"] / turn["prepare"])]
    assert record["bytes"] >= 300_000
    assert record["tokens"] > record["documents"] > 1
    assert "data prepare reaches" in done.stdout
