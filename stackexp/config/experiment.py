"""The experiment config: all sections of a run, and the options of optimizers, schedules and logging."""

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Optional

from stackexp.config.fields import Errors, option
from stackexp.config.model import FLASH_KERNELS, TransformerConfig
from stackexp.config.registry import register
from stackexp.config.trainer import TrainerConfig, find_class_errors


@dataclass
class EvaluationConfig:
    """Benchmarks that `fit` scores every few steps; see docs/benchmarks.md. Requires stackexp[eval]."""

    tasks: list[str] = option([], affects="evaluation")
    """Tasks, groups or tags of lm-eval, such as smollm2_piqa; empty scores none."""
    interval: int = option(1000, min=1, affects="evaluation")
    """Steps between two evaluations of the tasks."""
    limit: Optional[int] = option(None, min=1, affects="evaluation")
    """Score only the first documents of each task, this many; null scores all."""
    batch_size: int = option(16, min=1, affects="execution")
    """Sequences per device and forward pass of the tasks."""
    datasets: Optional[str] = option(None, affects="location")
    """Folder of local datasets, <task>/<split>.jsonl; null downloads them."""

    def find_errors(self) -> Errors:
        """Yield the errors that involve several options."""
        if self.datasets is not None and not self.tasks:
            yield "datasets", "requires tasks; name some in evaluation.tasks"


@dataclass
class WarmStartConfig:
    """The start from given weights. `model.init` is something else: the distribution of random initial weights."""

    weights: Optional[str] = None
    """Start a new run from these weights instead of random ones: a run folder (its last checkpoint), a checkpoint, or
    a safetensors file. Optimizer, schedule and data start from the beginning; a resumed run ignores this option.
    """
    memory: Literal["default", "identity"] = "default"
    """Start of a memory that the weights lack: its own initialization (default), or without effect (identity), so that
    the first loss is that of the model without the memory.
    """
    skip: list[str] = option([])
    """Tensors that are initialized at random although the weights have them, by name or part of it: embedding, head,
    memory, layers.0. An asterisk matches any text, as in layers.*.memory.up."""

    def find_errors(self) -> Errors:
        """Yield the errors that involve several options."""
        if self.skip and self.weights is None:
            yield "skip", "requires warm_start.weights"


@register("optimizer", "adamw", builds="stackexp.modules.optimizers:build_adamw")
@dataclass
class AdamWConfig:
    """AdamW. Norms, biases, embeddings and scalars have no weight decay."""

    kind: str = "adamw"
    lr: float = option(4e-4, above=0)
    """Peak learning rate."""
    memory_lr: Optional[float] = option(None, above=0)
    """Peak learning rate of the memory parameters; null takes lr."""
    beta1: float = option(0.9, min=0, below=1)
    """Decay of the first moment."""
    beta2: float = option(0.95, min=0, below=1)
    """Decay of the second moment."""
    eps: float = option(1e-5, above=0)
    """Epsilon of the denominator."""
    weight_decay: float = option(0.1, min=0)
    """Decoupled weight decay of all matrices."""


@register("optimizer", "muon", builds="stackexp.modules.optimizers:build_muon")
@dataclass
class MuonConfig(AdamWConfig):
    """Muon for the matrices between embedding and output projection (Jordan et al. 2024), AdamW for everything else.

    The updates of Muon are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so lr serves both. Not
    for sharded models: orthogonalization needs whole matrices.
    """

    kind: str = "muon"
    momentum: float = option(0.95, min=0, below=1)
    """Momentum of Muon."""


@dataclass
class ScheduleConfig:
    """Options of all schedules: linear warmup from 0, then a decay to `final_fraction` of the peak learning rate."""

    kind: str = "cosine"
    warmup_steps: int = option(200, min=0)
    """Steps of the linear warmup."""
    final_fraction: float = option(0.1, min=0, max=1)
    """Learning rate at the last step, relative to the peak."""

    def find_errors(self, trainer: TrainerConfig) -> Errors:
        """Yield the errors that involve several options of the schedule or the trainer."""
        if self.warmup_steps >= trainer.max_steps:
            yield "warmup_steps", f"{self.warmup_steps} must be smaller than trainer.max_steps {trainer.max_steps}"

    def count_decay_steps(self, max_steps: int) -> int:
        """Return the number of decay steps in a run of `max_steps`: all after the warmup."""
        return max_steps - self.warmup_steps


