"""Hyper-connections, attention residuals, DenseFormer and the value skip against their equations."""

import pytest
import torch
from stack_memories import decoder_config
from torch.nn import functional as F

from stackexp.config.memory import (
    AttentionResidualConfig,
    DenseFormerConfig,
    HyperConnectionsConfig,
    ManifoldHyperConnectionsConfig,
    ResidualScaleConfig,
    ResidualStackConfig,
    ValueSkipConfig,
)
from stackexp.models.memories.hyper_connections import normalize_sinkhorn
from stackexp.models.transformer import Transformer
from stackexp.models.warm_start import init_identity

MEMORIES = {
    "attention_residual": AttentionResidualConfig(),
    "dense_former": DenseFormerConfig(),
    "residual_scale": ResidualScaleConfig(),
    "residual_stack": ResidualStackConfig(num_slots=3),
    "residual_streams": ResidualStackConfig(update="none"),
    "value_skip": ValueSkipConfig(rank=3),
    "hyper_static": HyperConnectionsConfig(dynamic=False),
    "hyper_dynamic": HyperConnectionsConfig(num_streams=3),
    "mhc_static": ManifoldHyperConnectionsConfig(dynamic=False),
    "mhc": ManifoldHyperConnectionsConfig(),
}
TOKENS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])


def build_model(memory, is_random=True):
    """Return a decoder in float64; `is_random` moves it from its initial values, at which most memories do nothing."""
    torch.manual_seed(0)
    config = decoder_config(num_layers=3)
    config.memory = memory
    model = Transformer(config).double()
    if is_random:
        for memory in model.memories:
            for parameter in memory.parameters():
                parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def record_sublayers(model):
    """Return the list of (input, output) of all sublayers that the next forward pass fills."""
    calls = []
    for layer in model.layers:
        for norm, sublayer in ((layer.attention_norm, layer.attention), (layer.feed_forward_norm, layer.feed_forward)):
            entry = {}
            norm.register_forward_hook(lambda _, args, out, entry=entry: entry.update(input=args[0]))
            sublayer.register_forward_hook(
                lambda _, args, out, entry=entry: entry.update(output=out[0] if isinstance(out, tuple) else out)
            )
            calls.append(entry)
    model.norm.register_forward_hook(lambda _, args, out: calls.append({"input": args[0]}))
    return calls


def run_recorded(memory):
    model = build_model(memory)
    calls = record_sublayers(model)
    model(TOKENS)
    inputs = [call["input"] for call in calls]
    return model, model.embedding(TOKENS), inputs, [call["output"] for call in calls[:-1]]


def test_attention_residual_attends_to_the_embedding_and_all_outputs():
    model, embedding, inputs, outputs = run_recorded(MEMORIES["attention_residual"])
    assert torch.equal(inputs[0], embedding)
    for k, memory in enumerate(model.memories, 1):
        values = torch.stack([embedding, *outputs[:k]])  # [n, B, T, d]
        weights = (F.rms_norm(values, values.shape[-1:], eps=model.config.norm_eps) @ memory.query).softmax(0)
        torch.testing.assert_close(inputs[k], (weights.unsqueeze(-1) * values).sum(0), rtol=1e-6, atol=1e-6)


def test_dense_former_averages_the_outputs_of_all_blocks():
    model, embedding, inputs, outputs = run_recorded(MEMORIES["dense_former"])
    history = [embedding]
    for i, memory in enumerate(model.memories):
        history.append(inputs[2 * i] + outputs[2 * i] + outputs[2 * i + 1])
        expected = sum(weight * h for weight, h in zip(memory.weights, history, strict=True))
        torch.testing.assert_close(inputs[2 * i + 2], expected)


def test_value_skip_adds_a_map_of_the_embedding():
    model, embedding, inputs, outputs = run_recorded(MEMORIES["value_skip"])
    for i, memory in enumerate(model.memories):
        expected = inputs[2 * i] + outputs[2 * i] + outputs[2 * i + 1] + memory.up(memory.down(embedding))
        torch.testing.assert_close(inputs[2 * i + 2], expected)


def test_residual_scale_weights_each_sublayer():
    model, embedding, inputs, outputs = run_recorded(MEMORIES["residual_scale"])
    assert len(model.memories) == 6
    for k, memory in enumerate(model.memories):
        r, b, c = memory.scales
        torch.testing.assert_close(inputs[k + 1], r * inputs[k] + b * outputs[k] + c * embedding)


