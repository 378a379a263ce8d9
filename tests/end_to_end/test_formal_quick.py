"""`fit --config formal/quick` as a new user runs it: two models, one table. Takes minutes."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_quick_config_trains_two_models_of_which_one_learns_the_task(tmp_path):
    command = [sys.executable, "-m", "stackexp", "fit", "--config", "formal/quick"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert printed.count("\nstacktrans ") == 1
    results = {}
    for path in tmp_path.glob("runs/formal/quick/*/result.json"):
        result = json.loads(path.read_text())
        results[result["model"]] = result
        assert f"{result['score_41_500']:.3f}" in printed
    assert set(results) == {"stacktrans", "transformer"}
    assert results["transformer"]["score_41_500"] < 0.6
    assert results["stacktrans"]["accuracy"]["500"] >= 0.995
