"""Helpers of the composition tests: a base config, config files to add, and error lines."""

from pathlib import Path

import pytest

from stackexp.config.compose import compose
from stackexp.errors import ConfigError

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
