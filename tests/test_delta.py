"""DeltaNet and DeltaProduct: the chunked form against a loop over the tokens, state tracking, the decoder interface."""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_recurrent import HIDDEN, B, make_model, make_tokens
from torch.nn import functional as F

from stackexp.config.compose import compose
from stackexp.errors import ConfigError
from stackexp.models.attention import check_backend
from stackexp.models.delta import apply_delta_rule
from stackexp.planning.cost import make_plan

VARIANTS = ("delta_net", "delta_net_positive", "delta_product")


def run_by_token(q, k, v, beta, state):
    """Apply the equations of one sequence and head: q [T, D], k and v [n T, D], beta [n T], S values x keys."""
    steps, reads = len(k) // len(q), []
    for t in range(len(q)):
        for j in range(t * steps, (t + 1) * steps):
            identity = torch.eye(len(state), dtype=state.dtype)
            state = state @ (identity - beta[j] * torch.outer(k[j], k[j])) + beta[j] * torch.outer(v[j], k[j])
        reads.append(state @ q[t])
    return torch.stack(reads), state


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 20),
    steps=st.integers(1, 3),
    chunk=st.integers(3, 24),
    seed=st.integers(0, 99),
    high=st.booleans(),
)
def test_chunks_match_a_loop_with_gradients(length, steps, chunk, seed, high):
    torch.manual_seed(seed)
    heads, size = 2, 4
    q, k, v = (torch.randn(B, n * length, heads, size, dtype=torch.float64) for n in (1, steps, steps))
    beta = (2 if high else 1) * torch.rand(B, steps * length, heads, dtype=torch.float64)
    state = torch.randn(B, heads, size, size, dtype=torch.float64)
    k = F.normalize(k, dim=-1)
    inputs = [x.requires_grad_() for x in (q, k, v, beta, state)]
    reads, new = apply_delta_rule(*inputs, chunk_steps=chunk)
    wanted = torch.zeros_like(reads), torch.zeros_like(new)
    for b in range(B):
        for i in range(heads):
            rows = (x[b, :, i] for x in (q, k, v, beta))
            wanted[0][b, :, i], last = run_by_token(*rows, state[b, i].T)
            wanted[1][b, i] = last.T
    torch.testing.assert_close((reads, new), wanted)
    weights = torch.randn_like(reads), torch.randn_like(new)
    gradients = [
        torch.autograd.grad(sum((w * y).sum() for w, y in zip(weights, outputs, strict=True)), inputs)
        for outputs in ((reads, new), wanted)
    ]
    torch.testing.assert_close(*gradients)


def test_float32_chunks_stay_close_to_float64_over_many_reflections():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1000, 2, 16, dtype=torch.float64)
    inputs = (q, F.normalize(k, dim=-1), v, torch.full((1, 1000, 2), 2.0).double(), torch.zeros(1, 2, 16, 16).double())
    reads, _ = apply_delta_rule(*inputs)
    single, _ = apply_delta_rule(*(x.float() for x in inputs))
    assert (single - reads).norm() / reads.norm() < 1e-4


def test_one_reflection_per_token_counts_parity_and_two_rotate():
    """With beta = 2, k = e_1 flips the sign of e_1; two reflections rotate by twice the angle between them."""
    bits = torch.randint(2, (1, 60, 1), generator=torch.Generator().manual_seed(0))
    e_1 = F.one_hot(torch.zeros(1, 60, 1, dtype=torch.int64), 2).double()
    nothing, state = torch.zeros_like(e_1), torch.eye(2, dtype=torch.float64).view(1, 1, 2, 2)
    reads, _ = apply_delta_rule(e_1, e_1, nothing, 2.0 * bits, state)
    assert torch.equal(reads[0, :, 0, 0], (-1.0) ** bits[0, :, 0].cumsum(0).double())
    angle = math.pi / 5
    turned = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64).expand(1, 60, 1, 2)
    keys = torch.stack([e_1, turned], 2).flatten(1, 2)
    _, state = apply_delta_rule(
        e_1[:, :5], keys[:, :10], torch.zeros_like(keys)[:, :10], 2 * torch.ones(1, 10, 1).double(), state
    )
    torch.testing.assert_close(state[0, 0], torch.eye(2, dtype=torch.float64))


