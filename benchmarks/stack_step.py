"""The stack steps of all layers, without the rest of the model, against a lower bound of bytes and FLOPs.

    python benchmarks/stack_step.py [--config pretrain/stacktrans-360m] [--rounds 100] [--out FILE.json] [KEY=VALUE ...]

The lower bound counts each byte once that must be read from or written to memory if no data stay on the chip between
layers. Forward: occupied slots and masks before and after the step, pushed vector, logits and read. Backward: the same
and their gradients. The result is compared with a copy of as many bytes, in alternating measurements. `compiled` is the
eager step, compiled for each layer by torch.compile.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stackexp import stack
from stackexp.benchmarking import build_parser, choose_device, time_alternating, write_record
from stackexp.config.compose import compose
from stackexp.config.experiment import ExperimentConfig
from stackexp.tables import format_table

PASSES = {"forward": 1, "forward + backward": 3}
"""Bytes and FLOPs of each pass, in multiples of a forward pass."""
compiled_step = torch.compile(stack.step, fullgraph=True, dynamic=False)


def count_lower_bound_bytes(config: ExperimentConfig, tokens: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes of one forward pass of all layers."""
    memory, total = config.model.memory, 0
    for update in range(count_updates(config)):
        occupied_before, occupied_after = (min(n, memory.num_slots) for n in (update, update + 1))
        total += (
            (occupied_before + occupied_after) * (memory.head_dim + 1) + 2 * memory.head_dim + count_actions(config)
        )
    return dtype.itemsize * tokens * memory.num_heads * total


def count_flops(config: ExperimentConfig, tokens: int) -> int:
    """Return the FLOPs of one forward pass, in multiply-adds per occupied element.

    One for each action in the update, and two in a global read.
    """
    memory = config.model.memory
    occupied = sum(min(update + 1, memory.num_slots) for update in range(count_updates(config)))
    per_element = count_actions(config) + (2 if memory.read == "global" else 0)
    return 2 * per_element * tokens * memory.num_heads * memory.head_dim * occupied


def count_updates(config: ExperimentConfig) -> int:
    """Return the updates of a token's stacks in all layers."""
    return config.model.num_layers * config.model.memory.updates_per_layer


def count_actions(config: ExperimentConfig) -> int:
    """Return the number of actions: push, pop and no-op, or for push_only push and no-op."""
    return 2 if config.model.memory.discipline == "push_only" else 3


