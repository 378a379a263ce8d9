"""The CPU time of commands that do not train, against that of importing torch, which they avoid.

    python benchmarks/command_line.py [--rounds 5] [--out FILE.json]

Each command runs in a process of its own. The time of the import of the training loop shows what `fit` needs to start.
"""

import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial

from stackexp.benchmarking import build_parser, time_alternating, write_record
from stackexp.tables import format_table

TORCH = "import torch"
START = "from stackexp.startup import hide_optional_packages; hide_optional_packages(); import stackexp.training.loop"
COMMANDS = ("--help", "fit --config quickstart --print-config", "sweep run formal_table --dry-run")


def run(arguments: list[str]) -> None:
    """Run Python with these arguments. Raises CalledProcessError if it fails."""
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)


def read_cpu_seconds() -> float:
    """Return the CPU time of all finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Run the benchmark."""
    args = build_parser(__doc__, rounds=5).parse_args()
    actions: dict[str, Callable[[], None]] = {name: partial(run, ["-c", name]) for name in (TORCH, START)}
    actions |= {name: partial(run, ["-m", "stackexp", *name.split()]) for name in COMMANDS}
    times = time_alternating(actions, args.rounds, warmup=1, clock=read_cpu_seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [{"command": name, "seconds": s, "ratio": s / medians[TORCH]} for name, s in medians.items()]
    lines = [[row["command"].replace(START, "fit"), f"{row['seconds']:.2f}", f"{row['ratio']:.2f}"] for row in rows]
    print(format_table(lines, header=["command", "CPU seconds", "of importing torch"], align="<>>"))
    write_record(args.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
