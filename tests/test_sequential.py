"""Group-sequential tests: error rates and power by simulation, planned pairs, and agreement of its parts."""

import collections
import math

import numpy as np
import pytest

from stackexp import sequential
from stackexp.sequential import (
    MAX_PLANNED,
    MIN_PAIRS,
    Outcome,
    choose_batch,
    compute_crossing_probability,
    compute_interval,
    compute_power,
    count_pairs,
    estimate_deviation,
    find_barrier,
    find_detectable_effect,
    format_pairs,
    judge,
)


def compute_p_value(values, planned):
    """Return the smallest level at which a look at the first 3, 4, ... n of `values` [..., n] decides against zero."""
    return compute_crossing_probability(sequential._compute_evidence(values, planned).max(-1), planned)


@pytest.mark.parametrize("planned", [4, 8, 30, 60])
@pytest.mark.parametrize("arms", [1, 17])
@pytest.mark.parametrize("correlation", [0.0, 0.5], ids=["independent", "shared-baseline"])
def test_without_an_effect_at_most_five_percent_get_a_verdict(planned, arms, correlation):
    random = np.random.default_rng(planned)
    size = 60_000 // arms
    shared = random.standard_normal((size, 1, planned))
    own = random.standard_normal((size, arms, planned))
    p_values = compute_p_value(math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own, planned)
    false = np.mean(p_values.min(1) <= 0.05 / arms)  # Holm finds something if the smallest is below this level
    assert 0.02 < false < 0.05 + 2 * math.sqrt(0.05 * 0.95 / size)


def test_arms_with_the_effect_rarely_have_none():
    """17 arms have the effect of 1 that `no effect above 1` excludes. Without Bonferroni's correction: 28 and 34 %."""
    random, size, found, excluded = np.random.default_rng(3), 150, 0, 0
    for _ in range(size):
        judgments = judge(dict(enumerate(random.normal(1, 1, (17, 20)))), 20, 1.0).values()
        found += any(judgment.outcome == Outcome.NO_EFFECT for judgment in judgments)
        excluded += any(not judgment.low <= 1 <= judgment.high for judgment in judgments)
    assert 0 < found / size < 0.05
    assert 0 < excluded / size < 0.05 + 2 * math.sqrt(0.05 * 0.95 / size)


@pytest.mark.parametrize("arms", [1, 17])
@pytest.mark.parametrize("deviation", [0.008, 0.015])
def test_an_effect_is_found_with_the_planned_number_of_pairs(arms, deviation):
    planned = count_pairs(0.01, deviation, 0.05 / arms)
    random = np.random.default_rng(arms)
    p_values = compute_p_value(random.normal(-0.01, deviation, (20_000, planned)), planned)
    assert 0.8 < np.mean(p_values <= 0.05 / arms) < 0.87
    assert compute_power(planned, 0.01, deviation, 0.05 / arms) >= 0.8
    assert compute_power(planned - 1, 0.01, deviation, 0.05 / arms) < 0.8


def test_pairs_planned_from_the_deviation_of_a_pilot_keep_the_error():
    """The pilot's pairs do not count. If its four pairs counted, 6.6 % of the verdicts would be false."""
    random = np.random.default_rng(0)
    trials = 1500
    plans = [min(30, count_pairs(0.01, estimate_deviation(random.normal(0, 0.012, 4))[0])) for _ in range(trials)]
    false = np.mean([compute_p_value(random.normal(0, 0.012, planned), planned) <= 0.05 for planned in plans])
    assert 0.02 < false < 0.05 + 2 * math.sqrt(0.05 * 0.95 / trials)


@pytest.mark.parametrize("planned", [4, 16, 30])
def test_intervals_of_all_looks_cover_the_mean_together(planned):
    random = np.random.default_rng(1)
    x = random.normal(0.003, 0.01, (1500, planned))
    bounds = [[compute_interval(row[:n], planned)[1:] for n in range(MIN_PAIRS, planned + 1)] for row in x[:300]]
    covered = np.mean([all(low < 0.003 < high for low, high in looks) for looks in bounds])
    assert covered > 0.95 - 2 * math.sqrt(0.05 * 0.95 / len(bounds))


@pytest.mark.parametrize("n", [3, 5, 9])
def test_p_value_and_interval_agree(n):
    """The interval at the level of the p-value of the last look ends at zero."""
    values = np.random.default_rng(n).normal(0.5, 1, n) + np.arange(n) / 4  # the last look has the strongest evidence
    p = float(compute_p_value(values, 9))
    assert n == 3 or p < float(compute_p_value(values[:-1], 9))
    _, low, high = compute_interval(values, 9, p)
    assert min(abs(low), abs(high)) < 1e-6


def test_barrier_approaches_the_tabulated_constants_from_below_the_continuous_one():
    """O'Brien and Fleming's two-sided constants for K looks at level 0.05: 2.004 (K = 3), 2.040 (5), 2.087 (10).

    They hold for known variances. Ours are higher, and below 2.241, that of looking all the time.
    """
    for looks, constant in ((5, 2.040), (10, 2.087), (20, 2.126)):
        assert constant < find_barrier(looks, 0.05) < 2.241
    assert compute_crossing_probability(2.2414 - sequential.CONTINUITY / 1000, 10**6) == pytest.approx(0.05, abs=1e-4)
    grid = np.linspace(0.7, 1.3, 7)
    assert np.all(np.diff(compute_crossing_probability(grid, 16)) < 0), "both series agree where they meet"


