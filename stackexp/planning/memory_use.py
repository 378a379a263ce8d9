"""Memory of one rank: weights, gradients, optimizer state, communication buffers and activations.

Weights, gradients and the optimizer state follow from the shards of each parameter, activations from a pass on fake
tensors, which have shapes but no values. Not included are the CUDA context, NCCL buffers, cuBLAS workspaces and
fragmentation; `devices.HEADROOM` reserves memory for them. `trainer.compile` has no effect on the prediction.
"""

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from stackexp.config import registry
from stackexp.config.data import FormalLanguageConfig
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.trainer import TrainerConfig
from stackexp.errors import RunError
from stackexp.models.cross_entropy import NextTokenLoss
from stackexp.models.transformer import Transformer
from stackexp.modules.optimizers import WeightAverage
from stackexp.stack import use_implementation
from stackexp.tasks import TASKS


class MemoryTracker(TorchDispatchMode):
    """A context that tracks the bytes of all storages by kind: `live` now, `peak` at the maximum of their sum.

    Weights of the model and storages from before the context do not count. The kinds are
      logits       [..., output vocabulary], and their gradients
      stack        made in the forward pass of a memory, except its output hidden states
      casts        copies of weights in another dtype, as autocast makes them
      activations  everything else
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._output_size = getattr(model.config, "output_vocab_size", None) or model.config.vocab_size
        self._kinds = {p.untyped_storage()._cdata: "weights" for p in model.parameters()}
        self._is_in_memory = False
        self._total = 0
        for memory in model.memories:
            memory.register_forward_pre_hook(self._enter_memory)
            memory.register_forward_hook(self._leave_memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self._add(tensor, is_cast)
        return result

    def _add(self, tensor: Tensor, is_cast: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._kinds:  # a view, or modified in place
            return
        if tensor.ndim and tensor.shape[-1] == self._output_size:
            kind = "logits"
        else:
            kind = "casts" if is_cast else "stack" if self._is_in_memory else "activations"
        self._kinds[storage._cdata] = kind
        weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes()).atexit = False
        self._change(kind, storage.nbytes())

    def _remove(self, key: int, size: int) -> None:
        self._change(self._kinds.pop(key), -size)

    def _change(self, kind: str, size: int) -> None:
        self.live[kind] += size
        self._total += size
        if self._total > self.peak.total():
            self.peak = self.live.copy()

    def _enter_memory(self, *_: Any) -> None:
        self._is_in_memory = True

    def _leave_memory(self, module: nn.Module, args: Any, output: tuple) -> None:
        self._is_in_memory = False
        storage = output[0].untyped_storage()
        if self._kinds[storage._cdata] == "stack":
            self._kinds[storage._cdata] = "activations"
            self._change("stack", -storage.nbytes())
            self._change("activations", storage.nbytes())


def track_pass(
    model: Transformer,
    shape: tuple[int, int],
    autocast: bool,
    criterion: NextTokenLoss,
    is_training: bool = True,
    has_document_mask: bool = False,
) -> Counter[str]:
    """Return the peak bytes by kind of a pass over tokens of this shape [B, T], with or without gradients.

    `has_document_mask` trains with the dense mask [B, 1, T, T] that sdpa needs to separate documents.
    The model is on the meta device. Gradients of weights are freed at once, because `MemoryUse` has its own entry for
    them.
    """
    with _use_fake_tensors(model):
        free_gradients(model)
        with torch.set_grad_enabled(is_training), MemoryTracker(model) as tracker:
            tokens = torch.zeros(shape, dtype=torch.int64)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                if is_training:
                    documents = torch.zeros_like(tokens) if has_document_mask else None
                    loss = compute_loss(model.train(), tokens, criterion, documents)
                else:
                    output = model.eval()(tokens, return_hidden=criterion.needs_hidden)
                    criterion.compute_token_losses(model, output, tokens)
            if is_training:
                loss.backward()
    return tracker.peak


def compute_loss(
    model: Transformer, tokens: Tensor, criterion: NextTokenLoss, documents: Tensor | None = None
) -> Tensor:
    """Return the training loss like LanguageModeling.training_step, with the same lifetimes of tensors."""
    output = model(tokens, documents=documents, return_hidden=criterion.needs_hidden)
    loss = criterion(model, output, tokens).total
    return loss + model.entropy_weight * output.entropy if model.entropy_weight else loss


def free_gradients(model: nn.Module) -> None:
    """Free the gradient of each parameter as soon as it is complete."""

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(free)


def fuse_norms(model: nn.Module) -> None:
    """Run RMSNorm as one kernel, as on CUDA. CPUs have no such kernel."""
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            setattr(module, "forward", lambda x, n=module: FusedRMSNorm.apply(x, n.weight.to(x.dtype)))  # noqa: B010


class FusedRMSNorm(torch.autograd.Function):
    """The allocations of CUDA's fused RMSNorm, without values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Allocate the output, and save what the backward pass needs."""
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate the gradients."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextlib.contextmanager
def _use_fake_tensors(model: Transformer) -> Iterator[None]:
    """Make the model and all new tensors fake. sdpa on fake tensors is a flash kernel, as on CUDA."""
    fuse_norms(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        yield


DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}
SAMPLED_LAYERS = (1, 2)
"""Numbers of layers to extrapolate from, where a stack is scanned over the tokens."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one rank at the peak, by kind."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int  # gathered blocks and their gradients (fsdp, hsdp), DDP buckets, autocast copies of weights
    activations: int
    stack: int  # made and kept by memories between layers, except their output hidden states
    logits: int

    @property
    def peak(self) -> int:
        """The sum over all kinds."""
        return sum(vars(self).values())


def build_meta_model(config: ExperimentConfig) -> Transformer:
    """Build the model on the meta device, in the dtype of its weights.

    Attention is replaced by sdpa, which runs on fake tensors; on CUDA every backend is a flash kernel. The kernel fla
    of DeltaNet needs CUDA, too.
    """
    options = config.model
    if hasattr(options, "attention"):
        options = replace(options, attention="sdpa")
    if hasattr(options, "kernel"):
        options = replace(options, kernel="torch")
    with torch.device("meta"):
        model = registry.build("model", options)
    model.checkpoint_blocks = config.trainer.recompute_mode
    return model.to(DTYPES[config.trainer.precision])


def compute_memory_use(config: ExperimentConfig, is_training: bool) -> MemoryUse:
    """Return the memory of one rank. Raises RunError if a memory between layers depends on tensor values."""
    model, ranks = build_meta_model(config), count_shards(config.trainer)
    peak = measure_peak(config, is_training)
    weights = sum(compute_shard_bytes(p, ranks) for p in model.parameters())
    return MemoryUse(
        weights=weights,
        gradients=weights,  # those of the last step are still allocated in validation
        optimizer=compute_optimizer_bytes(config, ranks),
        gathered=peak["casts"] + _compute_communication_bytes(config.trainer, model, is_training),
        activations=peak["activations"],
        stack=peak["stack"],
        logits=peak["logits"],
    )


def count_shards(trainer: TrainerConfig) -> int:
    """Return the number of ranks that share one copy of the weights."""
    return {"fsdp": trainer.world_size, "hsdp": trainer.devices}.get(trainer.strategy, 1)


def compute_shard_bytes(parameter: torch.Tensor, ranks: int = 1) -> int:
    """Return the bytes of one shard of a parameter: FSDP2 splits dimension 0 and pads it."""
    if ranks == 1:
        return parameter.nbytes
    rows = math.ceil(parameter.shape[0] / ranks)
    return rows * parameter[0].numel() * parameter.element_size()


def compute_optimizer_bytes(config: ExperimentConfig, ranks: int) -> int:
    """Return the bytes of optimizer state and averaged weights per rank.

    State with the shape of a parameter is sharded like it.
    """
    model = build_meta_model(config)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        optimizer = registry.build("optimizer", config.optimizer, model)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        averages = WeightAverage(model, config.trainer.ema_decay).tensors.values() if config.trainer.ema_decay else ()
    return sum(compute_shard_bytes(average, ranks) for average in averages) + sum(
        compute_shard_bytes(value, ranks) if value.shape == parameter.shape else value.nbytes
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _compute_communication_bytes(trainer: TrainerConfig, model: Transformer, is_training: bool) -> int:
    """Return an upper bound of the buffers for weights and gradients in communication.

    ddp: its buckets, as large as the gradients. fsdp and hsdp: the weights of the root unit, of all memories with
    bf16-mixed, and of the current and the next block (of all blocks without reshard_after_forward). The backward pass
    adds the head's gradient, a block's gradients and their copy to reduce, and ends with the same for the root unit.
    """
    total = sum_bytes(model.parameters())
    if not trainer.is_sharded:
        return total if trainer.strategy == "ddp" or trainer.world_size > 1 else 0
    blocks, memories = [sum_bytes(layer.parameters()) for layer in model.layers], 0
    if trainer.precision == "bf16-mixed":  # memories stay gathered in float32; see `shard_model`
        in_layers = [getattr(layer, "memories", ()) for layer in model.layers]  # recurrent layers have none
        own = [sum_bytes(p for memory in found for p in memory.parameters()) for found in in_layers]
        blocks, memories = [block - part for block, part in zip(blocks, own, strict=True)], sum(own)
    root, reduced = total - memories - sum(blocks), max(blocks)
    gathered = [size // 2 if trainer.precision == "bf16-mixed" else size for size in blocks]
    weights = max(gathered) + (max(gathered) if trainer.reshard_after_forward else sum(gathered))
    if not is_training:
        return root + memories + weights
    head = sum_bytes([(model.head or model.embedding).weight])
    return root + memories + max(weights + head + max(gathered) + reduced, root + root)


def sum_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total size of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def measure_peak(config: ExperimentConfig, is_training: bool) -> Counter[str]:
    """Return the bytes of one pass by kind.

    Fake tensors are slow for a stack that is scanned over the tokens. Its bytes are therefore extrapolated from fewer
    layers and from more, shorter sequences, whose peak is at the logits. With token_major, the peak of a long sequence
    can be in the backward pass. The sum of all kinds is then up to 4 % too low (measured with 3 to 8 layers of width 64
    and 64 or 128 tokens).
    """
    data, layers = config.data, config.model.num_layers
    batch = config.micro_batch_size if is_training else data.eval_batch_size
    length, axis = data.context_length, build_meta_model(config).axis
    if isinstance(data, FormalLanguageConfig) and not is_training:  # the test at the end has the longest strings
        batch = min(batch, data.eval_sequences)
        length = TASKS[data.task].count_tokens(data.eval_max_length)
    memory = getattr(config.model, "memory", None)
    num_slots = getattr(memory, "num_slots", None)
    if not is_training:
        num_slots = getattr(memory, "eval_num_slots", None) or num_slots
    if axis in (None, "depth") or num_slots is None:
        return measure_pass(config, is_training, layers, batch, length)
    shortest = 2 ** math.ceil(math.log2(num_slots + 1))
    lengths = [shortest, 2 * shortest] if axis == "time" else [shortest, 2 * shortest, 4 * shortest]
    if layers <= SAMPLED_LAYERS[-1] or (is_training and length <= lengths[-1]):
        return measure_pass(config, is_training, layers, batch, length)
    if length <= lengths[-1]:
        lengths = [length]

    def get_coordinates(length: int) -> list[float]:
        # Bytes are linear in 1/T, because slots fill up, and for token_major in T, because it keeps all keys
        return [1, 1 / length, length][: len(lengths)]

    def measure_layers(layers: int) -> Counter[str]:
        samples = [measure_pass(config, is_training, layers, round(batch * length / t), t) for t in lengths]
        return _extrapolate([get_coordinates(t) for t in lengths], samples, get_coordinates(length))

    return _extrapolate([[1, x] for x in SAMPLED_LAYERS], [measure_layers(x) for x in SAMPLED_LAYERS], [1, layers])


def _extrapolate(points: list[list[float]], samples: list[Counter[str]], point: list[float]) -> Counter[str]:
    """Evaluate at `point` the linear function with these samples at these points; at least 0 bytes of a kind."""
    weights = torch.linalg.solve(torch.tensor(points, dtype=torch.float64).T, torch.tensor(point, dtype=torch.float64))
    kinds = set().union(*samples)
    sums = {k: sum(w * s[k] for w, s in zip(weights.tolist(), samples, strict=True)) for k in kinds}
    return Counter({kind: max(0, round(size)) for kind, size in sums.items()})


_pass_cache: dict[str, Counter[str]] = {}


def measure_pass(config: ExperimentConfig, is_training: bool, layers: int, batch: int, length: int) -> Counter[str]:
    """Return the bytes by kind of one pass over `batch` sequences of `length` tokens, from a cache if measured."""
    trainer = config.trainer
    has_mask = getattr(config.data, "document_mask", False) and config.model.attention == "sdpa"
    config = replace(config, model=replace(config.model, num_layers=layers))
    autocast, criterion = trainer.precision == "bf16-mixed", NextTokenLoss.from_config(trainer)
    key = f"{config.model} {trainer.precision} {trainer.is_sharded} {trainer.recompute_mode} {criterion}"
    key = f"{key} {is_training} {trainer.accelerator} {batch} {length} {has_mask}"
    if key not in _pass_cache:
        model = build_meta_model(config)
        if autocast and trainer.is_sharded:
            model.layers.to(torch.bfloat16)  # the dtype in which blocks are gathered
            nn.ModuleList(model.memories).to(torch.float32)
        is_cuda = trainer.device_type(has_cuda=True) == "cuda"
        implementation = "triton" if is_cuda and model.axis == "depth" else "auto"  # scans on CUDA count as eager
        try:
            with use_implementation(implementation):
                _pass_cache[key] = track_pass(model, (batch, length), autocast, criterion, is_training, has_mask)
        except DataDependentOutputException as error:
            raise RunError(
                f"model.memory.kind {config.model.memory.kind}: the forward pass depends on tensor values "
                f"({error.func}), so its memory cannot be predicted; measure some steps with fit"
            ) from None
    return _pass_cache[key]
