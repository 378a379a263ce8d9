"""Options of the trainer."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, Optional

from stackexp.config.fields import Errors, option
from stackexp.errors import suggest_name


@dataclass
class TrainerConfig:
    """Options of the training loop and its devices. Names follow Lightning; a step is an optimizer step."""

    accelerator: Literal["auto", "cpu", "cuda"] = option("auto", affects="execution")
    """Type of the devices; auto takes cuda if there is a GPU."""
    devices: int = option(1, min=1, affects="execution")
    """Devices (processes) on each node."""
    num_nodes: int = option(1, min=1, affects="execution")
    """Number of nodes."""
    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp"] = option("auto", affects="execution")
    """Parallelism: fsdp shards over all devices (FSDP2), hsdp shards within a node and replicates across nodes; auto
    is single on one device, otherwise ddp.
    """
    reshard_after_forward: bool = option(True, affects="execution")
    """Free the gathered weights between forward and backward pass (fsdp, hsdp)."""
    startup_timeout_seconds: float = option(60, above=0, affects="execution")
    """Seconds in which all processes must connect. The first step may take this much longer than others."""
    collective_timeout_seconds: float = option(600, above=0, affects="execution")
    """Seconds without progress of any process; then the run aborts and names the process that hangs."""

    max_steps: int = option(10_000, min=1, affects="continuation")
    """Optimizer steps of the run."""
    max_time: Optional[str] = option(None, affects="execution")
    """Time limit of a session as DD:HH:MM:SS; the run then saves and exits with code 75."""

    stop_grace_seconds: float = option(120, above=0, affects="execution")
    """Seconds after a stop request in which no batch ends; then the run exits without saving."""

    val_check_interval: Optional[int] = option(1000, min=1, affects="evaluation")
    """Steps between two validations; null validates only at the end."""
    checkpoint_interval: int = option(1000, min=1, affects="execution")
    """Steps between two checkpoints."""
    checkpoint_interval_minutes: Optional[float] = option(None, above=0, affects="execution")
    """Minutes between two checkpoints, in addition to checkpoint_interval."""
    keep_checkpoints: int = option(2, min=1, affects="execution")
    """Number of newest checkpoints to keep; the best one is always kept."""

    precision: Literal["32-true", "bf16-mixed", "bf16-true", "64-true"] = option("bf16-mixed", changes_scores=True)
    """Precision of weights and computation."""
    gradient_clip_val: Optional[float] = option(1.0, above=0)
    """Largest gradient norm; null does not clip."""
    z_loss: float = option(0.0, min=0)
    """Weight of the mean squared log-partition function in the loss."""

    ema_decay: Optional[float] = option(None, above=0, below=1)
    """Decay of the exponential moving average of the weights, which checkpoints then include; null has none."""

    spike_threshold: Optional[float] = option(6.0, above=0, affects="continuation")
    """A loss this many standard deviations above the mean of recent steps is logged as a spike; null detects none."""
    skip_spikes: bool = option(False, affects="continuation")
    """Skip the update of a step with a loss spike."""

    compile: Literal["auto", True, False] = option("auto", affects="execution")
    """Compile attention, feed-forward network and loss with torch.compile, once for all layers; auto: on CUDA, for
    language models without a token_major memory."""
    activation_checkpointing: bool = option(False, affects="execution")
    """Recompute the activations of each block in the backward pass to save memory."""
    recompute: Literal["all", "selective"] = option("all", affects="execution")
    """Activations to recompute in the backward pass: all, or all except matrix products and attention (selective)."""
    cross_entropy: Literal["chunked", "whole"] = option("chunked", affects="execution")
    """Computation of the loss: chunked (cross_entropy_chunk tokens at a time), or whole (all logits of a micro-batch at
    once)."""
    cross_entropy_chunk: int = option(4096, min=1, affects="execution")
    """Tokens per chunk of cross_entropy: chunked."""

    callbacks: list[Any] = option([], affects="continuation")
    """Own Lightning callbacks, called after those of stackexp: `module:Class`, or {class: module:Class, options:
    {...}}. A module is installed, or a Python file; see docs/security.md."""
    profile: Optional[str] = option(None, affects="logging")
    """Steps to profile, such as 10-15; writes a Chrome trace and, on CUDA, a memory snapshot to the run folder."""

    def find_errors(self) -> Errors:
        """Yield the errors that involve several options."""
        yield from find_class_errors("callbacks", self.callbacks)
        if self.skip_spikes and self.spike_threshold is None:
            yield "skip_spikes", "requires spike_threshold, found null"
        if self.strategy == "single" and self.world_size > 1:
            yield "strategy", f"single supports one device, not {self.world_size}; use ddp, fsdp or hsdp"
        if self.precision == "64-true" and self.is_sharded:
            yield "precision", f"64-true does not support strategy: {self.strategy}; use 32-true, or strategy: ddp"
        if self.recompute == "selective" and not self.activation_checkpointing:
            yield "recompute", "selective requires activation_checkpointing: true"
        if self.max_time is not None and not re.fullmatch(r"\d+:[0-2]\d:[0-5]\d:[0-5]\d", self.max_time):
            yield "max_time", f"expected DD:HH:MM:SS such as 00:23:30:00, found {self.max_time!r}"
        if self.profile is not None:
            steps = re.fullmatch(r"(\d{1,9})-(\d{1,9})", self.profile)
            first, last = map(int, steps.groups()) if steps else (0, 0)
            if not 1 <= first <= last:
                yield "profile", f"expected two steps such as 10-15, found {self.profile!r}"
            elif first > self.max_steps:
                yield "profile", f"starts after the last step, trainer.max_steps {self.max_steps}; use earlier steps"

    @property
    def recompute_mode(self) -> bool | str:
        """Return what to recompute in the backward pass: False, True (all) or "selective"."""
        return self.activation_checkpointing and (self.recompute == "all" or self.recompute)

    def device_type(self, has_cuda: bool) -> str:
        """Return "cpu" or "cuda": the accelerator, with auto resolved."""
        return self.accelerator if self.accelerator != "auto" else "cuda" if has_cuda else "cpu"

    @property
    def world_size(self) -> int:
        """Return the number of processes, one for each device of each node."""
        return self.devices * self.num_nodes

    @property
    def is_sharded(self) -> bool:
        """Return True if each process has a part of every weight."""
        return self.strategy in ("fsdp", "hsdp")


def split_class(entry: Any) -> tuple[Any, Any]:
    """Return name and options of an entry: a name, `module:Class`, or {class: module:Class, options: {...}}."""
    return (entry.get("class"), entry.get("options", {})) if isinstance(entry, dict) else (entry, {})


def find_class_errors(key: str, entries: list[Any], names: Collection[str] = ()) -> Errors:
    """Yield the errors of a list of callbacks or loggers; `names` are those that need no module."""
    for number, entry in enumerate(entries):
        name, options = split_class(entry)
        if isinstance(entry, dict) and not entry.keys() <= {"class", "options"}:
            yield key, f"expected the keys class and options, found {', '.join(map(str, entry))}"
        elif not isinstance(options, dict):
            yield key, f"options of {name}: expected a mapping, found {options!r}"
        elif not isinstance(name, str) or (name not in names and not re.fullmatch(r".+:\w+", name)):
            known = f"one of {', '.join(names)}, or module:Class" if names else "module:Class"
            yield key, f"expected {known}, found {name!r}{suggest_name(str(name), names)}"
        elif entry in entries[:number]:
            yield key, f"{name} is named twice; name it once"
