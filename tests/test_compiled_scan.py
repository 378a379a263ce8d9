"""The scan in numba equals the reference: values and all gradients, whatever the options and the shapes."""

import itertools
import os
import random
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stackexp import stack
from stackexp.stack import compiled, eager, reference

DISCIPLINES = ["stack", "queue", "push_only"]
READS = [("global", "multiply"), ("global", "log"), ("global", "additive"), ("top", "multiply")]
FEEDBACK = [None, "identity", "tanh"]
SHAPES = {"num_slots": [1, 2, 7, 24, 33], "tokens": [1, 5, 40], "heads": [1, 3, 4], "size": [1, 4, 8, 17]}


def make_inputs(discipline, tokens, heads, size, batch=2, start=0, scale=1.0, seed=0, dtype=torch.float64):
    """x, logits, w_g, P, Q, and a state of `start` slots as the tokens before would have left it."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    count = 2 if discipline == "push_only" else 3
    slots = draw(batch, heads, start, size)
    mask = torch.rand(batch, heads, start, generator=generator, dtype=torch.float64).sort(-1, descending=True).values
    inputs = [draw(batch, tokens, heads, size), scale * draw(batch, tokens, heads, count), draw(heads, size)]
    inputs += [0.3 * draw(heads * size, heads, size), 0.3 * draw(heads * size, heads, count)]
    return [tensor.to(dtype).requires_grad_() for tensor in (*inputs, slots * mask.unsqueeze(-1), mask)]


def run(implementation, inputs, feedback=None, num_slots=7, read="global", **options):
    """Outputs, the last state's occupied slots, and the gradients of a random functional of them all."""
    x, logits, query, *maps, slots, mask = inputs
    start = mask.shape[-1]
    state = reference.StackState(slots, mask)
    if implementation is reference:
        missing = num_slots - start
        state = reference.StackState(
            *(torch.nn.functional.pad(s, (0, 0) * (s.dim() - 3) + (0, missing)) for s in state)
        )
    options |= {"feedback": maps, "feedback_activation": feedback} if feedback else {}
    query = None if read == "top" else query
    output, state = implementation.scan(state, x, logits, query, num_slots=num_slots, read=read, **options)
    held = min(start + x.shape[1], num_slots)
    values = [*output, state.slots[..., :held, :], state.mask[..., :held]]
    generator = torch.Generator().manual_seed(1)
    factors = [torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v.dtype) for v in values]
    total = sum((v * f).sum() for v, f in zip(values, factors, strict=True) if v.requires_grad)
    return values, torch.autograd.grad(total, inputs, allow_unused=True)


def assert_equal(ours, theirs, **tolerance):
    """Values and gradients; where one has no gradient, the other's is zero."""
    for a, b in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        if a is not None or b is not None:
            zeros = torch.zeros_like(b if a is None else a)
            torch.testing.assert_close(zeros if a is None else a, zeros if b is None else b, **tolerance)


def tolerances(options):
    """(1 - M) * 1e9 magnifies the rounding of M in the scores."""
    additive = options["read"] == "global" and options["read_mask"] == "additive"
    return {"rtol": 1e-5, "atol": 1e-5} if additive else {"rtol": 1e-11, "atol": 1e-11}


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize(("read", "read_mask"), READS)
def test_equals_the_reference(discipline, read, read_mask):
    """Every kind of feedback with shapes drawn from all, saturated actions among them, from empty and given states."""
    rng = random.Random(f"{discipline} {read} {read_mask}")
    for feedback, scale in itertools.product(FEEDBACK, [1.0, 50.0]):
        num_slots, tokens, heads, size = (rng.choice(values) for values in SHAPES.values())
        start = rng.choice([0, 1, num_slots, num_slots // 2])
        inputs = make_inputs(discipline, tokens, heads, size, start=start, scale=scale)
        options = {"num_slots": num_slots, "discipline": discipline, "read": read, "read_mask": read_mask}
        ours, theirs = (run(module, inputs, feedback, **options) for module in (compiled, reference))
        assert_equal(ours, theirs, **tolerances(options))


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SHAPES.items() for value in values])
def test_every_shape_equals_the_reference(name, value):
    """Each size by itself, with the options that experiments use."""
    sizes = {"num_slots": 7, "tokens": 9, "heads": 2, "size": 3} | {name: value}
    num_slots = sizes.pop("num_slots")
    for read, feedback in itertools.product(["top", "global"], [None, "tanh"]):
        inputs = make_inputs("stack", **sizes, start=1)
        options = {"num_slots": num_slots, "read": read, "read_mask": "log"}
        ours, theirs = (run(module, inputs, feedback, **options) for module in (compiled, reference))
        assert_equal(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (2, 0)])
