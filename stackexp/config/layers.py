"""Files, group choices and overrides laid over one another; every value keeps the place it was written at.

Order: schema defaults < files in order < group choices < overrides. A group choice is the file
configs/<section path>/<name>.yaml. It takes the place of a section chosen by `kind`, and of the validation sets, and
lies on top of any other (trainer: fsdp says how to spread over devices, not for how long to train). In a section
chosen by `kind`, naming another kind starts the section afresh.
"""

import dataclasses
from pathlib import Path

from stackexp.config.experiment import ExperimentConfig
from stackexp.config.registry import SECTIONS, list_kinds
from stackexp.config.suggestions import find_closest, suggest_name
from stackexp.config.yaml_files import Leaf, Tree, configs_folder, display_path, list_yaml_names, read_file, read_value
from stackexp.errors import ConfigError

SETS = "data.validation"  # null: none


def list_sections() -> list[str]:
    """Every section of a config that files can be chosen for, such as model, model.memory and trainer."""
    typed = [f.name for f in dataclasses.fields(ExperimentConfig) if dataclasses.is_dataclass(f.type)]
    return [*SECTIONS, *typed, SETS]


def default_tree() -> Tree:
    """The sections that are always there, those chosen by kind with their default kind."""
    fields = {f.name: f for f in dataclasses.fields(ExperimentConfig) if f.name in list_sections()}
    return {
        name: {"kind": Leaf(field.default_factory()["kind"], "")} if name in SECTIONS else {}  # type: ignore[misc]
        for name, field in fields.items()
    }


def get_group_folder(section: str) -> Path:
    """Where the choices for a section are."""
    return configs_folder() / section.replace(".", "/")


def list_config_names() -> list[str]:
    """Names of the shipped configs; files in the folder of a section are choices for it and no configs."""
    names = [
        name for name in list_yaml_names(configs_folder(), "**/*.yaml") if name.split("/")[0] not in list_sections()
    ]
    return sorted(names, key=lambda name: (name.count("/"), name))


def is_recipe(name: str) -> bool:
    """Whether a config is there to be laid on top of another: it says how to train, but not on what data."""
    return name.startswith("recipe/")


def find_config(name: str, origin: str = "", folder: Path = Path()) -> Path:
    """The file of a config: a shipped NAME or a path, read as it is. Raises ConfigError with the nearest name."""
    prefix = f"{origin}: " if origin else ""
    if name.endswith((".yaml", ".yml")):
        return _existing(name, prefix, folder)
    if name in list_config_names():
        return configs_folder() / f"{name}.yaml"
    if Path(name).is_file():
        return Path(name)
    for section in sorted(list_sections(), key=len, reverse=True):
        start = section.replace(".", "/") + "/"
        if name.startswith(start) and name.removeprefix(start) in list_yaml_names(get_group_folder(section)):
            choice = f"{section}={name.removeprefix(start)}"
            raise ConfigError(f"{prefix}{name} is no config but a choice for the section {section}: write {choice}")
    known = {full.split("/")[-1]: full for full in list_config_names()} | {full: full for full in list_config_names()}
    found = find_closest(name, known)
    hint = f"did you mean {known[found]!r}?" if found else "`configs list` shows them all"
    raise ConfigError(f"{prefix}unknown config {name!r}; {hint}")


def find_choice(section: str, name: str, origin: str, folder: Path = Path()) -> Path:
    """The file of a group choice. Raises ConfigError with the nearest one."""
    if name.endswith((".yaml", ".yml")):
        return _existing(name, f"{origin}: {section}: ", folder)
    choices = list_yaml_names(get_group_folder(section))
    if name in choices:
        return get_group_folder(section) / f"{name}.yaml"
    hint = suggest_name(name, choices)
    if name in list_kinds(SECTIONS.get(section, "")):
        hint = f"; for the kind of that name write {section}.kind={name}"
    known = f" (there are {', '.join(choices)})" if choices else " (configs/ has no choices for this section)"
    raise ConfigError(f"{origin}: {section}: unknown choice {name!r}{known}{hint}")


def _existing(name: str, prefix: str, folder: Path) -> Path:
    for path in (folder / name, Path(name)):
        if path.is_file():
            return path
    raise ConfigError(f"{prefix}there is no file {name}")


