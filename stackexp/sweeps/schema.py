"""The schema of a sweep's YAML, checked like that of a config, and its expansion into labeled trials."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Optional

from stackexp.config.fields import Errors, option
from stackexp.config.layers import list_options
from stackexp.config.model import PAPER_SYMBOLS
from stackexp.config.yaml_files import Leaf, read_value
from stackexp.errors import ConfigError, suggest_name
from stackexp.metric_tags import AVERAGE_LOSS


@dataclass
class Resources:
    """The resources of each trial.

    `devices` and `num_nodes` set the trainer options of the same names, where launchers read them (a trial may override
    them, as `trainer.devices` in `list`). The options from `time` on are Slurm's.
    """

    devices: Optional[int] = option(None, min=1)  # per node; None: as in the config
    num_nodes: Optional[int] = option(None, min=1)  # None: as in the config
    trials_per_gpu: int = option(1, min=1)  # more for models that are too small to fill a GPU
    time: Optional[str] = None  # sbatch --time, such as 1-12:00:00
    partition: Optional[str] = None
    account: Optional[str] = None
    qos: Optional[str] = None
    gres: Optional[str] = None  # such as gpu:h100:8
    cpus_per_task: Optional[int] = option(None, min=1)  # a task is one device
    signal_seconds: int = option(180, min=30)  # from the warning to the time limit: to save, then to requeue the job

    def find_errors(self) -> Errors:
        """Check the time limit."""
        if self.time is not None and not re.fullmatch(r"(\d+-)?\d+:\d\d(:\d\d)?", self.time):
            quotes = " (in quotes: YAML reads 24:00:00 as a number)" if self.time.isdecimal() else ""
            yield "time", f"expected '24:00:00' or '1-12:00:00'{quotes}, found {self.time!r}"


@dataclass
class Space:
    """The values of one key in a search: a list, or a range from `low` to `high`."""

    values: Optional[list[Any]] = None
    low: Optional[float] = None
    high: Optional[float] = None
    log: bool = False  # log-uniform
    int: bool = False

    def contains(self, value: Any) -> bool:
        """Return True if a search may draw `value`."""
        if self.values is not None:
            return value in self.values
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and self.low is not None and self.high is not None and self.low <= value <= self.high

    def find_errors(self) -> Errors:
        """Check that there are values, or a valid range."""
        if self.values is not None:
            if self.low is not None or self.high is not None or not self.values:
                yield "values", "expected at least one value, or low and high instead"
        elif self.low is None or self.high is None or not self.low < self.high:
            yield "low", "expected values: [...], or low and high with low < high"
        elif self.log and self.low <= 0:
            yield "low", f"expected a number > 0 with log: true, found {self.low}"
        elif self.int and not (self.low.is_integer() and self.high.is_integer()):
            yield "low", f"expected integers with int: true, found {self.low} and {self.high}"


def find_space_errors(spaces: Mapping[str, Space]) -> Errors:
    """Check that there are keys to search, and the space of each."""
    if not spaces:
        yield "space", "name at least one key with its values"
    for key, space in spaces.items():
        yield from ((f"space.{key}.{name}", message) for name, message in space.find_errors())


@dataclass
class Prune:
    """Successive halving: at steps min_steps * reduction_factor**k, the best 1/reduction_factor of trials continue."""

    reduction_factor: int = option(3, min=2)
    min_steps: int = option(100, min=1)
    # A tag of metrics.jsonl. Higher is better if its name contains "accuracy". train/loss is averaged over 20 steps.
    metric: str = AVERAGE_LOSS


@dataclass
class Search:
    """Search: new trials are drawn near the best earlier ones (`tpe`), or independently of them (`random`)."""

    kind: Literal["tpe", "random"] = "tpe"
    trials: int = option(50, min=1)
    seed: int = option(0, min=0)  # seed of the sampler
    space: dict[str, Space] = field(default_factory=dict)
    prune: Optional[Prune] = None

    def find_errors(self) -> Errors:
        """Check the search space."""
        yield from find_space_errors(self.space)


@dataclass
class SweepConfig:
    """A sweep. Its trials are the product of `grid`, `axes`, `list` and `seeds`; each of these is optional.

    Their keys and values are overrides of the config (`model.memory.num_heads: [1, 2]`, `model.memory: [queue, null]`).
    Two keys belong to the sweep: `config` (base configs) and `tokens` (the token budget of a trial).
    """

    name: Optional[str] = None  # the sweep's folder is <logging.root>/<name>; None: the file's name
    config: Any = None  # one or several base configs, names or paths
    folder: Optional[str] = None  # paths of configs are relative to it; None: to the sweep's file
    overrides: list[str] = field(default_factory=list)  # KEY=VALUE, for every trial
    command_line: list[str] = field(default_factory=list)  # of the last `sweep run`; only in the copy
    seeds: list[int] = field(default_factory=list)
    tokens: Optional[float] = option(None, above=0)  # budget of each trial; trainer.max_steps follows from it
    objective: str = "average.loss"  # path into result.json
    direction: Literal["minimize", "maximize"] = "minimize"
    resources: Resources = field(default_factory=Resources)
    retries: int = option(0, min=0)  # retries of a failed trial within one `sweep run`
    search: Optional[Search] = None
    grid: dict[str, list[Any]] = field(default_factory=dict)  # every combination of the values
    axes: dict[str, list[Any]] = field(default_factory=dict)  # vary one key at a time, the others at the center
    center: dict[str, Any] = field(default_factory=dict)  # also the fixed values in figures of a grid
    list: "list[dict[str, Any]]" = field(default_factory=list)  # one trial each: `name`, and its keys

    def find_errors(self) -> Errors:
        """Check the direction, the axes, the name, and that no key is set twice."""
        if self.direction == "minimize" and re.search("accuracy|^score_", self.objective):
            yield "objective", f"{self.objective} is an accuracy; set direction: maximize"
        yield from self._find_duplicate_keys()
        for key in self.axes.keys() - self.center.keys():
            yield f"axes.{key}", f"no center; set center.{key}, its value while other axes vary"
        for key in self.center.keys() - self.axes.keys() - self.grid.keys():
            yield f"center.{key}", f"no axis or grid has this name{suggest_name(key, [*self.axes, *self.grid])}"
        if self.name is not None and not re.fullmatch(r"[\w+-][\w.+-]*(/[\w+-][\w.+-]*)*", self.name):
            yield "name", f"{self.name!r} cannot name a folder; use letters, digits and . _ - + between slashes"

    def _find_duplicate_keys(self) -> Errors:
        options: dict[str, set[str]] = {"seeds": {"seed"} if self.seeds else set()}
        for section, searched in {"grid": self.grid, "axes": self.axes}.items():
            for key, values in searched.items():
                if not values:
                    yield f"{section}.{key}", "expected at least one value"
            options[section] = {
                x for key, found in searched.items() for value in found for x in list_options({key: value})
            }
        options["list"] = {x for entry in self.list for x in list_options(entry)} - {"name"}
        for (_, first), (section, second) in itertools.combinations(options.items(), 2):
            for key in sorted(first & second):
                yield section, f"{key} is set by two of grid, axes, list and seeds"
        names = [(_join_label([_format_word(x["name"])]), x.get("seed")) for x in self.list if "name" in x]
        for name, seed in dict.fromkeys(names):
            if names.count((name, seed)) > 1:
                yield "list", f"{name} is the name of two entries"
        if self.search and any(options.values()):
            yield "search", "a search chooses its own trials; remove grid, axes, list and seeds"


# Trials

MAX_LABEL = 120

Values = dict[str, Any]
"""Searched config key -> value."""


def expand(config: SweepConfig) -> list[tuple[str, Values]]:
    """Return (label, values) of every trial: the product of grid, axes, list and seeds."""
    grid = [dict(zip(config.grid, values, strict=True)) for values in itertools.product(*config.grid.values())]
    seeds = [{"seed": seed} for seed in config.seeds]
    names = shorten_keys([*config.grid, *config.axes, *(key for entry in config.list for key in entry), "seed"])
    trials = []
    for entry, cell, point, seed in itertools.product(config.list or [{}], grid, _expand_axes(config), seeds or [{}]):
        listed = {key: value for key, value in entry.items() if key != "name"}
        searched = cell | point | seed
        words = [_format_word(entry["name"])] if "name" in entry else _format_values(listed, names)
        trials.append((_join_label([*words, *_format_values(searched, names)]), listed | searched))
    return trials


def _expand_axes(config: SweepConfig) -> list[Values]:
    """Return the center, and every value of each axis with the other axes at the center."""
    center = {key: config.center[key] for key in config.axes}
    points = [center] + [center | {key: value} for key, values in config.axes.items() for value in values]
    return [point for i, point in enumerate(points) if point not in points[:i]]


def list_extremes(space: dict[str, Space]) -> list[Values]:
    """Return the points that vary one key at a time over its choices, or over the ends of its range."""
    if not space:
        return []
    choices = {key: s.values or [int(x) if s.int else x for x in (s.low or 0, s.high or 0)] for key, s in space.items()}
    first = {key: values[0] for key, values in choices.items()}
    return [first, *(first | {key: value} for key, values in choices.items() for value in values[1:])]


def format_label(values: Values) -> str:
    """Return a readable trial name, such as `H=4-S=24`."""
    return _join_label(_format_values(values, shorten_keys(values)))


def shorten_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return key -> the paper's symbol, or the shortest ending that is unique among the keys."""
    keys = list(dict.fromkeys(keys))
    plain = [key for key in keys if key not in PAPER_SYMBOLS]
    return {key: PAPER_SYMBOLS.get(key) or _shortest_ending(key, plain) for key in keys}


def _shortest_ending(key: str, keys: list[str]) -> str:
    parts = key.split(".")
    endings = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
    return next((end for end in endings if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key)


def format_value(value: Any) -> str:
    """Return a value as override text that parses back to the same value."""
    if isinstance(value, str):
        try:
            if read_value(value, "") == Leaf(value, ""):
                return value
        except ConfigError:
            pass
    return json.dumps(value, default=str)


def _format_values(values: Values, names: dict[str, str]) -> list[str]:
    return [f"{names[key]}={_format_word(value)}" for key, value in values.items()]


def _format_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str).replace("null", "none")


def _join_label(words: list[str]) -> str:
    return re.sub(r"[^\w.+=-]+", "_", "-".join(words) or "trial")[:MAX_LABEL]
