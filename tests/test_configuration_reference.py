"""The configuration reference is complete, and docs/configuration.md is current."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stackexp.config.affects import flatten_config
from stackexp.config.compose import compose
from stackexp.config.layers import list_config_names
from stackexp.config.reference import explain, list_keys
from stackexp.config.registry import _entries
from stackexp.errors import ConfigError

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"


def test_every_key_has_a_sentence_and_a_type():
    """Keys of kinds that other tests have registered are left out."""
    shipped = {kind for (_, kind), entry in _entries.items() if entry.config.__module__.startswith("stackexp.")}
    keys = [key for key in list_keys() if key.kind in ("", *shipped)]
    assert [k.name for k in keys if not re.fullmatch(r"[A-Z].{9,}\.", k.description, re.S) or "<class" in k.type] == []


@pytest.mark.parametrize("config", ["quickstart", "pretrain/stacktrans-360m", "formal/lstm", "formal/stack_rnn"])
def test_every_key_of_a_config_is_in_the_reference(config):
    assert config in list_config_names()
    names = {key.name for key in list_keys()}
    sets = ("data.validation.", "data.test.")  # names that a user chooses
    for name in flatten_config(compose([config])):
        assert name in names or name.endswith(".kind") or name.startswith(sets), name


def test_page_is_current():
    """If this fails: python -m stackexp configs explain > docs/configuration.md."""
    command = [sys.executable, "-m", "stackexp", "configs", "explain"]  # without the kinds that other tests register
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert PAGE.read_text(encoding="utf-8") == printed


def test_one_key_is_explained(invoke):
    output = invoke("configs explain model.memory.num_slots")
    description = "Number of slots S of each stack; independent of the parameter shapes."
    headings = [line for line in output.splitlines() if line.startswith("model.")]
    assert headings == [f"model.memory.num_slots (kind {kind})" for kind in ("residual_stack", "stack")]
    assert f"{headings[1]}\n  {description}\n" in output
    assert "type     an integer from 1 to 1048576\n  default  24\n" in output
    assert explain("model.kind").endswith(
        "type     one of delta_net, lstm, stack_rnn, transformer\n  default  transformer"
    )


def test_a_section_is_a_table_of_its_keys_and_the_end_of_a_key_is_enough():
    header, _, *rows = explain("trainer").splitlines()
    assert header.split() == ["key", "kind", "default", "description"]
    assert all(row.startswith("trainer.") for row in rows)
    assert any(row.startswith("trainer.max_steps ") for row in rows)
    texts = explain("num_slots")
    assert "model.memory.num_slots (kind stack)\n" in texts
    assert "model.num_slots (kind stack_rnn)\n" in texts


def test_symbols_of_the_paper_find_their_keys_and_unknown_keys_are_reported():
    keys = {"d_s": "head_dim", "S": "num_slots", "H": "num_heads", "slot_size": "head_dim", "lambda": "entropy_weight"}
    assert [s for s, key in keys.items() if f"model.memory.{key} (kind stack)\n" not in explain(s)] == []
    with pytest.raises(ConfigError, match=r"no such key; did you mean 'model.memory.num_slots'\?"):
        explain("model.memory.num_slot")
