"""The recurrent models: equations against a plain loop, hard actions against a list, states, sizes, gradients."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.config.recurrent import LSTMConfig, StackRNNConfig
from stackexp.models.transformer import Cache
from stackexp.planning import cost
from stackexp.planning.memory_tracker import MemoryTracker, free_gradients, fuse_norms

VOCAB, OUTPUTS, B, T = 7, 3, 2, 9
KINDS = {"lstm": LSTMConfig, "stack_rnn": StackRNNConfig}


def make_model(kind, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "output_vocab_size": OUTPUTS, "hidden_size": 10, "num_layers": 2}
    return registry.build("model", KINDS[kind](**(sizes | options))).to(dtype)


def make_tokens(length=T):
    return torch.randint(VOCAB, (B, length), generator=torch.Generator().manual_seed(1))


def lstm_by_hand(layer, x):
    h = c = torch.zeros_like(x[0])
    outputs = []
    for x_t in x:
        gates = layer.weight_ih_l0 @ x_t + layer.bias_ih_l0 + layer.weight_hh_l0 @ h + layer.bias_hh_l0
        i, f, g, o = gates.chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs)


def stack_rnn_by_hand(layer, x, num_slots):
    """One sequence [T, d]; the stack is a list of `num_slots` vectors, each number of it mixed by itself."""
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
def test_the_model_is_the_one_written_out(kind, num_slots):
    model = make_model(kind, **({"num_slots": num_slots} if num_slots else {}))
    rows = []
    for tokens in make_tokens():
        h = model.embedding.weight[tokens]
        for layer in model.layers:
            h = stack_rnn_by_hand(layer, h, num_slots) if num_slots else lstm_by_hand(layer, h)
        rows.append(model.head.weight @ h.T + model.head.bias[:, None])
    wanted, got = torch.stack(rows).transpose(1, 2), model(make_tokens()).logits
    torch.testing.assert_close(got, wanted)
    gradients = [torch.autograd.grad(y.logsumexp(-1).square().sum(), model.parameters()) for y in (got, wanted)]
    torch.testing.assert_close(*gradients)


def test_with_hard_actions_the_stack_is_a_list():
    """Actions are read off the input: it pushes a number of h, pops or waits; the list is deeper than the stack."""
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


def test_more_slots_outside_training():
    model = make_model("stack_rnn", num_slots=2, eval_num_slots=6)
    more = make_model("stack_rnn", num_slots=6)
    assert torch.equal(model.eval()(make_tokens()).logits, more(make_tokens()).logits)
    assert not torch.allclose(model.train()(make_tokens()).logits, more(make_tokens()).logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [[1] * T, [4, 1, 4]])
def test_cached_logits_equal_those_of_the_whole(kind, chunks):
    model, cache = make_model(kind, num_layers=3), Cache()
    logits = torch.cat([model(part, cache).logits for part in make_tokens().split(chunks, 1)], 1)
    torch.testing.assert_close(logits, model(make_tokens()).logits)
    assert cache.length == T


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_not_changed_in_place(kind):
    model, cache = make_model(kind), Cache()
    model(make_tokens(), cache)
    before = [tensor.clone() for state in cache.states.values() for tensor in state]
    kept = [tensor for state in cache.states.values() for tensor in state]
    model(make_tokens(), cache)
    assert all(torch.equal(*pair) for pair in zip(before, kept, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_know_nothing_of_one_another_nor_of_later_tokens(kind):
    model, tokens, changed = make_model(kind), make_tokens(), make_tokens()
    changed[0, 4] = (changed[0, 4] + 1) % VOCAB
    moved = (model(changed).logits - model(tokens).logits).abs().amax(-1)
    assert all(moved[0, :4] < 1e-12)
    assert all(moved[0, 4:] > 1e-12)
    assert all(moved[1] < 1e-12)


# kind -> how many numbers a layer needs to be as large as five layers of a Transformer (64, 176), of StackTrans
MATCHED = {"lstm": (79, 82), "stack_rnn": (154, 160)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("column", "like"), [(0, "formal/transformer"), (1, "formal/stacktrans")])
def test_parameters_match_those_of_the_decoders(kind, column, like):
    config, decoder = (compose([name]).model for name in (f"formal/{kind}", like))
    assert config.hidden_size == MATCHED[kind][1]
    model = registry.build("model", replace(config, hidden_size=MATCHED[kind][column]))
    assert model.num_parameters() == pytest.approx(registry.build("model", decoder).num_parameters(), rel=0.01)
    assert model.num_parameters() == model.num_parameters(memory=False) == sum(p.numel() for p in model.parameters())
    assert model.num_parameters(memory=True) == 0


SHORT = ["data.max_length=2", "data.curriculum_steps=0", "data.batch_size=3"]


@pytest.mark.parametrize("kind", ["stack_rnn", "stack_attention"])
def test_the_plan_counts_what_a_real_pass_takes(kind):
    config = compose([f"formal/{kind}"], SHORT)
    shape = 3, config.data.context_length
    model, tokens = cost.build_meta_model(config).to_empty(device="cpu"), torch.zeros(shape, dtype=torch.int64)
    fuse_norms(model)
    free_gradients(model)
    with MemoryTracker(model) as allocations:
        model(tokens).logits[:, :-1].float().logsumexp(-1).mean().backward()
    planned = cost.make_plan(config).training
    taken = planned.activations + planned.stack + planned.logits
    assert taken == pytest.approx(allocations.peak.total(), rel=0.05)
    assert (planned.stack > 0) == (kind == "stack_attention")


def test_an_lstm_can_be_planned():
    """Its kernels are the device's own, and what they keep: counted are at least inputs and outputs of each layer."""
    planned = cost.make_plan(compose(["formal/lstm"], SHORT))
    assert planned.training.activations > 2 * 5 * (3 * 6 * 82) * 4
    assert planned.fits


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_caller_of_the_decoder_finds_here_too(kind):
    model = make_model(kind, output_vocab_size=None)
    output = model(make_tokens(), probe=True)
    assert output.logits.shape == (B, T, VOCAB)
    assert output.entropy == model.entropy_weight == 0
    assert (model.memories, model.axis) == ([], None)
    assert len(output.probes) == 2
    assert model(make_tokens()).probes is None
    if kind == "stack_rnn":
        assert all(sum(probe.values()).item() == pytest.approx(1) for probe in output.probes)
        assert not any(value.requires_grad for probe in output.probes for value in probe.values())
    with pytest.raises(ValueError, match=r"set data\.document_mask=false"):
        model(make_tokens(), documents=make_tokens())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_drawn_after_the_meta_device_are_the_same(kind):
    direct = make_model(kind, dtype=torch.float32)
    with torch.device("meta"):
        model = make_model(kind, dtype=torch.float32)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in direct.state_dict().items())
    assert not torch.equal(model.head.weight, make_model(kind, 1, torch.float32).head.weight)


