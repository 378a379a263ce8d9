"""Field helpers of the config schema: defaults with limits."""

from collections.abc import Iterator
from dataclasses import field
from typing import Any

Problems = Iterator[tuple[str, str]]


def at_least(minimum: float, default: Any) -> Any:
    """A number >= minimum."""
    return field(default=default, metadata={"at_least": minimum})


def above(bound: float, default: Any) -> Any:
    """A number > bound."""
    return field(default=default, metadata={"above": bound})


def within(low: float, high: float, default: Any) -> Any:
    """A number in [low, high]."""
    return field(default=default, metadata={"within": (low, high)})


def from_up_to(low: float, bound: float, default: Any) -> Any:
    """A number in [low, bound)."""
    return field(default=default, metadata={"at_least": low, "below": bound})
