"""Recurrent models: equations, hard actions, parameter counts and FLOPs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.config.model import DeltaNetConfig, LSTMConfig, StackRNNConfig
from stackexp.planning.cost import make_plan

VOCAB, OUTPUTS, B, T, HIDDEN = 7, 3, 2, 9, 12
KINDS = {
    "lstm": (LSTMConfig, {}),
    "stack_rnn": (StackRNNConfig, {}),
    "delta_net": (DeltaNetConfig, {"num_heads": 3}),
    "delta_net_positive": (
        DeltaNetConfig,
        {"num_heads": 3, "allow_negative_eigenvalues": False, "conv_size": None},
    ),
    "delta_product": (DeltaNetConfig, {"num_heads": 3, "num_householder": 3, "conv_size": 2}),
}


def make_model(kind, dtype=torch.float64, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "output_vocab_size": OUTPUTS, "hidden_size": HIDDEN, "num_layers": 2}
    config, of_kind = KINDS[kind]
    return registry.build("model", config(**(sizes | of_kind | options))).to(dtype)


def make_tokens(length=T):
    return torch.randint(VOCAB, (B, length), generator=torch.Generator().manual_seed(1))


def run_lstm(layer, x):
    h = c = torch.zeros_like(x[0])
    outputs = []
    for x_t in x:
        gates = layer.weight_ih_l0 @ x_t + layer.bias_ih_l0 + layer.weight_hh_l0 @ h + layer.bias_hh_l0
        i, f, g, o = gates.chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs)


def run_stack_rnn(layer, x, num_slots):
    """Run one sequence [T, d] with a stack stored as a list of `num_slots` vectors."""
    hidden, size = x.shape[1], layer.config.slot_size
    u, p = layer.recurrent.split([hidden, size], 1)
    a, v = layer.stack_input.weight.split([3, size])
    a_bias, v_bias = layer.stack_input.bias.split([3, size])
    empty = -torch.ones(size, dtype=x.dtype)
    h, stack, outputs = torch.zeros(hidden, dtype=x.dtype), [empty] * num_slots, []
    for x_t in x:
        h = torch.tanh(layer.input.weight @ x_t + layer.input.bias + u @ h + p @ stack[0])
        push, pop, no_op = torch.softmax(a @ h + a_bias, 0)
        around = [torch.sigmoid(v @ h + v_bias), *stack, empty]
        stack = [push * around[j] + no_op * around[j + 1] + pop * around[j + 2] for j in range(num_slots)]
        outputs.append(h)
    return torch.stack(outputs)


@pytest.mark.parametrize(("kind", "num_slots"), [("lstm", 0), ("stack_rnn", 1), ("stack_rnn", 4), ("stack_rnn", 20)])
def test_logits_match_an_explicit_loop(kind, num_slots):
    model = make_model(kind, **({"num_slots": num_slots} if num_slots else {}))
    rows = []
    for tokens in make_tokens():
        h = model.embedding.weight[tokens]
        for layer in model.layers:
            h = run_stack_rnn(layer, h, num_slots) if num_slots else run_lstm(layer, h)
        rows.append(model.head.weight @ h.T + model.head.bias[:, None])
    wanted, got = torch.stack(rows).transpose(1, 2), model(make_tokens()).logits
    torch.testing.assert_close(got, wanted)
    gradients = [torch.autograd.grad(y.logsumexp(-1).square().sum(), model.parameters()) for y in (got, wanted)]
    torch.testing.assert_close(*gradients)


def test_weights_that_a_single_token_does_not_use_have_zero_gradients():
    """DDP ends with an error if a weight has no gradient."""
    model = make_model("stack_rnn")
    model(make_tokens()[:, :1]).logits.logsumexp(-1).sum().backward()
    unused = {f"layers.{i}.stack_input.{name}" for i in (0, 1) for name in ("weight", "bias")}
    assert {name for name, p in model.named_parameters() if not p.grad.any()} >= unused


def test_hard_actions_match_a_list():
    """The input selects push, pop or no-op. The list is deeper than the stack."""
    model = make_model("stack_rnn", hidden_size=4, num_layers=1, slot_size=1, num_slots=5)
    layer, generator = model.layers[0], torch.Generator().manual_seed(2)
    torch.nn.init.zeros_(layer.recurrent)
    with torch.no_grad():
        layer.input.weight.copy_(torch.eye(4))
        layer.input.bias.zero_()
        layer.stack_input.weight.zero_()
        layer.stack_input.weight[:3, :3] = 1e4 * torch.eye(3)
        layer.stack_input.weight[3, 3] = 1
        layer.stack_input.bias.zero_()
    actions = torch.randint(3, (1, 60), generator=generator)
    x = torch.cat([F.one_hot(actions, 3).double(), torch.randn(1, 60, 1, dtype=torch.float64, generator=generator)], -1)
    stack, state = [-1.0] * 5, None
    for t, action in enumerate(actions[0].tolist()):
        _, state, _ = layer(x[:, t : t + 1], state, False)
        if action == 0:
            stack = [1 / (1 + math.exp(-math.tanh(x[0, t, 3]))), *stack[:-1]]
        elif action == 1:
            stack = [*stack[1:], -1.0]
        kept = state[1][0, :, 0].tolist()
        assert kept == pytest.approx(stack[: len(kept)], abs=1e-12)
        assert stack[len(kept) :] == [-1.0] * (5 - len(kept))


def test_eval_num_slots_applies_outside_training():
    model = make_model("stack_rnn", num_slots=2, eval_num_slots=6)
    more = make_model("stack_rnn", num_slots=6)
    assert torch.equal(model.eval()(make_tokens()).logits, more(make_tokens()).logits)
    assert not torch.allclose(model.train()(make_tokens()).logits, more(make_tokens()).logits)


# kind -> how many numbers a layer needs to be as large as five layers of a Transformer (64, 176), of StackTrans
MATCHED = {"lstm": (79, 82), "stack_rnn": (154, 160)}


@pytest.mark.parametrize("kind", MATCHED)
@pytest.mark.parametrize(("column", "like"), [(0, "formal/transformer"), (1, "formal/stacktrans")])
def test_parameter_counts_match_the_decoders(kind, column, like):
    config, decoder = (compose([name]).model for name in (f"formal/{kind}", like))
    assert config.hidden_size == MATCHED[kind][1]
    model = registry.build("model", replace(config, hidden_size=MATCHED[kind][column]))
    assert model.num_parameters() == pytest.approx(registry.build("model", decoder).num_parameters(), rel=0.01)
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())
    assert model.num_memory_parameters() == 0


def test_plan_supports_lstm():
    """The plan counts at least the inputs and outputs of each layer; fused kernels save device-specific tensors."""
    short = ["data.max_length=2", "data.curriculum_steps=0", "data.batch_size=3"]
    planned = make_plan(compose(["formal/lstm"], short))
    assert planned.training.activations > 2 * 5 * (3 * 6 * 82) * 4
    assert planned.fits


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_models_have_the_decoder_interface(kind):
    model = make_model(kind, output_vocab_size=None)
    output = model(make_tokens(), probe=True)
    assert output.logits.shape == (B, T, VOCAB)
    assert output.entropy == model.entropy_weight == 0
    assert (model.memories, model.axis) == ([], None)
    assert len(output.probes) == 2
    assert model(make_tokens()).probes is None
    if kind == "lstm":
        layer = model.layers[0]
        expected = [0] * HIDDEN + [1] * HIDDEN + [0] * 2 * HIDDEN
        assert (layer.bias_ih_l0 + layer.bias_hh_l0).tolist() == expected, "an open forget gate"
    elif kind == "stack_rnn":
        assert all(sum(probe.values()).item() == pytest.approx(1) for probe in output.probes)
        assert not any(value.requires_grad for probe in output.probes for value in probe.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lstm_layers_run_in_the_dtype_of_the_weights(dtype):
    """On CUDA, autocast of torch.nn.LSTM is float16, whatever its dtype."""
    layer = make_model("lstm", dtype=dtype).layers[0]
    with torch.autocast("cpu", torch.bfloat16):
        y, state, _ = layer(torch.ones(B, T, HIDDEN, dtype=torch.bfloat16), None, False)
        again, _, _ = layer(torch.ones(B, T, HIDDEN), state, False)
    assert {tensor.dtype for tensor in (y, *state, again)} == {dtype}


def test_flops_of_kernels_that_torch_does_not_count():
    lstm = make_model("lstm", hidden_size=64, num_layers=1, output_vocab_size=1)
    assert lstm.flops_per_token(20) == 6 * (8 * 64 * 64 + 64)
    plain, convolved = (make_model("delta_net", conv_size=size).flops_per_token(20) for size in (None, 4))
    assert convolved - plain == 3 * 2 * 2 * 4 * 3 * HIDDEN  # training, multiply-add, layers, taps, channels
    few, more = (make_model("stack_rnn", num_slots=n).flops_per_token(20) for n in (1, 4))
    occupied = np.minimum(np.arange(1, 21)[:, None], [1, 4]).mean(0)  # after each token
    assert more - few == pytest.approx(3 * 2 * 2 * (occupied[1] - occupied[0]) * 3 * 8)  # terms, numbers of a slot
