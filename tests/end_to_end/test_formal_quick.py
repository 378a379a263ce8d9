"""The demonstration of formal languages as a newcomer starts it."""

import json

import pytest
from processes import Program
from records import only_run


@pytest.mark.xfail(reason="0.97 at length 500 so far: docs/results.md")
@pytest.mark.slow  # two minutes; its time is for the benchmarks to tell
def test_the_demonstration_reverses_strings_of_500_symbols_and_shows_both_curves(program: Program, tmp_path):
    printed = program.run("fit", "--config", "formal/quick", "logging.progress_bar=false")
    stacktrans, transformer = (
        json.loads(only_run(tmp_path / "runs", name).result.read_text())
        for name in ("formal/quick", "formal/quick-transformer")
    )
    assert stacktrans["accuracy"]["500"] >= 0.995
    assert (stacktrans["model"], transformer["model"]) == ("stacktrans", "transformer")
    last = printed.rpartition("tensorboard --logdir")[2]
    assert "o stacktrans   x transformer" in last, "the table and the picture of both"
    assert f"{stacktrans['score_41_500']:.3f}" in last
    assert f"{transformer['score_41_500']:.3f}" in last
