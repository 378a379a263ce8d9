"""Config keys and values of earlier versions, and the errors that name the current ones."""

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
    section = next((old for old in REMOVED_KEYS if f"{key}.".startswith(f"{old}.")), None)
    return f"removed; {REMOVED_KEYS[section]}" if section else ""


def explain_old_value(key: str, value: Any) -> str:
    """Return the fix for a value of an earlier version, or "" if the value was never valid."""
    new = RENAMED_VALUES.get((key, value)) if isinstance(value, str) else None
    return f"{value!r} was renamed; use {new!r}" if new else ""