def test_the_forget_gate_begins_open():
    layer = make_model("lstm").layers[0]
    assert (layer.bias_ih_l0 + layer.bias_hh_l0).tolist() == [0] * 10 + [1] * 10 + [0] * 20


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_recomputes_and_changes_no_gradient(kind):
    model, calls, gradients = make_model(kind), [], []
    model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for model.checkpoint_blocks in (False, True):
        gradients.append(torch.autograd.grad(model(make_tokens()).logits.logsumexp(-1).sum(), model.parameters()))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    assert len(calls) == 1 + 2


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_and_bfloat16_agree_with_float64(kind, autocast):
    expected = make_model(kind)(make_tokens()).logits
    model = make_model(kind, dtype=torch.float32)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(make_tokens()).logits
    except RuntimeError as error:
        if autocast and "could not create a primitive" in str(error):
            pytest.skip("oneDNN has no bfloat16 LSTM primitive for this CPU")
        raise
    assert (logits.double() - expected).abs().max() / expected.abs().max() < (0.05 if autocast else 1e-5)
    logits.float().sum().backward()


def test_flops_per_token_are_those_that_torch_counts():
    """The update of the stack is no matrix product, so torch does not count it; nor LSTM's, on a CPU."""
    model, tokens = make_model("stack_rnn", hidden_size=64, dtype=torch.float32), make_tokens(20)
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    of_updates = 3 * 2 * 2 * 3 * 8 * 20  # training, multiply-add, layers, terms, numbers of a slot, slots
    assert model.flops_per_token(20) - of_updates == pytest.approx(counter.get_total_flops() / (20 * B), rel=0.02)
    lstm = make_model("lstm", hidden_size=64, num_layers=1, output_vocab_size=1)
    assert lstm.flops_per_token(20) == 6 * (8 * 64 * 64 + 64)
