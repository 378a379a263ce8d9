"""Config keys of earlier versions: errors in configs and overrides, silent translation in run folders."""

from pathlib import Path

import pytest
from config_files import BASE, compose_error, write

from stackexp.config.compose import load_config
from stackexp.config.renames import RENAMED_KEYS, translate_options
from stackexp.config.yaml_files import flatten, read_file

OLD_CONFIG = Path(__file__).with_name("old_run") / "config.yaml"


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_error_for_an_old_key_names_the_new_key(old, new):
    assert compose_error([BASE], f"{old}=1") == f"override {old}=1: {old}: renamed; use {new}"


def test_error_for_an_old_key_in_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = write("my.yaml", "trainer:\n  checkpoint_minutes: 5\n")
    message = "my.yaml:2: trainer.checkpoint_minutes: renamed; use trainer.checkpoint_interval_minutes"
    assert compose_error([BASE, config]) == message


def test_error_for_an_old_value_and_a_removed_key():
    assert compose_error([BASE], "model.positional=sin_cos").endswith("'sin_cos' was renamed; use 'sinusoidal'")
    assert compose_error([BASE], "beside.x=[seed=1]").endswith("beside: removed; run a sweep instead")


def test_old_run_folder_is_read_with_the_new_names():
    config = load_config(OLD_CONFIG)
    assert config.model.positional == "sinusoidal"
    assert config.model.memory.action_noise_warmup_steps == 20
    assert config.trainer.checkpoint_interval_minutes == 30
    assert config.trainer.collective_timeout_seconds == 60
    options = flatten(read_file(OLD_CONFIG)[1])
    assert options["model.memory.checkpoint_every_layers"] == 4
    assert not [key for key in options if key in RENAMED_KEYS or key.startswith("beside")]


def test_options_of_an_old_checkpoint_are_translated():
    old = {"beside": {}, "model.positional": "sin_cos", "data.keep_remainder": True, "seed": 3}
    assert translate_options(old) == {"model.positional": "sinusoidal", "data.score_remainder": True, "seed": 3}
