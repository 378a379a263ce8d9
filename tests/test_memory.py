"""The stack as a module in the decoder's slot: every option, every axis."""

import collections
import dataclasses
import itertools
import math

import pytest
import torch
from hard_programs import apply_hard
from hypothesis import given, settings
from hypothesis import strategies as st

from stackexp.config.memory import StackMemoryConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.memories import Memory
from stackexp.models.memories.extensions import ExtendedStackMemory as StackMemory
from stackexp.models.transformer import Cache, Transformer

HIDDEN, B, T = 12, 2, 5
READS = [("global", "multiply"), ("global", "log"), ("global", "additive"), ("top", "multiply")]
ACTION_INPUTS = [("head", "none"), ("hidden", "none"), ("hidden", "slice")]
PROJECTIONS = ["low_rank", "none", "shared_slices"]
DISCIPLINES = ["stack", "queue", "push_only"]
AXES = [("depth", False), ("time", False), ("time", True), ("token_major", False)]


def decoder_config(num_layers=2, hidden_size=HIDDEN, **memory):
    memory = {"num_heads": 2, "head_dim": 6 if memory.get("projection") == "none" else 3, "num_slots": 4} | memory
    model = TransformerConfig(
        vocab_size=11,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=16,
        memory=StackMemoryConfig(**memory),
    )
    assert not [*model.find_errors(), *model.memory.find_errors(model)]
    return model


def make_memory(layer=0, seed=0, **options):
    torch.manual_seed(seed)
    model = decoder_config(**options)
    memory = StackMemory(model.memory, model, layer).double()
    memory.init_weights()
    return memory


