"""Load a sweep's YAML and compose its trials. Imports no torch; every mistake is a ConfigError."""

import copy
import dataclasses
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from stackexp.config.affects import flatten_config
from stackexp.config.compose import build_dataclass, compose, load_config
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.layers import (
    LocatedOverride,
    find_config,
    find_origin,
    get_shipped_folder,
    list_config_names,
    list_options,
    list_sections,
    list_shipped,
    read_overrides,
    split_overrides,
)
from stackexp.config.registry import find_trusted_file
from stackexp.config.yaml_files import Leaf, Tree, display_path, read_file, read_purpose, read_value
from stackexp.errors import ConfigError, suggest_name
from stackexp.runs import RunFolder
from stackexp.sweeps.schema import SweepConfig, Values, expand, format_value, list_extremes
from stackexp.sweeps.trials import Trial, compute_config_hash

COPY = "sweep.yaml"
"""The sweep's folder holds a copy of the sweep under this name."""
PURPOSE = "The sweep as it was last run here."
"""The first line of a copy. A user's own file may have the same name."""
SWEEP_KEYS = ("config", "tokens")
"""Keys of a trial that belong to the sweep, not to the config."""
STEPS = "trainer.max_steps"
ENDLESS = 10**15
"""More steps than any run has, for a config whose number of steps is not known yet."""


