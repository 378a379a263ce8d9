"""Options of the trainer."""

import re
from dataclasses import dataclass
from typing import Literal, Optional

from stackexp.config.fields import Problems, above, at_least


@dataclass
class TrainerConfig:
    """Named as in lightning's Trainer where it has a name; steps are optimizer steps throughout."""

    accelerator: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if there is one
    devices: int = at_least(1, 1)
    num_nodes: int = at_least(1, 1)
    # auto: single on one device, else ddp. fsdp shards over all devices (FSDP2), hsdp inside a node, replicated across.
    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp"] = "auto"
    reshard_after_forward: bool = True  # fsdp, hsdp: free a block's gathered weights between forward and backward
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "64-true"] = "bf16-mixed"
    max_steps: int = at_least(1, 10_000)
    max_time: Optional[str] = None  # DD:HH:MM:SS of this session; then save and exit with code 75
    gradient_clip_val: Optional[float] = above(0, 1.0)
    val_check_interval: Optional[int] = at_least(1, 1000)  # None: only at the end
    checkpoint_interval: int = at_least(1, 1000)
    checkpoint_minutes: Optional[float] = above(0, None)  # besides, whenever so much time has passed
    keep_checkpoints: int = at_least(1, 2)  # the newest, besides the one of the lowest validation loss
    collective_timeout: float = above(0, 600)  # seconds without progress of any process until the run is given up
    activation_checkpointing: bool = False  # compute activations again in the backward pass, a block at a time:
    recompute: Literal["all", "selective"] = "all"  # of them, or those that take no matrix product and no attention
    compile: bool = False
    # chunked: makes logits of `cross_entropy_chunk` tokens at a time. liger: the same by the package liger-kernel, on
    # CUDA. whole: of a whole micro-batch.
    cross_entropy: Literal["chunked", "liger", "whole"] = "chunked"
    cross_entropy_chunk: int = at_least(1, 4096)
    z_loss: float = at_least(0, 0.0)  # weight of the mean squared log-partition function
    spike_threshold: Optional[float] = above(0, 6.0)  # a loss so many deviations above the mean of the last steps
    skip_spikes: bool = False  # make no update on such a batch; otherwise it is only logged

    def problems(self) -> Problems:
        processes = self.devices * self.num_nodes
        if self.strategy == "single" and processes > 1:
            yield "strategy", f"single is for one device, not {processes}; choose ddp, fsdp or hsdp"
        if self.recompute == "selective" and not self.activation_checkpointing:
            yield "recompute", "selective says how activation_checkpointing does it; set that to true, too"
        if self.max_time is not None and not re.fullmatch(r"\d+:[0-2]\d:[0-5]\d:[0-5]\d", self.max_time):
            yield "max_time", f"expected DD:HH:MM:SS such as 00:23:30:00, found {self.max_time!r}"

    @property
    def recomputed(self) -> bool | str:
        """As `Transformer.checkpoint_blocks`: False, True or "selective"."""
        return self.activation_checkpointing and (self.recompute == "all" or self.recompute)

    def device_type(self, has_cuda: bool) -> str:
        """ "cpu" or "cuda", on a machine that has CUDA or not; auto is cuda where there is one."""
        return self.accelerator if self.accelerator != "auto" else "cuda" if has_cuda else "cpu"

    @property
    def sharded(self) -> bool:
        """Whether each process holds a part of every weight."""
        return self.strategy in ("fsdp", "hsdp")
