"""The experiment config: every section that `fit` needs."""

import re
from dataclasses import dataclass, field
from typing import Any, Optional

from stackexp.config.fields import Problems, at_least, within
from stackexp.config.model import FLASH_KERNELS, TransformerConfig
from stackexp.config.trainer import TrainerConfig


@dataclass
class LoggingConfig:
    root: str = "runs"  # run folders are <root>/<name>/<id>
    tensorboard: bool = True
    progress_bar: bool = True
    probe_interval: int = at_least(1, 10)  # steps between the probes of what the memory does


@dataclass
class ExperimentConfig:
    """One experiment: everything `fit` needs, and what a run folder's config.yaml holds."""

    name: str = "unnamed"
    seed: int = within(0, 2**32 - 1, 0)
    plugins: list[str] = field(default_factory=list)  # Python files or modules that register more kinds
    # name -> overrides: `fit` then trains this config with them on top, in its own run, and shows all side by side.
    beside: Optional[dict[str, list[str]]] = field(default_factory=dict)
    model: Any = field(default_factory=lambda: {"kind": "transformer"})
    data: Any = field(default_factory=lambda: {"kind": "shards"})
    optimizer: Any = field(default_factory=lambda: {"kind": "adamw"})
    schedule: Any = field(default_factory=lambda: {"kind": "cosine"})
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def problems(self, trains: bool = True) -> Problems:
        """`trains`: False where the model is only evaluated, which knows no global batch."""
        if not re.fullmatch(r"[\w+-][\w.+-]*(/[\w+-][\w.+-]*)*", self.name):
            yield "name", f"{self.name!r} cannot name run folders; use letters, digits and . _ - + between slashes"
        if self.beside and self.trainer.devices * self.trainer.num_nodes > 1:
            yield "beside", "trains one run after the other in one process; set trainer.devices: 1, or use a sweep"
        axis = getattr(getattr(self.model, "memory", None), "axis", "depth")
        blocks = isinstance(self.model, TransformerConfig) and axis == "depth"
        if self.trainer.recompute == "selective" and not blocks:
            yield "trainer.recompute", "selective is for a decoder without a scan over the tokens; set it to all"
        attention, precision = getattr(self.model, "attention", "sdpa"), self.trainer.precision
        if attention in FLASH_KERNELS and not precision.startswith("bf16"):
            yield "model.attention", f"{attention} is for bfloat16, not trainer.precision {precision}; set it to sdpa"
        if attention != "sdpa" and self.trainer.accelerator == "cpu" and (trains or attention in FLASH_KERNELS):
            yield "model.attention", f"{attention} needs CUDA, not trainer.accelerator cpu; set it to sdpa"
        if self.model.vocab_size < self.data.vocab_size:
            yield "model.vocab_size", f"{self.model.vocab_size} is smaller than data.vocab_size {self.data.vocab_size}"
        yield from self.data.experiment_problems(self, trains)

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches per optimizer step: global batch / (devices x micro-batch x context)."""
        return max(1, self.data.global_batch_tokens // self.tokens_per_pass)

    @property
    def micro_batch_size(self) -> int:
        """Sequences of one forward pass on each device."""
        return self.data.micro_batch(self.trainer.devices * self.trainer.num_nodes)

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of one forward pass over all devices, at most."""
        return self.trainer.devices * self.trainer.num_nodes * self.micro_batch_size * self.data.context_length

    @property
    def total_tokens(self) -> int:
        return self.trainer.max_steps * self.data.global_batch_tokens
