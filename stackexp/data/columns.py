"""Columns of JSON Lines and parquet files: the text of a document, and filters on the other columns."""

import operator
import re
from dataclasses import dataclass
from typing import Any

COMPARISONS = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
EQUALITY = ("==", "!=")
FILTER = re.compile(r"\s*([^=!<>]*[^=!<>\s])\s*(==|!=|>=|<=|>|<)\s*([^=!<>\s].*?)\s*", re.DOTALL)


@dataclass(frozen=True)
class Filter:
    """A condition on a column, such as int_score>=3. Documents that do not fulfill it are left out."""

    column: str  # a.b is the field b of the column a
    comparison: str
    value: str

    def __str__(self) -> str:
        is_plain = re.fullmatch(r"[^=!<>\s\"'](.*\S)?", self.value, re.DOTALL)
        return f"{self.column}{self.comparison}" + (self.value if is_plain else f'"{self.value}"')

    @property
    def number(self) -> int | float | None:
        """The value as a number, or None if it is not one."""
        for kind in (int, float):
            try:
                return kind(self.value)
            except ValueError:
                continue
        return None

    def find_mismatch(self, kind: str) -> str | None:
        """Return why values of a kind cannot be compared, or None.

        Kinds are "number", "text", "null" (a column without any value) and names of others.
        """
        if kind == "number":
            return f"{self.column} is a number, {self.value!r} is not" if self.number is None else None
        if kind == "text":
            is_ordered_number = self.number is not None and self.comparison not in EQUALITY
            return f"{self.column} is text, which {self.comparison} compares as letters" if is_ordered_number else None
        return None if kind == "null" else f"{self.column} is of type {kind}, neither number nor text"

    def accepts(self, value: Any) -> bool:
        """Return True if a number or a text fulfills the condition; None and NaN never do."""
        if value is None or value != value:
            return False
        reference: Any = self.value if isinstance(value, str) else self.number
        return COMPARISONS[self.comparison](value, reference)


@dataclass(frozen=True)
class Columns:
    """The columns that are read: the document's text, and those of the filters, which must all be fulfilled."""

    text: str = "text"
    filters: tuple[Filter, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return what differs from the defaults, for plan.json."""
        record: dict[str, Any] = {"text column": self.text} if self.text != "text" else {}
        return record | ({"filter": [str(condition) for condition in self.filters]} if self.filters else {})


ALL_TEXT = Columns()


def parse_filter(text: str) -> Filter:
    """Parse COLUMN OPERATOR VALUE; quotes around the value are removed. Raises ValueError for anything else."""
    match = FILTER.fullmatch(text)
    if not match:
        raise ValueError(f"expected COLUMN OPERATOR VALUE, quoted, such as 'int_score>=3', found {text!r}")
    column, comparison, value = match.groups()
    return Filter(column, comparison, re.sub(r"""^(["'])(.*)\1$""", r"\2", value, flags=re.DOTALL))


def get_value(record: Any, column: str) -> Any:
    """Return the value of a column in a JSON object. Raises KeyError or TypeError if it has none."""
    if column in record:
        return record[column]
    for key in column.split("."):
        record = record[key]
    return record


def name_kind(value: Any) -> str:
    """Return "number", "text" or the type's name of a JSON value."""
    if isinstance(value, bool):
        return "boolean"
    return "text" if isinstance(value, str) else "number" if isinstance(value, int | float) else type(value).__name__
