"""Weight initialization: fan-in scaling, truncation and embedding scale."""

import dataclasses
import math

import pytest
import torch

from stackexp.config.compose import compose
from stackexp.config.model import TransformerConfig
from stackexp.models.layers import init_weight_
from stackexp.models.transformer import Transformer

FAN_IN, FAN_OUT = 64, 20_000  # 1.3 million draws: the estimate of a sigma is good to 0.1 %
OF_TRUNCATED = 0.98658  # standard deviation of a unit normal cut at 3 sigma
BEYOND_2 = 0.0429  # the part of a normal cut at 3 sigma that lies beyond 2


def draw(output_of_layer: int | None = None, **options) -> torch.Tensor:
    torch.manual_seed(0)
    weight = torch.full((FAN_OUT, FAN_IN), torch.nan)
    init_weight_(weight, TransformerConfig(**options), output_of_layer)
    return weight


@pytest.mark.parametrize(("output_of_layer", "factor"), [(None, 1), (0, 2), (7, 16)])
def test_fan_in_is_a_normal_truncated_at_three_sigma(output_of_layer, factor):
    sigma = 1 / math.sqrt(factor * FAN_IN)
    weight = draw(output_of_layer, init="fan_in", init_std=5.0)
    assert weight.mean().item() == pytest.approx(0, abs=sigma / 100)
    assert weight.std().item() == pytest.approx(OF_TRUNCATED * sigma, rel=5e-3)
    assert 2.99 * sigma < weight.abs().max() <= 3 * sigma
    assert (weight.abs() > 2 * sigma).float().mean().item() == pytest.approx(BEYOND_2, rel=0.02)


def test_normal_is_not_truncated_or_scaled():
    for layer in (None, 7):
        weight = draw(layer, init="normal", init_std=0.02)
        assert weight.mean().item() == pytest.approx(0, abs=2e-4)
        assert weight.std().item() == pytest.approx(0.02, rel=5e-3)
        assert weight.abs().max() > 4 * 0.02


@pytest.mark.parametrize("memory", ["null", "value_skip"])
def test_embedding_scale_applies_to_the_input_only(memory):
    config = compose(["quickstart"], [f"model.memory={memory}", "model.num_layers=2", "model.embedding_scale=1"]).model
    torch.manual_seed(0)
    model = Transformer(config)
    scaled = Transformer(dataclasses.replace(config, embedding_scale=3.0))
    scaled.load_state_dict(model.state_dict())
    scaled.embedding.weight.data /= 3
    tokens = torch.arange(8).reshape(2, 4)
    hidden = [m(tokens, return_hidden=True).hidden for m in (model, scaled)]
    torch.testing.assert_close(*hidden)
    logits = scaled(tokens).logits
    torch.testing.assert_close(logits, hidden[1] @ scaled.embedding.weight.T)


@pytest.mark.parametrize("init", ["fan_in", "normal"])
def test_embedding_std_applies_only_to_the_embedding(init):
    options = {"vocab_size": 1000, "hidden_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    config = TransformerConfig(**options, intermediate_size=32, init=init, tie_embeddings=False, embedding_std=1.5)
    model = Transformer(config)
    assert model.embedding.weight.std().item() == pytest.approx(1.5, rel=0.02)
    assert model.embedding.weight.abs().max() > 3.5 * 1.5, "it is not truncated"
    assert model.head.weight.std().item() < 0.2
