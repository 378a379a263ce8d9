"""The stack memory as a module: parameters, equations, options, state and initialization."""

import math

import pytest
import torch
from stack_memories import HIDDEN, READS, B, T, decoder_config, hidden_states, make_memory

from stackexp.models.memories.extensions import ExtendedStackMemory as StackMemory


def parameters(**options):
    return {name: tuple(p.shape) for name, p in make_memory(**options).named_parameters()}


def test_parameter_shapes_match_paper():
    expected = {"down": (6, 12), "up": (12, 6), "actions": (2, 3, 3), "query": (2, 3), "gate": (1,)}
    assert parameters() == expected
    assert "actions" not in parameters(discipline="push_only")
    assert parameters(projection="none") == {"actions": (2, 3, 6), "query": (2, 6), "gate": (1,)}
    assert parameters(projection="shared_slices") == expected | {"down": (3, 6), "up": (6, 3), "query": (1, 3)}
    assert parameters(action_input="hidden")["actions"] == (2, 3, 12)
    assert "query" not in parameters(read="top")
    assert parameters(axis="time", feedback=True) == expected | {"feedback": (12, 6)}
    hidden = parameters(axis="time", feedback=True, feedback_activation="tanh", feedback_hidden_size=5)
    assert hidden == expected | {"feedback": (12, 5), "feedback_token": (5, 12), "feedback_read": (5, 6)}
    gated = parameters(axis="time", feedback=True, feedback_activation="gated", feedback_hidden_size=5)
    assert gated == expected | {"feedback": (12, 5), "feedback_token": (10, 12), "feedback_read": (10, 6)}


def compute_output(memory, h, read):
    """Compute h' from the concatenated reads of all heads [..., H * D]."""
    up = memory.up
    projected = read if up is None else read @ up.T
    return memory.gate * h + projected if memory.config.residual_gate == "hidden" else h + memory.gate * projected


@pytest.mark.parametrize("residual_gate", ["hidden", "read"])
@pytest.mark.parametrize(("read", "read_mask"), READS)
def test_first_update_matches_equations(read, read_mask, residual_gate):
    """Check one update of an empty stack: St[0] = a_push x, M[0] = a_push, and all other slots stay empty."""
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
    torch.testing.assert_close(new_h, compute_output(memory, h, (weight * top).flatten(-2)))
    assert trace["push"].item() == pytest.approx(push.mean().item())
    assert trace["occupancy"].item() == pytest.approx(push.mean().item())
    assert state.mask.shape == (B, T, 2, 1)


@pytest.mark.parametrize(("residual_gate", "gate"), [("hidden", 1.0), ("read", 0.5)])
def test_probes_are_detached_means(residual_gate, gate):
    memory, h = make_memory(residual_gate=residual_gate), hidden_states()
    torch.nn.init.constant_(memory.gate, gate)
    new_h, _, trace = memory(h, memory.empty_state(h), probe=True)
    names = {"push", "pop", "no_op", "occupancy", "read_share", "action_spread", "constant_heads"}
    assert set(trace) == {"entropy", *names}
    assert all(value.shape == () for value in trace.values())
    assert [name for name, value in trace.items() if value.requires_grad] == ["entropy"]
    assert (trace["push"] + trace["pop"] + trace["no_op"]).item() == pytest.approx(1)
    share = (new_h - h).norm(dim=-1) / h.norm(dim=-1)  # h itself is not scaled
    assert trace["read_share"].item() == pytest.approx(share.mean().item())
    assert set(memory(h, memory.empty_state(h))[2]) == {"entropy"}


def test_constant_heads_are_measured_although_the_mean_hides_them():
    memory, h = make_memory(), hidden_states(tokens=40)
    memory.actions.data[0] = 0  # the first head always mixes a third of each action
    memory.actions.data[1] *= 100
    _, _, trace = memory(h, memory.empty_state(h), probe=True)
    actions = torch.einsum("btd,ad->bta", memory.project_down(h)[:, :, 1], memory.actions[1]).softmax(-1)
    spread = actions.std(1, correction=0).norm(dim=-1).mean()  # over the tokens of each sequence
    assert trace["constant_heads"].item() == 0.5
    assert trace["action_spread"].item() == pytest.approx(spread.item() / 2, rel=1e-5)


def test_shared_slices_give_each_head_one_slice_of_h():
    memory, h = make_memory(projection="shared_slices", read="top"), hidden_states()
    new_h, _, _ = memory(h, memory.empty_state(h))
    for head, slice_ in enumerate(h.chunk(2, -1)):
        x = slice_ @ memory.down.T
        push = (x @ memory.actions[head].T).softmax(-1)[..., :1]
        torch.testing.assert_close(new_h.chunk(2, -1)[head], slice_ + (push * x) @ memory.up.T)


@pytest.mark.parametrize(("scale", "divisor"), [("none", 1.0), ("slice", math.sqrt(HIDDEN / 2))])
def test_action_input_hidden_reads_all_of_h(scale, divisor):
    memory, h = make_memory(action_input="hidden", action_scale=scale), hidden_states()
    logits = torch.einsum("btd,had->btha", h, memory.actions) / divisor
    _, _, trace = memory(h, memory.empty_state(h), probe=True)
    assert trace["pop"].item() == pytest.approx(logits.softmax(-1)[..., 1].mean().item())


@pytest.mark.parametrize("axis", ["time", "token_major"])
def test_token_scan_in_chunks_matches_full_scan(axis):
    memory, h = make_memory(axis=axis), hidden_states()
    whole, end, _ = memory(h, memory.empty_state(h))
    state, parts = memory.empty_state(h), []
    for part in h.split([2, 1, 2], 1):
        out, state, _ = memory(part, state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, end)


def test_eval_num_slots_applies_only_in_evaluation():
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
def test_initialization_has_configured_standard_deviation(init):
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


def test_additive_mask_reads_one_slot_and_gives_query_no_gradient():
    memory, h = make_memory(axis="time", read_mask="additive"), hidden_states()
    out, _, _ = memory(h, memory.empty_state(h))
    (gradient,) = torch.autograd.grad(out.sum(), memory.query)
    assert gradient.abs().max() < 1e-100, "only underflow may remain"
    top = make_memory(axis="time", read="top")
    top.load_state_dict({name: value for name, value in memory.state_dict().items() if name != "query"})
    torch.testing.assert_close(out, top(h, top.empty_state(h))[0])  # the occupied-most slot is the top
