"""Options of the trainer."""

import re
from dataclasses import dataclass
from typing import Literal, Optional

from stackexp.config.fields import Errors, option


@dataclass
class TrainerConfig:
    """Options of the training loop and its devices. Names follow Lightning; a step is an optimizer step."""

    # Devices. accelerator auto: cuda if available. strategy auto: single on one device, otherwise ddp.
    # fsdp shards over all devices (FSDP2); hsdp shards within a node and replicates across nodes.
    accelerator: Literal["auto", "cpu", "cuda"] = option("auto", affects="execution")
    devices: int = option(1, min=1, affects="execution")  # per node
    num_nodes: int = option(1, min=1, affects="execution")
    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp"] = option("auto", affects="execution")
    reshard_after_forward: bool = option(True, affects="execution")  # fsdp, hsdp: free gathered weights until backward
    startup_timeout_seconds: float = option(60, above=0, affects="execution")  # until all processes are connected
    collective_timeout_seconds: float = option(600, above=0, affects="execution")  # abort if no process makes progress

    # Length. max_time (DD:HH:MM:SS) limits one session, which then saves a checkpoint and exits with code 75.
    max_steps: int = option(10_000, min=1, affects="continuation")
    max_time: Optional[str] = option(None, affects="execution")

    stop_grace_seconds: float = option(120, above=0, affects="execution")  # after SIGTERM, without the end of a batch

    # Validation and checkpoints. None: validate only at the end; no checkpoints by time.
    val_check_interval: Optional[int] = option(1000, min=1, affects="evaluation")
    checkpoint_interval: int = option(1000, min=1, affects="execution")
    checkpoint_interval_minutes: Optional[float] = option(None, above=0, affects="execution")
    keep_checkpoints: int = option(2, min=1, affects="execution")  # the newest; the best one is always kept

    # Numerics. z_loss: weight of the mean squared log-partition function.
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "64-true"] = option("bf16-mixed", changes_scores=True)
    gradient_clip_val: Optional[float] = option(1.0, above=0)
    z_loss: float = option(0.0, min=0)

    # A loss more than spike_threshold standard deviations above the mean of recent steps is logged as a spike;
    # skip_spikes also skips the update of that step.
    spike_threshold: Optional[float] = option(6.0, above=0, affects="continuation")
    skip_spikes: bool = option(False, affects="continuation")

    # Speed and memory. activation_checkpointing recomputes each block in the backward pass: all of it, or with
    # recompute: selective everything but matrix products and attention.
    compile: bool = option(False, affects="execution")
    activation_checkpointing: bool = option(False, affects="execution")
    recompute: Literal["all", "selective"] = option("all", affects="execution")
    # chunked computes the logits of cross_entropy_chunk tokens at a time; liger does so with the package liger-kernel
    # (CUDA only); whole computes the logits of a micro-batch at once.
    cross_entropy: Literal["chunked", "liger", "whole"] = option("chunked", affects="execution")
    cross_entropy_chunk: int = option(4096, min=1, affects="execution")

    def find_errors(self) -> Errors:
        """Yield the errors that involve several options."""
        processes = self.devices * self.num_nodes
        if self.strategy == "single" and processes > 1:
            yield "strategy", f"single supports one device, not {processes}; use ddp, fsdp or hsdp"
        if self.recompute == "selective" and not self.activation_checkpointing:
            yield "recompute", "selective requires activation_checkpointing: true"
        if self.max_time is not None and not re.fullmatch(r"\d+:[0-2]\d:[0-5]\d:[0-5]\d", self.max_time):
            yield "max_time", f"expected DD:HH:MM:SS such as 00:23:30:00, found {self.max_time!r}"

    @property
    def recompute_mode(self) -> bool | str:
        """Return what to recompute in the backward pass: False, True (all) or "selective"."""
        return self.activation_checkpointing and (self.recompute == "all" or self.recompute)

    def device_type(self, has_cuda: bool) -> str:
        """Return "cpu" or "cuda": the accelerator, with auto resolved."""
        return self.accelerator if self.accelerator != "auto" else "cuda" if has_cuda else "cpu"

    @property
    def is_sharded(self) -> bool:
        """Return True if each process has a part of every weight."""
        return self.strategy in ("fsdp", "hsdp")