@dataclass(frozen=True)
class Sweep:
    """A sweep as written at `path`, with the overrides of the command line.

    `origins` maps each searched key to the file and line of its values.
    """

    path: Path
    config: SweepConfig
    origins: dict[str, str]
    overrides: tuple[str, ...] = ()
    _composed: dict[str, ExperimentConfig] = field(default_factory=dict, compare=False)  # by values without the seed
    _search_trials: dict[Path, Trial | None] = field(default_factory=dict, compare=False)  # None: not of this search

    @property
    def name(self) -> str:
        """The configured name, or the name of the file: relative to the shipped sweeps if it is one of them."""
        if self.config.name:
            return self.config.name
        path, shipped = self.path.resolve(), get_shipped_folder("sweep").resolve()
        return path.relative_to(shipped).with_suffix("").as_posix() if path.is_relative_to(shipped) else path.stem

    @cached_property
    def folder(self) -> Path:
        """<logging.root>/<name>; a copy of the YAML belongs to the folder that holds it."""
        return self.path.parent if self._is_copy else Path(self._base.logging.root, self.name)

    @cached_property
    def _is_copy(self) -> bool:
        return self.path.name == COPY and read_purpose(self.path) == PURPOSE

    @property
    def trials(self) -> list[Trial]:
        """The distinct trials of grid, axes, list and seeds; for a search, the trials in its folder.

        Raises ConfigError for an invalid config, and if two labels have the same config.
        """
        return self._find_search_trials() if self.config.search else self._listed_trials

    @cached_property
    def _listed_trials(self) -> list[Trial]:
        found: dict[str, tuple[str, Trial]] = {}
        renamed = []
        for label, values in expand(self.config):
            trial = self.build_trial(values, label)
            first, _ = found.setdefault(compute_config_hash(trial.config), (label, trial))
            if first != label:
                raise ConfigError(
                    f"{display_path(self.path)}: {first} and {label} are the same trial: their configs differ in "
                    "nothing that changes the results; remove one"
                )
            if (name := trial.name.rpartition("-")[0]) != label:
                renamed.append(f"{label} as {name}")
        if renamed:
            print(
                f"note: shown by the names of their folders, from an earlier run: {', '.join(renamed)}", file=sys.stderr
            )
        return [trial for _, trial in found.values()]

    def check_trials(self) -> None:
        """Compose all trials, or for a search the extremes of its space. Raises ConfigError for an invalid trial."""
        _ = self.trials
        for values in list_extremes(self.config.search.space) if self.config.search else []:
            self.build_trial(values, "extreme")

    def build_trial(self, values: Values, label: str) -> Trial:
        """Compose the trial with these values. An existing folder with the same hash keeps its name."""
        try:
            config = self._compose_seed(values)
        except ConfigError as error:
            if not values or error.origin in map(self._get_origin, values):  # it names the line of a value
                raise
            raise ConfigError(f"{error} (trial {label})") from error
        digest = compute_config_hash(config)
        path = self._existing_folders.get(digest, self.folder / f"{label}-{digest}")
        return Trial(RunFolder(path), config, values)

    @cached_property
    def base_trial(self) -> Trial:
        """The base config as a trial, to estimate the cost and the shape of a trial."""
        return Trial(RunFolder(self.folder / "base"), self._base, {})

    @cached_property
    def _base(self) -> ExperimentConfig:
        return self._compose({})

    def _find_search_trials(self) -> list[Trial]:
        """Return the trials that a search has started, sorted by name."""
        for path in self.folder.glob("*-*/"):
            if path not in self._search_trials and (path / "config.yaml").is_file():
                self._search_trials[path] = self._load_search_trial(RunFolder(path))
        return [trial for path, trial in sorted(self._search_trials.items()) if trial and path.exists()]

    def _load_search_trial(self, folder: RunFolder) -> Trial | None:
        """Return the trial in a folder if its values are in the search space, and composing them gives its hash."""
        assert self.config.search is not None
        config, space = load_config(folder.config), self.config.search.space
        options = flatten_config(config)
        values = {key: options[key] for key in space if key in options and space[key].contains(options[key])}
        if len(values) < len(space):
            return None
        try:
            digest = compute_config_hash(self._compose(values))
        except ConfigError:
            return None
        return Trial(folder, config, values) if folder.path.name.endswith(digest) else None

    @cached_property
    def _existing_folders(self) -> dict[str, Path]:
        """The run folders of the trials started before, by hash."""
        return {path.name.rpartition("-")[2]: path for path in sorted(self.folder.glob("*-*/"))}

    def to_yaml(self) -> str:
        """Return the sweep as YAML with all overrides and the absolute paths of configs and plugins."""
        own = [*self.config.command_line, *self.overrides]
        tree = dataclasses.asdict(_locate_plugins(dataclasses.replace(self.config, command_line=own)))
        tree |= {"name": self.name, "folder": str(self._config_folder.resolve())}
        kept = {key: value for key, value in tree.items() if value not in (None, [], {})}
        kept["resources"] = {key: value for key, value in tree["resources"].items() if value is not None}
        return f"# {PURPOSE}\n{yaml.safe_dump(kept, sort_keys=False)}"

    @property
    def all_overrides(self) -> list[str]:
        """The overrides of the YAML, then those of the command line."""
        return [*self.config.overrides, *self.config.command_line, *self.overrides]

    def _compose_seed(self, values: Values) -> ExperimentConfig:
        """Compose the config of a trial, or copy that of a trial with another seed, which is faster."""
        key, seed = str(values | {"seed": None}), values.get("seed")
        base = self._composed.get(key)
        if base and type(seed) is int and 0 <= seed < 2**32 and "seed" not in base.interpolated_keys:
            config = copy.deepcopy(base)
            config.seed = seed
            return config
        self._composed[key] = config = self._compose(values)
        return config

    def _compose(self, values: Values) -> ExperimentConfig:
        """Compose the config of a trial. Errors name the line of the sweep that set the value."""
        resources = {f"trainer.{key}": getattr(self.config.resources, key) for key in ("devices", "num_nodes")}
        options = {key: value for key, value in resources.items() if value is not None}
        options |= {key: value for key, value in values.items() if key not in SWEEP_KEYS}
        overrides = [self._locate(text, "overrides") for text in self.config.overrides]
        overrides += [*self.config.command_line, *self.overrides]
        overrides += [self._locate(f"{key}={format_value(value)}", key) for key, value in options.items()]
        if self._is_copy:  # in <root>/<name>; a name may contain slashes
            parents = self.path.parents
            root = parents[min(1 + self.name.count("/"), len(parents) - 1)]
            overrides.append(f"logging.root={format_value(str(root))}")
        overrides += [LocatedOverride(f"name={self.name}", display_path(self.path)), "logging.progress_bar=false"]
        self._check_plugins(values)
        configs, tokens = self._find_configs(values), values.get("tokens", self.config.tokens)
        if tokens is None:
            return compose(configs, overrides)
        if isinstance(tokens, bool) or not isinstance(tokens, int | float) or not 0 < tokens < math.inf:
            raise ConfigError(f"tokens: expected a number > 0, found {tokens!r}", self._get_origin("tokens"))
        if STEPS in [*list_options(values), *(key for key, *_ in read_overrides(self.all_overrides))]:
            raise ConfigError(f"tokens sets {STEPS}; give only one of them", display_path(self.path))
        config = compose(configs, [*overrides, f"{STEPS}={ENDLESS}"])  # only to read the batch size
        steps = math.ceil(tokens / config.data.global_batch_tokens)
        return compose(configs, [*overrides, self._locate(f"{STEPS}={steps}", "tokens")])

    def _locate(self, override: str, key: str) -> str:
        return LocatedOverride(override, self._get_origin(key))

    def _get_origin(self, key: str) -> str:
        return self.origins.get(key, display_path(self.path))

    def _check_plugins(self, values: Values) -> None:
        """Raise ConfigError for a plugin that is not trusted; a trial reads those of the command line from a file."""
        own = [*self.all_overrides, *(f"{key}={format_value(value)}" for key, value in values.items())]
        for key, text, origin in split_overrides(own):
            names = read_value(text, origin) if key == "plugins" else None
            for name in names.value if isinstance(names, Leaf) and isinstance(names.value, list) else []:
                find_trusted_file(Leaf(str(name), display_path(self.path)), Path())

    def _find_configs(self, values: Values) -> list[str]:
        """Return the files of the base configs. Paths are relative to the sweep's file or to the working directory."""
        names = values.get("config", self.config.config)
        names = [names] if isinstance(names, str) else names
        if names is None:
            message = "config: expected the base config at the top of the file; the folder of the sweep follows from it"
            raise ConfigError(message, display_path(self.path))
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            message = f"config: expected the base config of the trials, or a list, found {names!r}"
            raise ConfigError(message, self._get_origin("config"))
        return [str(find_config(name, self.origins["config"], self._config_folder)) for name in names]

    @property
    def _config_folder(self) -> Path:
        return Path(self.config.folder or self.path.parent)