def test_judge_names_all_four_cases():
    steps = 0.004 * np.array([-1.0, 1, -0.5, 0.5, 0.2, -0.2, -0.8, 0.8])
    arms = {"good": steps - 0.03, "bad": steps + 0.03, "same": steps / 10, "noisy": 20 * steps}
    found = judge(arms, planned=8, effect=0.01)
    assert {arm: judgment.outcome for arm, judgment in found.items()} == {
        **{"good": Outcome.HELPS, "bad": Outcome.HURTS, "same": Outcome.NO_EFFECT, "noisy": Outcome.UNDECIDED}
    }
    assert found["good"].high < 0 < found["bad"].low
    assert not found["noisy"].is_decided
    early = judge({arm: values[:2] for arm, values in arms.items()}, planned=8, effect=0.01)
    assert {judgment.outcome for judgment in early.values()} == {Outcome.UNDECIDED}
    assert early["good"].low == -math.inf


def test_a_verdict_stays_as_it_was_reached():
    """Later pairs do not change the word. Mean and interval are those of the pairs that decided, and agree with it."""
    values = [-0.1, -0.1001, -0.0999, 0.3, 0.28, 0.33, 0.31, 0.29]
    after = [judge({"arm": values[:n]}, planned=8, effect=0.01)["arm"] for n in (3, 4, 8)]
    assert {(found.outcome, found.look, round(found.mean, 6)) for found in after} == {(Outcome.HELPS, 3, -0.1)}
    assert [found.pairs for found in after] == [3, 4, 8]
    quiet = [*np.tile([0.001, -0.001], 4), *np.tile([0.03, -0.03], 4)]
    found = judge({"arm": quiet}, planned=16, effect=0.01)["arm"]
    assert (found.outcome, found.pairs) == (Outcome.NO_EFFECT, 16)
    assert found.look < 9


def test_no_later_pair_of_any_arm_changes_a_verdict():
    """The correction of an arm depends on the others, and later pairs may be stronger evidence than those before."""
    random = np.random.default_rng(3)
    words = collections.Counter()
    for _ in range(150):
        means = random.choice([0.0, -0.006, -0.02, 0.01], size=4)
        arms = {str(i): random.normal(mean, 0.008, 16) for i, mean in enumerate(means)}
        decided = {}
        for n in range(3, 17):
            found = judge({arm: values[:n] for arm, values in arms.items()}, planned=16, effect=0.01)
            for arm, judgment in found.items():
                verdict = (judgment.outcome, judgment.look, judgment.mean, judgment.low, judgment.high)
                assert decided.setdefault(arm, verdict) == verdict
                if not judgment.is_decided:
                    del decided[arm]
        words.update(verdict[0] for verdict in decided.values())
    assert min(words[word] for word in (Outcome.HELPS, Outcome.HURTS, Outcome.NO_EFFECT)) > 20


@pytest.mark.parametrize("mean", [-0.01, -0.003, 0.0])
def test_the_interval_of_a_decided_arm_excludes_zero_on_the_side_of_its_verdict(mean):
    random = np.random.default_rng(2)
    found = [judge({"arm": random.normal(mean, 0.012, 16)}, planned=16, effect=0.001)["arm"] for _ in range(400)]
    decided = [judgment for judgment in found if judgment.outcome in (Outcome.HELPS, Outcome.HURTS)]
    assert decided
    for judgment in decided:
        assert judgment.high < 0 if judgment.outcome == Outcome.HELPS else judgment.low > 0


def test_two_equal_arms_never_differ():
    found = judge({"copy": [0.0] * 8}, planned=8, effect=0.01)["copy"]
    assert (found.outcome, found.low, found.high) == (Outcome.NO_EFFECT, 0, 0)


def test_planned_pairs_and_detectable_effects_are_inverse():
    pairs = count_pairs(0.01, 0.011)
    assert 13 <= pairs <= 16  # 12 without looks
    assert find_detectable_effect(pairs, 0.011) <= 0.01 < find_detectable_effect(pairs - 1, 0.011)
    assert count_pairs(1e-9, 1.0) == sequential.MAX_PLANNED
    assert count_pairs(0.01, 0.0) == sequential.MIN_PLANNED, "two copies of one arm have no noise"
    assert find_detectable_effect(4, 1.0, 0.05 / 100) > 10
    pairs = count_pairs(0.02, 0.02, degrees=4)
    assert find_detectable_effect(pairs, 0.02) < 0.017, "if the deviation were known"
    assert find_detectable_effect(pairs, 0.02, degrees=4) <= 0.02 < find_detectable_effect(pairs - 1, 0.02, degrees=4)
    effects = [find_detectable_effect(pairs, 1.0, degrees=1) for pairs in range(4, 61)]
    assert effects == sorted(effects, reverse=True), "scipy's distribution is NaN for large shifts"


def test_the_deviation_has_its_own_interval():
    random = np.random.default_rng(0)
    bounds = [estimate_deviation(row)[1:] for row in random.standard_normal((2000, 4))]
    assert np.mean([low < 1 < high for low, high in bounds]) == pytest.approx(0.95, abs=0.015)


def test_looks_are_as_frequent_as_busy_workers_allow():
    for arms in range(2, 20):
        for workers in range(1, 40):
            pairs = choose_batch(arms, workers)
            busy = [n * arms / (workers * -(-n * arms // workers)) for n in range(1, pairs + 1)]
            assert busy[-1] >= 0.8
            assert all(share < 0.8 for share in busy[:-1])
    assert [choose_batch(3, workers) for workers in (1, 2, 3, 8, 16)] == [1, 2, 1, 5, 5]


def test_more_pairs_than_the_planned_ones_are_named_so():
    assert format_pairs(count_pairs(0.03, 1.0, 0.05 / 6)) == f"over {MAX_PLANNED}"
    assert format_pairs(count_pairs(0.5, 1.0)) == str(count_pairs(0.5, 1.0))
