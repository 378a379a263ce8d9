"""Config keys of earlier versions: errors for them, and the translation of old run folders and checkpoints."""

from collections.abc import Mapping
from typing import Any

RENAMED_KEYS = {
    "data.download_timeout": "data.download_timeout_seconds",
    "data.keep_remainder": "data.score_remainder",
    "model.memory.action_noise_steps": "model.memory.action_noise_warmup_steps",
    "model.memory.keep_every": "model.memory.checkpoint_every_layers",
    "trainer.checkpoint_minutes": "trainer.checkpoint_interval_minutes",
    "trainer.collective_timeout": "trainer.collective_timeout_seconds",
}
RENAMED_VALUES = {("model.positional", "sin_cos"): "sinusoidal"}
REMOVED_KEYS = {"beside": "run a sweep instead", "model.memory.constrained": "true is now model.memory=mhc"}


def explain_old_key(key: str) -> str:
    """Return the fix for a key of an earlier version, or "" if the key never existed."""
    if key in RENAMED_KEYS:
        return f"renamed; use {RENAMED_KEYS[key]}"
    section = _find_removed(key)
    return f"removed; {REMOVED_KEYS[section]}" if section else ""


def explain_old_value(key: str, value: Any) -> str:
    """Return the fix for a value of an earlier version, or "" if the value was never valid."""
    return f"{value!r} was renamed; use {RENAMED_VALUES[key, value]!r}" if _is_old_value(key, value) else ""


def translate_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate {full key: value} of an earlier version to the current names."""
    translated = {}
    for key, value in options.items():
        if not _find_removed(key):
            name = RENAMED_KEYS.get(key, key)
            translated[name] = RENAMED_VALUES[name, value] if _is_old_value(name, value) else value
    return translated


def _find_removed(key: str) -> str | None:
    return next((old for old in REMOVED_KEYS if f"{key}.".startswith(f"{old}.")), None)


def _is_old_value(key: str, value: Any) -> bool:
    return isinstance(value, str) and (key, value) in RENAMED_VALUES
