"""Families of models: runs of one memory with the same training options, which differ in size."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stackexp.config.affects import find_changed_keys
from stackexp.config.experiment import ExperimentConfig
from stackexp.reports.arms import ArmRun, name_memory
from stackexp.reports.power_law import BASELINE
from stackexp.sweeps.grid import shorten_keys
from stackexp.tables import ABSENT

SIZES = {
    *(f"model.{key}" for key in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size")),
    *(f"model.{key}" for key in ("tie_embeddings", "slot_size", "num_slots")),
    *("optimizer.lr", "optimizer.memory_lr"),
    *("data.global_batch_tokens", "schedule.warmup_steps", "schedule.decay_steps"),
}
"""Options that may differ between the sizes of a family. So may the integers of a memory."""
MEMORY_PREFIXES = ("model.memory.", "warm_start.memory", "optimizer.memory_lr")
Options = dict[str, Any]


class Family(NamedTuple):
    """The name of a family, and the name of the Transformer family with the same options outside the memory.

    A name has the options that separate the family from others and differ from their defaults.
    """

    name: str
    baseline: str


def name_families(runs: Sequence[ArmRun]) -> list[Family]:
    """Return the family of each run.

    If runs of one size and length differ in an option that may differ between sizes, such as the learning rate, it
    separates families as well.
    """
    memories = [name_memory(run.config) for run in runs]
    changes = [read_changes(run.config) for run in runs]
    _unify_embedding_scales(runs, changes)
    fixed = _select_fixed(memories, changes)
    families: dict[str, list[int]] = defaultdict(list)
    for i, key in enumerate(zip(memories, fixed, strict=True)):
        families[repr(key)].append(i)
    named = [dict(options) for options in fixed]
    for members in families.values():
        swept = _find_swept([runs[i] for i in members], [changes[i] for i in members])
        for i in members:
            named[i] |= {key: value for key, value in changes[i].items() if key in swept}
    short = shorten_keys(key for options in named for key in options)
    names = [_format(memory, options, short) for memory, options in zip(memories, named, strict=True)]
    result = []
    for name, *candidates in zip(names, named, fixed, strict=True):
        same_sweep, any_sweep = (_format(BASELINE, _drop_memory(options), short) for options in candidates)
        result.append(Family(name, same_sweep if same_sweep in names else any_sweep))
    return result


def _unify_embedding_scales(runs: Sequence[ArmRun], changes: Sequence[Options]) -> None:
    """Replace the embedding scale by "sqrt(d)", if every run that sets it has this value."""
    key = "model.embedding_scale"
    scaled = [(run, own) for run, own in zip(runs, changes, strict=True) if key in own]
    if all(math.isclose(own[key], math.sqrt(run.config["model.hidden_size"]), rel_tol=0.01) for run, own in scaled):
        for _, own in scaled:
            own[key] = "sqrt(d)"


def _select_fixed(memories: Sequence[str], changes: Sequence[Options]) -> list[Options]:
    """Return the options of each run that separate families, without those that may differ between sizes.

    An option outside the memory separates families if any two runs differ in it; an option of the memory, if two runs
    with this memory do.
    """
    sizes = SIZES | {k for own in changes for k, v in own.items() if k.startswith("model.memory.") and type(v) is int}
    fixed = [{key: value for key, value in own.items() if key not in sizes} for own in changes]
    shared = _find_differing([_drop_memory(own) for own in fixed])
    result = []
    for memory, own in zip(memories, fixed, strict=True):
        peers = [options for other, options in zip(memories, fixed, strict=True) if other == memory]
        separating = shared | _find_differing(peers)
        result.append({key: value for key, value in own.items() if key in separating})
    return result


def _find_swept(runs: Sequence[ArmRun], changes: Sequence[Options]) -> set[str]:
    """Return the options in which runs with equal parameters outside the memory and equal tokens differ."""
    equal: dict[tuple[int, int], list[Options]] = defaultdict(list)
    for run, own in zip(runs, changes, strict=True):
        backbone = (run.result.get("parameters") or 0) - (run.result.get("memory_parameters") or 0)
        equal[backbone, run.result.get("tokens") or 0].append(own)
    return set().union(*map(_find_differing, equal.values()))


def read_changes(config: Mapping[str, Any]) -> Options:
    """Return the training options that differ from their defaults, without the seed and the kind of the model."""
    kinds = {key: value for key, value in config.items() if key.endswith(".kind")}
    changes = {key: config.get(key) for key in find_changed_keys(config, kinds, ["training"]) if key != "seed"}
    defaults = ExperimentConfig()
    sections = {f"{name}.kind": getattr(defaults, name)["kind"] for name in ("data", "optimizer", "schedule")}
    return changes | {key: kinds[key] for key, default in sections.items() if kinds.get(key, default) != default}


def _find_differing(options: Sequence[Options]) -> set[str]:
    """Return the keys that do not have the same value everywhere."""
    keys = {key for own in options for key in own}
    return {key for key in keys if len({repr(own.get(key, ABSENT)) for own in options}) > 1}


def _drop_memory(options: Options) -> Options:
    return {key: value for key, value in options.items() if not key.startswith(MEMORY_PREFIXES)}


def _format(memory: str, options: Options, short: Mapping[str, str]) -> str:
    values = ", ".join(f"{key if key.endswith('.kind') else short[key]}={value}" for key, value in options.items())
    return f"{memory} ({values})" if values else memory
