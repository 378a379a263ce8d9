"""The cost of drawing a batch of each formal language, against a training step of a small model on one core.

    python benchmarks/tasks.py [--batch-size 128] [--length 40] [--rounds 20] [--out FILE.json]

Target: below 5 % of a step for every task. The step is a forward and backward pass of a plain Transformer of five
layers over the strings alone; real steps take longer. Medians of alternating CPU times. Exits with 1 above the target.
"""

import os
import statistics
from collections.abc import Callable
from functools import partial
from time import process_time

import numpy as np
import torch
from torch.nn import functional as F

from stackexp.benchmarking import build_parser, time_alternating, write_record
from stackexp.config.compose import compose
from stackexp.models.transformer import Transformer
from stackexp.tables import format_table
from stackexp.tasks import TASKS

TARGET = 0.05


def build_step(batch_size: int, length: int) -> Callable[[], None]:
    """Return a forward and backward pass of the small model on random symbols."""
    torch.manual_seed(0)
    config = compose(["formal/transformer"]).model
    model = Transformer(config)
    tokens = torch.randint(config.output_vocab_size, (batch_size, length))

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(tokens).logits.flatten(0, 1), tokens.flatten()).backward()

    return step


def main() -> int:
    """Run the benchmark."""
    parser = build_parser(__doc__, rounds=20)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--length", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rng = np.random.default_rng(0)
    actions = {name: partial(task.sample, rng, args.batch_size, args.length) for name, task in TASKS.items()}
    actions["step"] = build_step(args.batch_size, args.length)
    times = time_alternating(actions, args.rounds, warmup=2, clock=process_time)
    medians = {name: statistics.median(values) for name, values in times.items()}
    step = medians.pop("step")
    rows = [{"task": name, "ms": 1e3 * value, "share": value / step} for name, value in medians.items()]
    print(f"one step of {args.batch_size} x {args.length}: {1e3 * step:.0f} ms on one core")
    lines = [[row["task"], f"{row['ms']:.2f}", f"{row['share']:.2%}"] for row in rows]
    print(format_table(lines, header=["task", "ms per batch", "share of a step"], align="<>>"))
    worst = max(rows, key=lambda row: row["share"])
    print(f"largest share: {worst['task']} {worst['share']:.2%} (target: below {TARGET:.0%})")
    write_record(args.out, rows, step_ms=1e3 * step)
    return int(worst["share"] >= TARGET)


if __name__ == "__main__":
    raise SystemExit(main())
