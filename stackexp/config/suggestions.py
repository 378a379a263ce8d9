"""Suggestions for misspelled names."""

import difflib
from collections.abc import Iterable


def find_closest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate most similar to `name`, or None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)), None)


def suggest_name(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean 'x'?` for the closest candidate, or an empty string."""
    found = find_closest(name, candidates, cutoff)
    return f"; did you mean {found!r}?" if found else ""
