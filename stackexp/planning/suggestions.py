"""Suggest changes for a run that does not fit into device memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from stackexp.planning.cost import TrainingPlan, format_bytes
from stackexp.planning.devices import DEVICES

MAX_NODES = 64

Change = tuple[str, TrainingPlan]
"""An override, such as `data.micro_batch_size=2`, and the plan with it."""


def suggest_changes(plan: TrainingPlan) -> str:
    """Return all single changes with which a run fits, with their peak memory, or else a combination."""
    single = []
    for kind in CHANGES:
        change = next((change for change in _list_valid(kind, plan) if change[1].fits), None)
        single += [f"{change[0]} ({format_bytes(change[1].peak)})"] if change else []
    for name in DEVICES:
        other = replace(plan, device=name)
        if other.usable_bytes > plan.usable_bytes and plan.peak <= other.usable_bytes:
            single.append(f"--device {name} ({format_bytes(other.usable_bytes)} usable)")
    return f"any of these would fit: {', '.join(single)}" if single else _combine_changes(plan)


def _combine_changes(plan: TrainingPlan) -> str:
    """Combine changes of different kinds, each as small as possible, until the run fits."""
    overrides = []
    for kind in CHANGES:
        if changes := list(_list_valid(kind, plan)):
            override, plan = next((change for change in changes if change[1].fits), changes[-1])
            overrides.append(override)
        if plan.fits:
            return f"together these would fit: {' '.join(overrides)} ({format_bytes(plan.peak)})"
    tried = f" even with {' '.join(overrides)}" if overrides else ""
    advice = "use a smaller model, a shorter data.context_length or larger devices"
    return f"it needs {format_bytes(plan.peak)}{tried}; {advice}"


def _list_valid(kind: Callable[[TrainingPlan], Iterator[Change]], plan: TrainingPlan) -> Iterator[Change]:
    """Yield the changes with which the config is still valid."""
    for override, changed in kind(plan):
        if not any(changed.config.find_errors()):
            yield override, changed


def _recompute(plan: TrainingPlan) -> Iterator[Change]:
    if not plan.config.trainer.activation_checkpointing:
        yield _change_option(plan, "trainer.activation_checkpointing", True)


def _shrink_micro_batch(plan: TrainingPlan) -> Iterator[Change]:
    if hasattr(plan.config.data, "micro_batch_size"):  # a smaller data.batch_size would be another experiment
        yield from _halve(plan, "micro_batch_size", plan.training.peak)


def _shrink_eval_batch(plan: TrainingPlan) -> Iterator[Change]:
    if plan.validation:
        yield from _halve(plan, "eval_batch_size", plan.validation.peak)


def _halve(plan: TrainingPlan, option: str, peak: int) -> Iterator[Change]:
    """Yield smaller batch sizes, if the pass with this peak does not fit."""
    size = getattr(plan.config.data, option)
    while peak > plan.usable_bytes and size > 1:
        size //= 2
        yield _change_option(plan, f"data.{option}", size)


def _shard(plan: TrainingPlan) -> Iterator[Change]:
    if plan.config.trainer.is_sharded:
        return
    if plan.config.trainer.world_size > 1:
        yield _change_option(plan, "trainer.strategy", "fsdp")
    else:
        trainer = replace(plan.config.trainer, strategy="fsdp", devices=8)  # the same as configs/trainer/fsdp.yaml
        yield "trainer=fsdp", replace(plan, config=replace(plan.config, trainer=trainer))


def _add_nodes(plan: TrainingPlan) -> Iterator[Change]:
    """Double the nodes. Only fsdp needs less memory per device with more nodes."""
    nodes = plan.config.trainer.num_nodes
    while plan.config.trainer.strategy == "fsdp" and 2 * nodes <= MAX_NODES:
        nodes *= 2
        yield _change_option(plan, "trainer.num_nodes", nodes)


CHANGES = (_recompute, _shrink_micro_batch, _shrink_eval_batch, _shard, _add_nodes)
"""Each yields the values of one option, the smallest change first."""


def _change_option(plan: TrainingPlan, key: str, value: object) -> Change:
    """Return the override `key=value` and the plan with it."""
    section, name = key.split(".")
    config = replace(plan.config, **{section: replace(getattr(plan.config, section), **{name: value})})
    text = str(value).lower() if isinstance(value, bool) else value
    return f"{key}={text}", replace(plan, config=config)
