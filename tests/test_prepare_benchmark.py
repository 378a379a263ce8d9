"""The benchmark runs, and says what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "prepare.py"


def test_it_measures_both_on_the_same_text(tmp_path):
    options = ["--megabytes", "0.3", "--turns", "1", "--vocab-size", "300", "--out", tmp_path / "out.json"]
    done = subprocess.run([sys.executable, BENCHMARK, *options], capture_output=True, text=True, check=True)
    record = json.loads((tmp_path / "out.json").read_text())
    [turn] = record["turns"]
    assert record["ratios"] == [pytest.approx(turn["alone"] / turn["prepare"])]
    assert record["bytes"] >= 300_000
    assert record["tokens"] > record["documents"] > 1
    assert "data prepare reaches" in done.stdout
