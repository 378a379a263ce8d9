"""The formal-language report: which tests of a run count, from synthetic run folders."""

from pathlib import Path

import pytest
from formal_runs import ALL_LENGTHS, NEAR_LENGTHS, finish, format_formal, read_row, write_run

from stackexp.errors import RunError
from stackexp.reports.formal import recipes
from stackexp.reports.formal.cells import collect_results


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The path of a new folder; shipped recipes are not composed."""
    monkeypatch.setattr(recipes, "_compose_recipe", lambda name: None)
    return tmp_path / "runs"


def test_every_test_of_the_final_weights_counts(runs):
    """`test` writes another file if test.json is more thorough but shorter."""
    run = finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=0.5, stride=27)
    finish(run, beyond=0.6, file="test.json", longest=100)
    finish(run, beyond=0.75, file="test-to-500-every-9-of-512.json", stride=9)
    assert read_row(format_formal(runs), "even_pairs")["LSTM"] == "0.75↓ / 0.75 (1)"
    assert read_row(format_formal(runs, NEAR_LENGTHS), "even_pairs")["LSTM"] == "0.60↓ / 0.60 (1)"


def test_a_test_of_short_strings_covers_no_long_range(runs):
    finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=1.0, stride=460)
    with pytest.raises(RunError, match="no finished run on a formal language"):
        collect_results([runs], ALL_LENGTHS)


def test_training_on_the_tested_lengths_is_noted(runs):
    for longest, seed in ((40, 0), (60, 1)):
        folder = runs / str(longest)
        finish(
            write_run(
                folder, "LSTM", "even_pairs", f"data.max_length={longest}", "data.validation_max_length=80", seed=seed
            ),
            beyond=1.0,
        )
    note = "trained on lengths that the score includes, 41 and more: LSTM: even_pairs"
    assert note in format_formal(runs / "60")
    assert note not in format_formal(runs / "40")


@pytest.mark.parametrize("text", ["{}", '{"accuracy": [], "length_stride": 1}', '{"accuracy": {"41": null}}'])
def test_a_damaged_test_is_one_line(runs, text):
    (finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=1.0) / "test.json").write_text(text)
    with pytest.raises(RunError, match=r"test\.json: .*; test the run again: python -m stackexp test --run "):
        collect_results([runs], ALL_LENGTHS)
