"""A sweep of four trials in a temporary folder, and the workers that run it with fake trials."""

import json
import subprocess
from functools import cached_property
from pathlib import Path

import yaml
from conftest import TINY
from processes import Program

from stackexp.sweeps.sweep import load_sweep
from stackexp.sweeps.trials import Trial, TrialState, get_state

PROGRAM = Path(__file__).with_name("sweep_program.py")
ALL_STEPS = list(range(1, 11))
TWO = ("--max-parallel", 2)


class Study:
    """A sweep of the trials a, b, c and d, and its workers."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "letters.yaml"
        self.root = folder / "runs"
        config = TINY | {"logging": {"root": str(self.root)}, "data": TINY["data"] | {"path": "unused"}}
        (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
        trials = [{"name": name, "model.memory.num_slots": slots} for slots, name in enumerate("abcd", 1)]
        self.write(list=trials)
        self.root.mkdir()
        self.set_behavior({})

    def write(self, **keys: object) -> None:
        old = yaml.safe_load(self.path.read_text()) if self.path.exists() else {"config": "tiny.yaml"}
        self.path.write_text(yaml.safe_dump(old | keys))

    def set_behavior(self, behavior: dict) -> None:
        (self.root / "behavior.json").write_text(json.dumps(behavior))

    @cached_property
    def trials(self) -> list[Trial]:
        return load_sweep(str(self.path)).trials

    @property
    def folder(self) -> Path:
        return self.root / "letters"

    def start(self, *arguments: object, verb: str = "run") -> subprocess.Popen:
        return Program(self.path.parent, PROGRAM).start("sweep", verb, self.path, *arguments)

    def run(self, *arguments: object, expect: int = 0, verb: str = "run") -> str:
        return self.finish([self.start(*(arguments or TWO if verb == "run" else ()), verb=verb)], expect)

    def finish(self, workers: list[subprocess.Popen], expect: int = 0) -> str:
        """Wait for workers and return their output; fails unless they exit with `expect`."""
        outputs = [process.communicate(timeout=120)[0] for process in workers]
        assert [process.returncode for process in workers] == [expect] * len(workers), outputs
        return "\n".join(outputs)

    def get_states(self) -> list[TrialState]:
        return [get_state(trial) for trial in self.trials]

    def count_attempts(self) -> list[int]:
        """Return how often each trial has held its folder."""
        files = [trial.folder.path / "attempts" for trial in self.trials]
        return [len(file.read_text().splitlines()) if file.exists() else 0 for file in files]

    def read_attempts(self, field: int) -> list[str]:
        """Return a field of the last attempt of each trial that has started: process, GPUs, threads, job."""
        files = [trial.folder.path / "attempts" for trial in self.trials]
        return [file.read_text().splitlines()[-1].split()[field] for file in files if file.exists()]

    def read_steps(self) -> list[list[int]]:
        return [[line["step"] for line in trial.folder.read_metrics()] for trial in self.trials]
