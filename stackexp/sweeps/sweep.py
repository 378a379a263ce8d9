"""Load a sweep's YAML and compose its trials. Imports no torch; every mistake is a ConfigError."""

import dataclasses
import math
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from stackexp.config.affects import flatten_config
from stackexp.config.compose import build_dataclass, compose, load_config
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.layers import find_origin, list_sections, split_overrides
from stackexp.config.registry import find_trusted_file
from stackexp.config.yaml_files import Leaf, Tree, display_path, read_file, read_value
from stackexp.errors import ConfigError, suggest_name
from stackexp.runs import RunFolder
from stackexp.sweeps.grid import Values, expand, format_value, list_extremes
from stackexp.sweeps.schema import SweepConfig
from stackexp.sweeps.shipped import get_shipped_folder, list_shipped
from stackexp.sweeps.trials import Trial, compute_config_hash

COPY = "sweep.yaml"
"""The sweep's folder holds a copy of the sweep under this name."""
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

    @property
    def name(self) -> str:
        """The configured name, or the name of the file: relative to the shipped sweeps if it is one of them."""
        if self.config.name:
            return self.config.name
        path, shipped = self.path.resolve(), get_shipped_folder().resolve()
        return path.relative_to(shipped).with_suffix("").as_posix() if path.is_relative_to(shipped) else path.stem

    @cached_property
    def folder(self) -> Path:
        """<logging.root>/<name>; a copy of the YAML belongs to the folder that holds it."""
        return self.path.parent if self.path.name == COPY else Path(self._base.logging.root, self.name)

    @cached_property
    def trials(self) -> list[Trial]:
        """The distinct trials of grid, axes, list and seeds; for a search, the trials in its folder.

        Raises ConfigError for an invalid config, and if two labels have the same config.
        """
        if self.config.search:
            return self.find_search_trials()
        found: dict[str, tuple[str, Trial]] = {}
        for label, values in expand(self.config):
            trial = self.build_trial(values, label)
            first, _ = found.setdefault(compute_config_hash(trial.config), (label, trial))
            if first != label:
                raise ConfigError(
                    f"{display_path(self.path)}: {first} and {label} are the same trial: their configs differ in "
                    "nothing that changes the results; remove one"
                )
        return [trial for _, trial in found.values()]

    def check_trials(self) -> None:
        """Compose all trials, or for a search the extremes of its space. Raises ConfigError for an invalid trial."""
        _ = self.trials
        for values in list_extremes(self.config.search.space) if self.config.search else []:
            self.build_trial(values, "extreme")

    def build_trial(self, values: Values, label: str) -> Trial:
        """Compose the trial with these values. An existing folder with the same hash keeps its name."""
        config = self._compose(values)
        digest = compute_config_hash(config)
        path = self._existing_folders.get(digest, self.folder / f"{label}-{digest}")
        return Trial(RunFolder(path), config, values)

    @property
    def base_trial(self) -> Trial:
        """The base config as a trial, to estimate the cost of a trial."""
        return Trial(RunFolder(self.folder / "base"), self._base, {})

    @cached_property
    def _base(self) -> ExperimentConfig:
        return self._compose({})

    def find_search_trials(self, known: Collection[RunFolder] = ()) -> list[Trial]:
        """Return the trials that a search has started, except the `known` ones.

        A folder belongs to this search if its values are in the search space, and composing them gives its hash.
        """
        assert self.config.search is not None
        trials = []
        for folder in map(RunFolder, sorted(self.folder.glob("*-*/"))):
            if folder not in known and folder not in self._foreign and folder.config.is_file():
                config = load_config(folder.config)
                options = flatten_config(config)
                space = self.config.search.space
                values = {key: options[key] for key in space if key in options and space[key].contains(options[key])}
                if len(values) == len(space) and self._has_hash(folder, values):
                    trials.append(Trial(folder, config, values))
                else:
                    self._foreign.add(folder)
        return trials

    @cached_property
    def _foreign(self) -> set[RunFolder]:
        """Folders of other searches, which are not checked again."""
        return set()

    def _has_hash(self, folder: RunFolder, values: Values) -> bool:
        try:
            return folder.path.name.endswith(compute_config_hash(self._compose(values)))
        except ConfigError:  # a trial of another search
            return False

    @cached_property
    def _existing_folders(self) -> dict[str, Path]:
        """The run folders of the trials started before, by hash."""
        return {path.name.rpartition("-")[2]: path for path in sorted(self.folder.glob("*-*/"))}

    def to_yaml(self) -> str:
        """Return the sweep as YAML with all overrides and absolute paths, so that it is valid in any folder."""
        tree = dataclasses.asdict(self.config)
        tree |= {"name": self.name, "config": self._find_configs({}), "overrides": self.all_overrides}
        kept = {key: value for key, value in tree.items() if value not in (None, [], {})}
        kept["resources"] = {key: value for key, value in tree["resources"].items() if value is not None}
        return f"# The sweep as it was last run here.\n{yaml.safe_dump(kept, sort_keys=False)}"

    @property
    def all_overrides(self) -> list[str]:
        """The overrides of the YAML, then those of the command line."""
        return [*self.config.overrides, *self.overrides]

    def _compose(self, values: Values) -> ExperimentConfig:
        """Compose the config of a trial. Errors name the line of the sweep that set the value."""
        resources = {f"trainer.{key}": getattr(self.config.resources, key) for key in ("devices", "num_nodes")}
        options = {key: value for key, value in resources.items() if value is not None}
        options |= {key: value for key, value in values.items() if key not in SWEEP_KEYS}
        overrides = [*self.all_overrides, *(f"{key}={format_value(value)}" for key, value in options.items())]
        if self.path.name == COPY:
            overrides.append(f"logging.root={format_value(str(self._get_root()))}")
        overrides += [f"name={self.name}", "logging.progress_bar=false"]
        self._check_plugins(values)
        configs, tokens = self._find_configs(values), values.get("tokens", self.config.tokens)
        keys = [*values, *(key for key, _, _ in split_overrides(self.all_overrides))]
        if tokens is not None and STEPS in keys:
            raise ConfigError(f"{display_path(self.path)}: tokens sets {STEPS}; give only one of them")
        try:
            if tokens is None:
                return compose(configs, overrides)
            config = compose(configs, [*overrides, f"{STEPS}={ENDLESS}"])  # only to read the batch size
            steps = math.ceil(float(tokens) / config.data.global_batch_tokens)
            return compose(configs, [*overrides, f"{STEPS}={steps}"])
        except ConfigError as error:
            raise ConfigError(self._locate_error(str(error), values)) from None

    def _check_plugins(self, values: Values) -> None:
        """Raise ConfigError for a plugin that is not trusted; a trial reads those of the command line from a file."""
        own = [*self.all_overrides, *(f"{key}={format_value(value)}" for key, value in values.items())]
        for key, text, origin in split_overrides(own):
            names = read_value(text, origin) if key == "plugins" else None
            for name in names.value if isinstance(names, Leaf) and isinstance(names.value, list) else []:
                find_trusted_file(Leaf(str(name), display_path(self.path)), Path())

    def _get_root(self) -> Path:
        """Return the root of the copied sweep's folder <root>/<name>; a name may contain slashes."""
        parents = self.path.parents
        return parents[min(1 + self.name.count("/"), len(parents) - 1)]

    def _find_configs(self, values: Values) -> list[str]:
        """Return the base configs. A path is relative to the sweep's file, or to the working directory."""
        names = values.get("config", self.config.config)
        paths = {name: self.path.parent / name for name in ([names] if isinstance(names, str) else names)}
        is_file = {name: path.suffix in (".yaml", ".yml") and path.is_file() for name, path in paths.items()}
        return [str(path.resolve()) if is_file[name] else name for name, path in paths.items()]

    def _locate_error(self, message: str, values: Values) -> str:
        """Replace the overrides in an error of `compose` by the lines of this sweep that they come from."""
        resources = {f"trainer.{key}": value for key, value in dataclasses.asdict(self.config.resources).items()}
        own = dict.fromkeys(self.config.overrides, "overrides")
        own |= {f"{key}={format_value(value)}": key for key, value in (resources | values).items()}
        for override, key in own.items():
            message = message.replace(f"override {override}", self.origins.get(key, f"override {override}"))
        has_origin = message.startswith(("override ", f"{display_path(self.path)}:"))
        return message if has_origin else f"{display_path(self.path)}: {message}"


