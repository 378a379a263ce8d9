"""Accuracy against length: scores over ranges, the table and the picture in text."""

import pytest

from stackexp.config.formal_language import FormalLanguageConfig
from stackexp.reports.formal.accuracy import compute_scores, format_accuracy_table, get_ranges, plot_accuracy


def test_scores_are_means_over_the_tested_lengths_of_their_ranges():
    data = FormalLanguageConfig()
    assert get_ranges(data) == [(41, 100), (41, 500)]
    accuracy = {5: 0.0, 41: 1.0, 91: 0.5, 141: 0.0}
    assert compute_scores(data, accuracy) == {"score_41_100": 0.75, "score_41_500": 0.5}
    assert list(compute_scores(FormalLanguageConfig(eval_max_length=100), accuracy)) == ["score_41_100"]
    assert list(compute_scores(FormalLanguageConfig(eval_max_length=60), accuracy)) == ["score_41_60"]
    assert list(compute_scores(FormalLanguageConfig(max_length=100, eval_max_length=200), accuracy)) == [
        "score_101_200"
    ]


def test_the_table_has_scores_and_the_tested_lengths_nearest_to_round_ones():
    runs = {"stacktrans": dict.fromkeys((9, 41, 101, 499), 1.0), "lstm": {9: 1.0, 41: 0.9, 101: 0.5, 499: 0.4}}
    head, _, first, second = format_accuracy_table(runs, FormalLanguageConfig()).splitlines()
    assert head.split() == ["41..100", "41..500", "9", "41", "101", "499"]
    assert first.split() == ["stacktrans", "1.000", "1.000", "1.00", "1.00", "1.00", "1.00"]
    assert second.split() == ["lstm", "0.900", "0.600", "1.00", "0.90", "0.50", "0.40"]


def test_the_picture_shows_each_run_with_its_mark():
    falling = {1: 1.0, 50: 0.5, 99: 0.0}
    lines = plot_accuracy({"flat": dict.fromkeys(falling, 1.0), "falling": falling}, max_length=50).splitlines()
    rows = {line[:4].strip(): line[5:] for line in lines[:11]}
    assert set(rows["1.0"]) == {"o"}, "the first run is drawn on top"
    places = [row.index("x") for row in (rows["0.9"], rows["0.5"], rows["0.1"], rows["0.0"])]
    assert places == sorted(places)
    assert abs(places[1] - 32) <= 3
    assert lines[11][5:].index("|") == pytest.approx(32, abs=1)
    assert lines[12].split() == ["1", "99"]
    assert "o flat   x falling" in lines[13]


def test_a_short_range_has_a_narrow_picture():
    lines = plot_accuracy({"one": {1: 1.0, 2: 1.0}}, max_length=1).splitlines()
    assert lines[0] == " 1.0 oo"
