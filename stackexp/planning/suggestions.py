"""What would make a plan fit that does not."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from stackexp.planning.cost import Plan, readable
from stackexp.planning.devices import DEVICES

MOST_NODES = 64


def remedies(plan: Plan) -> str:
    """Single changes that each make it fit, with the memory they leave it at; else several that do together."""
    single = [f"{change} ({readable(p.peak)})" for change, p in _changes(plan) if _works(p)]
    single += [
        f"--device {name} ({readable(other.room)} of room)"
        for name in DEVICES
        if (other := replace(plan, device=name)).room > plan.room and plan.peak <= other.room
    ]
    if single:
        return f"any of these would fit: {', '.join(single)}"
    return _together(plan)


def _changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """One change at a time."""
    yield from _distribute(plan)
    yield from _recompute(plan)
    yield from _shrink(plan, _batch(plan), plan.training.peak)
    if plan.validation:
        yield from _shrink(plan, "eval_batch_size", plan.validation.peak)
    yield from _add_nodes(plan)


def _together(plan: Plan) -> str:
    """Changes one on top of the other until it fits: recompute, batches of one, shard, more nodes."""
    names = []
    for step in (_recompute, _smallest(_batch(plan)), _smallest("eval_batch_size"), _distribute, _add_nodes):
        for name, changed in step(plan):
            if _divides(changed):
                names.append(name)
                plan = changed
        if _works(plan):
            return f"together these would fit: {' '.join(names)} ({readable(plan.peak)})"
    tried = f" even with {' '.join(names)}" if names else ""
    return (
        f"it needs {readable(plan.peak)}{tried}; take a smaller model, a shorter data.context_length, or larger devices"
    )


def _batch(plan: Plan) -> str:
    """The option that sets how many sequences a device takes in training."""
    return "micro_batch_size" if hasattr(plan.config.data, "micro_batch_size") else "batch_size"


def _distribute(plan: Plan) -> Iterator[tuple[str, Plan]]:
    if plan.config.trainer.is_sharded:
        return
    if plan.devices > 1:
        yield _changed(plan, "trainer.strategy", "fsdp")
    else:
        trainer = replace(plan.config.trainer, strategy="fsdp", devices=8)  # as configs/trainer/fsdp.yaml
        yield "trainer=fsdp", replace(plan, config=replace(plan.config, trainer=trainer))


def _recompute(plan: Plan) -> Iterator[tuple[str, Plan]]:
    if not plan.config.trainer.activation_checkpointing:
        yield _changed(plan, "trainer.activation_checkpointing", True)


def _shrink(plan: Plan, key: str, peak: int) -> Iterator[tuple[str, Plan]]:
    """The batch halved until its pass, whose `peak` is too large, fits."""
    size = getattr(plan.config.data, key)
    while peak > plan.room and size > 1:
        size //= 2
        change, smaller = _changed(plan, f"data.{key}", size)
        if _works(smaller):
            yield change, smaller
            return


def _smallest(key: str) -> Callable[[Plan], Iterator[tuple[str, Plan]]]:
    def step(plan: Plan) -> Iterator[tuple[str, Plan]]:
        if getattr(plan.config.data, key) > 1 and (plan.validation or key != "eval_batch_size"):
            yield _changed(plan, f"data.{key}", 1)

    return step


def _add_nodes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The nodes doubled until it fits. Only fsdp holds less on each device the more there are."""
    nodes = plan.config.trainer.num_nodes
    while plan.config.trainer.strategy == "fsdp" and 2 * nodes <= MOST_NODES:
        nodes *= 2
        change, larger = _changed(plan, "trainer.num_nodes", nodes)
        if _works(larger):
            yield change, larger
            return


def _changed(plan: Plan, key: str, value: object) -> tuple[str, Plan]:
    section, name = key.split(".")
    config = replace(plan.config, **{section: replace(getattr(plan.config, section), **{name: value})})
    shown = str(value).lower() if isinstance(value, bool) else value
    return f"{key}={shown}", replace(plan, config=config)


def _works(plan: Plan) -> bool:
    return _divides(plan) and plan.fits


def _divides(plan: Plan) -> bool:
    """Whether the batch can be divided among the devices: whole micro-batches make up the global batch."""
    return not any(plan.config.data.find_experiment_errors(plan.config, True))