def run_layer(layer, h):
    """Run one sequence [T, d] of a layer from its equations, token by token."""
    config = layer.config
    heads, size, steps = config.num_heads, config.hidden_size // config.num_heads, config.num_householder

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight

    x = norm(h, layer.delta_norm.weight)
    projected = torch.cat([x @ linear.weight.T for linear in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)
    if config.conv_size:
        taps = layer.conv.weight[:, 0]  # [C, conv_size], the last one for the token itself
        projected = torch.stack(
            [
                sum(taps[:, -1 - i] * projected[t - i] for i in range(min(t + 1, config.conv_size)))
                for t in range(len(h))
            ]
        )
    q, k, v = F.silu(projected).split([n * config.hidden_size for n in (1, steps, steps)], -1)
    q, k, v = (y.reshape(-1, heads, size) for y in (q, k, v))
    q, k = (y / y.norm(dim=-1, keepdim=True) for y in (q, k))
    beta = torch.sigmoid(x @ layer.beta_proj.weight.T).reshape(-1, heads) * (1 + config.allow_negative_eigenvalues)
    state = torch.zeros(size, size, dtype=h.dtype)
    reads = [run_by_token(q[:, i], k[:, i], v[:, i], beta[:, i], state)[0] for i in range(heads)]
    y = norm(torch.stack(reads, 1), layer.head_norm.weight).flatten(1)
    h = h + y @ layer.o_proj.weight.T
    x = norm(h, layer.feed_forward_norm.weight)
    ffn = layer.feed_forward
    return h + (F.silu(x @ ffn.gate_proj.weight.T) * (x @ ffn.up_proj.weight.T)) @ ffn.down_proj.weight.T


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_match_the_equations(name):
    model = make_model(name)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    rows = []
    for tokens in make_tokens():
        h = model.embedding.weight[tokens]
        for layer in model.layers:
            h = run_layer(layer, h)
        rows.append(F.rms_norm(h, (HIDDEN,), model.norm.weight, 1e-5) @ model.head.weight.T + model.head.bias)
    wanted, got = torch.stack(rows), model(make_tokens()).logits
    torch.testing.assert_close(got, wanted)
    gradients = [torch.autograd.grad(y.logsumexp(-1).square().sum(), model.parameters()) for y in (got, wanted)]
    torch.testing.assert_close(*gradients)


def test_weights_from_the_meta_device_are_those_of_the_constructor():
    model = make_model("delta_net", dtype=torch.float32, hidden_size=192)
    with torch.device("meta"):
        empty = make_model("delta_net", dtype=torch.float32, hidden_size=192)
    empty.to_empty(device="cpu")
    torch.manual_seed(0)
    empty.init_weights()
    for (name, weight), other in zip(model.named_parameters(), empty.parameters(), strict=True):
        assert torch.equal(weight, other), name
    for layer, index in zip(model.layers, (1, 2), strict=True):
        assert layer.o_proj.weight.std().item() == pytest.approx((2 * index * 192) ** -0.5, rel=0.05)
        assert layer.k_proj.weight.std().item() == pytest.approx(192**-0.5, rel=0.05)


def test_plan_supports_delta_product():
    short = ["data.max_length=2", "data.curriculum_steps=0", "data.batch_size=3", "model.num_layers=2"]
    planned = make_plan(compose(["formal/delta_product"], short))
    assert planned.training.activations > 2 * 3 * 4 * (64 + 3 * 144) * 4, "hidden states and feed-forward network"
    assert planned.fits


def test_fla_needs_cuda_and_its_package(monkeypatch):
    with pytest.raises(ConfigError, match=r"model\.kernel=fla needs a CUDA device, not cpu; set model\.kernel=torch"):
        make_model("delta_net", kernel="fla")(make_tokens())
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ConfigError, match=r"needs the package flash-linear-attention .*pip install 'stackexp\[fla\]'"):
        check_backend("fla", "cuda")