@register("schedule", "cosine", builds="stackexp.modules.optimizers:build_schedule")
@dataclass
class CosineConfig(ScheduleConfig):
    """A cosine decay until the last step."""

    kind: str = "cosine"


@register("schedule", "linear", builds="stackexp.modules.optimizers:build_schedule")
@dataclass
class LinearConfig(ScheduleConfig):
    """A linear decay until the last step."""

    kind: str = "linear"


@register("schedule", "wsd", builds="stackexp.modules.optimizers:build_schedule")
@dataclass
class WarmupStableDecayConfig(ScheduleConfig):
    """A constant learning rate, then a decay over the last `decay_steps`: linear, or 1 - sqrt."""

    kind: str = "wsd"
    final_fraction: float = option(0.0, min=0, max=1)
    """Learning rate at the last step, relative to the peak."""
    decay_steps: Optional[int] = option(None, min=1)
    """Steps of the final decay; null takes decay_fraction of trainer.max_steps."""
    decay_fraction: float = option(0.2, min=0, max=1)
    """Length of the final decay as a share of trainer.max_steps; 0: no decay."""
    decay: Literal["linear", "one_minus_sqrt"] = "one_minus_sqrt"
    """Shape of the final decay."""

    def find_errors(self, trainer: TrainerConfig) -> Errors:
        """Yield the errors that involve several options of the schedule or the trainer."""
        yield from super().find_errors(trainer)
        if self.warmup_steps + self.count_decay_steps(trainer.max_steps) > trainer.max_steps:
            name = "decay_fraction" if self.decay_steps is None else "decay_steps"
            yield name, f"warmup_steps and the decay exceed trainer.max_steps {trainer.max_steps}"

    def count_decay_steps(self, max_steps: int) -> int:
        """Return the number of decay steps in a run of `max_steps`, 0 only for `decay_fraction: 0`."""
        shortest = 1 if self.decay_fraction else 0
        return self.decay_steps or max(shortest, round(self.decay_fraction * max_steps))


LOGGERS = ("tensorboard", "csv", "wandb", "mlflow")
MAX_NAME_LENGTH = 200  # folder names; file systems permit 255 bytes


@dataclass
class LoggingConfig:
    """Options of the run folder, the progress display and logging."""

    root: str = option("runs", affects="logging")
    """Parent of the run folders, which are <root>/<name>/<id>."""
    loggers: list[Any] = option(["tensorboard"], affects="logging")
    """Lightning loggers that receive the lines of metrics.jsonl: tensorboard, csv, wandb, mlflow, or `module:Class` of
    your own, also as {class: module:Class, options: {...}}."""
    progress_bar: bool = option(True, affects="logging")
    """Show a progress bar in a terminal; if false, print lines."""
    log_interval_seconds: float = option(30, above=0, affects="logging")
    """Seconds between two progress lines, if there is no progress bar."""
    probe_interval: int = option(10, min=1, affects="logging")
    """Steps between two measurements of the memory (entropy, occupancy, action probabilities)."""

    def find_errors(self) -> Errors:
        """Yield the errors of the loggers."""
        yield from find_class_errors("loggers", self.loggers, LOGGERS)


