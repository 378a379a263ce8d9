"""Print the GPU time of a memory's operations in a profile of StackTrans.

    python benchmarks/profile_parts.py TRACE.json

Per profiled step, from the trace of `benchmarks/gpu.py --only profile`. A memory's operations are those from W_down
to the mean of the entropy after the stack step. Their backward operations have sequence numbers in the same range.
"""

import bisect
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

STEP = "_Step"  # the autograd.Function of the Triton step
FIRST, LAST = "aten::linear", "aten::mean"  # the operations at both ends of a memory
BACKWARD = "autograd::engine::evaluate_function: "

Event = dict[str, Any]


def list_memory_operations(operations: list[Event]) -> list[list[Event]]:
    """Return the forward operations of each memory call, in the order of time."""
    calls = []
    for i in (i for i, operation in enumerate(operations) if operation["name"] == STEP):
        first = max(j for j in range(i) if operations[j]["name"] == FIRST)
        last = min(j for j in range(i, len(operations)) if operations[j]["name"] == LAST)
        calls.append(operations[first : last + 1])
    return calls


def find_outermost(events: list[Event]) -> list[Event]:
    """Return the events of one thread that lie within no other one."""
    outermost: list[Event] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if not outermost or event["ts"] >= outermost[-1]["ts"] + outermost[-1]["dur"]:
            outermost.append(event)
    return outermost


def main() -> None:
    """Print the table."""
    events = [e for e in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["traceEvents"] if e["ph"] == "X"]
    kernels = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    launches = {e["args"]["correlation"]: e for e in events if e["cat"] in ("cuda_runtime", "cuda_driver")}
    threads = {e["tid"] for e in events if e["cat"] == "cpu_op"}
    operations = {t: find_outermost([e for e in events if e["cat"] == "cpu_op" and e["tid"] == t]) for t in threads}
    forward = next(t for t in threads if any(e["name"] == STEP for e in operations[t]))
    calls = list_memory_operations(operations[forward])
    members = {id(e) for call in calls for e in call}
    ends = [[call[i]["args"]["Sequence number"] for i in (0, -1)] for call in calls]
    numbers = {number for first, last in ends for number in range(first, last + 1)}
    steps = sum(e["cat"] == "user_annotation" and e["name"].startswith("Optimizer.step") for e in events)
    times: Counter[str] = Counter()
    for kernel in kernels:
        launch = launches[kernel["args"]["correlation"]]
        own = operations.get(launch["tid"], [])
        i = bisect.bisect_right(own, launch["ts"], key=lambda e: e["ts"]) - 1
        is_backward = launch["tid"] != forward
        if i >= 0 and (own[i]["args"].get("Sequence number") in numbers if is_backward else id(own[i]) in members):
            times[("backward " if is_backward else "forward ") + own[i]["name"].removeprefix(BACKWARD)] += kernel["dur"]
    for name, time in times.most_common():
        print(f"{time / 1000 / steps:7.2f} ms  {name}")
    total = sum(kernel["dur"] for kernel in kernels)
    print(f"{times.total() / 1000 / steps:7.2f} ms  the memory, of {total / 1000 / steps:.1f} ms")


if __name__ == "__main__":
    main()
