"""A helper that defines the fields of the config schema: default, limits, and what an option affects."""

import copy
from collections.abc import Collection, Iterator
from dataclasses import field
from typing import Any, Literal

Affects = Literal["training", "continuation", "evaluation", "location", "execution", "logging"]
"""The effects of an option:

training      the trained weights; a resumed run must keep it
continuation  the trained weights, from the current step on (how long to train, what to do about loss spikes)
evaluation    what is measured, when and on what
location      where data are read from; the data themselves are compared by their hashes
execution     where and how fast a run executes, what it keeps on disk; results differ by rounding at most
logging       what is shown and recorded

Only the options of `training` must not differ on resume; the last two do not identify a trial (see `affects.py`).
"""

Errors = Iterator[tuple[str, str]]
"""Pairs (key, message), as `find_errors` of a config section yields them."""


def option(
    default: Any,
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Collection[str] | None = None,
    affects: Affects = "training",
    changes_scores: bool = False,
) -> Any:
    """Define a field of a config dataclass; a list, dict or dataclass as default is copied for each instance.

    Numbers are valid from `min` to `max`, strictly between `above` and `below`. `choices` are the valid names, where
    `Literal` cannot list them. `changes_scores`: given weights score differently on a given evaluation set; not needed
    for options of the section `model` that affect training.
    """
    limits = {"min": min, "max": max, "above": above, "below": below, "choices": choices}
    metadata = {name: limit for name, limit in limits.items() if limit is not None}
    metadata |= {"affects": affects, "changes_scores": changes_scores}
    if default.__hash__ is None:  # mutable
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)