@pytest.mark.parametrize("name", ["residual_stack", "residual_streams"])
def test_residual_stack_moves_its_slots(name):
    """Follow the slots token by token, as a list of vectors."""
    model, embedding, inputs, outputs = run_recorded(MEMORIES[name])
    size = MEMORIES[name].num_slots

    def weight(memory, fixed, scale, rows, top):
        x = top / (top.square().mean() + model.config.norm_eps).sqrt()
        return fixed + scale * (memory.maps[rows] @ x).tanh(), x

    for b, t in ((0, 0), (1, 4)):
        slots = [embedding[b, t]] * size
        for k, memory in enumerate(model.memories):
            write, x = weight(memory, memory.write, memory.scale[0], slice(size), slots[0])
            push, pop, no_op = 0, 0, 1
            if memory.actions is not None:
                push, pop, no_op = (memory.actions @ x + memory.action_bias).softmax(0)
            pushed, popped = [slots[0], *slots[:-1]], [*slots[1:], slots[-1]]
            slots = [push * p + pop * q + no_op * s for p, q, s in zip(pushed, popped, slots, strict=True)]
            slots = [s + w * outputs[k][b, t] for s, w in zip(slots, write, strict=True)]
            read, _ = weight(memory, memory.read, memory.scale[1], slice(size, None), slots[0])
            expected = sum(w * s for w, s in zip(read, slots, strict=True))
            torch.testing.assert_close(inputs[k + 1][b, t], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["hyper_static", "hyper_dynamic", "mhc_static", "mhc"])
def test_hyper_connections_match_the_equations(name):
    """Follow the streams token by token, with the connections written out."""
    model, embedding, inputs, outputs = run_recorded(MEMORIES[name])
    config, n = MEMORIES[name], MEMORIES[name].num_streams

    def connect(memory, streams):
        residual, output, weights = memory.residual, memory.output, memory.input
        if config.dynamic and config.kind == "mhc":
            x = streams.flatten() / (streams.square().mean() + model.config.norm_eps).sqrt()
            changes = (memory.maps @ x.float().double()).view(n, n + 2)
        elif config.dynamic:
            x = streams / (streams.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt()
            changes = (x @ memory.maps.T).tanh()
        if config.dynamic:
            residual = residual + memory.scale[0] * changes[:, :n].T  # column j is from stream j
            output = output + memory.scale[1] * changes[:, n]
            weights = weights + memory.scale[2] * changes[:, n + 1]
        if config.kind == "mhc":
            return normalize_sinkhorn(residual), 2 * output.sigmoid(), weights.sigmoid()
        return residual, output, weights

    for b, t in ((0, 0), (1, 4)):
        streams = embedding[b, t].repeat(n, 1)
        for k, memory in enumerate(model.memories):
            residual, output, _ = connect(memory, streams)
            streams = residual @ streams + output[:, None] * outputs[k][b, t]
            expected = connect(memory, streams)[2] @ streams
            torch.testing.assert_close(inputs[k + 1][b, t], expected, rtol=1e-5, atol=1e-5)


def test_sinkhorn_ends_with_the_rows_as_in_the_paper():
    logits = 4 * torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = logits.exp()
    for _ in range(20):
        expected = expected / expected.sum(-2, keepdim=True)
        expected = expected / expected.sum(-1, keepdim=True)
    matrix = normalize_sinkhorn(logits)
    torch.testing.assert_close(matrix, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(50, 4, dtype=torch.float64), rtol=1e-12, atol=0)
    assert ((matrix.sum(-2) - 1).abs() < 0.2).all()
    torch.testing.assert_close(normalize_sinkhorn(90 * torch.eye(4)), torch.eye(4))  # exp(90) overflows in float32
    torch.testing.assert_close(
        normalize_sinkhorn(torch.tensor([[0.0, 0.0], [-200.0, -200.0]])), torch.full((2, 2), 0.5)
    )
    logits = torch.tensor([[0.0, -300.0], [-150.0, 200.0]], requires_grad=True)
    normalize_sinkhorn(logits).square().sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    "name",
    ["dense_former", "residual_scale", "residual_streams", "value_skip", "hyper_static", "hyper_dynamic", "mhc_static"],
)
def test_models_start_as_the_plain_transformer(name):
    """The streams of hyper-connections are summed or averaged, and the last norm removes that factor."""
    plain, model = build_model(None), build_model(MEMORIES[name], is_random=False)
    if name != "mhc_static":
        init_identity(model)
    tolerance = 0 if name in ("dense_former", "residual_scale", "value_skip") else 1e-4
    torch.testing.assert_close(model(TOKENS).logits, plain(TOKENS).logits, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_float64_models_compute_nothing_in_float32(memory):
    """A central difference equals the gradient to about 1e-8; float32 anywhere would give 1e-3."""
    model = build_model(memory)
    parameters = [parameter for memory in model.memories for parameter in memory.parameters()]
    direction = [torch.randn_like(parameter) for parameter in parameters]

    def compute(step):
        with torch.no_grad():
            for parameter, change in zip(parameters, direction, strict=True):
                parameter.add_(step * change)
        return model(TOKENS).logits.square().mean()

    loss = compute(0.0)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    slope = sum((g * c).sum() for g, c in zip(gradients, direction, strict=True) if g is not None)
    high, low = compute(1e-6), compute(-2e-6)
    assert (high - low).item() / 2e-6 == pytest.approx(slope.item(), rel=1e-5)