def hidden_states(seed=1, tokens=T):
    return torch.randn(B, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters(**options):
    return {name: tuple(p.shape) for name, p in make_memory(**options).named_parameters()}


def test_parameters_are_those_of_the_paper():
    expected = {"down": (6, 12), "up": (12, 6), "actions": (2, 3, 3), "query": (2, 3), "gate": (1,)}
    assert parameters() == expected
    assert parameters(discipline="push_only")["actions"] == (2, 2, 3)
    assert parameters(projection="none") == {"actions": (2, 3, 6), "query": (2, 6), "gate": (1,)}
    assert parameters(projection="shared_slices") == expected | {"down": (3, 6), "up": (6, 3), "query": (1, 3)}
    assert parameters(action_input="hidden")["actions"] == (2, 3, 12)
    assert "query" not in parameters(read="top")
    assert parameters(axis="time", feedback=True) == expected | {"feedback": (12, 6)}
    hidden = parameters(axis="time", feedback=True, feedback_activation="tanh", feedback_hidden_size=5)
    assert hidden == expected | {"feedback": (12, 5), "feedback_token": (5, 12), "feedback_read": (5, 6)}
    gated = parameters(axis="time", feedback=True, feedback_activation="gated", feedback_hidden_size=5)
    assert gated == expected | {"feedback": (12, 5), "feedback_token": (10, 12), "feedback_read": (10, 6)}


def test_the_gate_is_no_scalar_tensor_and_starts_at_one():
    """FSDP2 refuses zero-dimensional parameters."""
    assert make_memory().gate.tolist() == [1.0]


def equation(memory, h, read):
    """h' with the residual's gate for a read of all heads [..., H * D], or None for no projection up."""
    up = memory.up
    projected = read if up is None else read @ up.T
    return memory.gate * h + projected if memory.config.residual_gate == "hidden" else h + memory.gate * projected


@pytest.mark.parametrize("residual_gate", ["hidden", "read"])
@pytest.mark.parametrize(("read", "read_mask"), READS)
def test_first_update_by_hand(read, read_mask, residual_gate):
    """After one update of an empty stack: St[0] = a_push x, M[0] = a_push, everything else empty."""
    memory = make_memory(read=read, read_mask=read_mask, residual_gate=residual_gate)
    memory.gate.data.fill_(0.7)
    h = hidden_states()
    x = (h @ memory.down.T).view(B, T, 2, 3)
    push = torch.stack([(x[:, :, i] @ memory.actions[i].T).softmax(-1)[..., :1] for i in range(2)], 2)
    top = push * x  # [B, T, H, D]
    if read == "top":
        weight = 1
    else:
        content = (top * memory.query).sum(-1, keepdim=True)
        score, nothing = {
            "multiply": (content * push, 0.0),
            "log": (content + push.log(), math.log(torch.finfo(torch.float64).tiny)),
            "additive": (content - 1e9 * (1 - push), -1e9),
        }[read_mask]
        weight = 1 / (1 + 3 * (nothing - score).exp())  # three empty slots of four
    new_h, state, trace = memory(h, memory.empty_state(h), probe=True)
    torch.testing.assert_close(new_h, equation(memory, h, (weight * top).flatten(-2)))
    assert trace["push"].item() == pytest.approx(push.mean().item())
    assert trace["occupancy"].item() == pytest.approx(push.mean().item())
    assert state.mask.shape == (B, T, 2, 1)


def test_probes_are_means_without_gradient():
    memory, h = make_memory(), hidden_states()
    new_h, _, trace = memory(h, memory.empty_state(h), probe=True)
    assert set(trace) == {"entropy", "push", "pop", "no_op", "occupancy", "read_share"}
    assert all(value.shape == () for value in trace.values())
    assert [name for name, value in trace.items() if value.requires_grad] == ["entropy"]
    assert (trace["push"] + trace["pop"] + trace["no_op"]).item() == pytest.approx(1)
    share = (new_h - h).norm(dim=-1) / h.norm(dim=-1)  # the gate is 1
    assert trace["read_share"].item() == pytest.approx(share.mean().item())
    assert set(memory(h, memory.empty_state(h))[2]) == {"entropy"}


def test_shared_slices_cut_h_into_one_slice_per_head():
    memory, h = make_memory(projection="shared_slices", read="top"), hidden_states()
    new_h, _, _ = memory(h, memory.empty_state(h))
    for head, slice_ in enumerate(h.chunk(2, -1)):
        x = slice_ @ memory.down.T
        push = (x @ memory.actions[head].T).softmax(-1)[..., :1]
        torch.testing.assert_close(new_h.chunk(2, -1)[head], slice_ + (push * x) @ memory.up.T)


@pytest.mark.parametrize(("scale", "divisor"), [("none", 1.0), ("slice", math.sqrt(HIDDEN / 2))])
def test_actions_may_read_all_of_h(scale, divisor):
    memory, h = make_memory(action_input="hidden", action_scale=scale), hidden_states()
    logits = torch.einsum("btd,had->btha", h, memory.actions) / divisor
    _, _, trace = memory(h, memory.empty_state(h), probe=True)
    assert trace["pop"].item() == pytest.approx(logits.softmax(-1)[..., 1].mean().item())


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize(("action_input", "action_scale"), ACTION_INPUTS)
def test_feedback_computes_push_and_action_from_h_plus_the_last_read(projection, action_input, action_scale):
    """Token by token on h_t + F R_{t-1} without feedback, but with the residual taken from h_t."""
    options = {"projection": projection, "action_input": action_input, "action_scale": action_scale, "axis": "time"}
    memory = make_memory(feedback=True, **options)
    plain = make_memory(**options)
    plain.load_state_dict({name: value for name, value in memory.state_dict().items() if name != "feedback"})
    reads = []
    plain.project_up = lambda read: reads.append(read[:, 0]) or StackMemory.project_up(plain, read)
    h = hidden_states()
    got, _, _ = memory(h, memory.empty_state(h))
    state, fed_back = plain.empty_state(h), torch.zeros(B, HIDDEN, dtype=torch.float64)
    for t in range(T):
        seen = h[:, t] + fed_back
        new, state, _ = plain(seen[:, None], state)
        torch.testing.assert_close(got[:, t], new[:, 0] - fed_back)  # the gate is 1
        fed_back = reads[-1].flatten(1) @ memory.feedback.T


@pytest.mark.parametrize(("action_input", "action_scale"), ACTION_INPUTS)
@pytest.mark.parametrize("activation", ["tanh", "gated"])
def test_feedback_of_a_hidden_layer_adds_to_push_and_action(activation, action_input, action_scale):
    """Token by token without feedback, with P u and Q u added to what h gives: u = f(U h_t + V R_{t-1})."""
    options = {"action_input": action_input, "action_scale": action_scale, "axis": "time", "read": "top"}
    memory = make_memory(feedback=True, feedback_activation=activation, feedback_hidden_size=7, **options)
    plain = make_memory(action_sharpness=1.0, **options)
    for weight in (memory.down, memory.actions):
        torch.nn.init.normal_(weight)
    shared = {name: value for name, value in memory.state_dict().items() if not name.startswith("feedback")}
    plain.load_state_dict(shared)
    reads, units = [torch.zeros(B, 2, 3, dtype=torch.float64)], None
    plain.project_up = lambda read: reads.append(read[:, 0]) or StackMemory.project_up(plain, read)

    def fed(h):
        push, logits = StackMemory.project(plain, h)
        added = units @ memory.feedback.T
        return push + added[:, None, :6].unflatten(-1, (2, 3)), logits + added[:, None, 6:].unflatten(-1, (2, 3))

    plain.project = fed
    h = hidden_states()
    got, _, _ = memory(h, memory.empty_state(h))
    state = plain.empty_state(h)
    for t in range(T):
        units = torch.tanh(h[:, t] @ memory.feedback_token.T + reads[-1].flatten(1) @ memory.feedback_read.T)
        if activation == "gated":
            units = units[:, :7] * units[:, 7:]
        new, state, _ = plain(h[:, t : t + 1], state)
        torch.testing.assert_close(got[:, t], new[:, 0])


def test_beside_a_hidden_layer_down_and_actions_begin_at_zero():
    hidden = {"feedback_activation": "gated", "feedback_hidden_size": 5, "action_input": "hidden"}
    hidden |= {"axis": "time", "feedback": True}
    memory, plain = make_memory(**hidden), make_memory(axis="time", feedback=True)
    assert not memory.down.any()
    assert not memory.actions.any()
    assert all(weight.any() for name, weight in memory.named_parameters() if name not in ("down", "actions"))
    assert all(weight.any() for weight in plain.parameters())
    h = hidden_states().requires_grad_()
    memory(h, memory.empty_state(h))[0].square().sum().backward()
    assert all(weight.grad.any() for name, weight in memory.named_parameters() if name != "query")


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"feedback": False}, "feedback_activation", "gated requires feedback: true"),
        ({"feedback_activation": "identity"}, "feedback_hidden_size", "requires feedback: true"),
        ({"feedback_hidden_size": None}, "feedback_activation", "gated requires feedback_hidden_size"),
        ({"axis": "depth"}, "feedback", "requires axis: time"),
    ],
)
def test_what_a_hidden_layer_needs_is_one_line(changes, key, message):
    options = {"axis": "time", "feedback": True, "feedback_activation": "gated", "feedback_hidden_size": 8}
    model = TransformerConfig(vocab_size=7)
    found = dict(StackMemoryConfig(**options | changes).find_errors(model))
    assert message in found.pop(key)
    assert not found
    assert not list(StackMemoryConfig(**options).find_errors(model))


