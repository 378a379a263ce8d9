"""The run folder, `<root>/<name>/<id>/`: the only record of a run. No torch here.

config.yaml        resolved, enough to run again
environment.json   commit, versions, hardware, command
metrics.jsonl      one line per optimizer step (`step`, `tokens`, TensorBoard tags), and one per validation
events.out.*       TensorBoard's copy of the metrics
tokenizer.json     what turns the run's tokens into text
checkpoints/       <step>.ckpt
result.json        written last, atomically: its presence means that the run is done
"""

import fcntl
import importlib.metadata
import json
import os
import platform
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stackexp.config.compose import to_yaml
from stackexp.config.schema import ExperimentConfig
from stackexp.errors import RunError

FOLDER_VARIABLE = "STACKEXP_RUN_FOLDER"
"""Set by the first process of a run, so that the processes it starts write to the same folder."""


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
    def finished(self) -> bool:
        return self.result.exists()

    def newest_checkpoint(self) -> Path | None:
        """The checkpoint of the highest step, or None."""
        return max(self.checkpoints.glob("*.ckpt"), key=lambda path: path.stem, default=None)

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl, a last line cut off by a kill left out."""
        if self.metrics.exists():
            for line in self.metrics.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    yield json.loads(line)

    def forget_after(self, step: int) -> None:
        """Drop metrics and checkpoints of the steps after `step`, which a resumed run will take again."""
        kept = [json.dumps(line) + "\n" for line in self.read_metrics() if line["step"] <= step]
        write_atomically(self.metrics, "".join(kept))
        for path in self.checkpoints.glob("*.ckpt"):
            if path.stem > checkpoint_name(step):
                path.unlink()

    def begin(self, config: ExperimentConfig) -> IO[str]:
        """Make the folder, or take it over, for this process: the returned file holds it while it is open.

        Writes config.yaml, adds this process to environment.json (a resumed run has several) and removes what a
        kill left half-written. Raises RunError if another process works here.
        """
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        lock = self.lock()
        for leftover in self.checkpoints.glob(".*"):
            leftover.unlink()
        write_atomically(self.config, to_yaml(config))
        path = self.path / "environment.json"
        sessions = json.loads(path.read_text()) if path.exists() else []
        write_atomically(path, json.dumps([*sessions, environment()], indent=2))
        return lock

    def lock(self) -> IO[str]:
        """Hold the folder while the returned file is open. Raises RunError if another process does."""
        handle = open(self.path / ".lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{self.path}: another process is running in this folder; wait for it or stop it") from None
        os.register_at_fork(after_in_child=handle.close)  # a loader's worker that outlives us must not hold it
        return handle


def new(config: ExperimentConfig) -> RunFolder:
    """The folder of a new run, its id the time of its start; nothing is written yet.

    Chosen by the first process; those that Lightning starts (it sets LOCAL_RANK) find it in their environment.
    Raises RunError where somebody else launches the processes and does not name the folder to all of them.
    """
    if "LOCAL_RANK" in os.environ:
        if FOLDER_VARIABLE not in os.environ:
            raise RunError(f"started by another launcher: set {FOLDER_VARIABLE} to one new folder for all processes")
        return RunFolder(Path(os.environ[FOLDER_VARIABLE]))
    path = Path(config.logging.root, config.name, time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2))
    os.environ[FOLDER_VARIABLE] = str(path)
    return RunFolder(path)


def checkpoint_name(step: int) -> str:
    """The name, without its ending, of the checkpoint after `step` steps; names sort as steps do."""
    return f"{step:08d}"


def newest_unfinished(config: ExperimentConfig) -> RunFolder:
    """The newest run of the config's name that has a checkpoint but no result. Raises RunError if there is none."""
    parent = Path(config.logging.root, config.name)
    runs = sorted((RunFolder(path) for path in parent.glob("*/")), key=lambda run: run.path.name, reverse=True)
    for run in runs:
        if not run.finished and run.newest_checkpoint():
            return run
    if runs and runs[0].finished:
        raise RunError(
            f"{runs[0].path}: this run is finished (it has a result.json); start a new one without --ckpt_path, "
            f"or extend it with trainer.max_steps=MORE --ckpt_path {runs[0].newest_checkpoint()}"
        )
    raise RunError(f"{parent}: no unfinished run with a checkpoint to resume; start one without --ckpt_path")


def at(path: str) -> RunFolder:
    """The run folder at `path`. Raises RunError if it is none."""
    run = RunFolder(Path(path))
    if not run.config.is_file():
        raise RunError(f"{path}: not a run folder (it has no config.yaml); give runs/<name>/<id>")
    return run


def write_atomically(path: Path, text: str) -> None:
    """All of `text` is at `path` afterwards, or what was there before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def environment() -> dict[str, Any]:
    """Commit, versions, hardware and command of this process."""
    import torch

    packages = ("stackexp", "torch", "lightning", "torchmetrics", "omegaconf", "mosaicml-streaming", "tokenizers")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join([os.path.basename(sys.executable), *sys.orig_argv[1:]]),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "host": platform.node(),
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def commit() -> str | None:
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
