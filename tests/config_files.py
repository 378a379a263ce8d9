"""A base config, config files and sweeps of it, and error lines."""

from pathlib import Path

import pytest
import yaml

from stackexp.config.compose import compose, to_yaml
from stackexp.errors import ConfigError
from stackexp.files import write_hashed_json
from stackexp.sweeps.sweep import Sweep, load_sweep
from stackexp.sweeps.trials import Trial

BASE = str(Path(__file__).with_name("base.yaml"))


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")
    return name


def compose_error(configs: list[str], *overrides: str) -> str:
    """Return the error line of a composition."""
    with pytest.raises(ConfigError) as caught:
        compose(configs, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def build_sweep(*overrides: str, **keys: object) -> Sweep:
    """Write a sweep of the base config with these keys to study.yaml, and load it."""
    return load_sweep(write("study.yaml", yaml.safe_dump({"config": BASE} | keys, sort_keys=False)), overrides)


def finish_trial(trial: Trial, loss: float, **result: object) -> None:
    """Write the config and the result of a trial: this validation loss, and 0.5 less in training."""
    trial.folder.path.mkdir(parents=True, exist_ok=True)
    trial.folder.config.write_text(to_yaml(trial.config))
    figures = {"version": 1, "parameters": 1000, "memory_parameters": 10, "train_loss": {"last_20_steps": loss - 0.5}}
    write_hashed_json(trial.folder.result, figures | {"average": {"loss": loss}} | result)
