"""Positional encodings of the decoder, non-causal attention, attention windows and output vocabularies."""

import math

import pytest
import small_models
import torch
from small_models import VOCAB, B, T, make_tokens
from torch.nn import functional as F

from stackexp.config.model import TransformerConfig
from stackexp.models.attention import (
    build_alibi_bias,
    build_sinusoidal_table,
    compute_alibi_slopes,
    compute_query_scale,
)
from stackexp.models.transformer import Cache

HEADS, HIDDEN = 4, 16
KINDS = ["rope", "none", "sinusoidal", "alibi", "log_scale"]  # the last: no positions, and scores times log n
BASE = 5


def make_model(**options):
    if options.get("positional") == "log_scale":
        options |= {"positional": "none", "attention_log_base": BASE}
    return small_models.make_model(**options)


def compute_attention(attention, x, bias, scale):
    """Compute softmax attention without RoPE, one query head at a time.

    The scores of query t are multiplied by scale[t]; then bias [heads, T, T] is added.
    """
    size = HIDDEN // HEADS
    q = attention.q_proj(x).unflatten(-1, (HEADS, size))
    k, v = (p(x).unflatten(-1, (2, size)) for p in (attention.k_proj, attention.v_proj))
    heads = []
    for n in range(HEADS):
        scores = q[:, :, n] @ k[:, :, n // 2].transpose(1, 2) / math.sqrt(size) * scale[:, None] + bias[n]
        heads.append(scores.softmax(-1) @ v[:, :, n // 2])
    return attention.o_proj(torch.cat(heads, -1))


def compute_logits(model, h, bias, scale):
    for layer in model.layers:
        h = h + compute_attention(layer.attention, layer.attention_norm(h), bias, scale)
        h = h + layer.feed_forward(layer.feed_forward_norm(h))
    return F.linear(model.norm(h), model.embedding.weight)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("positional", ["none", "sinusoidal", "alibi", "log_scale"])
def test_logits_match_explicit_positional_encoding(positional, causal):
    model, tokens = make_model(positional=positional, causal=causal), make_tokens()
    h, bias = model.embedding(tokens), torch.zeros(HEADS, T, T, dtype=torch.float64)
    scale = torch.ones(T, dtype=torch.float64)
    for i in range(T):
        if positional == "log_scale":
            scale[i] = math.log(i + 1 if causal else T, BASE)
        if positional == "sinusoidal":
            angles = [i / 10_000 ** (2 * (n // 2) / HIDDEN) for n in range(HIDDEN)]
            row = [math.cos(a) if n % 2 else math.sin(a) for n, a in enumerate(angles)]
            h[:, i] = 4 * model.embedding(tokens)[:, i] + torch.tensor(row, dtype=torch.float64)
        for j in range(T):
            if causal and j > i:
                bias[:, i, j] = -torch.inf
            elif positional == "alibi":
                bias[:, i, j] = torch.tensor([-abs(i - j) / 4 ** (n + 1) for n in range(HEADS)])
    torch.testing.assert_close(model(tokens).logits, compute_logits(model, h, bias, scale))


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (3, [4, 8, 2]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (15, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5]),
    ],
)
def test_alibi_slopes_match_paper(heads, exponents):
    slopes = compute_alibi_slopes(heads, torch.zeros(1))
    assert slopes.tolist() == pytest.approx([2**-e for e in exponents])


def test_tables_are_float32_and_start_at_the_offset():
    like = torch.zeros(1, dtype=torch.bfloat16)
    table = build_sinusoidal_table(8, 4000, 2, like)
    assert table.dtype == torch.float32
    assert table[0, :2].tolist() == pytest.approx([math.sin(4000), math.cos(4000)], abs=1e-6)
    assert torch.equal(table, build_sinusoidal_table(8, 3998, 4, like)[2:])
    bias = build_alibi_bias(4, 300, 2, 302, True, like)
    assert bias.dtype == torch.float32
    assert bias.shape == (1, 4, 2, 302)
    assert bias[0, 0, 0, [0, 300, 301]].tolist() == [-75, 0, -torch.inf]
    assert torch.equal(bias, build_alibi_bias(4, 0, 302, 302, True, like)[:, :, 300:])


@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_cache_keeps_only_keys_inside_the_window(window):
    model, tokens = make_model(attention_window=window).eval(), make_tokens()
    cache = Cache()
    logits = torch.cat([model(part, cache).logits for part in tokens.split([4, 1, 4], 1)], 1)
    torch.testing.assert_close(logits, model(tokens).logits)
    kept = {layer: keys.shape[2] for layer, (keys, _) in cache.keys_values.items()}
    assert kept == dict.fromkeys(range(3), (window or T + 1) - 1)


@pytest.mark.parametrize("positional", KINDS)
def test_non_causal_attention_depends_on_later_tokens(positional):
    tokens, changed = make_tokens(), make_tokens()
    changed[:, 5] = (changed[:, 5] + 1) % VOCAB
    model = make_model(positional=positional, causal=False)
    assert (model(changed).logits - model(tokens).logits).abs().amax((0, 2)).min() > 1e-9


@pytest.mark.parametrize("positional", KINDS)
def test_attention_window_limits_the_receptive_field(positional):
    tokens, changed = make_tokens(), make_tokens()
    changed[:, 2] = (changed[:, 2] + 1) % VOCAB
    model = make_model(positional=positional, attention_window=2)
    moved = (model(changed).logits - model(tokens).logits).abs().amax((0, 2))
    assert all(moved[2:6] > 1e-9), "each of the three layers adds one token"
    assert all(moved[:2] < 1e-12)
    assert all(moved[6:] < 1e-12)
    whole, wide = (make_model(positional=positional, attention_window=width)(tokens).logits for width in (None, T))
    torch.testing.assert_close(whole, wide)


def test_non_causal_model_rejects_cache_documents_and_token_major():
    model, tokens = make_model(causal=False), make_tokens()
    for options in ({"cache": Cache()}, {"documents": torch.zeros_like(tokens)}):
        with pytest.raises(ValueError, match=r"model\.causal=false.*set model\.causal=true"):
            model(tokens, **options)
    with pytest.raises(ValueError, match="token_major"):
        make_model(causal=False, memory={"axis": "token_major"})(tokens)


@pytest.mark.parametrize("memory", [None, {"axis": "depth"}, {"axis": "time"}])
def test_output_vocab_size_shrinks_the_output_head(memory):
    model = make_model(output_vocab_size=5, tie_embeddings=False, memory=memory)
    plain = make_model(tie_embeddings=False, memory=memory)
    assert model(make_tokens()).logits.shape == (B, T, 5)
    assert plain.num_parameters() - model.num_parameters() == (VOCAB - 5) * HIDDEN
    assert plain.flops_per_token(T) - model.flops_per_token(T) == 6 * (VOCAB - 5) * HIDDEN


def test_score_scaling_has_the_precision_of_the_model():
    config = TransformerConfig(vocab_size=9, attention_log_base=5)
    scale = compute_query_scale(config, torch.arange(7), like=torch.zeros(1, dtype=torch.float64))
    assert (scale[:, 0] - torch.arange(1, 8, dtype=torch.float64).log() / math.log(5)).abs().max() < 1e-15
    assert (
        compute_query_scale(config, torch.arange(7), like=torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    )