def test_depth_result_of_a_token_is_independent_of_all_others():
    memory, h = make_memory(discipline="queue"), hidden_states()
    results, state = [], memory.empty_state(h)
    for _ in range(3):
        together, state, _ = memory(h, state)
        results.append(together)
    for b, t in itertools.product(range(B), range(T)):
        alone = h[b : b + 1, t : t + 1]
        state = memory.empty_state(alone)
        for together in results:
            out, state, _ = memory(alone, state)
            torch.testing.assert_close(out[0, 0], together[b, t])


@pytest.mark.parametrize("axis", ["time", "token_major"])
def test_a_scan_over_tokens_may_be_cut_anywhere(axis):
    memory, h = make_memory(axis=axis), hidden_states()
    whole, end, _ = memory(h, memory.empty_state(h))
    state, parts = memory.empty_state(h), []
    for part in h.split([2, 1, 2], 1):
        out, state, _ = memory(part, state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, end)


def test_more_slots_in_evaluation():
    h = hidden_states(tokens=9)
    memory = make_memory(axis="time", eval_num_slots=7)
    assert memory(h, memory.empty_state(h))[1].mask.shape[-1] == 4
    memory.eval()
    out, state, _ = memory(h, memory.empty_state(h))
    assert state.mask.shape[-1] == 7
    wide = make_memory(axis="time", num_slots=7)
    torch.testing.assert_close(out, wide(h, wide.empty_state(h))[0])
    assert make_memory().eval().num_slots == 4


