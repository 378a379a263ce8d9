"""The stack memory as a module: parameters, equations, options, feedback, state and initialization."""

import math

import pytest
import torch
from scans import READS
from stack_memories import ACTION_INPUTS, HIDDEN, PROJECTIONS, B, T, decoder_config, hidden_states, make_memory

from stackexp.errors import RunError
from stackexp.models.memories import Memory
from stackexp.models.memories.base import check_interface
from stackexp.models.memories.extensions import ExtendedStackMemory as StackMemory
from stackexp.models.transformer import Cache, Transformer
from stackexp.stack import use_implementation
from stackexp.stack.reference import compute_scores


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


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize(("action_input", "action_scale"), ACTION_INPUTS)
def test_linear_feedback_adds_last_read_to_h(projection, action_input, action_scale):
    """Compare with a memory without feedback on h_t + F R_{t-1}, one token at a time, with h_t as the residual."""
    options = {"projection": projection, "action_input": action_input, "action_scale": action_scale, "axis": "time"}
    memory = make_memory(feedback=True, **options)
    plain = make_memory(**options)
    plain.load_state_dict({name: value for name, value in memory.state_dict().items() if name != "feedback"})
    reads = []
    plain.choose_products = lambda h: None  # it would not call project_up
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
    plain.choose_products = lambda h: None  # it would not call project_up
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


def run_twice(memory, implementation="auto"):
    """Return h' after two updates, the second of another layer's hidden states, and the state."""
    with use_implementation(implementation):
        state = memory.empty_state(hidden_states())
        _, state, _ = memory(hidden_states(), state)
        new_h, state, _ = memory(hidden_states(seed=2), state)
    return new_h, state


@pytest.mark.parametrize("read_mask", ["multiply", "log"])
@pytest.mark.parametrize("discipline", ["stack", "queue"])
def test_an_empty_slot_takes_its_share_of_the_read(read_mask, discipline):
    options = {"read_mask": read_mask, "discipline": discipline}
    memory, plain = make_memory(empty_slot=True, **options), make_memory(**options)
    plain.load_state_dict({name: p for name, p in memory.state_dict().items() if name != "empty_score"})
    assert memory.empty_score.tolist() == [0, 0]
    with torch.no_grad():
        memory.empty_score.copy_(torch.tensor([0.5, -0.7]))
    gradients = []
    for implementation in ("auto", "reference"):
        new_h, state = run_twice(memory, implementation)
        gradients.append((new_h, *torch.autograd.grad(new_h.square().sum(), list(memory.parameters()))))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected)
    assert gradients[0][-2].abs().min() > 0, "the score is learned"
    scores = compute_scores(state, memory.get_query(), read_mask)  # of the reference: all slots
    share = scores.exp().sum(-1) / (scores.exp().sum(-1) + memory.empty_score.exp())  # [B, T, H]
    read = share.unsqueeze(-1) * (scores.softmax(-1).unsqueeze(-1) * state.slots).sum(-2)
    torch.testing.assert_close(new_h, memory.add_read(hidden_states(seed=2), read))

    with torch.no_grad():
        memory.empty_score.fill_(-1e4)
    torch.testing.assert_close(run_twice(memory)[0], run_twice(plain)[0])
    with torch.no_grad():
        memory.empty_score.fill_(1e4)
    torch.testing.assert_close(run_twice(memory)[0], memory.gate * hidden_states(seed=2))


@pytest.mark.parametrize("axis", ["depth", "token_major"])
def test_each_sublayer_has_a_memory_with_its_own_parameters(axis):
    torch.manual_seed(0)
    model = Transformer(decoder_config(num_layers=2, axis=axis, site="each_sublayer", num_slots=5)).double()
    assert [memory.site for memory in model.memories] == ["after_attention", "after_block"] * 2
    assert model.num_memory_parameters() == 4 * sum(p.numel() for p in make_memory().parameters())
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
    for key in ("site", "axis"):
        with pytest.raises(RunError, match=f"Unknown.{key}: expected one of .*, found 'after_ffn'"):
            check_interface(type("Unknown", (Memory,), {key: "after_ffn"})(None, model, 0))
    with pytest.raises(RunError, match="site each_sublayer requires axis depth or token_major, found time"):
        check_interface(Everywhere(None, model, 0))


# Push-Only, as the paper words it: a_push = 1, no pop, no no-op, no action parameters and no entropy term

PUSH_ONLY = {"discipline": "push_only", "num_slots": 4}


def read_list(pushed: list[list[float]], query: list[float], num_slots: int, read: str, read_mask: str) -> list[float]:
    """Return R of one head after these pushes, the newest last; every pushed element has M = 1."""
    stack = pushed[::-1][:num_slots]
    if read == "top":
        return stack[0]
    scores = [sum(w * value for w, value in zip(query, element, strict=True)) for element in stack]
    empty = {"multiply": 0.0, "log": math.log(torch.finfo(torch.float64).tiny), "additive": -1e9}[read_mask]
    weights = [math.exp(score) for score in [*scores, *[empty] * (num_slots - len(stack))]]
    return [
        sum(w * element[i] for w, element in zip(weights, stack, strict=False)) / sum(weights)
        for i in range(len(stack[0]))
    ]


@pytest.mark.parametrize(("read", "read_mask"), READS)
@pytest.mark.parametrize("implementation", ["reference", "eager", "auto"])
def test_layers_read_a_list_of_everything_below(implementation, read, read_mask):
    """Six layers push onto four slots, so the oldest elements are lost."""
    memories = [make_memory(layer, seed=layer, read=read, read_mask=read_mask, **PUSH_ONLY) for layer in range(6)]
    h, state, pushed = hidden_states(), None, []
    with use_implementation(implementation):
        for memory in memories:
            x = memory.project_down(h)  # [B, T, H, D]
            pushed.append(x)
            new_h, state, stats = memory(h, memory.empty_state(h) if state is None else state)
            for b, t in ((0, 0), (B - 1, T - 1)):
                reads = [
                    read_list(
                        [p[b, t, head].tolist() for p in pushed],
                        [] if read == "top" else memory.get_query()[head].tolist(),
                        *(4, read, read_mask),
                    )
                    for head in range(2)
                ]
                expected = memory.gate * h[b, t] + memory.project_up(torch.tensor([reads], dtype=torch.float64))[0]
                torch.testing.assert_close(new_h[b, t], expected)
            assert stats["entropy"] == 0
            h = new_h.detach()


def test_it_has_no_action_parameters_and_no_entropy_term():
    config = decoder_config(num_layers=3, **PUSH_ONLY)
    model = Transformer(config)
    memory = 2 * 12 * 6 + 6 + 1  # W_down and W_up, w_g, g
    assert model.num_memory_parameters() == 3 * memory
    assert model.entropy_weight == 0
    output = model(torch.zeros(1, 4, dtype=torch.int64), probe=True)
    assert output.probes[0]["push"] == 1
    assert output.probes[0]["pop"] == output.probes[0]["no_op"] == 0
    assert [probe["occupancy"].item() for probe in output.probes] == [1, 2, 3]
