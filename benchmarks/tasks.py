"""What a batch of each formal language costs beside a training step of the small model, on one core in one run.

    python benchmarks/tasks.py [--batch-size 128] [--length 40] [--turns 20] [--json FILE]

Asked: less than 5 % of a step, on every task. The step is a forward and backward pass of a plain Transformer of five
layers, d = 64, over the strings alone, without places for answers, a memory or an optimizer: real steps take longer.
Batches and steps take turns; reported are medians of the processor time they used, so that waiting counts for neither.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from stackexp.config.compose import compose
from stackexp.models.transformer import Transformer
from stackexp.tables import table
from stackexp.tasks import TASKS

ASKED = 0.05


def training_step(batch_size: int, length: int) -> Callable[[], None]:
    """A forward and backward pass of the small model over random symbols."""
    torch.manual_seed(0)
    config = compose(["formal/transformer"]).model
    model = Transformer(config)
    tokens = torch.randint(config.output_vocab_size, (batch_size, length))

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(tokens).logits.flatten(0, 1), tokens.flatten()).backward()

    return step


def milliseconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return 1000 * (time.process_time() - begin)


def measure(batch_size: int, length: int, turns: int) -> dict[str, float]:
    """Median milliseconds of a batch of each task, and of the `step`."""
    rng = np.random.default_rng(0)
    works = {name: lambda task=task: task.sample(rng, batch_size, length) for name, task in TASKS.items()}
    works["step"] = training_step(batch_size, length)
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(-2, turns):  # two to warm up
        for name, work in works.items():
            spent = milliseconds(work)
            if turn >= 0:
                times[name].append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--length", type=int, default=40)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    found = measure(options.batch_size, options.length, options.turns)
    step = found.pop("step")
    rows = [[name, f"{spent:.2f}", f"{100 * spent / step:.2f} %"] for name, spent in found.items()]
    print(f"a step of {options.batch_size} x {options.length}: {step:.0f} ms on one core")
    print(table([["task", "ms a batch", "of a step"], *rows], align="<>>", rules=(1,)))
    worst = max(found, key=found.__getitem__)
    print(f"the most costly, {worst}: {100 * found[worst] / step:.2f} % of a step (asked: less than {ASKED:.0%})")
    if options.json:
        options.json.write_text(json.dumps({"step_ms": step, "batch_ms": found}, indent=1))
    return int(found[worst] >= ASKED * step)


if __name__ == "__main__":
    raise SystemExit(main())
