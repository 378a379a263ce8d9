"""A sweep's YAML -> its trials, each composed and checked. Needs no torch; every mistake is a ConfigError."""

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from stackexp.config.compose import compose, load, typed_as
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.layers import origin_of, sections, split_overrides
from stackexp.config.model import SYMBOLS
from stackexp.config.suggestions import nearest
from stackexp.config.yaml_files import Leaf, Tree, configs_folder, display, names_in, read_file, read_value
from stackexp.errors import ConfigError
from stackexp.runs import RunFolder
from stackexp.sweeps.schema import SweepConfig
from stackexp.sweeps.trials import Trial, config_hash

COPY = "sweep.yaml"
MAX_LABEL = 120


def shipped() -> Path:
    """The folder of the shipped sweeps: beside the shipped configs."""
    return configs_folder().parent / "sweeps"


def find(target: str) -> Path:
    """The YAML of a sweep's folder, of a shipped name or at a path. Raises ConfigError with the nearest name."""
    if Path(target, COPY).is_file():
        return Path(target, COPY)
    names = names_in(shipped())
    if target in names:
        return shipped() / f"{target}.yaml"
    if Path(target).is_file():
        return Path(target)
    if target.endswith((".yaml", ".yml")):
        raise ConfigError(f"there is no file {target}")
    hint = nearest(target, names) or f"; there are {', '.join(names)}"
    raise ConfigError(f"unknown sweep {target!r}{hint}, or give a YAML file or a sweep's folder")


@dataclass(frozen=True)
class Sweep:
    """A sweep as written at `path`, with the command line's overrides."""

    path: Path
    config: SweepConfig
    origins: dict[str, str]  # key of a trial -> where its values are written
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.config.name or self.path.stem

    @cached_property
    def folder(self) -> Path:
        """<logging.root>/<name>; the folder that holds a copy of the YAML is the copy's own."""
        if self.path.name == COPY:
            return self.path.parent
        return Path(self._compose({}).logging.root, self.name)

    @cached_property
    def trials(self) -> list[Trial]:
        """The trials of grid, axes, list and seeds, each once, composed and checked; of a search, those begun."""
        if self.config.search:
            return self.begun()
        found: dict[str, tuple[str, Trial]] = {}
        for label, values in points(self.config):
            trial = self.trial(values, label)
            first, _ = found.setdefault(config_hash(trial.config), (label, trial))
            if first != label:
                why = "they differ in nothing, or only in where they run"
                raise ConfigError(f"{display(self.path)}: {first} and {label} are the same trial: {why}")
        return [trial for _, trial in found.values()]

    def trial(self, values: dict[str, Any], label: str) -> Trial:
        """The trial of these values. A folder of the same hash is the same trial, whatever it was called."""
        config = self._compose(values)
        digest = config_hash(config)
        path = self.existing.get(digest, self.folder / f"{label}-{digest}")
        return Trial(RunFolder(path), config, values)

    @property
    def any_trial(self) -> Trial:
        """The base config as a trial, to know what one needs."""
        return self.trial({}, "base")

    def begun(self, known: Collection[RunFolder] = ()) -> list[Trial]:
        """The trials that a search has made, but for those known: folders whose values give the same hash again."""
        found = []
        for path in sorted(self.folder.glob("*-*/")):
            if RunFolder(path) not in known and (path / "config.yaml").is_file():
                config = load(path / "config.yaml")
                values = {key: lookup(config, key) for key in self.config.search.space}
                found += [Trial(RunFolder(path), config, values)] if self._is_of(path, values) else []
        return found

    def _is_of(self, path: Path, values: dict[str, Any]) -> bool:
        return path.name.endswith(config_hash(self._compose(values)))

    @cached_property
    def existing(self) -> dict[str, Path]:
        """hash -> run folder of what has been started before."""
        return {path.name.rpartition("-")[2]: path for path in sorted(self.folder.glob("*-*/"))}

    def copy(self) -> str:
        """The sweep as YAML that means the same elsewhere: with the command line's overrides, and paths made whole."""
        tree = dataclasses.asdict(self.config)
        tree |= {"name": self.name, "config": self._configs({}), "overrides": self.all_overrides}
        kept = {key: value for key, value in tree.items() if value not in (None, [], {})}
        kept["resources"] = {key: value for key, value in tree["resources"].items() if value is not None}
        return f"# The sweep as it was last run here.\n{yaml.safe_dump(kept, sort_keys=False)}"

    def _compose(self, values: dict[str, Any]) -> ExperimentConfig:
        resources = {f"trainer.{key}": getattr(self.config.resources, key) for key in ("devices", "num_nodes")}
        fixed = {key: value for key, value in resources.items() if value is not None}
        fixed |= {key: value for key, value in values.items() if key not in ("config", "tokens")}
        overrides = [*self.all_overrides, *(f"{key}={spelled(value)}" for key, value in fixed.items())]
        if self.path.name == COPY:
            overrides.append(f"logging.root={spelled(str(self.path.parent.parent))}")
        configs, tokens = self._configs(values), values.get("tokens", self.config.tokens)
        try:
            own = [f"name={self.name}", "logging.progress_bar=false"]
            config = compose(configs, [*overrides, *own])
            if tokens is not None:
                own.append(f"trainer.max_steps={math.ceil(float(tokens) / config.data.global_batch_tokens)}")
                config = compose(configs, [*overrides, *own])
        except ConfigError as error:
            raise ConfigError(self._located(str(error), values)) from None
        config.beside = {}  # a sweep has its trials
        return config

    @property
    def all_overrides(self) -> list[str]:
        """The YAML's, then the command line's."""
        return [*self.config.overrides, *self.overrides]

    def _configs(self, values: dict[str, Any]) -> list[str]:
        """The base configs; a path is relative to the sweep's file, or to the working directory."""
        names = values.get("config", self.config.config)
        names = [names] if isinstance(names, str) else names
        beside = [self.path.parent / name for name in names]
        return [
            str(b.resolve()) if b.suffix in (".yaml", ".yml") and b.is_file() else n
            for b, n in zip(beside, names, strict=True)
        ]

    def _located(self, message: str, values: dict[str, Any]) -> str:
        """An error of `compose`, with this sweep's lines in the place of overrides that it has made itself."""
        own = dict.fromkeys(self.config.overrides, "overrides")
        resources = {f"trainer.{key}": value for key, value in dataclasses.asdict(self.config.resources).items()}
        own |= {f"{key}={spelled(value)}": key for key, value in (resources | values).items()}
        for override, key in own.items():
            message = message.replace(f"override {override}", self.origins.get(key, f"override {override}"))
        named = message.startswith(("override ", f"{display(self.path)}:"))
        return message if named else f"{display(self.path)}: {message}"


