"""Learning rate schedules at chosen steps."""

import pytest

from stackexp.config.optimizer import CosineConfig, LinearConfig, WarmupStableDecayConfig
from stackexp.modules.optimizers import build_cosine, build_linear, build_warmup_stable_decay

WARMUP = {"warmup_steps": 10}
COSINE = build_cosine(CosineConfig(**WARMUP, final_fraction=0.2), 110)
LINEAR = build_linear(LinearConfig(**WARMUP, final_fraction=0.2), 110)


def build_wsd(max_steps: int, **options):
    return build_warmup_stable_decay(WarmupStableDecayConfig(**WARMUP, **options), max_steps)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (COSINE, {0: 0, 5: 0.5, 10: 1, 60: 0.6, 110: 0.2}),
        (LINEAR, {0: 0, 10: 1, 35: 0.8, 110: 0.2, 120: 0.2}),
        (build_linear(LinearConfig(warmup_steps=0, final_fraction=0), 4), {0: 1, 1: 0.75, 4: 0}),
        (build_wsd(100, decay_steps=40, decay="linear"), {5: 0.5, 10: 1, 60: 1, 80: 0.5, 100: 0}),
        (build_wsd(100, decay_steps=40, final_fraction=0.5), {60: 1, 70: 0.75, 100: 0.5}),
        (build_wsd(80, decay_fraction=0.25, decay="linear"), {60: 1, 70: 0.5, 80: 0}),
        (build_wsd(80, decay_fraction=0.0), {5: 0.5, 79: 1, 80: 1}),
    ],
)
def test_learning_rate_at_chosen_steps(schedule, expected):
    assert {step: schedule(step) for step in expected} == pytest.approx(expected)
