"""The stack memory in the decoder: gradients of every configuration, hard actions, and plugins."""

import collections
import dataclasses
import itertools

import pytest
import torch
from hard_programs import apply_hard
from hypothesis import given, settings
from hypothesis import strategies as st
from stack_memories import ACTION_INPUTS, DISCIPLINES, PROJECTIONS, READS, decoder_config

from stackexp.config.memory import StackMemoryConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.memories import Memory
from stackexp.models.transformer import Cache, Transformer

AXES = [("depth", False), ("time", False), ("time", True), ("token_major", False)]


def get_names_without_gradient(config, layer):
    """Return the parameters without a gradient: w_g where the read softmax is one-hot."""
    one_hot = config.read_mask == "additive"
    alone = config.axis == "depth" and layer == 0 and config.read_mask == "log"  # one occupied slot among empty ones
    return {"query"} if config.read == "global" and (one_hot or alone) else set()


def iterate_configurations():
    """Yield all combinations of axis, discipline, read and projection; cycle through the other options."""
    turns = itertools.cycle(
        itertools.product(ACTION_INPUTS, ["hidden", "read"], ["after_block", "after_attention", "before_attention"])
    )
    for (axis, feedback), discipline, (read, mask), projection in itertools.product(
        AXES, DISCIPLINES, READS, PROJECTIONS
    ):
        (action_input, action_scale), residual_gate, site = next(turns)
        if discipline == "push_only":  # it has no actions
            feedback, action_input, action_scale = False, "head", "none"
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
def test_every_configuration_gives_gradients_to_every_parameter(autocast):
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    for memory in iterate_configurations():
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
            if not (of_memory and of_memory in get_names_without_gradient(memory, int(layer))):
                assert parameter.grad.abs().sum() > 0, (name, memory)


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
def test_hard_actions_match_list_or_deque(axis, discipline, num_slots, program, tokens):
    """Run the full decoder with weights that make layer l execute program[l][token] and push the token's vector.

    h is the one-hot embedding in every layer: attention and feed-forward output zero, and the read gate is closed.
    So each element identifies its token. A selects the operation with logits of 1e4, which is exactly one-hot.
    """
    model = make_hard_decoder(axis, discipline, num_slots, program)
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
                assert get_tokens_on_stack(state, 0, t) == list(reversed(stacks[t]))
    elif axis == "time":
        for layer, state in calls:
            stack = new()
            for token in tokens:
                apply_hard(stack, program[layer][token], token, num_slots)
            assert get_tokens_on_stack(state, 0) == list(reversed(stack))
    else:
        stack = new()
        assert [layer for layer, _ in calls] == list(range(LAYERS)) * LENGTH
        for (layer, state), token in zip(calls, [token for token in tokens for _ in range(LAYERS)], strict=True):
            apply_hard(stack, program[layer][token], token, num_slots)
            assert get_tokens_on_stack(state, 0) == list(reversed(stack))


def make_hard_decoder(axis, discipline, num_slots, program):
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


def get_tokens_on_stack(state, *index):
    """Return the tokens on a hard stack with one head, top first. Check that full slots precede empty ones."""
    slots, mask = state.slots[index][0], state.mask[index][0].tolist()
    count = int(sum(mask))
    assert mask == [1.0] * count + [0.0] * (len(mask) - count)
    assert (slots[count:] == 0).all()
    tokens = slots[:count].argmax(-1)
    assert torch.equal(slots[:count], torch.eye(VOCABULARY, dtype=torch.float64)[tokens])
    return tokens.tolist()


def test_plugin_needs_only_empty_state_and_forward():
    class Mean(Memory):
        def __init__(self, config, model, layer):
            super().__init__(config, model, layer)
            self.scale = torch.nn.Linear(model.hidden_size, model.hidden_size)

        def empty_state(self, h):
            return torch.zeros_like(h)

        def forward(self, h, state, previous, probe=False):
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
    assert model.num_memory_parameters() == 2 * (12 * 12 + 12)
    assert model.layers[0].memory.flops_per_token(8) == 2 * (12 * 12 + 12)
