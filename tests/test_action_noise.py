"""Action sharpness and action noise, which push stack actions toward one-hot values."""

import pytest
import torch
from small_models import make_model, make_tokens

from stackexp import stack


def make_decoder(**options):
    """Build a small decoder with seed 0 and a stack on the time axis."""
    return make_model({"axis": "time", "num_slots": 5, "read": "top"} | options, torch.float32, num_layers=2)


@pytest.fixture
def tokens():
    return make_tokens(9, batch=3)


@pytest.mark.parametrize("feedback", [False, True])
def test_sharpness_multiplies_action_logits(tokens, feedback):
    sharp, plain = make_decoder(action_sharpness=3.0, feedback=feedback), make_decoder(feedback=feedback)
    assert not torch.equal(sharp(tokens).logits, plain(tokens).logits)
    with torch.no_grad():
        for memory in plain.memories:
            memory.actions *= 3
    torch.testing.assert_close(sharp(tokens).logits, plain(tokens).logits, rtol=1e-5, atol=1e-6)


def test_noise_applies_only_in_training(tokens):
    noisy, plain = make_decoder(action_noise=2.0), make_decoder()
    assert not torch.equal(noisy(tokens).logits, noisy(tokens).logits)
    assert torch.equal(noisy.eval()(tokens).logits, plain.eval()(tokens).logits)


def test_noise_has_the_configured_standard_deviation(monkeypatch):
    seen = []
    scan = stack.scan

    def record_logits(state, x, logits, *rest, **options):
        seen.append(logits)
        return scan(state, x, logits, *rest, **options)

    monkeypatch.setattr(stack, "scan", record_logits)
    model, many = make_decoder(action_noise=0.5), torch.zeros(200, 40, dtype=torch.int64)
    model(many)
    noisy = seen[0]
    model.eval()(many)
    difference = noisy - seen[2]
    assert difference.std().item() == pytest.approx(0.5, rel=0.02)
    assert abs(difference.mean().item()) < 0.01


def test_noise_grows_over_warmup_steps():
    growing, whole = make_decoder(action_noise=2.0, action_noise_warmup_steps=10), make_decoder(action_noise=2.0)
    seen = []
    for step in (0, 5, 10, 15):
        for model in (growing, whole):
            for memory in model.memories:
                memory.set_step(step)
        seen.append(([m.noise.item() for m in growing.memories], [m.noise.item() for m in whole.memories]))
    assert seen == [([0.0] * 2, [2.0] * 2), ([1.0] * 2, [2.0] * 2), ([2.0] * 2, [2.0] * 2), ([2.0] * 2, [2.0] * 2)]
    assert "noise" not in " ".join(growing.state_dict())
