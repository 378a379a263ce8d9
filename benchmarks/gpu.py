"""Run all measurements that need a GPU, the most important ones first.

    python benchmarks/gpu.py [--out FOLDER] [--only STEP ...]

Each step is a process of its own that ends within nine minutes and writes its JSON at once, so that a GPU lent for a
short time is used to the last minute. A failed step is reported and the next one starts.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from stackexp.verbs.bench import MEMORIES

STEP_SECONDS = 540

# -v: a step that is ended early leaves no XML, but its log names the finished tests
PYTEST = [sys.executable, "-m", "pytest", "-v", "-m", "gpu and not slow", "-n", "auto", "--dist", "load"]
TESTS = [
    "tests/test_gpu.py",
    "tests/test_triton_depth.py",
    "tests/test_triton_scan.py",
    "tests/test_loss_curves.py",
    "tests/test_attention_requirements.py",
    "tests/test_cost.py",
]
BENCH = [sys.executable, "-m", "stackexp", "bench"]
EFFICIENCY = [*BENCH, "efficiency", "--config", "pretrain/transformer-360m", "trainer.precision=bf16-mixed"]
EFFICIENCY += ["data.context_length=2048", "data.global_batch_tokens=32768"]
MANY, FEWER = "data.micro_batch_size=16", "data.micro_batch_size=8"
"""Sequences per step: with 2, an H200 waits for Python; with 16, some other memories and full_dim by the reference need
more than its 139 GiB. A row that does not fit says "out of memory"."""
IN_PAPER = ("stacktrans", "single_head", "full_dim")
PAPER_ROWS = f"--only={','.join(IN_PAPER)}"
OTHER_ROWS = f"--only={','.join(name for name in MEMORIES if name not in IN_PAPER)}"
COMPILED = "trainer.compile=true", "model.num_layers=8"
"""With all 32 layers, compilation alone takes longer than a step may."""
STACK = [sys.executable, "benchmarks/stack_step.py", "--config", "pretrain/stacktrans-360m", "data.micro_batch_size=8"]
QUICKSTART = [sys.executable, "-m", "stackexp", "fit", "--config", "quickstart", "trainer.accelerator=cuda"]
QUICKSTART += ["trainer.precision=bf16-mixed"]
FIT = [*QUICKSTART, "data.micro_batch_size=64", "data.global_batch_tokens=16384"]
PROFILE = [*QUICKSTART, "name=profile", "model=transformer-360m", "model.vocab_size=4096", "model.memory=stacktrans"]
PROFILE += ["data.context_length=2048", "data.micro_batch_size=16", "data.global_batch_tokens=32768"]
PROFILE += ["schedule.warmup_steps=1", "trainer.max_steps=14", "trainer.val_check_interval=14", "trainer.profile=10-12"]
"""The layers of the 360M model. Its vocabulary is the quickstart's, so its logits are 12 times smaller."""


def list_steps(out: Path) -> dict[str, list[str]]:
    """Return the command of each step; each writes below `out`."""
    return {
        "correctness": [*PYTEST, *TESTS, f"--junitxml={out}/correctness.xml"],
        "efficiency": [*EFFICIENCY, MANY, PAPER_ROWS, f"--out={out}/efficiency.json", "--steps=5"],
        "stack_1": [*STACK, "model.memory.checkpoint_every_layers=1", f"--out={out}/stack_1.json"],
        "stack_4": [*STACK, "model.memory.checkpoint_every_layers=4", f"--out={out}/stack_4.json"],
        "efficiency_others": [*EFFICIENCY, FEWER, OTHER_ROWS, f"--out={out}/efficiency_others.json", "--steps=5"],
        "efficiency_compiled": [
            *(*EFFICIENCY, MANY, *COMPILED, "--only=stacktrans", "--steps=5"),
            f"--out={out}/efficiency_compiled.json",
        ],
        "profile": [*PROFILE, f"logging.root={out}/runs"],
        "compiled": [*FIT, "name=compiled", "trainer.compile=true", f"logging.root={out}/runs"],
        "sharded": [*FIT, "name=sharded", "trainer.strategy=fsdp", f"logging.root={out}/runs"],
        "scan": [sys.executable, "benchmarks/scan.py", "--device=cuda", "--rounds=3", f"--out={out}/scan.json"],
        "cross_entropy": [sys.executable, "benchmarks/cross_entropy.py", f"--out={out}/cross_entropy.json"],
    }


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
