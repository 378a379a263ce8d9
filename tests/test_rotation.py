"""`memory.rotation`: slots that turn from token to token, by the angles that each token gives."""

import math

import pytest
import torch

from stackexp import stack
from stackexp.config import registry
from stackexp.config.schema import StackMemoryConfig, TransformerConfig
from stackexp.errors import ConfigError
from stackexp.models.memory import StackMemory
from stackexp.models.transformer import Cache
from stackexp.stack import StackState, reference

B, T, H, D, S = 2, 7, 3, 4, 5


def inputs(num_actions=3):
    """x, logits, contents, mask and angles, which turn several times round."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(B, T, H, D), (B, T, H, num_actions), (B, H, S, D), (B, H, S), (B, T, H)]
    x, logits, slots, mask, angles = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    mask = mask.sigmoid().cumprod(-1)
    return [part.requires_grad_() for part in (x, logits, slots * mask.unsqueeze(-1), mask, 4 * angles)]


def results(scan, cuts=(), **options):
    """Everything a scan gives, and the gradients of a functional of it."""
    x, logits, slots, mask, angles = given = inputs(2 if options.get("discipline") == "push_only" else 3)
    state, reads = StackState(slots, mask), []
    for begin, end in zip([0, *cuts], [*cuts, T], strict=True):
        part = slice(begin, end)
        output, state = scan(state, x[:, part], logits[:, part], None, angles=angles[:, part], **options)
        reads.append(output.read)
    read = torch.cat(reads, 1)
    total = read.sin().sum() + state.slots.cos().sum() + state.mask.square().sum()
    return [read, *state, *torch.autograd.grad(total, given)]


@pytest.mark.parametrize("name", [name for name in stack.IMPLEMENTATIONS if name != "triton"])  # turned outside
@pytest.mark.parametrize("discipline", ["stack", "queue", "push_only"])
def test_every_implementation_turns_as_the_reference(name, discipline):
    options = {"num_slots": S, "read": "top", "discipline": discipline}
    with stack.implementation(name):
        found = results(stack.scan, **options)
    for value, expected in zip(found, results(reference.scan, **options), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)


def test_a_scan_that_turns_may_be_cut_anywhere():
    options = {"num_slots": S, "read": "top"}
    for value, expected in zip(results(stack.scan, (1, 4), **options), results(stack.scan, **options), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)


def test_the_planes_are_of_numbers_half_a_head_apart():
    turned = reference.turned(torch.tensor([1.0, 0.0, 0.0, 2.0]), torch.tensor(math.pi / 2))
    torch.testing.assert_close(turned, torch.tensor([0.0, -2.0, 1.0, 0.0]), atol=1e-6, rtol=0)


def test_what_is_pushed_turns_from_the_next_token_on():
    x, logits, angles = torch.zeros(1, 3, 1, 2), torch.full((1, 3, 1, 3), -1e4), torch.zeros(1, 3, 1)
    x[0, 0, 0, 0] = 1
    logits[0, 0, 0, 0] = logits[0, 1:, 0, 2] = 1e4  # push, then leave it
    angles[0, :, 0] = torch.tensor([0.5, 0.25, -1.0])
    with stack.implementation("eager"):
        state = stack.empty((1, 1), 4, 2, like=x)
        output, _ = stack.scan(state, x, logits, None, angles=angles, num_slots=4, read="top")
    expected = torch.tensor([[1.0, 0.0], [math.cos(0.25), math.sin(0.25)], [math.cos(0.75), -math.sin(0.75)]])
    torch.testing.assert_close(output.read[0, :, 0], expected)


FEEDBACK = (torch.zeros(H * D, H, D), torch.zeros(H * D, H, 3))


@pytest.mark.parametrize(
    "options", [{"read": "global"}, {"read": "top", "feedback": FEEDBACK}], ids=["read", "feedback"]
)
def test_a_scan_that_cannot_turn_says_so(options):
    x, logits, slots, mask, angles = inputs()
    query = torch.ones(H, D, dtype=torch.float64)
    with pytest.raises(ValueError, match="slots turn where the top is read"):
        stack.scan(StackState(slots, mask), x, logits, query, angles=angles, num_slots=S, **options)


# In the decoder


def options_of(**changes):
    return StackMemoryConfig(**({"axis": "time", "read": "top", "head_dim": 4, "rotation": True} | changes))


def decoder(**changes):
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    return registry.build("model", TransformerConfig(vocab_size=7, memory=options_of(**changes), **sizes))


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"axis": "depth"}, "rotation", "axis depth has none: set axis: time"),
        ({"axis": "token_major"}, "rotation", "axis token_major has none: set axis: time"),
        ({"read": "global"}, "rotation", "set read: top"),
        ({"feedback": True}, "rotation", "set feedback: false"),
        ({"head_dim": 5}, "head_dim", "5 is odd"),
    ],
)
def test_what_does_not_go_with_it_is_one_line(changes, key, message):
    model = TransformerConfig(vocab_size=7)
    found = dict(options_of(**changes).problems(model))
    assert message in found.pop(key)
    assert not found
    assert not list(options_of().problems(model))


def test_the_command_line_says_it_too():
    from stackexp.config.compose import compose

    with pytest.raises(ConfigError, match="set read: top"):
        compose(["formal/stacktrans"], ["model.memory.rotation=true", "model.memory.read=global"])


def test_every_parameter_learns_and_angles_stay_exact_under_autocast():
    model = decoder()
    tokens = torch.randint(7, (3, 9), generator=torch.Generator().manual_seed(1))
    angles = []
    model.memories[0]._angles = lambda h: angles.append(StackMemory._angles(model.memories[0], h)) or angles[-1]
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens).logits.float().logsumexp(-1).square().sum().backward()
    assert angles[0].dtype == torch.float32
    for memory in model.memories:
        assert all(memory.get_parameter(name).grad.abs().sum() > 0 for name in ("rotation", "bottom"))


def test_token_by_token_is_the_whole():
    model = decoder().eval()
    tokens = torch.randint(7, (3, 9), generator=torch.Generator().manual_seed(1))
    cache = Cache()
    parts = [model(part, cache).logits for part in tokens.split([1, 5, 3], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens).logits, rtol=1e-4, atol=1e-5)


def test_a_stack_begins_with_what_it_learned_and_nothing_else():
    memory = decoder().memories[0]
    state = memory.empty_state(torch.zeros(3, 9, 16))
    assert state.mask.tolist() == [[[1.0]] * 4] * 3
    assert torch.equal(state.slots, memory.bottom.expand(3, -1, -1).unsqueeze(-2))


@torch.no_grad()
def test_a_stack_that_turns_counts_modulo_five_at_any_length():
    """Its top, which no action touches, points to where on a circle of 5 the moves -1, 0, +1 end."""
    config = options_of(num_heads=1, head_dim=2, num_slots=1, projection="none", action_input="hidden")
    memory = StackMemory(config, TransformerConfig(vocab_size=3, hidden_size=2), layer=0)
    memory.init_weights()
    memory.gate.zero_()  # the output is what was read
    memory.bottom.copy_(torch.tensor([[1.0, 0.0]]))
    memory.rotation.copy_(torch.tensor([[math.tau / 5 * math.sqrt(2), 0.0]]))
    memory.actions.zero_()[0, 2, 1] = 100.0  # h[1] = 1: leave it
    moves = torch.randint(-1, 2, (64, 2000), generator=torch.Generator().manual_seed(2))
    h = torch.stack([moves.float(), torch.ones(moves.shape)], -1)
    read, _, _ = memory(h, memory.empty_state(h))
    place = torch.atan2(read[..., 1], read[..., 0]) / (math.tau / 5)
    assert torch.equal(place.round().long() % 5, moves.cumsum(1) % 5)


def test_without_it_there_are_no_such_parameters():
    assert StackMemoryConfig().rotation is False
    assert {"rotation", "bottom"}.isdisjoint(dict(decoder(rotation=False).memories[0].named_parameters()))
