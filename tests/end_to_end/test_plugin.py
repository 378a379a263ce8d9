"""An out-of-tree memory: one Python file and one YAML file, as in the README."""

import re
from pathlib import Path

import pytest
from forks import Forks

from stackexp.runs import RunFolder

README = Path(__file__).parents[2] / "README.md"


def readme_block(language: str, first_line: str) -> str:
    """The fenced block of the README that begins with `first_line`, so that the test runs the README's own code."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    (block,) = (block for block in blocks if block.startswith(first_line))
    return block


def test_readme_plugin_trains_and_resumes(tiny, forks, tmp_path):
    (tmp_path / "moving_average.py").write_text(readme_block("python", "# moving_average.py"))
    variant = readme_block("yaml", "# moving-average.yaml").replace("- quickstart", f"- {tiny}")
    (tmp_path / "moving-average.yaml").write_text(variant)

    output = forks.run("fit", "--config", "moving-average.yaml", "logging.root=runs", "model.memory.decay=0.5")
    (path,) = (tmp_path / "runs").glob("*/*")
    run = RunFolder(path)
    assert run.is_finished
    assert "64 of them in the memory" in output, "a gate of 32 numbers in each of 2 layers"
    lines = [line for line in run.read_metrics() if "train/loss" in line]
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    assert "memory/state_norm/layer_01" in lines[0], "its own probes are recorded"

    # The run's config.yaml finds the plugin again
    forks.run("generate", "--run", path, "--prompt", "def", "--max_new_tokens", "3")

    # Its options are described and checked like built-in ones
    explained = forks.run("configs", "explain", "model.memory.decay", "--config", "moving-average.yaml")
    assert "Weight of the previous average; 0 keeps only the current hidden state." in explained
    assert "a number from 0 to 1" in explained
    mistake = forks.run("fit", "--config", "moving-average.yaml", "model.memory.decya=0.5", expect=2)
    assert "model.memory.decya" in mistake
    assert "model.memory.decay" in mistake


WRONG = """
from dataclasses import dataclass
import torch
from stackexp.config.registry import register
from stackexp.models.memories.base import Memory

@dataclass
class Options:
    kind: str = "wrong"

@register("memory", "wrong", config=Options)
class Wrong(Memory):
    def empty_state(self, h):
        return h
    def forward(self, h, state, previous, probe=False):
        return RETURNED
"""
WRONG_YAML = "defaults: [{}]\nplugins: [wrong.py]\nmodel:\n  memory:\n    kind: wrong\n"


def train_wrong(tiny: Path, folder: Path, code: str) -> str:
    """Return the output of a training with this memory."""
    (folder / "wrong.py").write_text(code)
    (folder / "wrong.yaml").write_text(WRONG_YAML.format(tiny))
    error = Forks(folder).run("fit", "--config", "wrong.yaml", "logging.root=runs", expect=1)
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ("h, state", "2 values"),
        ("h", "Tensor"),
        ("h[:, 1:], state, {}", "h [4, 31, 32] instead of [4, 32, 32]"),
        ("None, state, {}", "h NoneType instead of [4, 32, 32]"),
        ("h, state, None", "the statistics None, not a dict of tensors"),
        ("h, state, {'gate': 0.5}", "the statistics {'gate': 0.5}, not a dict of tensors"),
    ],
)
def test_a_memory_that_returns_something_else_is_one_line(tiny, tmp_path, returned, found):
    expected = f"error: Wrong.forward: expected (h [B, T, d], state, statistics), found {found}; see Memory.forward"
    assert expected in train_wrong(tiny, tmp_path, WRONG.replace("RETURNED", returned))


UNUSED = """
    def __init__(self, config, model, layer):
        super().__init__(config, model, layer)
        self.bias = torch.nn.Parameter(torch.zeros(3))
"""


def test_a_parameter_without_gradient_is_an_error_in_the_first_step(tiny, tmp_path):
    """Otherwise the run would train, and its checkpoints could not be loaded."""
    expected = "error: layers.0.memory.bias: has no gradient; use this parameter in forward, or make it a buffer"
    assert expected in train_wrong(tiny, tmp_path, WRONG.replace("RETURNED", "h, state, {}") + UNUSED)