@dataclass
class ExperimentConfig:
    """An experiment: the input of `fit`, and the contents of a run folder's config.yaml.

    `environment_texts` has the unresolved text of each value with `${oc.env:NAME}`, by key; `interpolated_keys` has the
    keys on which other options depend.
    """

    environment_texts: ClassVar[dict[str, Any]] = {}
    interpolated_keys: ClassVar[set[str]] = set()
    name: str = option("unnamed", affects="logging")
    """Name of the experiment and of the folder of its runs; slashes make subfolders."""
    seed: int = option(0, min=0, max=2**32 - 1)
    """Seed of the weights and of the order of the data."""
    plugins: list[str] = option([], affects="logging")
    """Python files or modules that register more kinds; see docs/security.md."""
    model: Any = field(default_factory=lambda: {"kind": "transformer"})
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    data: Any = field(default_factory=lambda: {"kind": "shards"})
    optimizer: Any = field(default_factory=lambda: {"kind": "adamw"})
    schedule: Any = field(default_factory=lambda: {"kind": "cosine"})
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = option(EvaluationConfig(), affects="evaluation")
    logging: LoggingConfig = option(LoggingConfig(), affects="logging")

    def find_errors(self, is_training: bool = True) -> Errors:
        """Yield the errors that involve several sections; for an evaluation, the global batch is not checked."""
        if not re.fullmatch(r"[\w+-][\w.+-]*(/[\w+-][\w.+-]*)*", self.name):
            yield "name", f"{self.name!r} cannot name a folder; use letters, digits and . _ - + between slashes"
        if max(map(len, self.name.split("/"))) > MAX_NAME_LENGTH:
            yield "name", f"a part of it is longer than {MAX_NAME_LENGTH} characters; use a shorter one"
        is_decoder = isinstance(self.model, TransformerConfig) and self.model.memory_axis == "depth"
        if self.trainer.recompute == "selective" and not is_decoder:
            yield "trainer.recompute", "selective is only supported by decoders with memories of axis: depth; use all"
        if self.optimizer.kind == "muon" and self.trainer.is_sharded:
            yield "optimizer.kind", f"muon does not support trainer.strategy: {self.trainer.strategy}; use adamw"
        if is_training and getattr(self.optimizer, "memory_lr", None) and getattr(self.model, "memory", None) is None:
            yield "optimizer.memory_lr", "the model has no memory; set model.memory, or memory_lr to null"
        if self.evaluation.tasks and self.data.objective != "language_modeling":
            yield "evaluation.tasks", f"requires training on text, found data.kind: {self.data.kind}; set it to []"
        if getattr(self.model, "residual_dtype", "float32") == "bfloat16" and self.trainer.precision != "bf16-mixed":
            found = f"found trainer.precision {self.trainer.precision}"
            yield "model.residual_dtype", f"bfloat16 requires trainer.precision: bf16-mixed, {found}; use float32"
        yield from self._find_attention_errors(is_training)
        if self.model.vocab_size < self.data.vocab_size:
            yield "model.vocab_size", f"{self.model.vocab_size} is smaller than data.vocab_size {self.data.vocab_size}"
        yield from self.data.find_experiment_errors(self, is_training)

    def _find_attention_errors(self, is_training: bool) -> Errors:
        attention, precision = getattr(self.model, "attention", "sdpa"), self.trainer.precision
        if attention in FLASH_KERNELS and not precision.startswith("bf16"):
            yield "model.attention", f"{attention} requires bfloat16, found trainer.precision {precision}; use sdpa"
        if attention != "sdpa" and self.trainer.accelerator == "cpu" and (is_training or attention in FLASH_KERNELS):
            yield "model.attention", f"{attention} requires CUDA, found trainer.accelerator cpu; use sdpa"

    @property
    def accumulate_grad_batches(self) -> int:
        """Return the micro-batches per optimizer step: global batch / (devices x micro-batch x context)."""
        return max(1, self.data.global_batch_tokens // self.tokens_per_pass)

    @property
    def micro_batch_size(self) -> int:
        """Return the sequences per device and forward pass."""
        has_size = hasattr(self.data, "micro_batch_size")  # other data have one pass of `batch_size` sequences
        return self.data.micro_batch_size if has_size else self.data.batch_size // self.trainer.world_size

    @property
    def tokens_per_pass(self) -> int:
        """Return the tokens per forward pass over all devices; the maximum if lengths vary."""
        return self.trainer.world_size * self.micro_batch_size * self.data.context_length

    @property
    def total_tokens(self) -> int:
        """Return the training tokens of the whole run."""
        return self.trainer.max_steps * self.data.global_batch_tokens
