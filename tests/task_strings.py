"""The written form of strings and answers of formal-language tasks."""

from collections.abc import Iterable, Sequence


def format_symbols(ids: Iterable[int], names: Sequence[str]) -> str:
    """Return the names of these ids, separated by spaces if one has several characters."""
    separator = " " if any(len(name) > 1 for name in names) else ""
    return separator.join(names[i] for i in ids)
