"""The run folder, `<root>/<name>/<id>/`: the only record of a run. Imports no torch, except for environment.json.

.stackexp          marks the folder as ours; see `claim`
config.yaml        resolved; enough to repeat the run
config.step-N.yaml the config before step N, if a resumed run has changed it there
environment.json   commit, versions, hardware and command of each session
metrics.jsonl      one line per optimizer step (`step`, `tokens`, TensorBoard tags), and one per validation
events.out.*       TensorBoard's copy of the metrics
tokenizer.json     the tokenizer of the training data
checkpoints/       <step>/
result.json        written last, atomically; if it exists, the run is finished
"""

import contextlib
import importlib.metadata
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
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from stackexp import __version__
from stackexp.config.compose import to_yaml
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.yaml_files import flatten, read_file
from stackexp.errors import FolderBusyError, RunError, mask_secrets
from stackexp.files import (
    is_locked,
    read_json,
    read_json_lines,
    try_lock,
    write_atomically,
    write_json,
    write_json_lines,
)
from stackexp.metric_tags import AVERAGE_ACCURACY, AVERAGE_LOSS
from stackexp.run_result import NewerVersionError, RunResult, compute_sha256

MARKER = ".stackexp"
STAMP = "%Y%m%d-%H%M%S"
RETRY_SECONDS = 0.2


class RunFolder:
    """The files of a run folder, which may not exist yet."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.tokenizer = path / "tokenizer.json"
        self.checkpoints = path / "checkpoints"
        self.result = path / "result.json"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunFolder) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def is_finished(self) -> bool:
        """Return True if the run has a result.json."""
        return self.result.exists()

    @property
    def is_running(self) -> bool:
        """Return True if a fit uses the folder, on any machine."""
        return is_locked(self.path / ".lock")

    def read_options(self) -> dict[str, Any]:
        """Read config.yaml without checking it: {key with dots: value}."""
        return flatten(read_file(self.config)[1])

    def read_result(self) -> RunResult:
        """Read result.json. Raises RunError if it is damaged or has a newer version."""
        try:
            return RunResult.from_dict(read_json(self.result))
        except NewerVersionError as error:
            raise RunError(f"{self.result}: {error}") from error
        except ValueError as error:
            raise RunError(f"{self.result}: {error}; delete it and resume the run, which evaluates again") from error

    def write_result(self, result: RunResult) -> None:
        """Write result.json, which marks the run as finished."""
        contents = result.to_dict()
        write_json(self.result, contents | {"sha256": compute_sha256(contents)})

    def read_sessions(self) -> list[dict[str, Any]]:
        """Read environment.json: commit, versions, hardware and command of each session. Raises RunError for damage."""
        sessions = read_json(self.environment) if self.environment.exists() else []
        if not isinstance(sessions, list) or not all(isinstance(session, dict) for session in sessions):
            raise RunError(f"{self.environment}: not a list of sessions; delete the file")
        return sessions

    def list_checkpoints(self) -> list[Path]:
        """Return the checkpoints, oldest first. Copies under other names are ignored."""
        return sorted(path for path in self.checkpoints.glob("*/") if path.name.isdecimal())

    def newest_checkpoint(self) -> Path | None:
        """Return the checkpoint of the highest step, or None."""
        return max(self.list_checkpoints(), default=None)

    def best_checkpoint(self) -> Path | None:
        """Return the validated checkpoint with the lowest mean validation loss, or None.

        The latest with an accuracy of 1 is the best. The loss on whole sets is not compared with losses on samples.
        """
        lines = (line for line in self.read_metrics() if line.get(AVERAGE_LOSS) is not None)  # null: not finite
        losses = {line["step"]: 0.0 if line.get(AVERAGE_ACCURACY) == 1 else line[AVERAGE_LOSS] for line in lines}
        if self.is_finished and not self.read_options().get("data.eval_sequences"):
            result = self.read_result()  # of the final validation, which may be between two intervals
            if (final := result.figures.get("average", {}).get("loss")) is not None:
                losses.setdefault(result.steps, final)
        validated = [p for p in self.list_checkpoints() if int(p.name) in losses]
        return min(reversed(validated), key=lambda p: losses[int(p.name)], default=None)

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of metrics.jsonl, except a last line cut off by a kill. Raises RunError for damage."""
        for number, line in enumerate(read_json_lines(self.metrics), 1):
            if not isinstance(line.get("step"), int) or any(isinstance(v, str | dict | list) for v in line.values()):
                raise RunError(f"{self.metrics}: line {number} is not a line of metrics; delete the line")
            yield line

    def find_logged_tags(self, step: int) -> set[str]:
        """Return the tags that metrics.jsonl contains for a step."""
        return {tag for line in self.read_metrics() if line["step"] == step for tag in line}

    def truncate_after(self, step: int) -> None:
        """Delete the metrics and checkpoints after `step`; a resumed run repeats these steps."""
        for path in self.list_checkpoints():
            if int(path.name) > step:
                remove_checkpoint(path)
        write_json_lines(self.metrics, [line for line in self.read_metrics() if line["step"] <= step])

    def claim(self) -> None:
        """Create the folder and mark it as a run folder. Raises RunError if it contains other files."""
        self.check_ownership()
        self.mark()

    def mark(self) -> None:
        """Create the folder and mark it as a run folder without checking its contents, for the trials of a sweep."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / MARKER).touch()

    def check_ownership(self) -> None:
        """Raise RunError if the folder exists, is not empty, and is not a run folder.

        A run folder has the file .stackexp, or, as a copy without hidden files, two of the other files.
        """
        is_ours = (self.path / MARKER).exists() or (self.config.exists() and self.environment.exists())
        try:
            file = next((path.name for path in sorted(self.path.iterdir()) if path.name != ".lock"), None)
        except FileNotFoundError:
            file = None
        if file and not is_ours:
            raise RunError(f"{self.path}: not a run folder, and not empty ({file}); choose another --run")

    @contextlib.contextmanager
    def start_session(
        self,
        config: ExperimentConfig,
        step: int = 0,
        newest: Path | None = None,
        origin: dict[str, Any] | None = None,
    ) -> Iterator[None]:
        """Create or reopen the folder, and lock it within the context. The session starts after `step`.

        `newest` is the newest checkpoint that the caller has seen in the folder. `origin` has path, step and SHA-256 of
        the weights that a new run starts from; environment.json records it.

        Writes config.yaml, adds this process to environment.json (one entry per session) and deletes partial
        checkpoints that a kill left behind. If the config has changed, the old one is kept as config.step-N.yaml.

        Raises:
            FolderBusyError: Another process uses the folder, or has saved another checkpoint than `newest`.
            RunError: Another process has finished the run in the meantime, or the folder is not a run folder.
        """
        self.claim()
        self.checkpoints.mkdir(exist_ok=True)
        with self.lock():
            if self.is_finished:
                raise RunError(f"{self.path}: another process finished this run; start a new one without --ckpt_path")
            if self.newest_checkpoint() != newest:
                raise FolderBusyError(f"{self.path}: another process changed the checkpoints; rerun the command")
            for partial in self.checkpoints.glob(".[0-9]*"):
                shutil.rmtree(partial, ignore_errors=True)
            if step and self.config.exists() and self.config.read_text(encoding="utf-8") != to_yaml(config):
                os.replace(self.config, self.path / f"config.step-{step}.yaml")
            write_atomically(self.config, to_yaml(config))
            session = describe_environment() | ({"origin": origin} if origin else {})
            write_json(self.environment, [*self.read_sessions(), session])
            yield

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder within the context. Raises FolderBusyError if another process holds the lock."""
        file = try_lock(self.path / ".lock")
        if file is None:  # perhaps only `is_running` of another process, which holds a shared lock for an instant
            time.sleep(RETRY_SECONDS)
            file = try_lock(self.path / ".lock")
        if file is None:
            raise FolderBusyError(f"{self.path}: another process uses this folder; wait for it or stop it")
        with file:
            yield


