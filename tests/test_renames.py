"""Config keys of earlier versions: errors in configs and overrides that name the current key."""

import pytest
from config_files import BASE, compose_error, write

from stackexp.config.renames import RENAMED_KEYS


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
