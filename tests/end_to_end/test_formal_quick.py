"""The demonstration of formal languages as a newcomer starts it: minutes, and how many is for benchmarks to tell."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from records import only_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("quick")


@pytest.fixture(scope="module")
def printed(folder) -> str:
    command = [sys.executable, "-m", "stackexp", "fit", "--config", "formal/quick", "logging.progress_bar=false"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def results(folder, printed) -> list[dict]:
    names = ("formal/quick", "formal/quick-transformer")
    return [json.loads(only_run(folder / "runs", name).result.read_text()) for name in names]


def test_the_demonstration_shows_both_curves(printed, results):
    stacktrans, transformer = results
    assert (stacktrans["model"], transformer["model"]) == ("stacktrans", "transformer")
    last = printed.rpartition("tensorboard --logdir")[2]
    assert "o stacktrans   x transformer" in last, "the table and the picture of both"
    assert f"{stacktrans['score_41_500']:.3f}" in last
    assert f"{transformer['score_41_500']:.3f}" in last


def test_the_transformer_does_not_learn_it(results):
    assert results[1]["score_41_500"] < 0.6


def test_the_demonstration_reverses_strings_of_500_symbols(results):
    assert results[0]["accuracy"]["500"] >= 0.995
