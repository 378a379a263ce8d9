"""Accuracy by length: scores over ranges, and the table."""

import math
import statistics

import pytest

from stackexp.config.data import FormalLanguageConfig
from stackexp.evaluation.accuracy import compute_scores, format_accuracy, get_ranges


def test_scores_are_means_over_all_lengths_of_a_range():
    data = FormalLanguageConfig(max_length=40, eval_max_length=500)
    assert get_ranges(data) == [(41, 100), (41, 500)]
    falling = {n: 1 / n for n in range(1, 501)}
    scores = compute_scores(data, falling)
    assert scores["score_41_500"] == pytest.approx(statistics.fmean(1 / n for n in range(41, 501)))
    assert scores["score_41_100"] == pytest.approx(statistics.fmean(1 / n for n in range(41, 101)))


@pytest.mark.parametrize("stride", [7, 27, 51])
def test_scores_of_every_nth_length_are_not_biased(stride):
    """The accuracy falls from 1 at 41 symbols to 0.5, as on compute_sqrt."""
    data = FormalLanguageConfig(max_length=40, eval_max_length=500)
    exact = {n: 0.5 + 0.5 * math.exp(-(n - 41) / 60) for n in range(1, 501)}
    strided = {n: value for n, value in exact.items() if (n - 41) % stride == 0}
    for key, score in compute_scores(data, exact).items():
        plain = statistics.fmean(v for n, v in strided.items() if 41 <= n <= int(key.split("_")[2]))
        assert abs(compute_scores(data, strided)[key] - score) < abs(plain - score) / 2


@pytest.mark.parametrize("stride", [250, 1000])
def test_the_longest_length_is_always_tested(stride):
    data = FormalLanguageConfig(max_length=40, eval_max_length=500, eval_length_stride=stride)
    falling = {n: 1 - n / 500 for n in data.tested_lengths}
    assert compute_scores(data, falling)["score_41_500"] == pytest.approx(1 - (41 + 500) / 2 / 500)


def test_length_ranges_come_from_the_config():
    ranges = {(40, 100): [(41, 100)], (40, 60): [(41, 60)], (100, 200): [(101, 200)]}
    for (trained, tested), expected in ranges.items():
        assert get_ranges(FormalLanguageConfig(max_length=trained, eval_max_length=tested)) == expected


def test_table_shows_scores_and_lengths_closest_to_round_values():
    runs = {"stacktrans": dict.fromkeys((9, 41, 101, 499), 1.0), "lstm": {9: 1.0, 41: 0.9, 101: 0.5, 499: 0.4}}
    _, _, head, _, first, second = format_accuracy(
        FormalLanguageConfig(max_length=40, eval_max_length=500), runs
    ).splitlines()
    assert head.split() == ["41..100", "41..500", "9", "41", "101", "499"]
    assert first.split() == ["stacktrans", "1.000", "1.000", "1.00", "1.00", "1.00", "1.00"]
    assert second.split() == ["lstm", "0.703", "0.483", "1.00", "0.90", "0.50", "0.40"]
