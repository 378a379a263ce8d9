"""`fit --config formal/quick` as a new user runs it: two models, one table. Takes minutes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("quick")


@pytest.fixture(scope="module")
def printed(folder) -> str:
    command = [sys.executable, "-m", "stackexp", "fit", "--config", "formal/quick"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def results(folder, printed) -> dict[str, dict]:
    paths = (folder / "runs" / "formal" / "quick").glob("*/result.json")
    return {path.parent.name.rpartition("-")[0]: json.loads(path.read_text()) for path in paths}


def test_scores_of_both_models_are_printed_once(printed, results):
    assert set(results) == {"stacktrans", "transformer"}
    assert printed.count("o stacktrans   x transformer") == 1
    for name, result in results.items():
        assert result["model"] == name
        assert f"{result['score_41_500']:.3f}" in printed


def test_transformer_does_not_learn_the_task(results):
    assert results["transformer"]["score_41_500"] < 0.6


def test_stacktrans_reverses_strings_of_500_symbols(results):
    assert results["stacktrans"]["accuracy"]["500"] >= 0.995
