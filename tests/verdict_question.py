"""A verdict on four arms in a temporary folder, with fake trials."""

import json
import random
import subprocess
from pathlib import Path

import yaml
from conftest import TINY
from processes import Program, read_to_end

from stackexp.sweeps.verdict import Question as LoadedQuestion
from stackexp.sweeps.verdict import load_verdicts

PROGRAM = Path(__file__).with_name("sweep_program.py")
SEEDS = range(100, 108)


class Question:
    """A file with the arms plain (the baseline), copy, good and same, and the losses of its fake trials."""

    def __init__(self, folder: Path) -> None:
        self.path, self.folder = folder / "question.yaml", folder / "runs" / "question"
        config = TINY | {"logging": {"root": str(folder / "runs")}, "data": TINY["data"] | {"path": "unused"}}
        (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
        arms = [
            {"name": "plain", "model.memory": None},
            {"name": "copy", "model.memory": None},
            {"name": "good", "model.memory.num_slots": 2},
            {"name": "same", "model.memory.num_slots": 3},
        ]
        tuning = {"space": {"optimizer.lr": {"values": [0.001, 0.002, 0.004]}}}
        self.keys = {"config": "tiny.yaml", "arms": arms, "effect": 0.01, "pairs": len(SEEDS), "tuning": tuning}
        self.write()
        noise = random.Random(0)
        shift = {"plain": 0.0, "good": -0.05, "same": 0.0}
        losses = {
            f"{arm}-seed={s}-": 4 + 0.1 * (s % 7) + shift[arm] + noise.gauss(0, 0.002) for s in SEEDS for arm in shift
        }
        for arm in shift:
            losses |= {f"{arm}-{i}-seed={s}-": 4 + 0.2 * abs(i - 1) + 0.001 * s for i in range(3) for s in (50, 51)}
        self.behavior = {name: {"seconds": 0.01, "loss": loss} for name, loss in losses.items()}

    def write(self, **keys: object) -> None:
        self.keys |= keys
        self.path.write_text(yaml.safe_dump(self.keys))

    def keep_arms(self, *names: str) -> None:
        self.write(arms=[arm for arm in self.keys["arms"] if arm["name"] in names])

    def prepare(self) -> None:
        """Write the behavior of the fake trials."""
        for stage in ("tuning", "pairs"):
            (self.folder / stage).mkdir(parents=True, exist_ok=True)
        (self.folder / "behavior.json").write_text(json.dumps(self.behavior))

    def run(self, *arguments: str, expect: int = 0) -> str:
        self.prepare()
        output, _ = read_to_end(self.start(*arguments), 300, expect=expect)
        return output

    def start(self, *arguments: str) -> subprocess.Popen:
        """Start a verdict whose behavior has been written."""
        program = Program(self.path.parent, PROGRAM)
        return program.start("verdict", self.path, "--max-parallel", 2, *arguments)

    def load(self) -> LoadedQuestion:
        return load_verdicts(self.path)[0]

    def list_runs(self, stage: str) -> list[str]:
        return sorted(path.parent.name.rpartition("-")[0] for path in (self.folder / stage).glob("*/result.json"))

    def count_attempts(self) -> list[int]:
        """Return how often each trial has held its folder, in ascending order."""
        return sorted(len(path.read_text().splitlines()) for path in self.folder.glob("*/*/attempts"))
