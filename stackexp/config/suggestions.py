"""The right name nearest to a wrong one."""

import difflib
from collections.abc import Iterable


def find_closest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate most like `name`, if any is like it."""
    return next(iter(difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)), None)


def suggest_name(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?` for the closest candidate, or nothing."""
    found = find_closest(name, candidates, cutoff)
    return f"; did you mean {found!r}?" if found else ""