def choose_dtype(config: ExperimentConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of pushed vectors, logits, reads and stack states."""
    return torch.bfloat16 if device.type == "cuda" and "bf16" in config.trainer.precision else torch.float32


class StackSteps:
    """The stack steps of all layers of a config, in order, on random numbers."""

    def __init__(self, config: ExperimentConfig, device: torch.device):
        memory = config.model.memory
        self.options = {"num_slots": memory.num_slots, "discipline": memory.discipline, "read": memory.read}
        self.options["read_mask"] = memory.read_mask
        self.shape = (config.data.micro_batch_size, config.data.context_length, memory.num_heads)
        generator = torch.Generator(device).manual_seed(0)

        def draw(*size: int) -> Tensor:
            numbers = torch.randn(*size, device=device, generator=generator)
            return numbers.to(choose_dtype(config, device)).requires_grad_()

        updates = range(count_updates(config))
        self.pushed = [draw(*self.shape, memory.head_dim) for _ in updates]
        self.logits = [draw(*self.shape, count_actions(config)) for _ in updates]
        self.query = draw(memory.num_heads, memory.head_dim) if memory.read == "global" else None
        self.checkpoint_every = memory.checkpoint_every_layers

    def forward(self, step: Callable = stack.step) -> Tensor:
        """Return the sum of all reads."""
        first = self.pushed[0]
        size = (self.options["num_slots"], first.shape[-1])
        options = {"dtype": first.dtype, "num_updates": len(self.pushed)}
        state = stack.empty(self.shape, *size, like=first, axis="depth", **options)
        reads = []
        for x, logits in zip(self.pushed, self.logits, strict=True):
            output, state = step(state, x, logits, self.query, checkpoint_every=self.checkpoint_every, **self.options)
            reads.append(output.read)
        return torch.stack(reads).sum()

    def run(self, name: str, implementation: str) -> None:
        """Run one of PASSES with an implementation, or with the `compiled` eager step."""
        leaves = [*self.pushed, *self.logits, *([] if self.query is None else [self.query])]
        is_compiled, sizes = implementation == "compiled", 2 * len(self.pushed)
        with (
            stack.use_implementation("eager" if is_compiled else implementation),
            torch.set_grad_enabled(name != "forward"),
            torch._dynamo.config.patch(recompile_limit=sizes, accumulated_recompile_limit=sizes),
        ):
            total = self.forward(compiled_step if is_compiled else stack.step)
            if name != "forward":
                torch.autograd.grad(total, leaves)


def measure(
    config: ExperimentConfig, rounds: int, device: torch.device, implementations: Sequence[str] = ("auto", "reference")
) -> Iterator[dict[str, Any]]:
    """Yield a row for each pass and implementation."""
    layers, tokens = StackSteps(config, device), config.data.micro_batch_size * config.data.context_length
    for name, multiple in PASSES.items():
        num_bytes = multiple * count_lower_bound_bytes(config, tokens, choose_dtype(config, device))
        flops = multiple * count_flops(config, tokens)
        source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device)  # read once, written once
        target = torch.empty_like(source)
        actions = {key: lambda key=key, name=name: layers.run(name, key) for key in implementations}
        times = time_alternating(actions | {"copy": lambda s=source, t=target: t.copy_(s)}, rounds)
        copy = statistics.median(times["copy"])
        for implementation in actions:
            seconds = statistics.median(times[implementation])
            row = {"implementation": implementation, "pass": name, "seconds": seconds, "copy_seconds": copy}
            row |= {"bytes": num_bytes, "gigabytes_per_second": num_bytes / seconds / 1e9}
            row |= {"flops": flops, "gigaflops_per_second": flops / seconds / 1e9}
            yield row | {"share_of_copy": copy / seconds}


def format_rows(rows: list[dict[str, Any]]) -> str:
    """Return one line for each implementation and pass, all layers together."""
    header = ["stack", "pass", "ms", "GB/s", "of a copy", "GFLOP/s", "copy ms"]
    lines = []
    for row in rows:
        speed = [f"{row['gigabytes_per_second']:.1f}", f"{row['share_of_copy']:.1%}"]
        speed += [f"{row['gigaflops_per_second']:.1f}", f"{1e3 * row['copy_seconds']:.3f}"]
        lines.append([row["implementation"], row["pass"], f"{1e3 * row['seconds']:.3f}", *speed])
    return format_table(lines, header=header, align="<<>>>>>")


def main() -> None:
    """Run the benchmark."""
    parser = build_parser(__doc__, rounds=100)
    parser.add_argument("--config", default="quickstart", metavar="NAME_OR_PATH")
    choices = (*stack.IMPLEMENTATIONS, "auto", "compiled")
    parser.add_argument("--implementations", nargs="+", choices=choices, default=["auto", "reference"])
    args, overrides = parser.parse_known_args()
    config = compose([args.config], overrides)
    memory = config.model.memory
    if getattr(memory, "kind", None) != "stack" or memory.axis != "depth":
        parser.error("requires a stack over the depth; set model.memory=stacktrans")
    if memory.empty_slot:
        parser.error("does not measure the kernels' empty slot; set model.memory.empty_slot=false")
    rows = list(measure(config, args.rounds, choose_device(), args.implementations))
    print(format_rows(rows))
    write_record(args.out, rows, configs=[args.config], overrides=overrides)


if __name__ == "__main__":
    main()