def allocate_run(config: ExperimentConfig) -> RunFolder:
    """Return a folder for a new run without creating it. Its id is the current time, and sorts after all other ids."""
    parent = Path(config.logging.root, config.name)
    now = datetime.now()
    stamps = [match[0] for path in parent.glob("*/") if (match := re.match(r"\d{8}-\d{6}(?=-)", path.name))]
    if stamps and now.strftime(STAMP) <= max(stamps):  # the same second, or the clock went backwards
        now = datetime.strptime(max(stamps), STAMP) + timedelta(seconds=1)
    return RunFolder(parent / f"{now.strftime(STAMP)}-{secrets.token_hex(2)}")


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a kill does not leave an incomplete checkpoint."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    os.replace(checkpoint, hidden)
    shutil.rmtree(hidden)


def format_checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after `step` steps. Names sort in the order of their steps."""
    return f"{step:08d}"


def find_unfinished_run(config: ExperimentConfig) -> RunFolder:
    """Return the newest unfinished run of the config's name with a checkpoint. Raises RunError if there is none."""
    parent = Path(config.logging.root, config.name)
    folders = map(RunFolder, sorted(parent.glob("*/"), reverse=True))
    runs = [run for run in folders if run.config.is_file()]  # others hold runs of other names, as in formal/
    for run in runs:
        if not run.is_finished and run.newest_checkpoint():
            return run
    if runs and runs[0].is_finished:
        raise RunError(
            f"{runs[0].path}: this run is finished (it has a result.json); start a new one without --ckpt_path, "
            f"or extend it with trainer.max_steps=MORE --ckpt_path {runs[0].newest_checkpoint()}"
        )
    raise RunError(f"{parent}: no unfinished run with a checkpoint to resume; start one without --ckpt_path")


def format_resume_command(folder: RunFolder) -> str:
    """Return the command that resumes this run from its newest checkpoint."""
    return f"python -m stackexp fit --run {shlex.quote(str(folder.path))}"


def open_run(path: str) -> RunFolder:
    """Return the run folder at `path`. Raises RunError if it is not a run folder."""
    run = RunFolder(Path(path))
    if not run.config.is_file():
        raise RunError(f"{path}: not a run folder (no config.yaml); give runs/<name>/<id>")
    return run


def describe_environment() -> dict[str, Any]:
    """Return commit, versions, hardware and command of this process."""
    import torch

    packages = ("torch", "lightning", "torchmetrics", "omegaconf", "mosaicml-streaming", "tokenizers")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": mask_secrets(shlex.join([os.path.basename(sys.executable), *sys.orig_argv[1:]])),
        "commit": read_commit(),
        "python": platform.python_version(),
        "versions": {"stackexp": __version__} | versions,  # stackexp need not be installed
        "host": platform.node(),
        "cpu": {"model": _read_cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def read_commit() -> str | None:
    """Return the commit of this code, followed by "+changes" if files differ; None outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+changes" if status.stdout.strip() else "")


def _read_cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor()
