"""The contents of result.json."""

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any

from stackexp.files import has_valid_sha256

RESULT_VERSION = 1


class NewerVersionError(ValueError):
    """A result.json that a later version of stackexp wrote."""


@dataclass(frozen=True)
class RunResult:
    """The final results of a run.

    `train_loss` has the keys first and last_20_steps. `figures` depend on the objective: `sets` and `average` with the
    scores of named sets, or accuracy by length. Fields that are missing from a file of an earlier version are None.
    """

    steps: int | None
    tokens: int | None
    parameters: int | None
    memory_parameters: int | None
    train_loss: dict[str, float] | None
    seconds: float | None  # of all sessions, without steps that a kill lost
    seconds_of_last_session: float | None
    figures: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of result.json: the fields, the items of `figures`, and the version."""
        fields = {key: value for key, value in vars(self).items() if key != "figures" and value is not None}
        return {"version": RESULT_VERSION} | fields | self.figures

    @classmethod
    def from_dict(cls, contents: Any) -> "RunResult":
        """Build a result from the contents of a result.json. Raises ValueError for damage or a newer version."""
        if not isinstance(contents, dict):
            raise ValueError(f"expected an object, found {contents!r:.60}")
        version = contents.get("version", 0)
        if not isinstance(version, int):
            raise ValueError(f"version is {version!r:.60}")
        if version > RESULT_VERSION:
            raise NewerVersionError(f"version {version} is newer than this stackexp; update it")
        if "sha256" in contents and not has_valid_sha256(contents):  # earlier versions wrote none
            raise ValueError("its contents differ from their sha256")
        fields = {field.name: field.type for field in dataclasses.fields(cls) if field.name != "figures"}
        for name, hint in fields.items():
            _check_type(name, contents.get(name), hint)
        for name, value in (contents.get("train_loss") or {}).items():
            _check_type(f"train_loss.{name}", value, float | None)
        figures = {key: value for key, value in contents.items() if key not in (*fields, "version", "sha256")}
        check_scores(figures)
        return cls(**{name: contents.get(name) for name in fields}, figures=figures)


def check_scores(figures: dict[str, Any]) -> None:
    """Raise ValueError unless `sets` and `average` hold numbers, as far as they are present."""
    _check_type("sets", figures.get("sets", {}), dict)
    _check_type("average", figures.get("average", {}), dict)
    named = {f"sets.{name}": scores for name, scores in figures.get("sets", {}).items()}
    for name, scores in (named | {"average": figures.get("average", {})}).items():
        _check_type(name, scores, dict)
        for key, value in scores.items():
            _check_type(f"{name}.{key}", value, float | None)
        if name in named and "loss" not in scores:
            raise ValueError(f"{name} has no loss")


def _check_type(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError unless `value` has the type; an integer is a float too."""
    types = tuple(typing.get_origin(t) or t for t in typing.get_args(hint) or (hint,))
    types += (int,) if float in types else ()
    if not isinstance(value, types) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.60}")
