"""Run folders with networks whose automaton is known, for the tests of `certify`."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from stackexp import cli, runs
from stackexp.certification.machine import ReadState
from stackexp.config.compose import compose
from stackexp.training.objectives import build_objective

SMALL = [
    *("model.num_layers=1", "model.hidden_size=8", "model.num_heads=1", "model.num_kv_heads=1"),
    *("model.intermediate_size=8", "model.positional=none", "model.memory.num_heads=1", "model.memory.head_dim=2"),
]
K = 12.0  # tanh(K) is 1 in float32


def write_run(folder, config: str, *overrides: str, weights=None, finished: bool = True):
    """Write a run folder as `fit` leaves it. Returns the arguments of `certify` for a file of these weights."""
    config = compose([config], [*overrides, f"logging.root={folder}", "logging.loggers=[]"])
    run = runs.allocate_run(config)
    path = run.path / "weights.safetensors"
    with run.start_session(config):
        state = {k: v.clone() for k, v in build_objective(config).build_module().model.state_dict().items()}
        save_file(state if weights is None else weights(state), path)
    if finished:
        run.result.touch()
    return ["--run", str(run.path), "--ckpt_path", str(path), "--out", str(folder / "certificate")]


def build_parity(state):
    """Compute parity: the slot is 0 or 1, and the gated feedback tanh(K (2 s - 1)) tanh(+-K) keeps or flips it.

    Hidden features: 0 the constant, 1 the sign of the symbol (a and empty: +1, b: -1), 2 the read.
    """
    for name, weight in state.items():
        weight.fill_(1.0 if "norm" in name or name.endswith("gate") else 0.0)
    memory = "layers.0.memory."
    state["embedding.weight"][:, 0] = 1
    state["embedding.weight"][:, 1] = torch.tensor([1.0, -1.0, 1.0])
    state[memory + "down"][0, 0] = 0.5
    state[memory + "feedback"][0, 0] = 0.5
    state[memory + "feedback_token"][0, 0], state[memory + "feedback_token"][1, 1] = -K, K
    state[memory + "feedback_read"][0, 0] = 2 * K
    state[memory + "actions"][0, 0, 0] = 60  # always push; the other actions have probability 0
    state[memory + "actions"][0, 1:, 0] = -60
    state[memory + "up"][2, 0] = 1
    state["head.weight"][1, 2], state["head.weight"][1, 0] = 2, -1
    state["head.weight"][1, 5] = 1  # of a feature that is always 0
    return state


def parity_options(units: int = 1) -> list[str]:
    memory = f"model.memory.feedback_hidden_size={units}"
    return ["formal/stacktrans/cycle_navigation", "data.task=parity_check", "model.memory.action_sharpness=1", memory]


def build_reverse(state):
    """Push symbols, wait at the first empty token, pop at later ones; attention over two tokens finds the first.

    Hidden features: 0 the constant, 1 the sign of the symbol, 2 whether it is one, 3 attention to feature 2, 4 read.
    """
    for name, weight in state.items():
        weight.fill_(1.0 if "norm" in name or name.endswith("gate") else 0.0)
    memory, rms = "layers.0.memory.", (6 / 8) ** 0.5
    state["embedding.weight"][:, 0], state["embedding.weight"][-1, 0] = 2, 6**0.5  # every token has the same norm
    state["embedding.weight"][:2, 1] = torch.tensor([-1.0, 1.0])
    state["embedding.weight"][:-1, 2] = 1
    state["layers.0.attention.v_proj.weight"][0, 2] = 1
    state["layers.0.attention.o_proj.weight"][3, 0] = rms
    state[memory + "down"][0, 1] = 1
    state[memory + "actions"][0, 0, 2], state[memory + "actions"][0, 0, 0] = 200, -40  # push
    state[memory + "actions"][0, 2, 3], state[memory + "actions"][0, 2, 2] = 160, -160  # no-op
    state[memory + "actions"][0, 2, 0] = -16
    state[memory + "up"][4, 0] = 1
    state["head.weight"][:2, 4] = torch.tensor([-3.0, 3.0])
    return state


REVERSE = [
    *("formal/stacktrans/reverse_string", *SMALL, "model.attention_window=2", "model.memory.action_input=hidden"),
    *("model.memory.eval_num_slots=64",),
]


def build_late_reverse(state):
    """Push each symbol with the token after it, so that the stack also holds the first symbol twice.

    Hidden features as in `build_reverse`, and 5 attention to feature 1.
    """
    state = build_reverse(state)
    memory, rms = "layers.0.memory.", (6 / 8) ** 0.5
    state["layers.0.attention.v_proj.weight"][1, 1] = 1
    state["layers.0.attention.o_proj.weight"][5, 1] = rms
    state[memory + "down"][0, 5], state[memory + "down"][0, 1] = 2, -1  # the sign of the token before
    state[memory + "actions"].zero_()
    state[memory + "actions"][0, 0, 3], state[memory + "actions"][0, 0, 0] = 400, -40  # push after a symbol, then pop
    state[memory + "actions"][0, 2, 0] = -16
    return state


def build_manipulation(state):
    """Push 0, 1, PUSH0 and PUSH1, pop at POP; then as `build_reverse`, with the constant for an empty stack."""
    state = build_reverse(state)
    state["embedding.weight"][:5, 1] = torch.tensor([-1.0, 1.0, 0.0, -1.0, 1.0])
    state["embedding.weight"][2, 5] = 1  # feature 5: POP
    state["layers.0.memory.actions"][0, 0, 5] = -200
    state["head.weight"][2, 0] = 0.5
    return state


def flip(build, name: str, index: tuple[int, ...]):
    def weights(state):
        build(state)[name][index] *= -1
        return state

    return weights


class Forgetful:
    """A machine that computes parity, but answers 0 while the last 60 symbols are b."""

    batch_size = None

    def read(self, strings, tokens):
        return np.column_stack([strings, tokens]) if isinstance(strings, np.ndarray) else tokens

    def answer(self, strings, rows):
        is_lost = strings[:, -60:].sum(1) == 60
        return torch.eye(2)[np.where(is_lost, 0, strings.sum(1) % 2)][:, None]


class Slots(NamedTuple):
    slots: torch.Tensor


class Exact:
    """A machine whose state is that of an automaton, in a slot; it answers right except in the state `wrong`."""

    batch_size, grid = 16, None

    def __init__(self, automaton, wrong=None):
        self.automaton, self.outputs = automaton, automaton.outputs.copy()
        if wrong is not None:
            self.outputs[wrong] = (self.outputs[wrong] + 1) % (self.outputs.max() + 1)

    def read(self, cache, tokens):
        assert len(tokens), "a network has no batches without rows"
        state = np.zeros(len(tokens), np.int64) if not cache.states else cache.states[0].slots[:, 0].numpy().astype(int)
        for symbols in tokens.T:
            state = self.automaton.transitions[state, symbols]
        return ReadState(cache.length + tokens.shape[1], {}, {0: Slots(torch.tensor(state)[:, None])})

    def answer(self, cache, rows):
        return torch.eye(self.outputs.max() + 1)[self.outputs[cache.states[0].slots[:rows, 0].numpy()]][:, None]


def certify(capsys, arguments, *options: str) -> tuple[int, str, dict]:
    """Certify a run quickly; return the exit code, the output and the certificate."""
    code = cli.main(["certify", *arguments, "--strings", "200", "--max-length", "60", *options])
    printed, steps = capsys.readouterr()
    assert steps.startswith("checking: all ")
    assert all(line.startswith("checking: ") for line in steps.splitlines()), steps
    record = json.loads(Path(arguments[-1], "certificate.json").read_text())
    assert printed.endswith(f"verdict: {record['verdict']}\n")
    return code, printed, record
