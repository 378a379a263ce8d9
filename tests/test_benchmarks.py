"""The benchmarks run, and compare what they say they compare. What they measure is no test's business."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_every_step_for_a_gpu_is_a_command_that_composes():
    code = (
        "import gpu, pathlib; from stackexp.config.compose import compose\n"
        "for name, command in gpu.steps(pathlib.Path('out')).items():\n"
        "    if '--config' in command:\n"
        "        at = command.index('--config')\n"
        "        compose([command[at + 1]], [x for x in command[at + 2 :] if '=' in x and not x.startswith('--')])\n"
        "        print(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 15, (
        "two tables, five of the step alone, seven models, one of them sharded as well"
    )


def test_the_losses_are_measured():
    sizes = {"tokens": 64, "batch_size": 2, "vocab_size": 50, "hidden_size": 16, "chunk": 16, "steps": 2}
    command = [sys.executable, "cross_entropy.py", *(f"--{name}={value}" for name, value in sizes.items())]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["loss", "whole", "chunked"]
