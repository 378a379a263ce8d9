"""Layers of a config: files, section choices and overrides, merged in order. Every value keeps its origin.

Order: schema defaults < files in order < section choices < overrides. A section choice is the file
configs/<section path>/<name>.yaml. It replaces a section that has a `kind`, and the validation sets. It is merged into
any other section: trainer=fsdp sets the strategy, but not the number of steps. Setting another `kind` resets a section
to the defaults of that kind.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stackexp.config.experiment import ExperimentConfig
from stackexp.config.fields import config_error
from stackexp.config.registry import SECTIONS, list_kinds, locate_class
from stackexp.config.yaml_files import (
    Leaf,
    Tree,
    display_path,
    get_configs_folder,
    list_yaml_names,
    read_file,
    read_purpose,
    read_value,
)
from stackexp.errors import ConfigError, find_closest, suggest_name

VALIDATION_SETS = "data.validation"  # not a dataclass, but files can be chosen for it; null: no sets


def list_sections() -> list[str]:
    """Return every section that files can be chosen for, such as model, model.memory and trainer."""
    typed = [f.name for f in dataclasses.fields(ExperimentConfig) if dataclasses.is_dataclass(f.type)]
    return [*SECTIONS, *typed, VALIDATION_SETS]


def build_default_tree() -> Tree:
    """Return the required sections; those with a kind contain their default kind."""
    fields = {f.name: f for f in dataclasses.fields(ExperimentConfig) if f.name in list_sections()}
    return {
        name: {"kind": Leaf(field.default_factory()["kind"], "")} if name in SECTIONS else {}  # type: ignore[misc]
        for name, field in fields.items()
    }


def get_group_folder(section: str) -> Path:
    """Return the folder of the choices for a section."""
    return get_configs_folder() / section.replace(".", "/")


def list_config_names() -> list[str]:
    """Return the names of the shipped configs. Files in the folder of a section are choices, not configs."""
    files = list_yaml_names(get_configs_folder(), "**/*.yaml")
    names = [name for name in files if name.split("/")[0] not in list_sections()]
    return sorted(names, key=lambda name: (name.count("/"), name))


def get_shipped_folder(kind: str) -> Path:
    """Return the folder of the shipped sweeps (kind `sweep`) or verdicts (`verdict`)."""
    return get_configs_folder().parent / f"{kind}s"


def list_shipped(kind: str) -> tuple[str, ...]:
    """Return the names of the shipped sweeps or verdicts, such as `ablation` and `formal/quick`."""
    return list_yaml_names(get_shipped_folder(kind), "**/*.yaml")


def list_catalog() -> list[tuple[str, str, str]]:
    """Return (kind, name, purpose) of all shipped configs, recipes, choices for sections, sweeps and verdicts.

    A recipe is a partial overlay without a dataset.
    """
    files = [("config", name, find_config(name)) for name in list_config_names()]
    for section in list_sections():
        folder = get_group_folder(section)
        files += [("choice", f"{section}={name}", folder / f"{name}.yaml") for name in list_yaml_names(folder)]
    for kind in ("sweep", "verdict"):
        files += [(kind, name, get_shipped_folder(kind) / f"{name}.yaml") for name in list_shipped(kind)]
    return [("recipe" if n.startswith("recipe/") else kind, n, read_purpose(path)) for kind, n, path in files]


def find_config(name: str, origin: str = "", folder: Path = Path()) -> Path:
    """Return the file of a config: a shipped name or a path. Raises ConfigError with the closest name."""
    if name.endswith((".yaml", ".yml")):
        return _find_file(name, folder, origin)
    names = list_config_names()
    if name in names:
        return get_configs_folder() / f"{name}.yaml"
    if Path(name).is_file():
        return Path(name)
    if name in list_shipped("sweep"):
        raise ConfigError(f"{name} is a sweep; run it with `sweep run {name}`", origin)
    files = [path for path in (f"{name}.yaml", f"{name}.yml", str(Path(name, "config.yaml"))) if Path(path).is_file()]
    known = {full.split("/")[-1]: full for full in names} | {full: full for full in names}
    found = files[0] if files else known.get(find_closest(name, known) or "")
    hint = f"did you mean {found!r}?" if found else "`configs list` shows the names"
    raise ConfigError(f"unknown config {name!r}; {hint}", origin)


def find_choice(section: str, name: str, origin: str, folder: Path) -> Path:
    """Return the file of a section choice. Raises ConfigError with the closest name."""
    if name.endswith((".yaml", ".yml")):
        return _find_file(name, folder, origin, section)
    choices = list_yaml_names(get_group_folder(section))
    if name in choices:
        return get_group_folder(section) / f"{name}.yaml"
    hint = suggest_name(name, choices)
    if name in list_kinds(SECTIONS.get(section, "")):
        hint = f"; to choose a kind, write {section}.kind={name}"
    known = f"choices: {', '.join(choices)}" if choices else "this section has no choices"
    raise ConfigError(f"{section}: unknown choice {name!r} ({known}){hint}", origin)


def _find_file(name: str, folder: Path, origin: str, key: str = "") -> Path:
    for path in (folder / name, Path(name)):
        if path.is_file():
            return path
    raise config_error(origin, key, f"{name}: file not found; correct the path")


CLASS_LISTS = (("trainer", "callbacks"), ("logging", "loggers"))
"""Options that name classes; files are relative to the config that names them, or to the working directory."""


class LocatedOverride(str):
    """An override KEY=VALUE that errors locate at `origin`, such as a line of a sweep, not on the command line."""

    origin: str

    def __new__(cls, text: str, origin: str) -> "LocatedOverride":
        """Return the text with its origin."""
        self = super().__new__(cls, text)
        self.origin = origin
        return self


class Layers:
    """The merged layers of a config: `tree` has the values, `plugins` the plugins to import before validation."""

    def __init__(self) -> None:
        self.tree = build_default_tree()
        self.plugins: list[tuple[Leaf, Path]] = []  # name and the folder it is relative to

    def add_file(self, path: Path, section: str = "", parents: tuple[Path, ...] = ()) -> None:
        """Merge a file into a section ("" for a whole config): first its `defaults:`, then its own keys.

        `parents` are the files whose `defaults:` include this file. Raises ConfigError if the file is invalid, or if
        its defaults are circular.
        """
        path = path.resolve()
        if path in parents:
            cycle = " -> ".join(display_path(p) for p in (*parents[parents.index(path) :], path))
            raise ConfigError(f"circular defaults: {cycle}", display_path(path))
        defaults, tree = read_file(path)
        for entry in defaults:
            self._add_default(entry, path.parent, section, (*parents, path))
        self._merge_at(section, tree, path.parent)

    def _add_default(self, entry: Leaf, folder: Path, section: str, parents: tuple[Path, ...]) -> None:
        """Merge one entry of a `defaults:` list: a name, or {section: name}."""
        value, origin = entry.value, entry.origin
        if isinstance(value, str):
            found = find_choice(section, value, origin, folder) if section else find_config(value, origin, folder)
            self.add_file(found, section, parents)
        elif isinstance(value, dict) and len(value) == 1:
            [(key, name)] = value.items()
            self._choose_file(f"{section}.{key}" if section else str(key), name, origin, folder, parents)
        else:
            raise ConfigError(f"defaults: expected NAME or SECTION: NAME, found {value!r}", origin)

    def _choose_file(
        self, section: str, name: object, origin: str, folder: Path = Path(), parents: tuple[Path, ...] = ()
    ) -> None:
        """Merge the file `name` into a section, or replace the section; None removes an optional section."""
        if section not in list_sections():
            raise ConfigError(f"unknown section {section!r}{suggest_name(section, list_sections())}", origin)
        parent = self.tree
        *outer, key = section.split(".")
        for part in outer:
            parent = parent[part]
        if name is None:
            parent[key] = _check_section_value(section, Leaf(None, origin))
        else:
            if section in (*SECTIONS, VALIDATION_SETS):
                parent[key] = build_default_tree().get(section, {})
            self.add_file(find_choice(section, str(name), origin, folder), section, parents)

    def add_overrides(self, arguments: list[str]) -> None:
        """Merge overrides: choices and kinds first, outer sections before inner ones; then single keys, in order."""
        overrides = list(read_overrides(arguments))
        for key, value, text, origin in sorted(overrides, key=lambda override: _get_rank(*override[:2])):
            if not _is_choice(key, value):
                self._merge_at(key, value)
            else:  # the text, because 360m or 1e3 can name a file
                self._choose_file(key, None if value.value is None else text, origin)

    def _merge_at(self, key: str, value: Leaf | Tree, folder: Path = Path()) -> None:
        """Merge a value or tree at a key, "" for the root. Plugins are relative to `folder`."""
        *outer, name = key.split(".")
        tree: Any = {name: value} if key else value
        for part in reversed(outer):
            tree = {part: tree}
        self._take_plugins(tree, folder)
        for section, name in CLASS_LISTS:
            leaf = tree[section].get(name) if isinstance(tree.get(section), dict) else None
            if isinstance(leaf, Leaf) and isinstance(leaf.value, list):
                located = [locate_class(entry, leaf.origin, folder) for entry in leaf.value]
                tree[section][name] = Leaf(located, leaf.origin)
        _merge(self.tree, tree, "")

    def _take_plugins(self, tree: Tree, folder: Path) -> None:
        """Move the plugins out of a tree; those of all layers are imported."""
        leaf = tree.pop("plugins", Leaf([], ""))
        names = leaf.value if isinstance(leaf, Leaf) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError("plugins: expected a list of Python files or modules", find_origin(leaf))
        self.plugins += [(Leaf(name, leaf.origin), folder) for name in names]


def read_overrides(arguments: list[str]) -> Iterator[tuple[str, Leaf | Tree, str, str]]:
    """Yield (key, value, text, origin) of each override. A section as a mapping is an override for each of its options.

    Raises ConfigError if the command line gives an empty section, which would change nothing.
    """
    for key, text, origin in split_overrides(arguments):
        yield from _split_section(key, read_value(text, origin), text, origin)


def _split_section(key: str, value: Leaf | Tree, text: str, origin: str) -> Iterator[tuple[str, Leaf | Tree, str, str]]:
    if not _is_merged(key):
        yield key, value, text, origin
    elif isinstance(value, dict):
        for name, inner in value.items():
            written = (inner.text or str(inner.value)) if isinstance(inner, Leaf) else ""
            yield from _split_section(f"{key}.{name}", inner, written, origin)
    elif value.value == {} and origin.startswith("override "):  # in a sweep, {} is the unchanged section
        remedy = ", or null to remove it" if key not in build_default_tree() else ""
        raise ConfigError(f"{key}: {{}} changes nothing; give its options{remedy}", origin)
    else:
        yield key, value, text, origin


def list_options(values: Mapping[str, Any], section: str = "") -> list[str]:
    """Return the keys of all options that plain values set, also those within the mapping of a section."""
    found = []
    for name, value in values.items():
        key = f"{section}.{name}" if section else name
        is_split = isinstance(value, dict) and value and _is_merged(key)
        found += list_options(value, key) if is_split else [key]
    return found


def _is_choice(key: str, value: Leaf | Tree) -> bool:
    """Return True if an override chooses a file for a section, or removes the section."""
    return key in list_sections() and isinstance(value, Leaf) and value.value != {}


def _get_rank(key: str, value: Leaf | Tree) -> float:
    """Return the sort key of an override: the depth of a section whose file or kind it chooses, else infinity."""
    is_kind = key.endswith(".kind") and key.removesuffix(".kind") in SECTIONS
    return key.removesuffix(".kind").count(".") if is_kind or _is_choice(key, value) else math.inf


def _is_merged(key: str) -> bool:
    """Return True for a section whose options are merged, not replaced."""
    return key in list_sections() and key != VALIDATION_SETS


def find_origin(tree: Leaf | Tree) -> str:
    """Return the origin of a leaf, or of the first leaf in a tree; "" if it has none."""
    while not isinstance(tree, Leaf):
        tree = next(iter(tree.values()), Leaf(None, ""))
    return tree.origin


def _merge(base: Tree, top: Tree, section: str) -> None:
    """Merge `top` into `base`, in place; another kind clears the section first."""
    kind = top.get("kind")
    if section in SECTIONS and isinstance(kind, Leaf) and kind.value != getattr(base.get("kind"), "value", None):
        base.clear()
    for name, value in top.items():
        key = f"{section}.{name}" if section else name
        if isinstance(value, dict):
            if not isinstance(base.get(name), dict):
                base[name] = {}
            _merge(base[name], value, key)
        elif value.value == {} and _is_merged(key) and isinstance(base.get(name), dict):
            continue  # no option of the section changes
        else:
            base[name] = _check_section_value(key, value) if key in list_sections() else value


def _check_section_value(section: str, leaf: Leaf) -> Leaf | Tree:
    """Return the value of a section that is set to a single value: null, if the section is optional."""
    if section == VALIDATION_SETS and leaf.value is None:
        return Leaf({}, leaf.origin)
    if leaf.value == {} or (leaf.value is None and section not in build_default_tree()):
        return leaf
    if isinstance(leaf.value, str):
        raise ConfigError(
            f"{section} is a section, not a single value; to choose a file for it, "
            f"write `- {section}: {leaf.value}` under defaults:",
            leaf.origin,
        )
    found = "null" if leaf.value is None else repr(leaf.value)
    raise ConfigError(f"{section} is a section with keys; it cannot be {found}", leaf.origin)


def split_overrides(arguments: list[str]) -> list[tuple[str, str, str]]:
    """Return (key, value, origin) of `a.b=c`, `--a.b=c` and `--a.b c`. Raises ConfigError for any other form.

    The origin is that of a `LocatedOverride`, else the override itself.
    """
    found, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        origin = getattr(argument, "origin", "")
        key, equals, value = argument.removeprefix("--").partition("=")
        if not equals and argument.startswith("--"):
            if not rest or rest[0].startswith("--"):
                is_key = key.split(".")[0] in ExperimentConfig.__dataclass_fields__
                hint = f"missing value; write {argument}=VALUE" if is_key else "not an option of this verb; see --help"
                raise ConfigError(f"override {argument}: {hint}")
            value = rest.pop(0)
            argument = f"{argument} {value}"
        elif not equals:
            is_config = argument in list_config_names() or argument.endswith((".yaml", ".yml"))
            hint = f"; for a config write --config {argument}" if is_config else ", without spaces"
            raise ConfigError(f"override {argument}: expected KEY=VALUE{hint}")
        origin = origin or f"override {argument}"
        if not all(part.strip() == part != "" for part in key.split(".")):
            raise ConfigError(f"invalid key {key!r}; expected SECTION.KEY=VALUE", origin)
        found.append((key, value, origin))
    return found