def _locate_plugins(config: SweepConfig) -> SweepConfig:
    """Return the sweep with the absolute path of each plugin file in overrides, list and grid."""

    def locate(names: Any) -> Any:
        if not isinstance(names, list):
            return names  # not valid, which composing the trial reports
        files = [[Path(str(name)), Path(f"{name}.py")] for name in names]
        found = [next((str(file.resolve()) for file in pair if file.is_file()), None) for pair in files]
        return [path or name for path, name in zip(found, names, strict=True)]

    def locate_overrides(overrides: list[str]) -> list[str]:
        split = split_overrides(overrides)
        leaves = {text: read_value(text, origin) for key, text, origin in split if key == "plugins"}
        found = {text: format_value(locate(x.value)) for text, x in leaves.items() if isinstance(x, Leaf)}
        return [f"{key}={found[text] if key == 'plugins' else text}" for key, text, _ in split] if found else overrides

    return dataclasses.replace(
        config,
        overrides=locate_overrides(config.overrides),
        command_line=locate_overrides(config.command_line),
        list=[{k: locate(v) if k == "plugins" else v for k, v in entry.items()} for entry in config.list],
        grid={k: list(map(locate, v)) if k == "plugins" else v for k, v in config.grid.items()},
    )


def load_sweep(target: str, overrides: Iterable[str] = ()) -> Sweep:
    """Load a sweep by name, file or folder and check everything except its trials. Raises ConfigError."""
    path = _find_sweep(target)
    _, tree = read_file(path)
    if "arms" in tree:
        shown = display_path(path)
        raise ConfigError(f"{shown}: arms: a question, not a sweep; run: python -m stackexp verdict {shown}")
    config = build_dataclass(SweepConfig, tree)
    sweep = Sweep(path, config, _find_origins(config, tree), tuple(overrides))
    for key, _, _, origin in read_overrides(sweep.all_overrides):
        if key in sweep.origins:
            raise ConfigError(f"the sweep sets {key} at {sweep.origins[key]}; change it there", origin)
        if key == "name":
            raise ConfigError(f"the sweep names its trials; set name: in {display_path(path)}", origin)
    for key in config.search.space if config.search else []:
        if key in (*list_sections(), *SWEEP_KEYS):
            raise ConfigError(f"{key}: a search takes single options, such as optimizer.lr", sweep.origins[key])
    return sweep


