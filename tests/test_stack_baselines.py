"""Stacks over the tokens against plain Python."""

from collections import defaultdict
from dataclasses import replace

import pytest
import small_models
import torch
from small_models import TOKEN_MEMORIES, B, T, make_tokens

from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.config.memory import NondeterministicStackConfig
from stackexp.models.memories.nondeterministic_stack import SumRuns
from stackexp.models.memories.stratified_stack import compute_weights

MEMORIES = TOKEN_MEMORIES | {
    "nondeterministic_middle": NondeterministicStackConfig(num_states=1, num_symbols=3, head_dim=3)
}


def make_model(name, **options):
    model = small_models.make_model(MEMORIES[name], **options)
    with torch.no_grad():
        for memory in model.memories:
            for parameter in memory.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def random_strengths(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 1.2 * torch.rand(2, B, 2, length, dtype=torch.float64, generator=generator)


def run_strengths(push, pop):
    """Return the read weights [T, T] of one stack by the equations of the paper, as loops over tokens and elements."""
    strengths, rows = [], []
    for d, u in zip(push, pop, strict=True):
        above, new = 0.0, []
        for strength in reversed(strengths):
            new.append((strength - (u - above).clamp(min=0)).clamp(min=0))
            above = above + strength
        strengths = [*reversed(new), d]
        above, row = 0.0, []
        for strength in reversed(strengths):
            row.append(torch.minimum(strength, torch.clamp(torch.as_tensor(1 - above), min=0)))
            above = above + strength
        rows.append(torch.stack([*reversed(row), *[d.new_zeros(())] * (len(push) - len(row))]))
    return torch.stack(rows)


@pytest.mark.parametrize(("length", "chunks"), [(1, [1]), (2, [2]), (12, [12]), (12, [5, 1, 6])])
def test_strengths_and_gradients_match_the_equations(length, chunks):
    push, pop = inputs = random_strengths(length).requires_grad_().unbind()
    wanted = torch.stack(
        [torch.stack([run_strengths(*s) for s in zip(*pair, strict=True)]) for pair in zip(*inputs, strict=True)]
    )
    sums, rows = push.new_zeros(B, 2, 0), []
    for parts in zip(push.split(chunks, -1), pop.split(chunks, -1), strict=True):
        weights, sums = compute_weights(*parts, sums)
        rows.append(torch.nn.functional.pad(weights, (0, length - weights.shape[-1])))
    got = torch.cat(rows, 2)
    torch.testing.assert_close(got, wanted)
    if length > 1:  # the first pop has no effect
        scale = torch.randn_like(got)
        torch.testing.assert_close(*(torch.autograd.grad((scale * y).sum(), inputs) for y in (got, wanted)))


def test_hard_strengths_match_a_list():
    length = 200
    actions = torch.randint(3, (B, 2, length), generator=torch.Generator().manual_seed(3))  # push, replace, pop
    weights, _ = compute_weights((actions < 2).float(), (actions > 0).float(), torch.zeros(B, 2, 0))
    for b in range(B):
        stack = []
        for t, action in enumerate(actions[b, 0].tolist()):
            if action > 0 and stack:
                stack.pop()
            if action < 2:
                stack.append(t)
            assert weights[b, 0, t].nonzero().flatten().tolist() == stack[-1:]


def test_float32_strengths_stay_accurate_for_1000_tokens():
    push, pop = random_strengths(1000)
    exact, _ = compute_weights(push, pop, push.new_zeros(B, 2, 0))
    single, _ = compute_weights(push.float(), pop.float(), torch.zeros(B, 2, 0))
    assert (single - exact).abs().max() < 1e-3


def test_stratified_stack_reads_the_values():
    memory = make_model("stratified_stack").memories[0]
    h = torch.randn(B, T, 16, dtype=torch.float64)
    new_h, _, stats = memory(h, memory.empty_state(h), probe=True)
    values = (h @ memory.values.weight.T).tanh().unflatten(-1, (2, 3))
    strengths = (h @ memory.strengths.weight.T + memory.strengths.bias).sigmoid()  # push of both heads, then pop
    for b in range(B):
        reads = [run_strengths(strengths[b, :, i], strengths[b, :, 2 + i]) @ values[b, :, i] for i in range(2)]
        torch.testing.assert_close(new_h[b], h[b] + torch.cat(reads, -1) @ memory.up.weight.T)
    assert stats["push"].item() == pytest.approx(strengths[..., :2].mean().item())
    assert stats["pop"].item() == pytest.approx(strengths[..., 2:].mean().item())
    assert stats["read_share"].item() == pytest.approx(((new_h - h).norm(dim=-1) / h.norm(dim=-1)).mean().item())


def random_moves(length, states, symbols, seed=0):
    generator = torch.Generator().manual_seed(seed)
    modes = states * symbols
    shapes = [(B, length, modes, n) for n in (modes, modes, states)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).exp() for shape in shapes]


def start_runs(states, symbols):
    segments = torch.zeros(B, symbols, states * symbols, states, dtype=torch.float64)
    segments[:, 0, 0, 0] = 1
    modes = torch.zeros(B, 2, states * symbols, dtype=torch.float64)
    modes[:, :, 0] = 1
    return segments, modes