class Layers:
    """A config in the making: `tree` holds what has been laid so far, `plugins` what is to be imported first."""

    def __init__(self) -> None:
        self.tree = default_tree()
        self.plugins: list[tuple[Leaf, Path]] = []  # name and the folder it is relative to

    def add_file(self, path: Path, section: str = "", chain: tuple[Path, ...] = ()) -> None:
        """Lay a file's defaults, then its own keys. `chain`: the files that led here."""
        path = path.resolve()
        if path in chain:
            cycle = " -> ".join(display_path(p) for p in (*chain[chain.index(path) :], path))
            raise ConfigError(f"{display_path(path)}: the defaults go in a circle: {cycle}")
        defaults, tree = read_file(path)
        for entry in defaults:
            self._add_default(entry, path.parent, section, (*chain, path))
        if not section:
            self._take_plugins(tree, path.parent)
        self._lay(tree, section)

    def _add_default(self, entry: Leaf, folder: Path, section: str, chain: tuple[Path, ...]) -> None:
        value, origin = entry.value, entry.origin
        if isinstance(value, str):
            found = find_choice(section, value, origin, folder) if section else find_config(value, origin, folder)
            self.add_file(found, section, chain)
        elif isinstance(value, dict) and len(value) == 1:
            [(key, name)] = value.items()
            self.choose(f"{section}.{key}" if section else str(key), name, origin, folder, chain)
        else:
            raise ConfigError(f"{origin}: defaults: expected NAME or SECTION: NAME, found {value!r}")

    def choose(
        self, section: str, name: object, origin: str, folder: Path = Path(), chain: tuple[Path, ...] = ()
    ) -> None:
        """Lay the group file `name`, a section chosen by kind afresh; None switches a section off that may be."""
        if section not in list_sections():
            raise ConfigError(f"{origin}: {section} is no section{suggest_name(section, list_sections())}")
        place = self.tree
        *outer, key = section.split(".")
        for part in outer:
            place = place[part]
        if name is None:
            place[key] = _checked_leaf(section, Leaf(None, origin))
        else:
            if section in (*SECTIONS, SETS):
                place[key] = default_tree().get(section, {})
            self.add_file(find_choice(section, str(name), origin, folder), section, chain)

    def add_overrides(self, arguments: list[str]) -> None:
        """Lay overrides: choices and kinds first, outer sections before inner ones; then plain keys, in order."""
        plain, choices = [], []
        for key, text, origin in split_overrides(arguments):
            value = read_value(text, origin)
            if key in list_sections() and isinstance(value, Leaf) and value.value != {}:
                choices.append((key, None if value.value is None else text, origin))
            elif key.removesuffix(".kind") in SECTIONS:
                choices.append((key, value, origin))
            else:
                plain.append((key, value))
        for key, value, origin in sorted(choices, key=lambda choice: choice[0].removesuffix(".kind").count(".")):
            if key in list_sections():
                self.choose(key, value, origin)
            else:
                self._lay_key(key, value)
        for key, value in plain:
            self._lay_key(key, value)

    def _lay_key(self, key: str, value: Leaf | Tree) -> None:
        for part in reversed(key.split(".")):
            value = {part: value}
        self._take_plugins(value, Path())
        self._lay(value, "")

    def _lay(self, tree: Tree, section: str) -> None:
        for part in reversed(section.split(".") if section else []):
            tree = {part: tree}
        _merge(self.tree, tree, "")

    def _take_plugins(self, tree: Tree, folder: Path) -> None:
        """Plugins of all layers add up."""
        leaf = tree.pop("plugins", Leaf([], ""))
        names = leaf.value if isinstance(leaf, Leaf) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{find_origin(leaf)}: plugins: expected a list of Python files or modules")
        self.plugins += [(Leaf(name, leaf.origin), folder) for name in names]


def find_origin(tree: Leaf | Tree) -> str:
    """Where a leaf, or the first leaf of a tree, was written."""
    while not isinstance(tree, Leaf):
        tree = next(iter(tree.values()))
    return tree.origin


def _merge(base: Tree, top: Tree, section: str) -> None:
    kind = top.get("kind")
    if section in SECTIONS and isinstance(kind, Leaf) and kind.value != getattr(base.get("kind"), "value", None):
        base.clear()
    for key, value in top.items():
        where = f"{section}.{key}" if section else key
        if isinstance(value, dict):
            if not isinstance(base.get(key), dict):
                base[key] = {}
            _merge(base[key], value, where)
        elif value.value != {} or not isinstance(base.get(key), dict):
            base[key] = _checked_leaf(where, value) if where in list_sections() else value


def _checked_leaf(section: str, leaf: Leaf) -> Leaf | Tree:
    """A single value may stand in the place of a section only where it is null and the section can be switched off."""
    if section == SETS and leaf.value is None:
        return {}
    if leaf.value == {} or (leaf.value is None and section not in default_tree()):
        return leaf
    if isinstance(leaf.value, str):
        raise ConfigError(
            f"{leaf.origin}: {section} is a section, not a single value; to choose a file for it, "
            f"write `- {section}: {leaf.value}` under defaults:"
        )
    found = "null" if leaf.value is None else repr(leaf.value)
    raise ConfigError(f"{leaf.origin}: {section} is a section with keys of its own; it cannot be {found}")


def split_overrides(arguments: list[str]) -> list[tuple[str, str, str]]:
    """(key, value, origin) of `a.b=c`, `--a.b=c` and `--a.b c`. Raises ConfigError for what is none of these."""
    found, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        key, equals, value = argument.removeprefix("--").partition("=")
        if not equals and argument.startswith("--"):
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"override {argument}: no value follows; write {argument}=VALUE")
            value = rest.pop(0)
            argument = f"{argument} {value}"
        elif not equals:
            hint = f"; for a config write --config {argument}" if argument in list_config_names() else ""
            raise ConfigError(f"override {argument}: expected KEY=VALUE{hint}")
        if not all(part.strip() == part != "" for part in key.split(".")):
            raise ConfigError(f"override {argument}: {key!r} is no key; expected SECTION.KEY=VALUE")
        found.append((key, value, f"override {argument}"))
    return found
