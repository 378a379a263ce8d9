"""What would make a plan fit that does not."""

from collections.abc import Iterator
from dataclasses import replace

from stackexp.config.devices import DEVICES
from stackexp.config.schema import ExperimentConfig
from stackexp.models.cost import Plan, readable

MOST_NODES = 64


def remedies(plan: Plan) -> str:
    """Single changes that each make it fit, with the memory they leave it at; else all that help, together."""
    single = [f"{change} ({readable(p.peak)})" for change, p in _changes(plan) if p.fits]
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
    trainer = plan.config.trainer
    if not trainer.sharded:
        yield _shard(plan)
    if not trainer.activation_checkpointing:
        yield _changed(plan, "trainer.activation_checkpointing", True)
    yield from _smaller_batch(plan)
    if trainer.strategy == "fsdp":
        yield from _more_nodes(plan)


def _together(plan: Plan) -> str:
    """Shard, recompute, and the smallest batches; then more nodes."""
    names, trainer = [], plan.config.trainer
    steps = [] if trainer.sharded else [_shard]
    if not trainer.activation_checkpointing:
        steps.append(lambda p: _changed(p, "trainer.activation_checkpointing", True))
    for key in ("micro_batch_size", "eval_batch_size"):
        if getattr(plan.config.data, key) > 1:
            steps.append(lambda p, key=key: _changed(p, f"data.{key}", 1))
    for step in steps:
        name, plan = step(plan)
        names.append(name)
        if plan.fits:
            return f"together these would fit: {' '.join(names)} ({readable(plan.peak)})"
    for name, larger in _more_nodes(plan):
        if larger.fits:
            return f"together these would fit: {' '.join([*names, name])} ({readable(larger.peak)})"
    tried = f" even with {' '.join(names)}" if names else ""
    return (
        f"it needs {readable(plan.peak)}{tried}; take a smaller model, a shorter data.context_length, or larger devices"
    )


def _shard(plan: Plan) -> tuple[str, Plan]:
    if plan.devices > 1:
        return _changed(plan, "trainer.strategy", "fsdp")
    trainer = replace(plan.config.trainer, strategy="fsdp", devices=8)
    return "trainer=fsdp", replace(plan, config=replace(plan.config, trainer=trainer))


def _smaller_batch(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The largest size of each batch, halved as often as needed, at which its pass fits."""
    for key, part in {"micro_batch_size": "training", "eval_batch_size": "validation"}.items():
        size, memory = getattr(plan.config.data, key), getattr(plan, part)
        if memory is None or memory.peak <= plan.room:
            continue
        growing = memory.activations + memory.stack + memory.logits
        while size > 1:
            growing, size = growing // 2, size // 2
            if memory.peak - (memory.activations + memory.stack + memory.logits) + growing <= plan.room:
                yield _changed(plan, f"data.{key}", size)
                break


def _more_nodes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The smallest number of nodes, doubled as often as needed, that fits and divides the batch."""
    nodes = 2 * plan.config.trainer.num_nodes
    while nodes <= MOST_NODES:
        name, larger = _changed(plan, "trainer.num_nodes", nodes)
        if larger.fits and not _undivided(larger.config):
            yield name, larger
            break
        nodes *= 2


def _changed(plan: Plan, key: str, value: object) -> tuple[str, Plan]:
    section, name = key.split(".")
    config = replace(plan.config, **{section: replace(getattr(plan.config, section), **{name: value})})
    shown = str(value).lower() if isinstance(value, bool) else value
    return f"{key}={shown}", replace(plan, config=config)


def _undivided(config: ExperimentConfig) -> int:
    return config.data.global_batch_tokens % config.tokens_per_pass
