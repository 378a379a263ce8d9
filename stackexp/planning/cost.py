"""What a training run will take, before anyone pays for it: memory of each rank, time, and the size of checkpoints.

Nothing is estimated that can be counted: parameters on the meta device, FLOPs from the modules, weights, gradients and
optimizer per shard, activations by a pass of fake tensors (`allocations`). Not counted is what torch does not allocate
for tensors (CUDA context, NCCL buffers, cuBLAS workspaces) and the allocator's fragmentation: `devices.HEADROOM`
is kept free for them. `trainer.compile` is counted as if it were off.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from stackexp.config import registry
from stackexp.config.data import ShardsConfig
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.trainer import TrainerConfig
from stackexp.errors import RunError
from stackexp.models.cross_entropy import NextTokenLoss
from stackexp.models.transformer import Transformer
from stackexp.planning.devices import DEVICES, Device
from stackexp.planning.memory_tracker import training_peak, validation_peak

DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}
LAYERS = (1, 2)  # counted in place of more layers, where a memory is scanned over the tokens


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its worst moment, by kind."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int  # whole blocks and their gradients (fsdp, hsdp), DDP's buckets, autocast's copies of weights
    activations: int
    stack: int  # what memories make and keep, without the hidden state they hand on
    logits: int

    @property
    def peak(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Plan:
    """The cost of `config` on devices of one kind, at a model FLOPs utilisation of `mfu` of their dense bfloat16 peak.

    FLOPs are those of `Transformer.flops_per_token`; what activation checkpointing computes again does not count as
    used, so that a run with it reaches a lower `mfu`.
    """

    config: ExperimentConfig
    device: str  # a key of DEVICES
    mfu: float
    parameters: int
    memory_parameters: int  # of them, in the memory between the layers
    flops_per_token: float

    @property
    def devices(self) -> int:
        return self.config.trainer.devices * self.config.trainer.num_nodes

    @property
    def strategy(self) -> str:
        """What `auto` stands for."""
        trainer = self.config.trainer
        return {"auto": "ddp" if self.devices > 1 else "single"}.get(trainer.strategy, trainer.strategy)

    @property
    def tokens(self) -> int:
        return self.config.total_tokens

    @property
    def flops(self) -> float:
        return self.flops_per_token * self.tokens

    @property
    def tokens_per_second(self) -> float:
        """Over all devices."""
        return self.mfu * self._card.peak_flops * self.devices / self.flops_per_token

    @property
    def hours(self) -> float:
        return self.tokens / self.tokens_per_second / 3600

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.devices

    @cached_property
    def checkpoint_bytes(self) -> int:
        """One checkpoint: the whole model and the optimizer's state."""
        model = build(self.config)
        return _bytes(model.parameters()) + _optimizer_bytes(self.config, ranks=1)

    @cached_property
    def training(self) -> Memory:
        """Per rank. Raises RunError if the memory between the layers looks at values, which a plan does not have."""
        return _memory(self.config, training=True)

    @cached_property
    def validation(self) -> Memory | None:
        """Per rank; None without sets to validate on. Raises as `training`."""
        data = self.config.data
        if isinstance(data, ShardsConfig) and not data.validation:
            return None
        return _memory(self.config, training=False)

    @property
    def peak(self) -> int:
        """Bytes per rank."""
        return max(self.training.peak, self.validation.peak if self.validation else 0)

    @property
    def room(self) -> int:
        """Bytes per rank that tensors may take."""
        return self._card.room

    @property
    def fits(self) -> bool:
        return self.peak <= self.room

    @property
    def _card(self) -> Device:
        return DEVICES[self.device]


def plan(config: ExperimentConfig, device: str = "h100", mfu: float = 0.4) -> Plan:
    """The plan of a config. What it says about memory is counted when first asked for, in seconds; the rest at once."""
    model = build(config)
    return Plan(
        config=config,
        device=device,
        mfu=mfu,
        parameters=model.num_parameters(),
        memory_parameters=model.num_parameters(memory=True),
        flops_per_token=model.flops_per_token(config.data.context_length),
    )


def readable(size: int) -> str:
    """Bytes for people: 74.35 GiB, 512.00 MiB."""
    return f"{size / 2**30:,.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:,.2f} MiB"


def build(config: ExperimentConfig) -> Transformer:
    """The model of a config in the precision of its weights, on the meta device.

    Its attention is sdpa: on CUDA every backend is a flash kernel, and this one runs on fake tensors too.
    """
    with torch.device("meta"):
        model = registry.build("model", _with_sdpa(config.model))
    model.checkpoint_blocks = config.trainer.recompute_mode
    return model.to(DTYPES[config.trainer.precision])


def _with_sdpa(model: Any) -> Any:
    return replace(model, attention="sdpa") if hasattr(model, "attention") else model


def shards(trainer: TrainerConfig) -> int:
    """How many ranks share one copy of the weights."""
    return {"fsdp": trainer.devices * trainer.num_nodes, "hsdp": trainer.devices}.get(trainer.strategy, 1)


def size_of(parameter: torch.Tensor, ranks: int = 1) -> int:
    """Bytes of the largest part of a parameter that FSDP2 cuts along dimension 0 into `ranks`, padded as it pads."""
    if ranks == 1:
        return parameter.nbytes
    rows = math.ceil(parameter.shape[0] / ranks)
    return rows * parameter[0].numel() * parameter.element_size()