@pytest.mark.parametrize("init", ["fan_in", "normal"])
def test_init(init):
    model = decoder_config(hidden_size=1024, num_heads=4, head_dim=64)
    model.init, model.init_std = init, 0.05
    memory = StackMemory(model.memory, model, layer=3)
    memory.init_weights()
    fan_ins = {"down": 1024, "up": 256 * 2 * 4, "actions": 64, "query": 64}  # up: 2 fan_in (layer + 1)
    for name, fan_in in fan_ins.items():
        weight, sigma = getattr(memory, name).detach(), fan_in**-0.5
        if init == "normal":
            assert weight.std().item() == pytest.approx(0.05, rel=0.15)
        else:
            assert weight.abs().max() <= 3 * sigma
            assert weight.std().item() == pytest.approx(0.9866 * sigma, rel=0.15)  # of the truncated normal
    assert memory.gate.item() == 1


def without_gradient(config, layer):
    """What the equations give no gradient: w_g where the softmax of the read is one-hot."""
    one_hot = config.read_mask == "additive"
    alone = config.axis == "depth" and layer == 0 and config.read_mask == "log"  # one occupied slot among empty ones
    return {"query"} if config.read == "global" and (one_hot or alone) else set()


def every_configuration():
    """All of axis, discipline, read and projection; the other options take turns."""
    turns = itertools.cycle(
        itertools.product(ACTION_INPUTS, ["hidden", "read"], ["after_block", "after_attention", "before_attention"])
    )
    for (axis, feedback), discipline, (read, mask), projection in itertools.product(
        AXES, DISCIPLINES, READS, PROJECTIONS
    ):
        (action_input, action_scale), residual_gate, site = next(turns)
        yield StackMemoryConfig(
            axis=axis,
            feedback=feedback,
            discipline=discipline,
            read=read,
            read_mask=mask,
            projection=projection,
            action_input=action_input,
            action_scale=action_scale,
            residual_gate=residual_gate,
            site=site,
        )


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16_autocast"])
def test_gradient_reaches_every_parameter_in_every_configuration(autocast):
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    for memory in every_configuration():
        options = {field.name: getattr(memory, field.name) for field in dataclasses.fields(memory)}
        for name in ("num_heads", "head_dim", "num_slots"):
            options.pop(name)
        torch.manual_seed(0)
        model = Transformer(decoder_config(**options))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(tokens)
        loss = output.logits.float().logsumexp(-1).square().sum() + output.entropy
        loss.backward()
        assert loss.isfinite()
        for name, parameter in model.named_parameters():
            assert parameter.grad.isfinite().all(), (name, memory)
            layer, _, of_memory = name.removeprefix("layers.").partition(".memory.")
            if not (of_memory and of_memory in without_gradient(memory, int(layer))):
                assert parameter.grad.abs().sum() > 0, (name, memory)


def test_additive_mask_reads_one_slot_and_teaches_the_query_nothing():
    memory, h = make_memory(axis="time", read_mask="additive"), hidden_states()
    out, _, _ = memory(h, memory.empty_state(h))
    (gradient,) = torch.autograd.grad(out.sum(), memory.query)
    assert gradient.abs().max() < 1e-100, "nothing but what underflow leaves"
    top = make_memory(axis="time", read="top")
    top.load_state_dict({name: value for name, value in memory.state_dict().items() if name != "query"})
    torch.testing.assert_close(out, top(h, top.empty_state(h))[0])  # the occupied-most slot is the top


def test_one_slot_teaches_the_query_nothing():
    """With S = 1 the softmax of the global read is over one slot."""
    memory, h = make_memory(num_slots=1), hidden_states()
    out, _, _ = memory(h, memory.empty_state(h))
    assert (torch.autograd.grad(out.sum(), memory.query)[0] == 0).all()


VOCABULARY, LAYERS, LENGTH = 6, 3, 7
operations = st.sampled_from(["push", "pop", "no_op"])