def read(target: str, overrides: Iterable[str] = ()) -> Sweep:
    """The sweep of a name, path or folder, checked but for its trials. Raises ConfigError."""
    path = find(target)
    _, tree = read_file(path)
    if "config" not in tree:
        raise ConfigError(f"{display(path)}: config: name the base config of the trials, or a list of them")
    config = typed_as(SweepConfig, tree)
    sweep = Sweep(path, config, _origins(config, tree), tuple(overrides))
    for key, _, origin in split_overrides(sweep.all_overrides):
        if key in sweep.origins:
            raise ConfigError(f"{origin}: the sweep itself sets {key} at {sweep.origins[key]}; change it there")
        if key == "name":
            raise ConfigError(f"{origin}: trials are named by the sweep; set name: in {display(path)}")
    for key in config.search.space if config.search else []:
        if key in (*sections(), "config", "tokens"):
            raise ConfigError(f"{sweep.origins[key]}: {key}: a search takes plain keys, such as optimizer.lr; use list")
    return sweep


def _origins(config: SweepConfig, tree: Tree) -> dict[str, str]:
    """Searched key -> where it stands in the sweep's file; `overrides` too."""
    sections = [tree[name] for name in ("center", "axes", "grid") if name in tree]
    sections += [tree["search"]["space"]] if config.search else []
    origins = {key: origin_of(value) for section in sections for key, value in section.items()}
    origins |= {key: origin_of(tree["list"]) for entry in config.list for key in entry}
    named = {"seed": "seeds", "tokens": "tokens", "overrides": "overrides"}
    around = {key: origin_of(tree[name]) for key, name in named.items() if name in tree}
    around |= {f"trainer.{key}": leaf.origin for key, leaf in tree.get("resources", {}).items()}
    return around | origins


def points(config: SweepConfig) -> list[tuple[str, dict[str, Any]]]:
    """(label, key -> value) of every trial: grid x axes x list x seeds."""
    grid = [dict(zip(config.grid, values, strict=True)) for values in itertools.product(*config.grid.values())]
    center = {key: config.center[key] for key in config.axes}
    axes = [center] + [center | {key: value} for key, values in config.axes.items() for value in values]
    axes = [point for i, point in enumerate(axes) if point not in axes[:i]]
    seeds = [{"seed": seed} for seed in config.seeds]
    names = short_names([*config.grid, *config.axes, *(key for entry in config.list for key in entry), "seed"])
    found = []
    for entry, cell, point, seed in itertools.product(config.list or [{}], grid, axes, seeds or [{}]):
        listed = {key: value for key, value in entry.items() if key != "name"}
        named = {} if "name" in entry else listed
        parts = [_word(entry["name"])] if "name" in entry else []
        parts += [f"{names[key]}={_word(value)}" for key, value in (named | cell | point | seed).items()]
        found.append((_label(parts), listed | cell | point | seed))
    return found


def lookup(config: Any, key: str) -> Any:
    """The value of a full key of a config."""
    return functools.reduce(getattr, key.split("."), config)


def label(values: dict[str, Any]) -> str:
    """The readable name of a trial with these values."""
    names = short_names(values)
    return _label([f"{names[key]}={_word(value)}" for key, value in values.items()])


def _label(parts: list[str]) -> str:
    return re.sub(r"[^\w.+=-]+", "_", "-".join(parts) or "trial")[:MAX_LABEL]


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """key -> the paper's symbol, or as many of its last parts as tell it from the other keys."""
    keys, names = list(dict.fromkeys(keys)), {}
    plain = [key for key in keys if key not in SYMBOLS]
    for key in keys:
        parts = key.split(".")
        tails = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        alone = (tail for tail in tails if sum(f".{other}".endswith(f".{tail}") for other in plain) == 1)
        names[key] = SYMBOLS.get(key) or next(alone)
    return names


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value).replace("null", "none")


def spelled(value: Any) -> str:
    """A value as the text of an override that reads as this value."""
    if isinstance(value, str):
        try:
            if read_value(value, "") == Leaf(value, ""):
                return value
        except ConfigError:
            pass
    return json.dumps(value)
