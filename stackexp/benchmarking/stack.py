"""`stackexp bench stack`: the stack step of every layer alone, beside the bytes and FLOPs it cannot do without.

The floor of a pass counts each byte once that must come from or go to memory if nothing is kept on the chip between
layers: forward, the occupied slots and masks of the layer before and after, pushed vector, logits and read; backward,
the same and the gradients of all of them. What is reached is told as a share of a copy of as many bytes, measured on
the same device in the same turns.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from stackexp import stack
from stackexp.benchmarking.efficiency import WARM_UP, seconds
from stackexp.config.experiment import ExperimentConfig


def precision(config: ExperimentConfig, device: torch.device) -> torch.dtype:
    """Of pushed vectors, logits and reads, and of what Triton's kernels keep of the stacks."""
    return torch.bfloat16 if device.type == "cuda" and "bf16" in config.trainer.precision else torch.float32


def floor_bytes(config: ExperimentConfig, tokens: int, dtype: torch.dtype = torch.float32) -> int:
    """Of one forward pass of all layers over so many tokens; a backward pass moves twice as many."""
    memory, total = config.model.memory, 0
    for layer in range(config.model.num_layers):
        before, after = (min(layer + more, memory.num_slots) for more in (0, 1))
        total += (before + after) * (memory.head_dim + 1) + 2 * memory.head_dim + 3
    return dtype.itemsize * tokens * memory.num_heads * total


def floor_flops(config: ExperimentConfig, tokens: int) -> int:
    """Of one forward pass: update (3) and read (2 multiply-adds) of each occupied number; a backward pass has twice."""
    memory = config.model.memory
    occupied = sum(min(layer + 1, memory.num_slots) for layer in range(config.model.num_layers))
    return 2 * 5 * tokens * memory.num_heads * memory.head_dim * occupied


class Layers:
    """The steps of all layers of a config, one after the other, on random numbers."""

    def __init__(self, config: ExperimentConfig, device: torch.device):
        memory, shape = config.model.memory, (config.data.micro_batch_size, config.data.context_length)
        actions = 2 if memory.discipline == "push_only" else 3
        self.options = {"num_slots": memory.num_slots, "discipline": memory.discipline, "read": memory.read}
        self.options["read_mask"] = memory.read_mask
        self.shape = (*shape, memory.num_heads)
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            numbers = torch.randn(*size, device=device, generator=generator)
            return numbers.to(precision(config, device)).requires_grad_()

        layers = range(config.model.num_layers)
        self.pushed = [normal(*self.shape, memory.head_dim) for _ in layers]
        self.logits = [normal(*self.shape, actions) for _ in layers]
        self.query = normal(memory.num_heads, memory.head_dim) if memory.read == "global" else None
        self.segment = memory.checkpoint_every_layers

    def forward(self) -> Tensor:
        """Sum of all reads: what a model would add to the residual stream."""
        first = self.pushed[0]
        sizes = self.shape, self.options["num_slots"], first.shape[-1]
        state = stack.empty(*sizes, like=first, axis="depth", dtype=first.dtype)
        reads = []
        for x, logits in zip(self.pushed, self.logits, strict=True):
            output, state = stack.step(state, x, logits, self.query, checkpoint_every=self.segment, **self.options)
            reads.append(output.read)
        return torch.stack(reads).sum()

    def without_gradients(self) -> None:
        with torch.no_grad():
            self.forward()

    def training(self) -> None:
        self.forward().backward()
        for leaf in (*self.pushed, *self.logits, *([] if self.query is None else [self.query])):
            leaf.grad = None


def measure(config: ExperimentConfig, turns: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows for `auto` and `reference`, forward without gradients and forward with backward, in turns with copies."""
    layers, tokens = Layers(config, device), config.data.micro_batch_size * config.data.context_length
    passes: dict[str, tuple[Callable[[], None], int]] = {
        "forward": (layers.without_gradients, 1),
        "forward + backward": (layers.training, 3),
    }
    for name, (action, multiple) in passes.items():
        moved = multiple * floor_bytes(config, tokens, precision(config, device))
        flops = multiple * floor_flops(config, tokens)
        source = torch.empty(moved // 2, dtype=torch.uint8, device=device)  # read once, written once
        target = torch.empty_like(source)
        for implementation in ("auto", "reference"):
            taken, copied = [], []
            for number in range(WARM_UP + turns):
                with stack.use_implementation(implementation):
                    own = seconds(action, device)
                copy = seconds(lambda s=source, t=target: t.copy_(s), device)
                if number >= WARM_UP:
                    taken.append(own)
                    copied.append(copy)
            yield row(implementation, name, statistics.median(taken), statistics.median(copied), moved, flops)


def row(implementation: str, name: str, own: float, copy: float, moved: int, flops: int) -> dict[str, Any]:
    """`floor_seconds`: what a copy of as many bytes takes."""
    return {
        **{"implementation": implementation, "pass": name, "seconds": own, "floor_seconds": copy},
        **{"bytes": moved, "flops": flops, "gigabytes_per_second": moved / own / 1e9},
        **{"share_of_copy": copy / own, "gigaflops_per_second": flops / own / 1e9},
    }