@settings(deadline=None, max_examples=30)
@given(
    axis=st.sampled_from(["depth", "time", "token_major"]),
    discipline=st.sampled_from(["stack", "queue"]),
    num_slots=st.integers(1, 5),
    program=st.lists(st.lists(operations, min_size=VOCABULARY, max_size=VOCABULARY), min_size=LAYERS, max_size=LAYERS),
    tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=LENGTH, max_size=LENGTH),
)
def test_hard_actions_are_a_list_or_a_deque_in_the_decoder_at_every_axis(axis, discipline, num_slots, program, tokens):
    """Run the full decoder with weights that make layer l execute program[l][token] and push the token's vector.

    h is the one-hot embedding in every layer: attention and feed-forward output zero, and the read gate is closed.
    So each element identifies its token. A selects the operation with logits of 1e4, which is exactly one-hot.
    """
    model = hard_decoder(axis, discipline, num_slots, program)
    calls = []  # (layer, state after the call), in the order of the updates
    for layer, memory in enumerate(model.memories):
        memory.register_forward_hook(lambda module, args, out, layer=layer: calls.append((layer, out[1])))
    model(torch.tensor([tokens]), Cache())
    new = list if discipline == "stack" else collections.deque
    if axis == "depth":
        stacks = [new() for _ in tokens]
        for layer, state in calls:
            for t, token in enumerate(tokens):
                apply_hard(stacks[t], program[layer][token], token, num_slots)
                assert contents(state, 0, t) == list(reversed(stacks[t]))
    elif axis == "time":
        for layer, state in calls:
            stack = new()
            for token in tokens:
                apply_hard(stack, program[layer][token], token, num_slots)
            assert contents(state, 0) == list(reversed(stack))
    else:
        stack = new()
        assert [layer for layer, _ in calls] == list(range(LAYERS)) * LENGTH
        for (layer, state), token in zip(calls, [token for token in tokens for _ in range(LAYERS)], strict=True):
            apply_hard(stack, program[layer][token], token, num_slots)
            assert contents(state, 0) == list(reversed(stack))


def hard_decoder(axis, discipline, num_slots, program):
    memory = StackMemoryConfig(
        axis=axis,
        discipline=discipline,
        num_heads=1,
        head_dim=VOCABULARY,
        num_slots=num_slots,
        projection="none",
        residual_gate="read",
    )
    sizes = {"vocab_size": VOCABULARY, "hidden_size": VOCABULARY, "num_layers": LAYERS, "intermediate_size": 4}
    model = Transformer(TransformerConfig(num_heads=1, num_kv_heads=1, memory=memory, **sizes)).double()
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(VOCABULARY))
        for layer, by_token in zip(model.layers, program, strict=True):
            layer.attention.o_proj.weight.zero_()
            layer.feed_forward.down_proj.weight.zero_()
            layer.memory.gate.zero_()
            for row, name in enumerate(["push", "pop", "no_op"]):
                wanted = [1e4 * (operation == name) for operation in by_token]
                layer.memory.actions[0, row] = torch.tensor(wanted)
    return model


def contents(state, *index):
    """The tokens on a hard stack of one head, top first; every slot is full or empty, and the full ones come first."""
    slots, mask = state.slots[index][0], state.mask[index][0].tolist()
    count = int(sum(mask))
    assert mask == [1.0] * count + [0.0] * (len(mask) - count)
    assert (slots[count:] == 0).all()
    tokens = slots[:count].argmax(-1)
    assert torch.equal(slots[:count], torch.eye(VOCABULARY, dtype=torch.float64)[tokens])
    return tokens.tolist()


def test_a_plugin_needs_an_empty_state_and_a_forward():
    class Mean(Memory):
        def __init__(self, config, model, layer):
            super().__init__(config, model, layer)
            self.scale = torch.nn.Linear(model.hidden_size, model.hidden_size)

        def empty_state(self, h):
            return torch.zeros_like(h)

        def forward(self, h, state, probe=False):
            state = state + h
            return h + self.scale(state), state, {}

    model = Transformer(decoder_config())
    for i, layer in enumerate(model.layers):
        layer.memory = Mean(None, model.config, i)
    before = model.layers[0].memory.scale.weight.clone()
    model.init_weights()
    assert not torch.equal(before, model.layers[0].memory.scale.weight)
    output = model(torch.tensor([[1, 2, 3]]), probe=True)
    assert output.entropy == 0
    assert output.probes == [{}, {}]
    assert model.entropy_weight == 0
    assert model.num_parameters(memory=True) == 2 * (12 * 12 + 12)
    assert model.layers[0].memory.flops_per_token(8) == 2 * (12 * 12 + 12)
