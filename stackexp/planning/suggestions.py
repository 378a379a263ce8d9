"""Suggest changes for a run that does not fit into device memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from stackexp.planning.cost import Plan, format_bytes
from stackexp.planning.devices import DEVICES

MAX_NODES = 64

Change = tuple[str, Plan]
"""An override, such as `data.micro_batch_size=2`, and the plan with it."""


def suggest_changes(plan: Plan) -> str:
    """Return all single changes that make a run fit, with their peak memory, or else a combination that does."""
    single = [f"{change} ({format_bytes(changed.peak)})" for change, changed in _list_changes(plan) if _works(changed)]
    single += [
        f"--device {name} ({format_bytes(other.usable_bytes)} usable)"
        for name in DEVICES
        if (other := replace(plan, device=name)).usable_bytes > plan.usable_bytes and plan.peak <= other.usable_bytes
    ]
    if single:
        return f"any of these would fit: {', '.join(single)}"
    return _combine_changes(plan)


def _list_changes(plan: Plan) -> Iterator[Change]:
    yield from _shard(plan)
    yield from _recompute(plan)
    yield from _shrink_batch(plan, get_batch_option(plan), plan.training.peak)
    if plan.validation:
        yield from _shrink_batch(plan, "eval_batch_size", plan.validation.peak)
    yield from _add_nodes(plan)


def _combine_changes(plan: Plan) -> str:
    """Accumulate changes until the run fits: recompute, batches of one, shard, more nodes."""
    names = []
    steps = (_recompute, _use_batch_of_one(get_batch_option(plan)), _use_batch_of_one("eval_batch_size"), _shard)
    for step in (*steps, _add_nodes):
        for name, changed in step(plan):
            if is_valid(changed):
                names.append(name)
                plan = changed
        if _works(plan):
            return f"together these would fit: {' '.join(names)} ({format_bytes(plan.peak)})"
    tried = f" even with {' '.join(names)}" if names else ""
    return (
        f"it needs {format_bytes(plan.peak)}{tried}; "
        "use a smaller model, a shorter data.context_length or larger devices"
    )


def get_batch_option(plan: Plan) -> str:
    """Return the name of the data option for the number of sequences per device in training."""
    return "micro_batch_size" if hasattr(plan.config.data, "micro_batch_size") else "batch_size"


def _shard(plan: Plan) -> Iterator[Change]:
    if plan.config.trainer.is_sharded:
        return
    if plan.devices > 1:
        yield change_option(plan, "trainer.strategy", "fsdp")
    else:
        trainer = replace(plan.config.trainer, strategy="fsdp", devices=8)  # as configs/trainer/fsdp.yaml
        yield "trainer=fsdp", replace(plan, config=replace(plan.config, trainer=trainer))


def _recompute(plan: Plan) -> Iterator[Change]:
    if not plan.config.trainer.activation_checkpointing:
        yield change_option(plan, "trainer.activation_checkpointing", True)


def _shrink_batch(plan: Plan, option: str, peak: int) -> Iterator[Change]:
    """Halve a batch size, whose pass has this peak, until the run fits."""
    size = getattr(plan.config.data, option)
    while peak > plan.usable_bytes and size > 1:
        size //= 2
        change, smaller = change_option(plan, f"data.{option}", size)
        if _works(smaller):
            yield change, smaller
            return


def _use_batch_of_one(option: str) -> Callable[[Plan], Iterator[Change]]:
    def step(plan: Plan) -> Iterator[Change]:
        if getattr(plan.config.data, option) > 1 and (plan.validation or option != "eval_batch_size"):
            yield change_option(plan, f"data.{option}", 1)

    return step


def _add_nodes(plan: Plan) -> Iterator[Change]:
    """Double the nodes until the run fits. Only fsdp needs less memory per device with more nodes."""
    nodes = plan.config.trainer.num_nodes
    while plan.config.trainer.strategy == "fsdp" and 2 * nodes <= MAX_NODES:
        nodes *= 2
        change, larger = change_option(plan, "trainer.num_nodes", nodes)
        if _works(larger):
            yield change, larger
            return


def change_option(plan: Plan, key: str, value: object) -> Change:
    """Return the override `key=value` and the plan with it."""
    section, name = key.split(".")
    config = replace(plan.config, **{section: replace(getattr(plan.config, section), **{name: value})})
    text = str(value).lower() if isinstance(value, bool) else value
    return f"{key}={text}", replace(plan, config=config)


def _works(plan: Plan) -> bool:
    return is_valid(plan) and plan.fits


def is_valid(plan: Plan) -> bool:
    """Return True if the global batch consists of whole micro-batches on all devices."""
    return not any(plan.config.data.find_experiment_errors(plan.config, True))
