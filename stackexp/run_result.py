"""The contents of result.json."""

import dataclasses
from dataclasses import dataclass
from typing import Any

RESULT_VERSION = 1


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
    figures: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of result.json: the fields, the items of `figures`, and the version."""
        fields = {key: value for key, value in vars(self).items() if key != "figures" and value is not None}
        return {"version": RESULT_VERSION} | fields | self.figures

    @classmethod
    def from_dict(cls, contents: dict[str, Any]) -> "RunResult":
        """Build a result from the contents of a result.json. Raises ValueError for those of a newer version."""
        if (version := contents["version"]) > RESULT_VERSION:
            raise ValueError(f"version {version} is newer than this stackexp; update it")
        fields = [field.name for field in dataclasses.fields(cls) if field.name != "figures"]
        figures = {key: value for key, value in contents.items() if key not in (*fields, "version")}
        return cls(**{name: contents.get(name) for name in fields}, figures=figures)
