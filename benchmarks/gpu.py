"""Everything that still waits for a GPU, in order of worth: python benchmarks/gpu.py [--out FOLDER] [--only STEP ...]

Every step is a process of its own that ends within nine minutes and writes its JSON at once, so that a machine lent
for half an hour is used to the last minute. A step that fails says so and the next one starts.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

LIMIT = 540  # seconds for one step

GPU_TESTS = [sys.executable, "-m", "pytest", "-m", "gpu"]
VARIANTS = {name: name for name in ("stacktrans", "queue", "push_only", "single_head", "full_dim", "authors_code")}
VARIANTS |= {"transformer": "null"}
SCAN_TESTS = "tests/test_triton_scan.py"  # a step of their own: Triton compiles a kernel for every option
BENCH = [sys.executable, "-m", "stackexp", "bench"]
EFFICIENCY = [*BENCH, "efficiency", "--config", "pretrain/transformer-360m", "trainer.precision=bf16-mixed"]
EFFICIENCY += ["data.micro_batch_size=8", "data.context_length=2048", "data.global_batch_tokens=16384"]
PAPER_ROWS = ["--only=stacktrans,single_head,full_dim"]
STACK = [*BENCH, "stack", "--config", "pretrain/stacktrans-360m", "data.micro_batch_size=8"]
FIT = [sys.executable, "-m", "stackexp", "fit", "--config", "quickstart", "trainer.accelerator=cuda"]


def steps(out: Path) -> dict[str, list[str]]:
    """Name -> command; each writes below `out`."""
    bf16 = ["trainer.precision=bf16-mixed", "data.micro_batch_size=64", "data.global_batch_tokens=16384"]
    return {
        "correctness": [*GPU_TESTS, f"--ignore={SCAN_TESTS}", f"--junitxml={out}/correctness.xml"],
        "scan_correctness": [*GPU_TESTS, SCAN_TESTS, f"--junitxml={out}/scan_correctness.xml"],
        "scan": [sys.executable, "benchmarks/cuda_scan.py", f"--out={out}/scan.json"],
        "cross_entropy": [sys.executable, "benchmarks/cross_entropy.py", f"--out={out}/cross_entropy.json"],
        "sharded": [*FIT, "name=sharded", "trainer.strategy=fsdp", f"logging.root={out}/runs", *bf16],
        "efficiency": [*EFFICIENCY, f"--out={out}/efficiency.json", "--steps=30"],
        "efficiency_compiled": [
            *EFFICIENCY,
            *PAPER_ROWS,
            f"--out={out}/efficiency_compiled.json",
            "trainer.compile=true",
        ],
        **{
            f"stack_{every}": [
                *STACK,
                f"model.memory.checkpoint_every_layers={every}",
                f"--out={out}/stack_{every}.json",
            ]
            for every in (1, 2, 3, 4, 6)
        },
        **{
            f"ablation_{name}": [*FIT, f"name={name}", f"model.memory={memory}", f"logging.root={out}/runs", *bf16]
            for name, memory in VARIANTS.items()
        },
    }


def run(name: str, command: list[str], out: Path) -> dict[str, object]:
    started = time.time()
    with open(out / f"{name}.log", "w") as log:
        try:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT).returncode
        except subprocess.TimeoutExpired:
            code = 124
    return {"step": name, "exit_code": code, "seconds": round(time.time() - started, 1), "command": command[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--only", nargs="+", help="names of steps; default: all")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, command in steps(options.out).items():
        if options.only is None or name in options.only:
            result = run(name, command, options.out)
            print(f"{name}: exit code {result['exit_code']}, {result['seconds']} s", flush=True)
            (options.out / f"{name}.step.json").write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
