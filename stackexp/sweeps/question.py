"""The file of a verdict: its keys, their checks, and other budgets of steps."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

from stackexp.config.fields import Errors, option
from stackexp.config.layers import list_options, read_overrides, split_overrides
from stackexp.config.yaml_files import Leaf, Tree, display_path, read_value
from stackexp.errors import ConfigError, suggest_name
from stackexp.sequential import MIN_PLANNED
from stackexp.sweeps.schema import Resources, format_value
from stackexp.sweeps.sweep import STEPS
from stackexp.sweeps.tuning import Tuning

MAX_TUNED = 3
"""Options that a file may tune for an arm: the learning rate and two more."""
FREE = ("name", "folder", "each", "stop_when_decided", "interventions_chunks", "resources", "retries", "made_from")
"""Keys of the file that may change after the plan."""
TOKENS = "tokens"
"""Key of an arm that sets its steps by their tokens."""
STEP_OPTIONS = ("_steps", "_interval")
"""Endings of the options that --budget scales."""


@dataclass
class VerdictConfig:
    """A question: which arms change the loss of the baseline? `effect` is the smallest difference of interest.

    An arm is an entry of a sweep's `list`. Without `tuning`, all arms train with the options of the config. Without
    `pairs`, their number follows from the noise between the tuning seeds, and is at most `max_pairs`. With `each`, the
    question is asked again for every combination of these values.
    """

    name: Optional[str] = None  # of the folder <logging.root>/<name>; None: the file's name
    config: Any = None
    folder: Optional[str] = None
    overrides: list[str] = field(default_factory=list)
    arms: "list[dict[str, Any]]" = field(default_factory=list)
    baseline: Optional[str] = None  # None: the first arm
    effect: float = option(0.01, above=0)  # nats per token
    equal: Literal["tokens", "time"] = "tokens"  # what all arms get as much of
    score: str = "average.loss"  # path into result.json; lower is better
    pairs: Optional[int] = option(None, min=MIN_PLANNED)
    max_pairs: int = option(60, min=MIN_PLANNED)
    stop_when_decided: bool = True  # false trains all pairs of every arm
    first_seed: int = option(100, min=0)
    each: dict[str, list[Any]] = field(default_factory=dict)
    tuning: Optional[Tuning] = None
    interventions_chunks: int = option(64, min=0)  # of each validation set; 0 measures no interventions
    resources: Resources = field(default_factory=Resources)
    retries: int = option(0, min=0)
    made_from: Optional[str] = None  # the hash of the options that `verdict --memory` has written the controls for

    def find_errors(self) -> Errors:
        """Check the arms, their names, and that no tuning seed is a seed of the pairs."""
        names = [entry.get("name") for entry in self.arms]
        yield from self._find_each_errors()
        if len(names) < 2:
            yield "arms", "expected at least two"
        for i, name in enumerate(names):
            if not isinstance(name, str) or "=" in name:
                yield f"arms[{i}].name", f"expected a name without '=', found {name!r}"
            elif names.count(name) > 1:
                yield f"arms[{i}].name", f"{name} is the name of two arms"
            if "seed" in self.arms[i]:
                yield f"arms[{i}].seed", "the verdict chooses the seeds; set first_seed and tuning.seeds"
            if self.equal == "time" and TOKENS in self.arms[i]:
                yield f"arms[{i}].{TOKENS}", "equal: time sets the steps of each arm; remove the key"
        if re.search("accuracy|^score_", self.score):
            yield "score", f"{self.score} is an accuracy; expected a loss"
        if self.baseline is not None and self.baseline not in names:
            yield "baseline", f"no arm is named {self.baseline}{suggest_name(self.baseline, list(map(str, names)))}"
        if self.tuning is None and self.pairs is None:
            yield "pairs", "required without tuning, which measures the noise that their number depends on"
        if self.tuning is None and self.equal == "time":
            yield "tuning", "required for equal: time, because it measures the speed of each arm"
        if self.tuning:
            yield from self._find_tuning_errors(self.tuning, list(map(str, names)))

    def list_own_keys(self) -> set[str]:
        """Return the options that the verdict chooses or its arms set; overrides of them are refused."""
        each = (option for key, values in self.each.items() for x in values for option in list_options({key: x}))
        return self._list_chosen_keys() | set(each)

    def _list_chosen_keys(self) -> set[str]:
        """Return the options that seeds, tuning, arms and resources set."""
        arms = (option for arm in self.arms for option in list_options(arm))
        resources = (f"trainer.{key}" for key in ("devices", "num_nodes") if getattr(self.resources, key) is not None)
        return {"seed", "name", *arms, *resources, *(self.tuning.space if self.tuning else ())}

    def _find_each_errors(self) -> Errors:
        for key, values in self.each.items():
            if not values:
                yield f"each.{key}", "expected at least one value"
            if any(not self._list_chosen_keys().isdisjoint(list_options({key: value})) for value in values):
                yield f"each.{key}", "chosen by the verdict or its tuning, or set by an arm"

    def _find_tuning_errors(self, tuning: Tuning, names: list[str]) -> Errors:
        fresh = range(self.first_seed, self.first_seed + (self.pairs or self.max_pairs))
        if self.pairs is None and len(tuning.seeds) < 2:
            yield "tuning.seeds", "expected two or more, to measure the noise; or set pairs"
        if used := [seed for seed in tuning.seeds if seed in fresh]:
            yield "tuning.seeds", f"{used[0]} is also a seed of the pairs, {fresh[0]} to {fresh[-1]}"
        for key, arm in ((key, arm) for key, space in tuning.space.items() for arm in space.arms):
            if arm not in names:
                yield f"tuning.space.{key}.arms", f"no arm is named {arm}{suggest_name(arm, names)}"
        if "seed" in tuning.space:
            yield "tuning.space.seed", "the verdict chooses the seeds; set tuning.seeds"
        if self.equal == "time" and STEPS in tuning.space:
            yield f"tuning.space.{STEPS}", "equal: time sets the steps of each arm; remove the key"
        for name in names:
            if (count := len(tuning.select_space(name))) > MAX_TUNED:
                yield "tuning.space", f"{name} tunes {count} options; expected at most {MAX_TUNED}"
        for i, entry in enumerate(self.arms):
            for key in tuning.select_space(str(entry.get("name"))).keys() & set(list_options(entry)):
                yield f"arms[{i}].{key}", "also in tuning.space, which would replace it; name the other arms there"


def scale_steps(tree: Tree, budget: float) -> Tree:
    """Multiply the numbers below keys that end in _steps or _interval, and overrides of such options, by `budget`.

    Numbers remain at least 1 unless they are 0.
    """

    def scale(node: Any, key: str) -> Any:
        if isinstance(node, Leaf):
            value = scale(node.value, key)
            return Leaf(value, node.origin, node.text if value == node.value else None)
        if isinstance(node, dict):
            return {name: scale(value, key if key.endswith(STEP_OPTIONS) else name) for name, value in node.items()}
        if isinstance(node, list):
            return [scale(value, key) for value in node]
        if key == "overrides" and isinstance(node, str):
            ((name, text, origin),) = split_overrides([node])
            value = read_value(text, origin)
            is_scaled = name.endswith(STEP_OPTIONS) and isinstance(value, Leaf)
            return f"{name}={format_value(scale(value.value, name))}" if is_scaled else node
        is_number = isinstance(node, int | float) and not isinstance(node, bool)
        return max(min(node, 1), round(node * budget)) if is_number and key.endswith(STEP_OPTIONS) else node

    return scale(tree, "")


def check_scaled(config: VerdictConfig, path: Path) -> None:
    """Raise ConfigError if the file does not set the steps that --budget scales, or an arm has a number of tokens."""
    if not any(re.fullmatch(rf"{re.escape(STEPS)}=\d+", text) for text in config.overrides):
        raise ConfigError(f"{display_path(path)}: overrides: --budget requires {STEPS}=STEPS here")
    for text in [*config.overrides, *(config.tuning.overrides if config.tuning else ())]:
        keys = [key for key, *_ in read_overrides([text]) if key.endswith(STEP_OPTIONS)]
        if keys and not text.startswith(f"{keys[0]}="):
            raise ConfigError(f"{display_path(path)}: overrides: --budget requires {keys[0]}=VALUE, not in a mapping")
    if any(TOKENS in arm for arm in config.arms):
        raise ConfigError(f"{display_path(path)}: arms: --budget does not scale {TOKENS}; set {STEPS} instead")
