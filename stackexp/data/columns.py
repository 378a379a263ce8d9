"""Columns of JSON Lines and parquet files: the text of a document, and filters on the other columns."""

import operator
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

COMPARISONS = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
FILTER = re.compile(r"\s*([^=!<>]*[^=!<>\s])\s*(==|!=|>=|<=|>|<)\s*([^=!<>\s].*?)\s*", re.DOTALL)


@dataclass(frozen=True)
class Filter:
    """A condition on a column, such as int_score>=3. Documents that do not satisfy it are left out."""

    column: str  # a.b is the field b of the column a
    comparison: str
    value: str

    def __str__(self) -> str:
        is_plain = re.fullmatch(r"[^=!<>\s\"'](.*\S)?", self.value, re.DOTALL)
        return f"{self.column}{self.comparison}" + (self.value if is_plain else f'"{self.value}"')

    def parse_number(self, kind: type) -> Any:
        """Return the value as a number to compare with numbers of this kind, or None if it is not a number."""
        for number in {int: (int, float), Decimal: (Decimal,)}.get(kind, (float,)):
            try:
                return number(self.value)
            except (ValueError, ArithmeticError):
                continue
        return None

    def accepts(self, value: Any) -> bool:
        """Return True if a number or a string satisfies the condition; None and NaN never do.

        Raises ValueError with the reason if the value cannot be compared.
        """
        if value is None or value != value:
            return False
        if isinstance(value, str):
            if self.comparison not in ("==", "!=") and self.parse_number(float) is not None:
                raise ValueError(f"{self.column} is text, which {self.comparison} compares as letters")
            return COMPARISONS[self.comparison](value, self.value)
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            raise ValueError(f"{self.column} is of type {type(value).__name__}, neither number nor text")
        if (reference := self.parse_number(type(value))) is None:
            raise ValueError(f"{self.column} is a number, {self.value!r} is not")
        return COMPARISONS[self.comparison](value, reference)


@dataclass(frozen=True)
class Columns:
    """The columns that are read: the document's text, and those of the filters, which must all be satisfied."""

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
    """Return the value of a column in a record, None in a parent that is null.

    Raises KeyError or TypeError if the record has no such column.
    """
    if column in record:
        return record[column]
    for key in column.split("."):
        if record is None:
            return None
        record = record[key]
    return record
