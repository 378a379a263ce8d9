"""The decoder with and without a memory: attention, sites, the order of updates, entropy and initialization."""

import math

import pytest
import torch
from small_models import B, T, make_model, make_tokens
from torch.nn import functional as F

from stackexp.models.attention import Positions, build_rope_table

AXES = ["depth", "time", "token_major"]


def run_plain_llama(model, tokens):
    """Compute the logits of the decoder without a memory, step by step."""
    h = model.embedding(tokens)
    positions = Positions(build_rope_table(model.config, 0, tokens.shape[1], h))
    for layer in model.layers:
        h = h + layer.attention(layer.attention_norm(h), positions)[0]
        h = h + layer.feed_forward(layer.feed_forward_norm(h))
    return F.linear(model.norm(h), model.embedding.weight if model.head is None else model.head.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_null_memory_matches_plain_transformer_exactly(tied):
    model = make_model(dtype=torch.float32, tie_embeddings=tied)
    output = model(make_tokens(), probe=True)
    assert torch.equal(output.logits, run_plain_llama(model, make_tokens()))
    assert output.entropy == 0
    assert output.probes == []
    assert model.entropy_weight == 0
    assert model(make_tokens()).probes is None


@pytest.mark.parametrize("memory", [{"axis": axis} for axis in AXES])
def test_memory_does_not_change_backbone_initialization(memory):
    plain, model = make_model(seed=5), make_model(memory, seed=5)
    weights = model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items())
    for layer in model.layers:
        layer.memory = None
    assert torch.equal(model(make_tokens()).logits, plain(make_tokens()).logits)


def test_attention_matches_grouped_query_attention_with_complex_rope():
    model = make_model()
    attention, x = model.layers[0].attention, torch.randn(B, T, 16, dtype=torch.float64)
    frequency = 1e5 ** (-torch.arange(0, 4, 2, dtype=torch.float64) / 4)
    rotations = torch.polar(torch.ones(T, 2, dtype=torch.float64), torch.arange(T)[:, None] * frequency)

    def rotate(y):  # [B, T, heads, 4], pairs half a head apart
        z = torch.complex(*y.chunk(2, -1)) * rotations[:, None]
        return torch.cat([z.real, z.imag], -1)

    q = rotate(attention.q_proj(x).view(B, T, 4, 4))
    k = rotate(attention.k_proj(x).view(B, T, 2, 4)).repeat_interleave(2, 2)  # query heads 0 and 1 share kv head 0
    v = attention.v_proj(x).view(B, T, 2, 4).repeat_interleave(2, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2
    weights = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
    expected = attention.o_proj(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))
    got, _ = attention(x, Positions(build_rope_table(model.config, 0, T, x)), None)
    torch.testing.assert_close(got, expected)


def test_rope_table_is_float32_for_bfloat16_input():
    table = build_rope_table(make_model().config, 4000, 1, torch.zeros(1, dtype=torch.bfloat16))
    assert table.dtype == torch.float32
    assert table[0, 0, 0].item() == pytest.approx(math.cos(4000), abs=1e-6)


@pytest.mark.parametrize("axis", AXES)
def test_states_pass_to_the_next_layer_or_token_or_both(axis):
    """Compare with an explicit loop: one stack per token (depth), per layer (time), or one in all (token_major)."""
    model, tokens = make_model({"axis": axis}), make_tokens()
    pasts, logits, states = [None] * 3, [], {}
    for t in range(T):
        h = model.embedding(tokens[:, t : t + 1])
        for i, layer in enumerate(model.layers):
            positions = Positions(build_rope_table(model.config, t, 1, h))
            attended, pasts[i] = layer.attention(layer.attention_norm(h), positions, pasts[i])
            h = h + attended
            h = h + layer.feed_forward(layer.feed_forward_norm(h))
            stack = {"depth": t, "time": i, "token_major": 0}[axis]
            state = states.get(stack) or layer.memory.empty_state(h)
            h, states[stack], _ = layer.memory(h, state)
        logits.append(F.linear(model.norm(h), model.embedding.weight))
    torch.testing.assert_close(model(tokens).logits, torch.cat(logits, 1))


@pytest.mark.parametrize(("site", "place"), [("before_attention", 0), ("after_attention", 1), ("after_block", 2)])
def test_memory_runs_at_configured_site(site, place):
    model, order = make_model({"site": site}), []
    for name in ("memory", "attention", "feed_forward"):
        getattr(model.layers[0], name).register_forward_hook(lambda *_, name=name: order.append(name))
    model(make_tokens())
    assert (order.pop(place), order) == ("memory", ["attention", "feed_forward"])


@pytest.mark.parametrize("axis", AXES)
def test_entropy_is_mean_over_layers_and_probes_are_detached(axis):
    model = make_model({"axis": axis, "entropy_weight": 0.25})
    output = model(make_tokens(), probe=True)
    assert model.entropy_weight == 0.25
    assert len(output.probes) == 3
    entropies = torch.stack([probe["entropy"] for probe in output.probes])
    assert output.entropy.item() == pytest.approx(entropies.mean().item())
    assert output.entropy.requires_grad
    for probe in output.probes:
        assert not any(value.requires_grad for value in probe.values())
        assert (probe["push"] + probe["pop"] + probe["no_op"]).item() == pytest.approx(1)
    occupancy = [probe["occupancy"].item() for probe in output.probes]
    assert 0 < occupancy[0] < 3
    if axis == "depth":
        assert occupancy[0] == pytest.approx(output.probes[0]["push"].item())


def test_initialization_scales_down_residual_outputs():
    model = make_model(hidden_size=128, intermediate_size=512, vocab_size=500, dtype=torch.float32)
    sigmas = {"attention.q_proj": 128, "feed_forward.up_proj": 128}
    for i, layer in enumerate(model.layers):
        sigmas |= {"attention.o_proj": 128 * 2 * (i + 1), "feed_forward.down_proj": 512 * 2 * (i + 1)}
        for name, scaled_fan_in in sigmas.items():
            weight = layer.get_submodule(name).weight
            assert weight.std().item() == pytest.approx(0.9866 * scaled_fan_in**-0.5, rel=0.05)
            assert weight.abs().max() <= 3 * scaled_fan_in**-0.5
    assert model.embedding.weight.std().item() == pytest.approx(0.9866 * 128**-0.5, rel=0.05)
    normal = make_model(hidden_size=128, init="normal", init_std=0.1, dtype=torch.float32)
    assert normal.layers[2].attention.o_proj.weight.std().item() == pytest.approx(0.1, rel=0.05)