def load_sweep(target: str, overrides: Iterable[str] = ()) -> Sweep:
    """Load a sweep by name, file or folder and check everything except its trials. Raises ConfigError."""
    path = _find_sweep(target)
    _, tree = read_file(path)
    if "config" not in tree:
        raise ConfigError(
            f"{display_path(path)}: config: missing; name the base config of the trials, or a list of them"
        )
    config = build_dataclass(SweepConfig, tree)
    sweep = Sweep(path, config, _find_origins(config, tree), tuple(overrides))
    for key, _, origin in split_overrides(sweep.all_overrides):
        if key in sweep.origins:
            raise ConfigError(f"{origin}: the sweep sets {key} at {sweep.origins[key]}; change it there")
        if key == "name":
            raise ConfigError(f"{origin}: the sweep names its trials; set name: in {display_path(path)}")
    for key in config.search.space if config.search else []:
        if key in (*list_sections(), *SWEEP_KEYS):
            raise ConfigError(f"{sweep.origins[key]}: {key}: a search takes single options, such as optimizer.lr")
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
    same: dict = {"name": None, "config": sweep.config.config, "overrides": []}  # the copy has them in another form
    if dataclasses.replace(last.config, **same) == dataclasses.replace(sweep.config, **same):
        return last
    note = f"note: {display_path(sweep.path)} differs from the last run, {display_path(last.path)}"
    print(note, file=sys.stderr)
    return load_sweep(target, [own for own in last.config.overrides if own not in sweep.config.overrides])


def _find_sweep(target: str) -> Path:
    """Return the YAML of a sweep's folder, a shipped name or a path. Raises ConfigError with the nearest name."""
    if Path(target, COPY).is_file():
        return Path(target, COPY)
    names = list_shipped()
    if target in names:
        return get_shipped_folder() / f"{target}.yaml"
    if Path(target).is_file():
        return Path(target)
    if target.endswith((".yaml", ".yml")):
        raise ConfigError(f"{target}: no such file; give a shipped name, a YAML file or a sweep's folder")
    hint = suggest_name(target, names) or f"; shipped names: {', '.join(names)}"
    raise ConfigError(f"unknown sweep {target!r}; give a YAML file, a sweep's folder or a shipped name{hint}")


def _find_origins(config: SweepConfig, tree: Tree) -> dict[str, str]:
    """Return the file and line of each searched key, and of `overrides`."""
    named = {"seed": "seeds", "tokens": "tokens", "overrides": "overrides"}
    origins = {key: find_origin(tree[name]) for key, name in named.items() if name in tree}
    origins |= {f"trainer.{key}": leaf.origin for key, leaf in tree.get("resources", {}).items()}
    searched = [tree[name] for name in ("center", "axes", "grid") if name in tree]
    searched += [tree["search"]["space"]] if config.search else []
    origins |= {key: find_origin(value) for section in searched for key, value in section.items()}
    return origins | {key: find_origin(tree["list"]) for entry in config.list for key in entry}