def enumerate_runs(push, replace, pop, states, symbols):
    """Follow every stack of one sequence; return the shares of (symbol, state, token of the top), [T, G, Q, T+1]."""
    runs, rows = {(0, ((0, 0),)): push.new_ones(())}, []  # (state, stack of (symbol, token)) -> weight
    for t in range(len(push)):
        following = defaultdict(lambda: push.new_zeros(()))
        for (state, stack), weight in runs.items():
            symbol, token = stack[-1]
            mode = symbol * states + state
            for new_state in range(states):
                for new_symbol in range(symbols):
                    new = new_symbol * states + new_state
                    following[new_state, (*stack, (new_symbol, t + 1))] += weight * push[t, mode, new]
                    following[new_state, (*stack[:-1], (new_symbol, token))] += weight * replace[t, mode, new]
                if len(stack) > 1:
                    following[new_state, stack[:-1]] += weight * pop[t, mode, new_state]
        runs = following
        row = push.new_zeros(symbols, states, len(push) + 1)
        for (state, stack), weight in runs.items():
            row[stack[-1][0], state, stack[-1][1]] += weight
        rows.append(row / row.sum())
    return torch.stack(rows)


@pytest.mark.parametrize(("length", "states", "symbols"), [(1, 2, 2), (4, 2, 2), (6, 1, 2), (4, 3, 1)])
def test_masses_match_an_enumeration_of_all_runs(length, states, symbols):
    moves = random_moves(length, states, symbols)
    masses, _, _ = SumRuns.apply(*moves, *start_runs(states, symbols))
    assert masses.shape == (B, length, symbols, states, length + 1)
    for b in range(B):
        torch.testing.assert_close(masses[b], enumerate_runs(*(m[b] for m in moves), states, symbols))


def test_gradients_match_those_of_the_enumeration():
    moves = [move.requires_grad_() for move in random_moves(4, 2, 2, seed=1)]
    masses, _, _ = SumRuns.apply(*moves, *start_runs(2, 2))
    masses = masses / masses.sum((2, 3, 4), keepdim=True)
    wanted = torch.stack([enumerate_runs(*(m[b] for m in moves), 2, 2) for b in range(B)])
    scale = torch.randn_like(wanted)
    torch.testing.assert_close(*(torch.autograd.grad((scale * y).sum(), moves) for y in (masses, wanted)))


def test_backward_under_autocast_keeps_its_precision():
    moves = [move.float().requires_grad_() for move in random_moves(4, 2, 2)]
    masses, _, _ = SumRuns.apply(*moves, *(x.float() for x in start_runs(2, 2)))
    wanted = torch.autograd.grad(masses.square().sum(), moves, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(masses.square().sum(), moves)
    assert all(map(torch.equal, found, wanted))


def test_gradients_of_longer_strings_pass_gradcheck():
    def normalize(*moves):
        masses, _, _ = SumRuns.apply(*moves, *start_runs(2, 2))
        return (masses / masses.sum((2, 3, 4), keepdim=True))[:, -3:]

    torch.autograd.gradcheck(normalize, [m.requires_grad_() for m in random_moves(9, 2, 2)], fast_mode=True)


def test_sharp_weights_stay_finite_for_200_tokens():
    generator = torch.Generator().manual_seed(0)
    moves = [(20 * torch.randn(1, 200, 4, n, generator=generator)).exp() for n in (4, 4, 2)]
    peak = torch.cat(moves, -1).amax((2, 3), keepdim=True)
    moves = [(move / peak).requires_grad_() for move in moves]
    masses, _, _ = SumRuns.apply(*moves, *(x[:1].float() for x in start_runs(2, 2)))
    torch.testing.assert_close(masses.sum((2, 3, 4)), torch.ones(1, 200))
    gradients = torch.autograd.grad(masses[0, -1, 0].sum(), moves)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_nondeterministic_stack_adds_the_expected_top():
    memory = make_model("nondeterministic_stack").memories[0]
    h = torch.randn(B, 4, 16, dtype=torch.float64)
    new_h, _, stats = memory(h, memory.empty_state(h), probe=True)
    weights = (h @ memory.transitions.weight.T + memory.transitions.bias).exp().unflatten(-1, (4, 10))
    vectors = (h @ memory.values.weight.T + memory.values.bias).sigmoid()
    vectors = torch.cat([memory.bottom.sigmoid().expand(B, 1, -1), vectors], 1)
    for b in range(B):
        masses = enumerate_runs(*weights[b].split([4, 4, 2], -1), 2, 2)
        read = torch.einsum("tyra,am->tyrm", masses, vectors[b]).flatten(1)
        torch.testing.assert_close(new_h[b], h[b] + read @ memory.up.weight.T)
    assert stats["read_share"].item() == pytest.approx(((new_h - h).norm(dim=-1) / h.norm(dim=-1)).mean().item())


@pytest.mark.parametrize("move", range(3))
def test_logits_far_apart_stay_finite(move):
    """Without a limit, the weight of every run underflows if all tokens prefer a move that their mode does not have."""
    model = make_model("nondeterministic_stack").float()
    for memory in model.memories:
        first = (0, memory.num_modes, 2 * memory.num_modes)[move]
        memory.transitions.bias.data.view(memory.num_modes, -1)[0, first] += 500
    logits = model(make_tokens()).logits
    logits.square().mean().backward()
    assert logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_only_the_middle_layer_has_a_stack():
    model = make_model("nondeterministic_middle")
    assert [sum(p.numel() for p in memory.parameters()) > 0 for memory in model.memories] == [False, True, False]
    assert [memory.flops_per_token(10) > 0 for memory in model.memories] == [False, True, False]


@pytest.mark.parametrize("name", ["stratified_stack", "nondeterministic_stack", "delta_net", "delta_product"])
def test_shipped_configs_have_the_parameters_of_the_lstm(name):
    config, lstm = compose([f"formal/{name}"]), compose(["formal/lstm"])
    assert (config.optimizer, config.schedule) == (lstm.optimizer, lstm.schedule)
    assert replace(config.data, eval_batch_size=lstm.data.eval_batch_size) == lstm.data
    models = [registry.build("model", c.model) for c in (config, lstm)]
    assert models[0].num_parameters() == pytest.approx(models[1].num_parameters(), rel=0.01)
