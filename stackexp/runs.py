"""The run folder, `<root>/<name>/<id>/`: the only record of a run. No torch here.

config.yaml        resolved, enough to run again
environment.json   commit, versions, hardware, command
metrics.jsonl      one line per optimizer step (`step`, `tokens`, TensorBoard tags), and one per validation
events.out.*       TensorBoard's copy of the metrics
tokenizer.json     what turns the run's tokens into text
checkpoints/       <step>/
result.json        written last, atomically: its presence means that the run is done
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from stackexp.config.compose import to_yaml
from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import FolderBusyError, RunError
from stackexp.files import read_json, read_json_lines, try_lock, write_atomically, write_json, write_json_lines

STAMP = "%Y%m%d-%H%M%S"
AVERAGE_LOSS = "validation/loss/average"  # the tag in metrics.jsonl
AVERAGE_ACCURACY = "validation/accuracy/average"


RESULT_VERSION = 1


@dataclass(frozen=True)
class RunResult:
    """The final figures of a run, as result.json has them.

    `train_loss` has the keys first and last_20_steps. `figures` depend on the objective: losses of named sets, or
    accuracy by length. Fields that a file of an earlier version lacks are None.
    """

    steps: int | None
    tokens: int | None
    parameters: int | None
    memory_parameters: int | None
    train_loss: dict[str, float] | None
    seconds_of_last_session: float | None
    figures: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of result.json: the fields and the figures side by side, and the version."""
        fields = {key: value for key, value in vars(self).items() if key != "figures" and value is not None}
        return {"version": RESULT_VERSION} | fields | self.figures

    @classmethod
    def from_dict(cls, contents: dict[str, Any]) -> "RunResult":
        """Build a result from the contents of a result.json. Raises ValueError if its version is newer than ours."""
        version = contents.get("version", 0)
        if version > RESULT_VERSION:
            raise ValueError(f"version {version} is newer than this stackexp; update it")
        names = [field.name for field in dataclasses.fields(cls) if field.name != "figures"]
        figures = {key: value for key, value in contents.items() if key not in (*names, "version")}
        return cls(**{name: contents.get(name) for name in names}, figures=figures)


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def is_finished(self) -> bool:
        return self.result.exists()

    def read_result(self) -> RunResult:
        """Read result.json. Raises RunError if it is damaged or of a newer version."""
        try:
            return RunResult.from_dict(read_json(self.result))
        except ValueError as error:
            raise RunError(f"{self.result}: {error}") from error

    def write_result(self, result: RunResult) -> None:
        """Write result.json, which marks the run as finished."""
        write_json(self.result, result.to_dict())

    def list_checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first; what a user put beside them under a name of its own is none."""
        return sorted(path for path in self.checkpoints.glob("*/") if path.name.isdecimal())

    def newest_checkpoint(self) -> Path | None:
        """The checkpoint of the highest step, or None."""
        return max(self.list_checkpoints(), default=None)

    def best_checkpoint(self) -> Path | None:
        """The checkpoint of the lowest mean validation loss among those of a step with a validation, or None.

        Those without a mistake are equally good, whatever their loss: of these the latest, which has trained longest.
        """
        lines = (line for line in self.read_metrics() if math.isfinite(line.get(AVERAGE_LOSS, math.nan)))
        losses = {line["step"]: 0.0 if line.get(AVERAGE_ACCURACY) == 1 else line[AVERAGE_LOSS] for line in lines}
        validated = [p for p in self.list_checkpoints() if int(p.name) in losses]
        return min(reversed(validated), key=lambda p: losses[int(p.name)], default=None)

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl, a last line cut off by a kill left out."""
        return read_json_lines(self.metrics)

    def truncate_after(self, step: int) -> None:
        """Drop metrics and checkpoints of the steps after `step`, which a resumed run will take again."""
        for path in self.list_checkpoints():
            if int(path.name) > step:
                remove_checkpoint(path)
        write_json_lines(self.metrics, [line for line in self.read_metrics() if line["step"] <= step])

    @contextlib.contextmanager
    def start_session(self, config: ExperimentConfig) -> Iterator[None]:
        """Make the folder, or take it over, and hold it for this process within the context.

        Writes config.yaml, adds this process to environment.json (a resumed run has several) and removes what a
        kill left half-written. Raises RunError if another process works here, or has finished the run meanwhile.
        """
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        with self.lock():
            if self.is_finished:
                raise RunError(
                    f"{self.path}: this run has been finished meanwhile; start a new one without --ckpt_path"
                )
            for leftover in self.checkpoints.glob(".*"):
                shutil.rmtree(leftover, ignore_errors=True)
            write_atomically(self.config, to_yaml(config))
            path = self.path / "environment.json"
            write_json(path, [*(read_json(path) if path.exists() else []), describe_environment()])
            yield

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder within the context. Raises RunError if another process does."""
        file = try_lock(self.path / ".lock")
        if file is None:
            raise FolderBusyError(f"{self.path}: another process is running in this folder; wait or stop it")
        with file:
            yield


def allocate_run(config: ExperimentConfig) -> RunFolder:
    """The folder of a new run; nothing is written yet. Its id is the time of its start, after all earlier ids."""
    parent = Path(config.logging.root, config.name)
    now = datetime.now()
    stamps = [match[0] for path in parent.glob("*/") if (match := re.match(r"\d{8}-\d{6}(?=-)", path.name))]
    if stamps and now.strftime(STAMP) <= max(stamps):  # within the same second, or the clock went backwards
        now = datetime.strptime(max(stamps), STAMP) + timedelta(seconds=1)
    return RunFolder(parent / f"{now.strftime(STAMP)}-{secrets.token_hex(2)}")


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint; a kill in the middle leaves none that looks whole."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    os.replace(checkpoint, hidden)
    shutil.rmtree(hidden)


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint after `step` steps; names sort as steps do."""
    return f"{step:08d}"


