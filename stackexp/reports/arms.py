"""Group the language-model runs of folders into arms: runs that differ only in their seed."""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stackexp.config.affects import changes_scores, find_changed_keys, get_value
from stackexp.config.compose import load_config
from stackexp.config.data import get_model_label
from stackexp.config.layers import split_overrides
from stackexp.config.registry import get_entry, list_kinds
from stackexp.data.olmo import NAMES
from stackexp.errors import ConfigError, RunError
from stackexp.frame import find_runs, name_arm, read_validations
from stackexp.reports.compare import GENERATED_DATA
from stackexp.reports.paper import CHOICES, find_stack_changes, find_variant
from stackexp.runs import RunFolder, format_resume_command

OLMO_GROUPS = tuple(f"{group}/" for group in NAMES)
MAX_NAMED_OPTIONS = 3  # in the name of a run


@dataclass(frozen=True)
class ArmRun:
    """A finished run. `sets` are the scores of its named sets, and those of V2 and V3 by later validations."""

    folder: RunFolder
    config: dict[str, Any]
    result: dict[str, Any]
    sets: dict[str, dict[str, float]]

    @property
    def seed(self) -> int:
        """The seed of weights and data order."""
        return self.config["seed"]

    @cached_property
    def flops_per_token(self) -> float | None:
        """Training FLOPs per token, from the config; None if it is invalid here, such as without its plugins."""
        from stackexp.planning.cost import make_plan

        try:
            return make_plan(load_config(self.folder.config)).flops_per_token
        except (ConfigError, RunError):
            return None


@dataclass(frozen=True)
class Arm:
    """The finished runs with the same options, one for each seed, and the runs that are not finished."""

    name: str
    runs: list[ArmRun] = field(default_factory=list)
    unfinished: list[RunFolder] = field(default_factory=list)

    @property
    def folders(self) -> list[RunFolder]:
        """The folders of its runs, the finished ones first."""
        return [*(run.folder for run in self.runs), *self.unfinished]

    @property
    def config(self) -> dict[str, Any]:
        """The options of the first run."""
        return self.runs[0].config if self.runs else self.unfinished[0].read_options()

    def average(self, key: str) -> float | None:
        """Return the mean of a figure of result.json over the seeds."""
        values = [run.result[key] for run in self.runs if run.result.get(key) is not None]
        return statistics.fmean(values) if values else None


def read_arms(paths: Sequence[Path], with_generated_data: bool = False) -> tuple[list[Arm], list[str]]:
    """Return the arms of all language-model runs at or below `paths`, and notes about skipped runs.

    `with_generated_data` includes runs on formal languages and arithmetic. Raises RunError if there are no such runs.
    """
    arms: list[Arm] = []
    notes: list[str] = []
    for folder in find_runs(paths):
        try:
            config = folder.read_options()
            if config.get("data.kind") in GENERATED_DATA and not with_generated_data:
                continue
            run = read_finished_run(folder, config) if folder.is_finished else None
            arm = _find_equal_arm(arms, name_arm(folder.path), config)
            if run is not None:
                _add_run(arm, run, notes)
            else:
                arm.unfinished.append(folder)
        except (ConfigError, RunError) as error:
            notes.append(f"skipped: {error}")
    if not arms:
        found = "; ".join(notes) or "no run folders of language models"
        raise RunError(f"{', '.join(map(str, paths))}: {found}; give run folders or folders of them")
    return _separate_names(sorted(arms, key=lambda arm: arm.name)), notes


def _find_equal_arm(arms: list[Arm], name: str, config: dict[str, Any]) -> Arm:
    """Return the arm with this name and these options, or append a new one without runs.

    An option that is newer than a run has its default value there.
    """
    for arm in (arm for arm in arms if arm.name == name):
        if not _find_differences(arm.config, config):
            return arm
    arms.append(Arm(name))
    return arms[-1]