def test_no_sequences_and_no_tokens(batch, tokens):
    """Nothing is read, and the state stays as it is."""
    inputs = make_inputs("stack", tokens, 2, 3, batch=batch, start=2)
    values, gradients = run(compiled, inputs, "tanh")
    assert values[0].shape == (batch, tokens, 2, 3)
    assert values[1].shape == (batch, tokens, 2, 3)
    held = min(2 + tokens, 7)
    assert values[-1].shape == (batch, 2, held)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients[:5])
    if not tokens:
        torch.testing.assert_close(values[-2:], inputs[-2:])


@pytest.mark.parametrize("feedback", FEEDBACK)
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_gradcheck(discipline, feedback):
    *inputs, slots, mask = make_inputs(discipline, 4, 2, 3, start=2)
    options = {
        "num_slots": 4,
        "discipline": discipline,
        "read_mask": "log",
        "feedback_activation": feedback or "identity",
    }

    def scan(x, logits, query, maps_x, maps_logits, slots, mask):
        maps = (maps_x, maps_logits) if feedback else None
        output, state = compiled.scan(reference.StackState(slots, mask), x, logits, query, feedback=maps, **options)
        return *output[:3], *state

    assert torch.autograd.gradcheck(scan, (*inputs, slots, mask))


@pytest.mark.parametrize("read", ["top", "global"])
def test_strided_inputs(read):
    inputs = make_inputs("stack", 6, 2, 3, start=2)
    strided = [t.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for t in inputs]
    strided[2] = inputs[2].detach()[:1].requires_grad_()
    expanded = [strided[0], strided[1], strided[2].expand(2, -1), *strided[3:]]
    plain = [*inputs[:2], inputs[2].detach()[:1].repeat(2, 1).requires_grad_(), *inputs[3:]]
    assert not strided[0].is_contiguous()
    assert_equal(run(compiled, expanded, "tanh", read=read), run(compiled, plain, "tanh", read=read))


