"""Push-Only, as the paper words it: a_push = 1, no pop, no no-op, no action parameters and no entropy term."""

import math

import pytest
import torch
from config_files import BASE, compose_error
from stack_memories import READS, B, T, decoder_config, hidden_states, make_memory

from stackexp.models.transformer import Transformer
from stackexp.stack import use_implementation

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


def test_scans_read_a_list_of_the_last_tokens():
    memory = make_memory(axis="time", **PUSH_ONLY | {"num_slots": 3})
    h = hidden_states()
    new_h, _, _ = memory(h, memory.empty_state(h))
    x = memory.project_down(h)
    reads = [
        read_list([x[0, t, head].tolist() for t in range(T)], memory.query[head].tolist(), 3, "global", "multiply")
        for head in range(2)
    ]
    expected = memory.gate * h[0, -1] + memory.project_up(torch.tensor([reads], dtype=torch.float64))[0]
    torch.testing.assert_close(new_h[0, -1], expected)


def test_it_has_no_action_parameters_and_no_entropy_term():
    config = decoder_config(num_layers=3, **PUSH_ONLY)
    model = Transformer(config)
    memory = 2 * 12 * 6 + 6 + 1  # W_down and W_up, w_g, g
    assert model.num_parameters(memory=True) == 3 * memory
    assert model.entropy_weight == 0
    output = model(torch.zeros(1, 4, dtype=torch.int64), probe=True)
    assert output.probes[0]["push"] == 1
    assert output.probes[0]["pop"] == output.probes[0]["no_op"] == 0
    assert [probe["occupancy"].item() for probe in output.probes] == [1, 2, 3]


@pytest.mark.parametrize("option", ["action_input=hidden", "action_noise=0.1", "action_sharpness=2", "feedback=true"])
def test_options_of_actions_are_refused(option):
    error = compose_error([BASE], "model.memory.discipline=push_only", f"model.memory.{option}")
    name = option.partition("=")[0]
    assert f"model.memory.{name}: not supported by discipline: push_only, which always pushes; use " in error