def load_last_run(target: str, overrides: Iterable[str] = ()) -> Sweep:
    """Load a sweep with the command-line overrides of its last run, unless others are given.

    A file that has changed since then, or another of the same name, is read as it is now.
    """
    overrides = tuple(overrides)
    sweep = load_sweep(target, overrides)
    if overrides or not (sweep.folder / COPY).is_file():
        return sweep
    last = load_sweep(str(sweep.folder))
    same: dict = {"name": None, "folder": None, "command_line": []}  # the copy has them in another form
    if dataclasses.replace(last.config, **same) == _locate_plugins(dataclasses.replace(sweep.config, **same)):
        return last
    note = f"note: {display_path(sweep.path)} differs from the last run, {display_path(last.path)}"
    print(note, file=sys.stderr)
    return load_sweep(target, last.config.command_line)


def _find_sweep(target: str) -> Path:
    """Return the YAML of a sweep's folder, a shipped name or a path. Raises ConfigError with the nearest name."""
    if Path(target, COPY).is_file():
        return Path(target, COPY)
    names = list_shipped("sweep")
    if target in names:
        return get_shipped_folder("sweep") / f"{target}.yaml"
    if target in list_config_names():
        raise ConfigError(f"{target} is a config; run it with `fit --config {target}`")
    if Path(target).is_file():
        return Path(target)
    if target.endswith((".yaml", ".yml")):
        raise ConfigError(f"{target}: no such file; give a shipped name, a YAML file or a sweep's folder")
    files = [path for path in (f"{target}.yaml", f"{target}.yml") if Path(path).is_file()]
    files += [str(path) for path in [Path("runs", target)] if (path / COPY).is_file()]
    hint = f"; did you mean {files[0]!r}?" if files else suggest_name(target, names)
    hint = hint or f"; shipped names: {', '.join(names)}"
    raise ConfigError(f"unknown sweep {target!r}; give a YAML file, a sweep's folder or a shipped name{hint}")


def _find_origins(config: SweepConfig, tree: Tree) -> dict[str, str]:
    """Return the file and line of each searched key, and of `overrides`."""
    named = {"config": "config", "seed": "seeds", "tokens": "tokens", "overrides": "overrides"}
    origins = {key: find_origin(tree[name]) for key, name in named.items() if name in tree}
    sections = {name: tree[name] for name in ("resources", "center", "axes", "grid", "search") if name in tree}
    sections = {name: section for name, section in sections.items() if isinstance(section, dict)}  # not empty
    origins |= {f"trainer.{key}": find_origin(leaf) for key, leaf in sections.pop("resources", {}).items()}
    if search := sections.pop("search", {}):
        sections["space"] = search["space"]
    origins |= {key: find_origin(value) for section in sections.values() for key, value in section.items()}
    for key, values in (config.grid | config.axes).items():
        origins |= {option: origins[key] for value in values for option in list_options({key: value})}
    listed = [option for entry in config.list for option in list_options(entry)]
    return origins | dict.fromkeys(listed, find_origin(tree["list"]) if listed else "")