@pytest.mark.parametrize("feedback", FEEDBACK)
@pytest.mark.parametrize("cut", [1, 4, 9])
def test_two_scans_are_one(cut, feedback):
    """Cut anywhere, with gradients through the state; and one token at a time, as token_major calls it."""
    inputs = make_inputs("queue", 10, 2, 3)
    x, logits, query, *maps, _, _ = inputs
    options = {"num_slots": 6, "discipline": "queue", "feedback": maps if feedback else None}
    options["feedback_activation"] = feedback or "identity"

    def scanned(*lengths):
        state, reads = compiled.empty((2, 2), 6, 3, x), []
        for x_part, logits_part in zip(x.split(lengths, 1), logits.split(lengths, 1), strict=True):
            output, state = compiled.scan(state, x_part, logits_part, query, **options)
            reads.append(output.read)
        read = torch.cat(reads, 1)
        wanted = inputs[:5] if feedback else inputs[:3]
        return read, state, torch.autograd.grad(read.square().sum() + state.slots.sum(), wanted)

    whole = scanned(10)
    torch.testing.assert_close(scanned(cut, 10 - cut), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(scanned(*[1] * 10), whole, rtol=1e-11, atol=1e-11)


def test_float32_is_as_exact_as_the_reference():
    """Errors against float64: of values and gradients at most twice those of the reference in float32, plus a bit."""
    for (read, read_mask), feedback in itertools.product([READS[0], READS[1], READS[3]], [None, "tanh"]):
        options = {"num_slots": 24, "read": read, "read_mask": read_mask}
        wide = [t.detach().float() for t in make_inputs("stack", 40, 4, 8, batch=8)]
        exact = run(reference, [t.double().requires_grad_() for t in wide], feedback, **options)
        errors = []
        for module in (compiled, reference):
            found = run(module, [t.clone().requires_grad_() for t in wide], feedback, **options)
            pairs = zip([*found[0], *found[1]], [*exact[0], *exact[1]], strict=True)
            errors.append([(a - b).norm() / (b.norm() + 1e-9) for a, b in pairs if a is not None and b is not None])
        for ours, theirs in zip(*errors, strict=True):
            assert ours <= 2 * theirs + 1e-7, (options, feedback)


def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(compiled, "NUMBERS_PER_THREAD", 1)
    inputs = make_inputs("stack", 9, 2, 3, batch=5)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(run(compiled, inputs, "tanh"))
    finally:
        torch.set_num_threads(before)
    assert_equal(results[1], results[0], rtol=0, atol=0)
    assert_equal(results[2], results[0], rtol=0, atol=0)


def test_threads_survive_a_fork(monkeypatch):
    monkeypatch.setattr(compiled, "NUMBERS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    inputs = [tensor.detach() for tensor in make_inputs("stack", 3, 2, 3, batch=4)]
    state = compiled.empty((4, 2), 7, 3, inputs[0])
    expected = compiled.scan(state, *inputs[:3], num_slots=7)[0].read
    if (child := os.fork()) == 0:
        found = compiled.scan(state, *inputs[:3], num_slots=7)[0].read
        os._exit(0 if torch.equal(found, expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def kept(tokens, wanted):
    """Bytes of what the backward pass keeps besides its inputs and outputs."""
    x, logits, query, *_ = make_inputs("stack", tokens, 2, 3)
    x, known, sizes = x.requires_grad_(wanted), set(), []

    def pack(tensor):
        if tensor.data_ptr() not in known:
            sizes.append(tensor.nbytes)
        return tensor

    known.update(t.data_ptr() for t in (x, logits, query))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.set_grad_enabled(wanted):
        output, _ = compiled.scan(compiled.empty((2, 2), 8, 3, x), x, logits, query, num_slots=8)
    return sum(sizes) - (sum(t.nbytes for t in output[:3]) if wanted else 0), output


def test_keeps_one_state_in_about_the_square_root_of_the_tokens():
    state = 2 * 2 * 8 * (3 + 1) * 8  # bytes
    assert kept(100, True)[0] == 9 * state
    assert kept(400, True)[0] == 19 * state


def test_keeps_nothing_without_gradients():
    size, output = kept(100, False)
    assert size == 0
    assert output.read.grad_fn is None


def test_auto_scans_with_it_on_cpu_only_where_numbers_are_computed(monkeypatch):
    calls = []
    scan = compiled.scan
    monkeypatch.setattr(compiled, "scan", lambda *args, **kwargs: calls.append(args) or scan(*args, **kwargs))
    x, logits, query, *_ = (tensor.detach() for tensor in make_inputs("stack", 3, 2, 3))

    def read(x, logits, query):
        return stack.scan(stack.empty((2, 2), 7, 3, x), x, logits, query, num_slots=7)[0].read

    expected = read(x, logits, query)
    assert len(calls) == 1
    with FakeTensorMode() as mode:
        assert read(*(mode.from_tensor(tensor) for tensor in (x, logits, query))).shape == expected.shape
    torch.testing.assert_close(torch.compile(read, fullgraph=True, backend="aot_eager")(x, logits, query), expected)
    torch.testing.assert_close(torch.func.vmap(read, (None, None, 0))(x, logits, query.expand(2, -1, -1))[1], expected)
    assert len(calls) == 1
    with stack.implementation("eager"):
        read(x, logits, query)
    assert len(calls) == 1


def test_numba_is_not_imported_before_a_scan():
    code = "import sys, stackexp.stack; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_where_no_cache_may_be_written_kernels_are_still_made():
    code = "from numba.core.caching import CacheImpl; CacheImpl._locator_classes = []; import stackexp.stack.kernels"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_steps_are_eagers():
    assert compiled.step is eager.step
