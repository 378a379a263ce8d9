"""Options that keep the heads of a stack in use: normalized pushes, action biases, initial scale, two sites a block."""

import pytest
import torch
from config_files import BASE, compose_error
from stack_memories import decoder_config, hidden_states, make_memory

from stackexp.errors import RunError
from stackexp.models.memories import Memory
from stackexp.models.memories.base import check_interface
from stackexp.models.transformer import Cache, Transformer


@pytest.mark.parametrize("action_input", ["head", "hidden"])
def test_push_norm_divides_each_head_by_its_root_mean_square(action_input):
    memory, h = make_memory(push_norm="head", action_input=action_input), hidden_states()
    x, logits = memory.project(h)
    plain, _ = make_memory(action_input=action_input).project(h)
    torch.testing.assert_close(x, plain / (plain.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    scaled_x, scaled_logits = memory.project(100 * h)
    torch.testing.assert_close(scaled_x, x, rtol=1e-3, atol=1e-3)
    if action_input == "head":  # the actions, too, do not depend on the size of h
        torch.testing.assert_close(scaled_logits, logits, rtol=1e-3, atol=1e-3)


def test_action_bias_starts_at_push_and_is_learned():
    memory, h = make_memory(action_bias=2.0), hidden_states()
    assert memory.action_bias.tolist() == [[2, 0, 0], [2, 0, 0]]
    _, logits = memory.project(h)
    _, plain = make_memory().project(h)
    torch.testing.assert_close(logits, plain + torch.tensor([2.0, 0, 0], dtype=torch.float64))
    new_h, _, _ = memory(h, memory.empty_state(h))
    assert torch.autograd.grad(new_h.sum(), memory.action_bias)[0].abs().sum() > 0


@pytest.mark.parametrize("option", ["push_norm=head", "action_bias=2"])
def test_options_that_break_the_linear_feedback_are_refused(option):
    feedback = ["model.memory.axis=time", "model.memory.feedback=true"]
    name = option.partition("=")[0]
    assert f"model.memory.{name}: " in compose_error([BASE], *feedback, f"model.memory.{option}")


@pytest.mark.parametrize("axis", ["depth", "token_major"])
def test_each_sublayer_has_a_memory_with_its_own_parameters(axis):
    torch.manual_seed(0)
    model = Transformer(decoder_config(num_layers=2, axis=axis, site="each_sublayer", num_slots=5)).double()
    assert [memory.site for memory in model.memories] == ["after_attention", "after_block"] * 2
    assert model.num_parameters(memory=True) == 4 * sum(p.numel() for p in make_memory().parameters())
    tokens = torch.tensor([[1, 2, 3, 4]])
    output = model(tokens, probe=True)
    assert len(output.probes) == 4
    cache = Cache()
    parts = [model(part, cache).logits for part in tokens.split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), output.logits)
    if axis == "depth":  # one stack of the token passes through all four
        assert output.probes[3]["occupancy"] > output.probes[0]["occupancy"]
    flops = [memory.flops_per_token(1) for memory in model.memories]
    assert [f - flops[0] for f in flops] == [2.0 * 5 * 6 * n for n in range(4)], "the occupied slots"
    two = [memory.flops_per_token(2) - flops[0] for memory in model.memories]  # the mean of two tokens
    occupied = [0, 1, 2, 3] if axis == "depth" else [2, 2.5, 3, 3.5]  # without the first slot, so at most 4
    assert two == pytest.approx([2.0 * 5 * 6 * n for n in occupied])


def test_memories_receive_the_outputs_of_the_sublayers():
    """`previous` is the input of the block, or of the sublayer for a memory at each; the embedding starts a state."""

    class Recorder(Memory):
        site = "each_sublayer"

        def empty_state(self, h):
            return [h]

        def forward(self, h, state, previous, probe=False):
            return h, [*state, h - previous], {}

    torch.manual_seed(0)
    config = decoder_config(num_layers=2)
    config.memory = None
    model, tokens = Transformer(config).double(), torch.tensor([[1, 2, 3]])
    for i, layer in enumerate(model.layers):
        layer.attention_memory, layer.memory = Recorder(None, config, i), Recorder(None, config, i)
        layer.attention_memory.site, layer.memory.site = "after_attention", "after_block"
    states = []
    model.layers[-1].memory.register_forward_hook(lambda module, args, output: states.append(output[1]))
    hidden = model(tokens, return_hidden=True).hidden
    (values,) = states
    assert len(values) == 1 + 4
    assert torch.equal(values[0], model.embedding(tokens))
    torch.testing.assert_close(model.norm(sum(values)), hidden)


def test_a_memory_with_another_interface_is_refused():
    class Old(Memory):
        def forward(self, h, state, probe=False):
            return h, state, {}

    class Everywhere(Memory):
        axis, site = "time", "each_sublayer"

    model = decoder_config()
    with pytest.raises(RunError, match=r"Old\.forward: has no argument previous; see Memory\.forward"):
        check_interface(Old(None, model, 0))
    with pytest.raises(RunError, match="site each_sublayer requires axis depth or token_major, found time"):
        check_interface(Everywhere(None, model, 0))