def _of_name(config: ExperimentConfig) -> list[RunFolder]:
    """The runs of the config's name, oldest first; folders of other names may lie among them, as in formal/."""
    runs = map(RunFolder, sorted(Path(config.logging.root, config.name).glob("*/")))
    return [run for run in runs if run.config.is_file()]


def find_unfinished_run(config: ExperimentConfig) -> RunFolder:
    """The newest run of the config's name that has a checkpoint but no result. Raises RunError if there is none."""
    parent, runs = Path(config.logging.root, config.name), _of_name(config)[::-1]
    for run in runs:
        if not run.is_finished and run.newest_checkpoint():
            return run
    if runs and runs[0].is_finished:
        raise RunError(
            f"{runs[0].path}: this run is finished (it has a result.json); start a new one without --ckpt_path, "
            f"or extend it with trainer.max_steps=MORE --ckpt_path {runs[0].newest_checkpoint()}"
        )
    raise RunError(f"{parent}: no unfinished run with a checkpoint to resume; start one without --ckpt_path")


def open_run(path: str) -> RunFolder:
    """The run folder at `path`. Raises RunError if it is none."""
    run = RunFolder(Path(path))
    if not run.config.is_file():
        raise RunError(f"{path}: not a run folder (it has no config.yaml); give runs/<name>/<id>")
    return run


def describe_environment() -> dict[str, Any]:
    """Commit, versions, hardware and command of this process."""
    import torch

    packages = ("stackexp", "torch", "lightning", "torchmetrics", "omegaconf", "mosaicml-streaming", "tokenizers")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join([os.path.basename(sys.executable), *sys.orig_argv[1:]]),
        "commit": read_commit(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "host": platform.node(),
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def read_commit() -> str | None:
    """The commit of this code, with "+changes" if the work tree differs; None outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+changes" if status.stdout.strip() else "")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