def _find_differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return the keys in which the configs of two arms differ: options of the training, and its length."""
    changed = find_changed_keys(ours, theirs, ["training"])
    length = ["trainer.max_steps"] if ours.get("trainer.max_steps") != theirs.get("trainer.max_steps") else []
    return [key for key in changed if key != "seed"] + length


def read_finished_run(folder: RunFolder, config: dict[str, Any]) -> ArmRun:
    """Read a finished run and the later validations of its last weights. Raises RunError for damage.

    Of a later validation, sets outside V2 and V3 count only if the run has none of its own: otherwise they would
    change its average. Sets without a finite loss, of a run that diverged, are left out.
    """
    result = folder.read_result().to_dict()
    own = result.get("sets", {})
    later: dict[str, dict[str, float]] = {}
    for record in read_validations(folder):
        keys = [key for key, *_ in split_overrides(record.get("overrides", []))]
        if record.get("step") == result.get("steps") and not any(changes_scores(config, key) for key in keys):
            later |= record.get("sets", {})
    if any(not name.startswith(OLMO_GROUPS) for name in own):
        later = {name: scores for name, scores in later.items() if name.startswith(OLMO_GROUPS)}
    sets = later | own
    finite = {name: scores for name, scores in sets.items() if math.isfinite(scores.get("loss") or math.nan)}
    return ArmRun(folder, config, result, {name: _drop_missing(scores) for name, scores in finite.items()})


def _drop_missing(scores: dict[str, Any]) -> dict[str, float]:
    """Return the scores that are numbers: a perplexity that overflows is null in the file."""
    return {key: value for key, value in scores.items() if value is not None}


def _add_run(arm: Arm, run: ArmRun, notes: list[str]) -> None:
    """Add a run. If several runs have the same seed, the last one counts, sorted by path."""
    for other in [other for other in arm.runs if other.seed == run.seed]:
        notes.append(f"left out, the same seed as {run.folder.path}: {other.folder.path}")
        arm.runs.remove(other)
    arm.runs.append(run)


def _separate_names(arms: list[Arm]) -> list[Arm]:
    """Append the options in which they differ, or else a run's folder, to the names of arms that share a name."""
    groups: dict[str, list[Arm]] = defaultdict(list)
    for arm in arms:
        groups[arm.name].append(arm)
    separate = []
    for name, members in groups.items():
        configs = [arm.config for arm in members]
        differing = list(dict.fromkeys(key for config in configs for key in _find_differences(configs[0], config)))
        every = {key: value for config in configs for key, value in config.items()}
        for arm, config in zip(members, configs, strict=True):
            values = ", ".join(f"{key.rpartition('.')[2]}={get_value(config, every, key)}" for key in differing)
            folder = arm.folders[0].path
            is_unique = [other.folders[0].path.name for other in members].count(folder.name) == 1
            detail = values if len(differing) <= MAX_NAMED_OPTIONS else folder.name if is_unique else str(folder)
            separate.append(Arm(f"{name} ({detail})", arm.runs, arm.unfinished) if len(members) > 1 else arm)
    return separate


def find_arm(arms: Sequence[Arm], name: str) -> Arm:
    """Return the arm with this name. Raises RunError with the known names if there is none."""
    found = next((arm for arm in arms if arm.name == name), None)
    if found is None:
        raise RunError(f"no run named {name}; choose among {', '.join(arm.name for arm in arms)}")
    return found


def rank_arm(arm: Arm) -> tuple[bool, bool, float, float]:
    """Return a sort key: arms with runs first, then those with a variant's name, many tokens and few parameters."""
    is_named = arm.name in CHOICES.values()
    return not arm.runs, not is_named, -(arm.average("tokens") or 0), arm.average("parameters") or 0


def describe_unfinished(arms: Sequence[Arm]) -> list[str]:
    """Return a line for each unfinished run, with the command that completes it."""
    lines = []
    for arm in arms:
        for run in arm.unfinished:
            command = f"unfinished: `{format_resume_command(run)}`"
            lines.append(f"{arm.name}: {f'running now in {run.path}' if run.is_running else command}")
    return lines


def name_memory(config: dict[str, Any]) -> str:
    """Return the family of a model: the paper's variant, the options of another stack, or the kind of its memory.

    Memories that start without effect (`warm_start.memory: identity`) are a family of their own.
    """
    kind = config.get("model.memory.kind")
    start = ", identity start" if kind and config.get("warm_start.memory") == "identity" else ""
    if variant := find_variant(config):
        return variant + start
    if kind == "stack":
        label = kind
        changes = find_stack_changes(config) | ({"num_heads": 1} if config["model.memory.num_heads"] == 1 else {})
    else:
        label, changes = get_model_label(config), _find_changed_choices(config) if kind else {}
    options = f" ({', '.join(f'{key}={value}' for key, value in changes.items())})" if changes else ""
    return label + options + start


def _find_changed_choices(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a memory, without its sizes, that differ from the defaults of its kind."""
    kind = config["model.memory.kind"]
    if kind not in list_kinds("memory"):  # of a plugin that is not loaded
        return {}
    options = {field.name: field.default for field in dataclasses.fields(get_entry("memory", kind).config)}
    values = {name: config.get(f"model.memory.{name}", default) for name, default in options.items()}
    return {name: value for name, value in values.items() if isinstance(value, bool | str) and value != options[name]}
