"""The stack memory in the decoder: gradients of every configuration, and plugins."""

import dataclasses
import itertools

import pytest
import torch
from scans import DISCIPLINES, READS
from stack_memories import ACTION_INPUTS, PROJECTIONS, decoder_config

from stackexp.config.memory import StackMemoryConfig
from stackexp.models.memories import Memory
from stackexp.models.transformer import Transformer

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