def _memory(config: ExperimentConfig, training: bool) -> Memory:
    model, ranks = build(config), shards(config.trainer)
    counted = _count(config, training)
    weights = sum(size_of(p, ranks) for p in model.parameters())
    return Memory(
        weights=weights,
        gradients=weights,  # while validating, those of the last step are still there
        optimizer=_optimizer_bytes(config, ranks),
        gathered=counted["casts"] + _communication(config.trainer, model, training),
        activations=counted["activations"],
        stack=counted["stack"],
        logits=counted["logits"],
    )


def _optimizer_bytes(config: ExperimentConfig, ranks: int) -> int:
    """What the optimizer keeps after a step; what has a weight's shape is cut as the weight is."""
    model = build(config)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        optimizer = registry.build("optimizer", config.optimizer, model)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
    return sum(
        size_of(value, ranks) if value.shape == parameter.shape else value.nbytes
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _communication(trainer: TrainerConfig, model: Transformer, training: bool) -> int:
    """Buffers for weights and gradients on their way between ranks, at most.

    ddp: its buckets, as large as the gradients. fsdp and hsdp (`shard_model`): the root's weights throughout; a
    block's and, on its way, the next one's (all blocks' without reshard_after_forward). In the backward pass also the
    head's gradient, a block's gradients and a copy of them to reduce; at its end the same of the root.
    """
    whole = _bytes(model.parameters())
    if not trainer.is_sharded:
        return whole if trainer.devices * trainer.num_nodes > 1 else 0
    in_blocks = [_bytes(layer.parameters()) for layer in model.layers]
    root, reduced = whole - sum(in_blocks), max(in_blocks)
    gathered = [size // 2 if trainer.precision == "bf16-mixed" else size for size in in_blocks]
    blocks = max(gathered) + (max(gathered) if trainer.reshard_after_forward else sum(gathered))
    if not training:
        return root + blocks
    head = _bytes([(model.head or model.embedding).weight])
    return root + max(blocks + head + max(gathered) + reduced, root + root)


def _bytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(p.nbytes for p in parameters)


def _count(config: ExperimentConfig, training: bool) -> Counter[str]:
    """Bytes by kind of one pass. A stack that is scanned over the tokens is counted on fewer layers and tokens."""
    data, layers = config.data, config.model.num_layers
    batch = config.micro_batch_size if training else data.eval_batch_size
    length, axis = data.context_length, build(config).axis
    num_slots = getattr(getattr(config.model, "memory", None), "num_slots", None)
    if axis in (None, "depth") or num_slots is None:
        return _pass(config, training, layers, batch, length)
    short = 2 ** math.ceil(math.log2(num_slots + 1))
    lengths = [short, 2 * short] if axis == "time" else [short, 2 * short, 4 * short]
    if length <= lengths[-1] or layers <= LAYERS[-1]:
        return _pass(config, training, layers, batch, length)

    def at_length(layers: int) -> Counter[str]:
        """Of as many tokens in shorter sequences: linear in 1/T (slots fill) and T (token_major keeps all keys)."""
        counts = [_pass(config, training, layers, round(batch * length / t), t) for t in lengths]
        return _extend(
            [[1, 1 / t, t][: len(lengths)] for t in lengths], counts, [1, 1 / length, length][: len(lengths)]
        )

    return _extend([[1, x] for x in LAYERS], [at_length(x) for x in LAYERS], [1, layers])


def _extend(points: list[list[float]], counts: list[Counter[str]], point: list[float]) -> Counter[str]:
    """At `point`, the function linear in the coordinates that has these counts at these points."""
    shares = torch.linalg.solve(torch.tensor(points, dtype=torch.float64).T, torch.tensor(point, dtype=torch.float64))
    kinds = set().union(*counts)
    return Counter({k: round(sum(s * c[k] for s, c in zip(shares.tolist(), counts, strict=True))) for k in kinds})


_passes: dict[str, Counter[str]] = {}  # counted so far


def _pass(config: ExperimentConfig, training: bool, layers: int, batch: int, length: int) -> Counter[str]:
    trainer = config.trainer
    config = replace(config, model=replace(config.model, num_layers=layers))
    autocast, criterion = trainer.precision == "bf16-mixed", replace(NextTokenLoss.from_config(trainer), compiled=False)
    key = f"{config.model} {trainer.precision} {trainer.is_sharded} {trainer.recompute_mode} {criterion}"
    key = f"{key} {training} {batch} {length}"
    if key not in _passes:
        model = build(config)
        if autocast and trainer.is_sharded:
            model.layers.to(torch.bfloat16)  # as they are gathered
        try:
            if training:
                _passes[key] = training_peak(model, batch, length, autocast, criterion)
            else:
                _passes[key] = validation_peak(model, batch, length, autocast, criterion)
        except DataDependentOutputException as error:
            raise RunError(
                f"model.memory.kind {config.model.memory.kind}: its forward pass needs the values of tensors "
                f"({error.func}), so the memory it takes cannot be counted without running it"
            ) from None
    return _passes[key]
