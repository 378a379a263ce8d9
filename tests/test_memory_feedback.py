"""Feedback of the last read into the push and the actions: linear, tanh and gated."""

import pytest
import torch
from stack_memories import ACTION_INPUTS, HIDDEN, PROJECTIONS, B, T, hidden_states, make_memory

from stackexp.config.memory import StackMemoryConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.memories.extensions import ExtendedStackMemory as StackMemory


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize(("action_input", "action_scale"), ACTION_INPUTS)
def test_linear_feedback_adds_last_read_to_h(projection, action_input, action_scale):
    """Compare with a memory without feedback on h_t + F R_{t-1}, one token at a time, with h_t as the residual."""
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
        inputs = h[:, t] + fed_back
        new, state, _ = plain(inputs[:, None], state)
        torch.testing.assert_close(got[:, t], new[:, 0] - fed_back)  # the gate is 1
        fed_back = reads[-1].flatten(1) @ memory.feedback.T


@pytest.mark.parametrize(("action_input", "action_scale"), ACTION_INPUTS)
@pytest.mark.parametrize("activation", ["tanh", "gated"])
def test_hidden_layer_feedback_adds_to_push_and_action(activation, action_input, action_scale):
    """Compare with a memory without feedback plus P u and Q u, one token at a time: u = f(U h_t + V R_{t-1})."""
    options = {"action_input": action_input, "action_scale": action_scale, "axis": "time", "read": "top"}
    memory = make_memory(feedback=True, feedback_activation=activation, feedback_hidden_size=7, **options)
    plain = make_memory(action_sharpness=1.0, **options)
    for weight in (memory.down, memory.actions):
        torch.nn.init.normal_(weight)
    shared = {name: value for name, value in memory.state_dict().items() if not name.startswith("feedback")}
    plain.load_state_dict(shared)
    reads, units = [torch.zeros(B, 2, 3, dtype=torch.float64)], None
    plain.project_up = lambda read: reads.append(read[:, 0]) or StackMemory.project_up(plain, read)

    def project_with_feedback(h):
        push, logits = StackMemory.project(plain, h)
        added = units @ memory.feedback.T
        return push + added[:, None, :6].unflatten(-1, (2, 3)), logits + added[:, None, 6:].unflatten(-1, (2, 3))

    plain.project = project_with_feedback
    h = hidden_states()
    got, _, _ = memory(h, memory.empty_state(h))
    state = plain.empty_state(h)
    for t in range(T):
        units = torch.tanh(h[:, t] @ memory.feedback_token.T + reads[-1].flatten(1) @ memory.feedback_read.T)
        if activation == "gated":
            units = units[:, :7] * units[:, 7:]
        new, state, _ = plain(h[:, t : t + 1], state)
        torch.testing.assert_close(got[:, t], new[:, 0])


def test_hidden_layer_feedback_starts_down_and_actions_at_zero():
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
def test_invalid_feedback_options_give_one_error(changes, key, message):
    options = {"axis": "time", "feedback": True, "feedback_activation": "gated", "feedback_hidden_size": 8}
    model = TransformerConfig(vocab_size=7)
    found = dict(StackMemoryConfig(**options | changes).find_errors(model))
    assert message in found.pop(key)
    assert not found
    assert not list(StackMemoryConfig(**options).find_errors(model))
