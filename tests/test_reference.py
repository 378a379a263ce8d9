"""Tests of the specification: the equations in scalars, hard actions against Python lists, and gradients."""

import collections
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import DISCIPLINES, READS

from stackexp.stack import reference

H, D = 2, 3


def random_state(num_slots, leading=(2,), seed=0):
    """Return a reachable state: a random non-increasing mask, and contents proportional to it."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(*leading, H, num_slots, generator=generator, dtype=torch.float64) * 0.5 + 0.4
    mask = mask.cumprod(-1)
    contents = torch.randn(*leading, H, num_slots, D, generator=generator, dtype=torch.float64)
    return reference.StackState(contents * mask[..., None], mask)


def random_inputs(discipline, leading=(2,), seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, H, D, generator=generator, dtype=torch.float64)
    logits = torch.randn(*leading, H, 2 if discipline == "push_only" else 3, generator=generator, dtype=torch.float64)
    return x, logits, torch.randn(H, D, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("num_slots", [1, 2, 4])
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_update_matches_the_scalar_equations(discipline, num_slots):
    state, (x, logits, _) = random_state(num_slots), random_inputs(discipline)
    action = reference.compute_actions(logits)
    new = reference.update_stack(state, action, x, discipline)
    for b, h, j in itertools.product(range(2), range(H), range(num_slots)):
        push, pop, no_op = action[b, h].tolist()
        mask = [1.0, *state.mask[b, h].tolist(), 0.0]  # mask[j + 1] is M[j]
        slots = [x[b, h], *state.slots[b, h], torch.zeros(D, dtype=torch.float64)]
        popped = slots[j + 1] * mask[j + 2] / mask[j + 1] if discipline == "queue" else slots[j + 2]
        torch.testing.assert_close(new.slots[b, h, j], push * slots[j] + pop * popped + no_op * slots[j + 1])
        expected = push * mask[j] + pop * mask[j + 2] + no_op * mask[j + 1]
        assert new.mask[b, h, j].item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(("read", "read_mask"), READS)
def test_read_matches_the_scalar_equation(read, read_mask):
    state, (_, _, query) = random_state(4), random_inputs("stack")
    result = reference.read_stack(state, query, read, read_mask)
    for b, h in itertools.product(range(2), range(H)):
        slots, mask = state.slots[b, h], state.mask[b, h]
        if read == "top":
            expected = slots[0]
        else:
            scores = []
            for j in range(4):
                content = query[h] @ slots[j]
                masked = {"multiply": query[h] @ (slots[j] * mask[j]), "log": content + mask[j].log()}
                scores.append(masked.get(read_mask, content + (1 - mask[j]) * -1e9))
            expected = torch.stack(scores).softmax(0) @ slots
        torch.testing.assert_close(result[b, h], expected)


def test_memory_layer_and_training_loss_match_the_scalar_equations():
    generator = torch.Generator().manual_seed(2)
    hidden_size, state = 4, random_state(3)
    shapes = [(H, D, hidden_size), (H, 3, D), (H, D), (hidden_size, H, D), ()]
    weights = reference.LayerWeights(*(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes))
    hidden = torch.randn(2, hidden_size, generator=generator, dtype=torch.float64)
    result, entropy, new = reference.memory_layer(hidden, state, weights)
    for b in range(2):
        expected = weights.gate * hidden[b]
        for h in range(H):
            x = weights.down[h] @ hidden[b]
            action = (weights.actions[h] @ x).softmax(0)
            own = reference.update_stack(reference.StackState(state.slots[b, h], state.mask[b, h]), action, x)
            read = (own.slots @ weights.query[h] * own.mask).softmax(0) @ own.slots
            expected = expected + weights.up[:, h] @ read
            torch.testing.assert_close((new.slots[b, h], new.mask[b, h]), tuple(own))
            assert entropy[b, h].item() == pytest.approx(-sum(p * math.log(p) for p in action.tolist()))
        torch.testing.assert_close(result[b], expected)
    loss = reference.training_loss(torch.tensor(2.0), entropy, 0.5)
    assert loss.item() == pytest.approx(2 + 0.5 * sum(entropy.flatten().tolist()) / 4)


def test_push_only_never_pops():
    action = reference.compute_actions(torch.tensor([[0.0, 0.0], [1000.0, -1000.0]]))
    assert action.tolist() == [[0.5, 0, 0.5], [1, 0, 0]]


def test_entropy_is_in_nats():
    assert reference.compute_entropy(torch.zeros(3)).item() == pytest.approx(1.0986123)
    assert reference.compute_entropy(torch.tensor([5.0, 5.0, -1e4])).item() == pytest.approx(0.6931472)


@pytest.mark.parametrize(("read", "read_mask"), READS)
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_step_gradients(discipline, read, read_mask):
    state, (x, logits, query) = random_state(3), random_inputs(discipline)
    inputs = [tensor.requires_grad_() for tensor in (state.slots, state.mask, x, logits, query)]

    def function(slots, mask, x, logits, query):
        options = {"num_slots": 3, "discipline": discipline, "read": read, "read_mask": read_mask}
        output, new = reference.step(reference.StackState(slots, mask), x, logits, query, **options)
        return output.read, output.action, output.entropy, new.slots, new.mask

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_feedback_scan_gradients(discipline):
    x, logits, query = random_inputs(discipline, leading=(1, 3))
    generator = torch.Generator().manual_seed(2)
    maps = [torch.randn(H * D, H, n, generator=generator, dtype=torch.float64) for n in (D, logits.shape[-1])]
    inputs = [tensor.requires_grad_() for tensor in (x, logits, query, *maps)]

    def function(x, logits, query, push_map, action_map):
        empty = reference.empty((1, H), 2, D, x)
        feedback = (push_map, action_map)
        return reference.scan(empty, x, logits, query, feedback=feedback, num_slots=2, discipline=discipline)[0].read

    assert torch.autograd.gradcheck(function, inputs)


def test_identity_hidden_layer_equals_feedback_without_one():
    """V = 1 and c = 0 change nothing. V = 0 adds a function of c to every token. An open gate equals no gate."""
    x, logits, query = random_inputs("stack", leading=(2, 4))
    maps = [torch.randn(H * D, H, n, dtype=torch.float64) for n in (D, 3)]
    given, options = torch.randn(2, 4, H * D, dtype=torch.float64), {"num_slots": 3, "feedback_activation": "tanh"}

    def read(*feedback):
        return reference.scan(reference.empty((2, H), 3, D, x), x, logits, query, feedback=feedback, **options)[0].read

    identity = torch.eye(H * D, dtype=torch.float64)
    torch.testing.assert_close(read(*maps, identity, torch.zeros_like(given)), read(*maps))
    shifts = [torch.einsum("btm,mhn->bthn", given.tanh(), weights) for weights in maps]
    shifted = (reference.empty((2, H), 3, D, x), x + shifts[0], logits + shifts[1], query)
    wanted = reference.scan(*shifted, num_slots=3)[0].read
    torch.testing.assert_close(read(*maps, torch.zeros_like(identity), given), wanted)
    open_gate = torch.full_like(given, 100.0)
    twice = (torch.zeros(2 * H * D, H * D, dtype=torch.float64), torch.cat([given, open_gate], -1))
    options["feedback_activation"] = "gated"
    torch.testing.assert_close(read(*maps, *twice), wanted)


@pytest.mark.parametrize(("read", "read_mask"), READS)
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_saturated_actions_have_finite_gradients(discipline, read, read_mask):
    x, logits, query = random_inputs(discipline, leading=(20, 6))
    logits = 1e4 * (logits == logits.amax(-1, keepdim=True))
    inputs = [tensor.double().requires_grad_() for tensor in (x, logits, query)]
    empty = reference.empty((20, H), 3, D, inputs[0])
    output, _ = reference.scan(empty, *inputs, num_slots=3, discipline=discipline, read=read, read_mask=read_mask)
    (output.read.sum() + output.entropy.sum()).backward()
    assert output.entropy.abs().max() == 0
    for tensor in inputs:
        assert tensor.grad is None or tensor.grad.isfinite().all()


@pytest.mark.parametrize("read_mask", ["multiply", "log", "additive"])
def test_empty_stack_reads_zero(read_mask):
    empty = reference.empty((2, H), 4, D, torch.zeros((), dtype=torch.float64))
    for tensor in empty:
        tensor.requires_grad_()
    read = reference.read_stack(empty, torch.randn(H, D, dtype=torch.float64), "global", read_mask)
    read.sum().backward()
    assert (read == 0).all()
    assert empty.slots.grad.isfinite().all()


def test_scan_equals_its_steps_and_its_parts():
    x, logits, query = random_inputs("stack", leading=(2, 7))
    options = {"num_slots": 3, "feedback": (torch.randn(H * D, H, D).double(), torch.randn(H * D, H, 3).double())}
    start = reference.empty((2, H), 3, D, x)
    whole, end = reference.scan(start, x, logits, query, **options)
    first, middle = reference.scan(start, x[:, :4], logits[:, :4], query, **options)
    second, cut_end = reference.scan(middle, x[:, 4:], logits[:, 4:], query, **options)
    torch.testing.assert_close(torch.cat([first.read, second.read], 1), whole.read)
    torch.testing.assert_close(cut_end, end)
    options.pop("feedback")
    state = start
    reads, _ = reference.scan(start, x, logits, query, **options)
    for t in range(7):
        output, state = reference.step(state, x[:, t], logits[:, t], query, **options)
        assert torch.equal(output.read, reads.read[:, t])


logit = st.floats(-30, 30)
programs = st.lists(st.tuples(logit, logit, logit), min_size=1, max_size=40)


@settings(deadline=None, max_examples=50)
@given(program=programs, num_slots=st.integers(1, 6), discipline=st.sampled_from(DISCIPLINES))
def test_mask_is_bounded_non_increasing_and_proportional_to_the_contents(program, num_slots, discipline):
    state = reference.empty((1,), num_slots, 1, torch.zeros((), dtype=torch.float64))
    for logits in program:
        logits = torch.tensor([logits], dtype=torch.float64)
        action = reference.compute_actions(logits[..., [0, 2]] if discipline == "push_only" else logits)
        state = reference.update_stack(state, action, torch.ones(1, 1, dtype=torch.float64), discipline)
        assert (state.mask >= 0).all()
        assert (state.mask <= 1 + 1e-12).all()
        assert (state.mask.diff() <= 1e-12).all()
        torch.testing.assert_close(state.slots[..., 0], state.mask, rtol=1e-9, atol=1e-12)  # every pushed vector was 1


hard_programs = st.lists(st.tuples(st.sampled_from(["push", "pop", "no_op"]), st.integers(1, 99)), max_size=40)


def apply_hard(memory, operation, value, capacity):
    """Apply one operation to a list or deque in place: the end is the top; beyond `capacity`, drop the oldest."""
    if operation == "push":
        memory.append(value)
        if len(memory) > capacity:
            del memory[0]
    elif operation == "pop" and memory:
        memory.pop() if isinstance(memory, list) else memory.popleft()


def hard_logits(operation):
    return 1e4 * torch.tensor([[operation == name for name in ("push", "pop", "no_op")]], dtype=torch.float64)


@settings(deadline=None, max_examples=100)
@given(program=hard_programs, num_slots=st.integers(1, 6), discipline=st.sampled_from(["stack", "queue"]))
def test_hard_actions_equal_a_list_or_deque(program, num_slots, discipline):
    state = reference.empty((1,), num_slots, 1, torch.zeros((), dtype=torch.float64))
    expected = [] if discipline == "stack" else collections.deque()
    for operation, value in program:
        action = reference.compute_actions(hard_logits(operation))
        state = reference.update_stack(state, action, torch.full((1, 1), float(value), dtype=torch.float64), discipline)
        apply_hard(expected, operation, value, num_slots)
        assert state.mask[0].tolist() == [1.0] * len(expected) + [0.0] * (num_slots - len(expected))
        assert state.slots[0, : len(expected), 0].tolist() == list(reversed(expected))
        assert (state.slots[0, len(expected) :] == 0).all()
