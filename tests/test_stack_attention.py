"""StackAttn: comparison with a slow loop and with a list, cached decoding, gradients and FLOPs."""

import pytest
import small_models
import torch
from small_models import B, T, make_tokens

from stackexp.config.memory import StackAttentionConfig
from stackexp.models.memories.stack_attention import ComputeTops


def make_model(**options):
    model = small_models.make_model(StackAttentionConfig(), **options)
    with torch.no_grad():
        for memory in model.memories:
            memory.actions.bias.normal_()
    return model


def random_actions(length, batch=B, seed=0):
    logits = torch.randn(batch, length, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (2 * logits).softmax(-1)


def compute_alphas(actions):
    """Compute [alpha_{-1}, alpha_0, ...] of one sequence [T, 3] with a loop, as dicts token -> mass."""
    states = [{0: 1.0}]
    for t, (push, pop, no_op) in enumerate(actions):
        if t == 0:
            states.append({0: 1.0})
            continue
        new = {t: push}
        for token, mass in states[-1].items():
            new[token] = new.get(token, 0) + no_op * mass
            for below, share in states[token].items():  # the state before `token` was read
                new[below] = new.get(below, 0) + pop * mass * share
        states.append(new)
    return states


@pytest.mark.parametrize("length", [1, 2, 3, 12])
def test_tops_and_gradients_match_a_slow_loop(length):
    actions = random_actions(length).requires_grad_()
    tops = ComputeTops.apply(actions, actions.new_zeros(B, 1, 0))
    assert tops.shape == (B, length + 1, length)
    wanted = torch.zeros(B, length + 1, length, dtype=torch.float64)
    for b, sequence in enumerate(actions):
        for row, state in enumerate(compute_alphas(sequence)):
            for token, mass in state.items():
                wanted[b, row, token] = mass
    torch.testing.assert_close(tops, wanted)
    torch.testing.assert_close(tops.sum(-1), torch.ones(B, length + 1, dtype=torch.float64))
    if length > 1:
        weights = torch.randn_like(tops)
        gradients = [torch.autograd.grad((weights * y).sum(), actions)[0] for y in (tops, wanted)]
        torch.testing.assert_close(*gradients)


def test_chunked_scan_passes_gradcheck():
    def scan_chunks(logits, first):
        actions = logits.softmax(-1)
        tops = ComputeTops.apply(actions[:, :first], actions.new_zeros(1, 1, 0))
        return ComputeTops.apply(actions[:, first:], tops)

    logits = torch.randn(1, 5, 3, dtype=torch.float64).requires_grad_()
    for first in (1, 2, 4):
        torch.testing.assert_close(
            scan_chunks(logits, first), ComputeTops.apply(logits.softmax(-1), logits.new_zeros(1, 1, 0))
        )
        torch.autograd.gradcheck(lambda x, first=first: scan_chunks(x, first), logits)


def test_backward_under_autocast_keeps_its_precision():
    actions = random_actions(12).float().requires_grad_()
    tops = ComputeTops.apply(actions, actions.new_zeros(B, 1, 0))
    loss = (torch.randn_like(tops) * tops).sum()
    (wanted,) = torch.autograd.grad(loss, actions, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.autograd.grad(loss, actions)[0], wanted)


def test_hard_actions_match_a_list():
    length = 80
    hard = torch.randint(3, (B, length), generator=torch.Generator().manual_seed(3))
    tops = ComputeTops.apply(torch.nn.functional.one_hot(hard, 3).double(), torch.zeros(B, 1, 0, dtype=torch.float64))
    for b in range(B):
        stack = [0]  # the first token is the bottom, whatever its action
        for t in range(1, length):
            if hard[b, t] == 0:
                stack.append(t)
            elif hard[b, t] == 1 and len(stack) > 1:
                stack.pop()
            assert tops[b, t + 1].nonzero().flatten().tolist() == [stack[-1]]
            assert tops[b, t + 1, stack[-1]] == 1


def test_memory_adds_the_stack_top():
    memory = make_model().memories[0]
    h = torch.randn(B, T, 16, dtype=torch.float64)
    new_h, _, trace = memory(h, memory.empty_state(h), probe=True)
    actions = (h @ memory.actions.weight.T + memory.actions.bias).softmax(-1)
    for b in range(B):
        for t, state in enumerate(compute_alphas(actions[b].tolist())[1:]):
            read = sum(mass * h[b, token] for token, mass in state.items())
            torch.testing.assert_close(new_h[b, t], h[b, t] + read)
    assert [trace[name].item() for name in ("push", "pop", "no_op")] == pytest.approx(actions.mean((0, 1)).tolist())
    assert trace["read_share"].item() == pytest.approx(((new_h - h).norm(dim=-1) / h.norm(dim=-1)).mean().item())


def test_memory_runs_after_every_feed_forward():
    model, order = make_model(), []
    assert (model.axis, model.entropy_weight, len(model.memories)) == ("time", 0, 3)
    for layer in model.layers:
        for name in ("feed_forward", "memory"):
            getattr(layer, name).register_forward_hook(lambda *_, name=name: order.append(name))
    output = model(make_tokens(), probe=True)
    assert order == ["feed_forward", "memory"] * 3
    assert output.entropy == 0
    assert set(output.probes[0]) == {"push", "pop", "no_op", "read_share"}
    assert model.num_memory_parameters() == 3 * (16 * 3 + 3)


def test_flops_match_the_sum_over_steps():
    """At token t, a pop takes t^2 multiply-adds; a read multiplies all vectors of 16."""
    memory, length = make_model().memories[0], 200
    counted = 2 * (16 * 3 + sum(t**2 + 16 * length for t in range(length)) / length)
    assert memory.flops_per_token(length) == pytest.approx(counted, rel=0.01)
