"""Run all measurements that need a GPU, the most important ones first.

    python benchmarks/gpu.py [--out FOLDER] [--only STEP ...]

Each step is a process of its own that ends within nine minutes and writes its JSON at once, so that half an hour on a
GPU is used to the last minute. A failed step is reported and the next one starts.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from stackexp.verbs.bench_efficiency import MEMORIES

STEP_SECONDS = 540

# -v: a step that is ended early leaves no XML, but its log names the finished tests
PYTEST = [sys.executable, "-m", "pytest", "-v", "-m", "gpu and not slow"]
SCAN_TESTS, FEEDBACK = "tests/test_triton_scan.py", "tanh or gated or identity"
TESTS = {
    "models": ["tests/test_gpu.py"],
    "losses": ["tests/test_cross_entropy.py", "tests/test_loss_curves.py"],
    "attention": ["tests/test_attention_requirements.py"],
    "memory": ["tests/test_cost.py"],
    "depth": ["tests/test_triton_depth.py"],
    "scan": [SCAN_TESTS, "-k", f"not ({FEEDBACK})"],
    "scan_feedback": [SCAN_TESTS, "-k", FEEDBACK],
}
"""Test files of each step correctness_<name>. Two for the scan: Triton compiles a kernel for each option."""
VARIANTS = {"transformer": "null"} | {name: name for name in MEMORIES}
BENCH = [sys.executable, "-m", "stackexp", "bench"]
EFFICIENCY = [*BENCH, "efficiency", "--config", "pretrain/transformer-360m", "trainer.precision=bf16-mixed"]
# Two sequences: with eight, full_dim by the reference needs 167 GiB, and several memories 75 to 93 GiB
EFFICIENCY += ["data.micro_batch_size=2", "data.context_length=2048", "data.global_batch_tokens=16384"]
PAPER_ROWS = "--only=stacktrans,single_head,full_dim"
STACK = [*BENCH, "stack", "--config", "pretrain/stacktrans-360m", "data.micro_batch_size=8"]
FIT = [sys.executable, "-m", "stackexp", "fit", "--config", "quickstart", "trainer.accelerator=cuda"]
FIT += ["trainer.precision=bf16-mixed", "data.micro_batch_size=64", "data.global_batch_tokens=16384"]


def list_steps(out: Path) -> dict[str, list[str]]:
    """Return the command of each step; each writes below `out`."""
    tests = {f"correctness_{name}": words for name, words in TESTS.items()}
    steps = {name: [*PYTEST, *words, f"--junitxml={out}/{name}.xml"] for name, words in tests.items()}
    steps |= {
        "scan": [sys.executable, "benchmarks/scan.py", "--device=cuda", "--rounds=10", f"--out={out}/scan.json"],
        "cross_entropy": [sys.executable, "benchmarks/cross_entropy.py", f"--out={out}/cross_entropy.json"],
        "sharded": [*FIT, "name=sharded", "trainer.strategy=fsdp", f"logging.root={out}/runs"],
        "efficiency": [*EFFICIENCY, f"--out={out}/efficiency.json", "--steps=30"],
    }
    compiled = [PAPER_ROWS, f"--out={out}/efficiency_compiled.json", "trainer.compile=true"]
    steps["efficiency_compiled"] = [*EFFICIENCY, *compiled]
    for every in (1, 2, 3, 4, 6):
        steps[f"stack_{every}"] = [
            *STACK,
            f"model.memory.checkpoint_every_layers={every}",
            f"--out={out}/stack_{every}.json",
        ]
    for name, memory in VARIANTS.items():
        steps[f"ablation_{name}"] = [*FIT, f"name={name}", f"model.memory={memory}", f"logging.root={out}/runs"]
    return steps


def run_step(name: str, command: list[str], out: Path) -> dict[str, object]:
    """Run one step with its output in `out`/<name>.log, and return its outcome."""
    start = time.time()
    with open(out / f"{name}.log", "w", encoding="utf-8") as log:
        try:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=STEP_SECONDS).returncode
        except subprocess.TimeoutExpired:
            code = 124
    return {"step": name, "exit_code": code, "seconds": round(time.time() - start, 1), "command": command[1:]}


def main() -> None:
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--only", nargs="+", metavar="STEP", help="default: all steps")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, command in list_steps(args.out).items():
        if args.only is None or name in args.only:
            result = run_step(name, command, args.out)
            print(f"{name}: exit code {result['exit_code']}, {result['seconds']} s", flush=True)
            (args.out / f"{name}.step.json").write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
