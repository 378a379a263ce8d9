"""The run folder, `<root>/<name>/<id>/`: the only record of a run. Imports no torch, except for environment.json.

.stackexp          marks the folder as a run folder, with the contents MARKER_TEXT
config.yaml        resolved; enough to repeat the run
config.step-N.yaml the config before step N, if a resumed run has changed it there
environment.json   commit, versions, hardware, command and tokenizer hash of each session
metrics.jsonl      one line per optimizer step (`step`, `tokens`, TensorBoard tags), and one per validation
events.out.*       TensorBoard's copy of the metrics
tokenizer.json     the tokenizer of the training data
checkpoints/       <step>/ with manifest.json and validation.json, see the end of this file and `models.checkpoints`
result.json        written last, atomically; if it exists, the run is finished
"""

import contextlib
import importlib.metadata
import logging
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from stackexp import __version__
from stackexp.config.compose import to_yaml
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.yaml_files import read_options
from stackexp.errors import DamagedCheckpointError, FolderBusyError, RunError, first_line, mask_secrets
from stackexp.files import (
    compute_sha256,
    is_locked,
    list_temporary_names,
    open_regular,
    read_hashed_json,
    read_json,
    read_json_lines,
    try_lock,
    write_atomically,
    write_hashed_json,
    write_json,
    write_json_lines,
)
from stackexp.run_result import RunResult

log = logging.getLogger(__name__)

MARKER = ".stackexp"
MARKER_TEXT = "A run folder of stackexp: `fit --run` resumes it, `runs remove` deletes it.\n"
MANIFEST = "manifest.json"
EMA = "ema"  # see `split_path`
VALIDATION = "validation.json"
STAMP = "%Y%m%d-%H%M%S"
DATE_FORMAT = "%Y-%m-%dT%H:%M:%S%z"
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
        return read_options(self.config)

    def read_earlier_options(self) -> dict[int, dict[str, Any]]:
        """Read the configs before each step at which a resumed run changed its config: {step: {key: value}}."""
        found = {int(path.stem.rpartition("-")[2]): path for path in self.path.glob("config.step-*[0-9].yaml")}
        return {step: read_options(path) for step, path in sorted(found.items())}

    def read_result(self) -> RunResult:
        """Read result.json. Raises RunError if it is damaged or has a newer version."""
        contents = read_hashed_json(self.result, "delete it and resume the run, which evaluates again")
        try:
            return RunResult.from_dict(contents)
        except ValueError as error:
            raise RunError(f"{self.result}: {error}") from error

    def write_result(self, result: RunResult) -> None:
        """Write result.json, which marks the run as finished."""
        write_hashed_json(self.result, result.to_dict())

    def read_sessions(self) -> list[dict[str, Any]]:
        """Read environment.json: commit, versions, hardware and command of each session. Raises RunError for damage."""
        sessions = read_json(self.environment) if self.environment.exists() else []
        if not isinstance(sessions, list) or not all(isinstance(session, dict) for session in sessions):
            raise RunError(f"{self.environment}: not a list of sessions; delete the file")
        for origin in filter(None, (session.get("origin") for session in sessions)):
            if not isinstance(origin, dict) or not isinstance(origin.get("path"), str):
                raise RunError(f"{self.environment}: the origin of a session is {origin!r:.60}; delete it")
        return sessions

    def read_start(self) -> datetime | None:
        """Return the start of the first session; None if it is not recorded."""
        try:
            return datetime.strptime(self.read_sessions()[0]["started"], DATE_FORMAT)
        except (IndexError, KeyError, TypeError, ValueError):
            return None

    def list_checkpoints(self) -> list[Path]:
        """Return the checkpoints, oldest first. Copies under other names are ignored."""
        return sorted(path for path in self.checkpoints.glob("*/") if path.name.isdecimal())

    def newest_checkpoint(self) -> Path | None:
        """Return the checkpoint of the highest step, or None."""
        return max(self.list_checkpoints(), default=None)

    def best_checkpoint(self) -> Path | None:
        """Return the validated checkpoint with the lowest mean validation loss, or None.

        Among checkpoints with an accuracy of 1, the latest is the best. One with a damaged manifest is never the best,
        nor one that was validated on other data than the latest, because a resumed run may change the validation.
        """
        found = ((path, read_validation(path)) for path in self.list_checkpoints()[::-1] if _has_intact_manifest(path))
        validated = {path: scores for path, scores in found if scores}
        data = next((scores.data for scores in validated.values()), None)
        losses = {path: scores.loss for path, scores in validated.items() if scores.data in (None, data)}
        return min(losses, key=losses.__getitem__, default=None)

    def has_checkpoint(self, path: Path) -> bool:
        """Return True if `path` is in checkpoints/ of this run, and not another run's checkpoint."""
        return path.resolve().is_relative_to(self.checkpoints.resolve())

    def find_tokenizer(self, checkpoint: Path | None = None) -> Path | None:
        """Return the path of tokenizer.json, or None if the run has no tokenizer.

        Every reader opens the tokenizer of a run through this method. It compares the file with the hash in
        environment.json and with that of `checkpoint`. Raises RunError if the file is missing or has changed.
        """
        hashes = {f"{self.environment.name} records": self.read_tokenizer_hash()}
        if checkpoint and (folder := split_path(checkpoint)[0]).is_dir():
            hashes[f"{folder} was trained with"] = read_manifest(folder)["tokenizer"]
        recorded = {source: sha256 for source, sha256 in hashes.items() if sha256}
        if not self.tokenizer.is_file():
            if recorded:
                raise RunError(f"{self.tokenizer}: missing; restore the file, such as from the training data")
            return None
        for source, sha256 in recorded.items():
            if compute_sha256(self.tokenizer) != sha256:
                raise RunError(f"{self.tokenizer}: not the tokenizer that {source} ({sha256!s:.12}); restore the file")
        return self.tokenizer

    def read_tokenizer_hash(self) -> str | None:
        """Return the SHA-256 of tokenizer.json that the last session recorded."""
        return next((session.get("tokenizer_sha256") for session in self.read_sessions()[-1:]), None)

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of metrics.jsonl, except a last line cut off by a kill. Raises RunError for damage."""
        for number, line in enumerate(read_json_lines(self.metrics), 1):
            if not is_metrics(line):
                raise RunError(f"{self.metrics}: line {number} is not a line of metrics; delete the line")
            yield line

    def find_logged_tags(self, step: int) -> set[str]:
        """Return the tags that metrics.jsonl contains for a step."""
        return {tag for line in self.read_metrics() if line["step"] == step for tag in line}

    def truncate_after(self, step: int, tag: str | None = None) -> None:
        """Delete metrics and checkpoints after `step`, and lines of `step` with `tag`; a resumed run repeats these."""
        for path in self.list_checkpoints():
            if int(path.name) > step:
                remove_checkpoint(path)
        kept = (line for line in self.read_metrics() if line["step"] <= step)
        write_json_lines(self.metrics, (line for line in kept if line["step"] < step or tag not in line))

    @property
    def is_marked(self) -> bool:
        """Return True if the folder has the marker with the contents that this program writes."""
        try:
            with open_regular(self.path / MARKER) as file:
                return file.read(len(MARKER_TEXT) + 1) == MARKER_TEXT
        except (OSError, RunError, UnicodeDecodeError):
            return False

    def create(self) -> None:
        """Create the folder and mark it as a run folder. Raises RunError if it contains other files."""
        self.check_ownership()
        self.mark()

    def mark(self) -> None:
        """Create the folder and mark it as a run folder without checking its contents, for the trials of a sweep."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.is_marked:
            write_atomically(self.path / MARKER, MARKER_TEXT)

    def check_ownership(self) -> None:
        """Raise RunError if the folder exists, is not empty, and does not have the marker of a run folder."""
        try:
            names = {path.name for path in self.path.iterdir()} - {".lock"} - list_temporary_names(self.path / MARKER)
        except FileNotFoundError:
            return
        if names and not self.is_marked:
            raise RunError(
                f"{self.path}: not a run folder (no valid {MARKER}), and not empty ({min(names)}); choose another"
            )

    @contextlib.contextmanager
    def start_session(
        self,
        config: ExperimentConfig,
        step: int = 0,
        newest: Path | None = None,
        origin: dict[str, Any] | None = None,
        tokenizer: str | None = None,
    ) -> Iterator[None]:
        """Create or reopen the folder, and lock it within the context. The session starts after `step`.

        `newest` is the newest checkpoint that the caller has found in the folder. `origin` has path, step and SHA-256
        of the weights that a new run starts from. `tokenizer` is the text of tokenizer.json. environment.json records
        `origin` and the hash of `tokenizer`.

        Writes config.yaml and tokenizer.json, adds this process to environment.json (one entry per session) and deletes
        partial checkpoints that a kill left behind. If the config has changed, the old one is kept as
        config.step-N.yaml. Warns about a plugin that has changed since the last session.

        Raises:
            FolderBusyError: Another process uses the folder, or has saved another checkpoint than `newest`.
            RunError: Another process has finished the run in the meantime, or the folder is not a run folder.
        """
        self.create()
        self.checkpoints.mkdir(exist_ok=True)
        with self.lock():
            if self.is_finished:
                raise RunError(f"{self.path}: another process finished this run; start a new one without --ckpt_path")
            if self.newest_checkpoint() != newest:
                raise FolderBusyError(f"{self.path}: another process changed the checkpoints; rerun the command")
            for partial in self.checkpoints.glob(".[0-9]*"):
                shutil.rmtree(partial, ignore_errors=True)
            earlier = self.path / f"config.step-{step}.yaml"  # of the steps up to this one
            is_changed = self.config.exists() and self.config.read_text(encoding="utf-8") != to_yaml(config)
            if step and is_changed and not earlier.exists():
                os.replace(self.config, earlier)
            write_atomically(self.config, to_yaml(config))
            session = describe_environment() | ({"origin": origin} if origin else {})
            if plugins := hash_plugins(config.plugins):
                session["plugins"] = plugins
                for last in self.read_sessions()[-1:]:
                    for name in plugins.keys() & last.get("plugins", {}).keys():
                        if plugins[name] != last["plugins"][name]:
                            log.warning("%s: changed since the last session of this run", name)
            if tokenizer is not None:
                if self.read_tokenizer_hash() is None or not self.tokenizer.exists():
                    write_atomically(self.tokenizer, tokenizer)
                self.find_tokenizer()  # raises if it has changed since the first session
                session["tokenizer_sha256"] = compute_sha256(self.tokenizer)
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


def is_metrics(line: Any) -> bool:
    """Return True for the contents of a line of metrics.jsonl: an object of numbers and nulls, with a step."""
    is_object = isinstance(line, dict) and type(line.get("step")) is int
    return is_object and not any(isinstance(value, str | dict | list) for value in line.values())


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
        problem = f"{runs[0].path}: this run is finished (it has a result.json); start a new one without --ckpt_path"
        newest = runs[0].newest_checkpoint()
        raise RunError(problem + f", or extend it with trainer.max_steps=MORE --ckpt_path {newest}" * bool(newest))
    raise RunError(f"{parent}: no unfinished run with a checkpoint to resume; start one without --ckpt_path")


def format_resume_command(folder: RunFolder) -> str:
    """Return the command that resumes this run from its newest checkpoint."""
    return f"python -m stackexp fit --run {shlex.quote(str(folder.path))}"


def open_run(path: str) -> RunFolder:
    """Return the run folder at `path`. Raises RunError if it is not a run folder."""
    run = RunFolder(Path(path))
    if not run.config.is_file():
        raise no_run_error(path)
    return run


def no_run_error(path: str) -> RunError:
    """Return the error for a path that is not a run folder; it suggests the last run in a folder of runs."""
    found = sorted(Path(path).glob("*/config.yaml")) or sorted(Path("runs", path).glob("*/config.yaml"))
    hint = f"did you mean {found[-1].parent}?" if found else "give runs/<name>/<id>"
    return RunError(f"{path}: not a run folder (no config.yaml); {hint}")


def describe_environment() -> dict[str, Any]:
    """Return commit, versions, hardware and command of this process."""
    import torch

    packages = ("torch", "lightning", "torchmetrics", "omegaconf", "mosaicml-streaming", "tokenizers")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "started": time.strftime(DATE_FORMAT),
        "command": mask_secrets(shlex.join([os.path.basename(sys.executable), *sys.orig_argv[1:]])),
        "commit": read_commit(),
        "python": platform.python_version(),
        "versions": {"stackexp": __version__} | versions,  # stackexp need not be installed
        "host": platform.node(),
        "cpu": {"model": _read_cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def hash_plugins(plugins: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of each plugin that is a file, by its path."""
    return {name: compute_sha256(Path(name)) for name in plugins if Path(name).is_file()}


def read_commit() -> str | None:
    """Return the commit of this code, followed by "+changes" if files differ; None unless git tracks it.

    An installed package may be inside the checkout of another project.
    """
    git = ["git", "-C", str(Path(__file__).parent)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    describe = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]  # without tags
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], **options)
        return subprocess.run([*git, *describe], **options).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _read_cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor()


# Checkpoints. The manifest, written last, has the step, the SHA-256 of the run's tokenizer, and that of every file. It
# detects a changed bit, a missing file, a file of another checkpoint, and a folder renamed to another step.
# validation.json has the scores and the SHA-256 of the manifest.


def write_manifest(folder: Path, step: int, tokenizer: str | None) -> None:
    """Write the manifest of a complete checkpoint, atomically. `tokenizer` is the SHA-256 of the run's tokenizer."""
    files = sorted(path for path in folder.iterdir() if path.name not in (MANIFEST, VALIDATION))
    with ThreadPoolExecutor() as threads:
        hashes = dict(zip((file.name for file in files), threads.map(compute_sha256, files), strict=True))
    write_hashed_json(folder / MANIFEST, {"step": step, "tokenizer": tokenizer, "files": hashes})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read step, tokenizer (None for a run without one) and files of a checkpoint.

    Raises DamagedCheckpointError if the manifest is missing or damaged, or the step is not that of the folder's name.
    """
    if not (folder / MANIFEST).exists():
        raise damaged_error(folder, f"{MANIFEST} is missing")
    try:
        manifest = read_hashed_json(folder / MANIFEST, "restore it")
    except (OSError, RunError) as error:
        raise damaged_error(folder, error) from None
    check_step(folder, manifest["step"])
    return manifest


def split_path(path: Path) -> tuple[Path, str]:
    """Return the folder of a checkpoint and the key of its weights: "ema" for the path <step>/ema, else "model"."""
    return (path.parent, EMA) if path.name == EMA else (path, "model")


def check_step(folder: Path, step: int) -> None:
    """Raise DamagedCheckpointError if the name of the folder is another step than `step`."""
    if folder.name.isdecimal() and int(folder.name) != step:
        raise damaged_error(folder, f"the checkpoint of step {step} under another name")


def verify_manifest(folder: Path, only: str | None = None) -> list[str]:
    """Compare all files, or the file `only`, with their hashes in the manifest, and return their names.

    Raises DamagedCheckpointError for a difference. Reads every byte: about 1 second per GB and core.
    """
    hashes = read_manifest(folder)["files"]
    names = sorted(hashes) if only is None else [only]
    try:
        with ThreadPoolExecutor() as threads:
            found = list(threads.map(lambda name: compute_sha256(folder / name), names))
    except (OSError, RunError) as error:
        raise damaged_error(folder, error) from None
    if changed := [name for name, sha256 in zip(names, found, strict=True) if hashes.get(name) != sha256]:
        raise damaged_error(folder, f"{changed[0]} has changed since it was written")
    return names


def damaged_error(path: Path, reason: BaseException | str) -> DamagedCheckpointError:
    """Return the error for a damaged checkpoint."""
    return DamagedCheckpointError(path, reason if isinstance(reason, str) else first_line(reason))


class Validation(NamedTuple):
    """The scores by which `best_checkpoint` compares checkpoints."""

    loss: float  # 0 for an accuracy of 1
    data: str | None  # a hash of the scored data; None in runs of earlier versions


def write_validation(checkpoint: Path, loss: float, accuracy: float | None, data: str) -> None:
    """Write the mean scores of the validation of a checkpoint; `data` is a hash of the scored data."""
    scores = {"loss": loss, "accuracy": accuracy, "data": data}
    write_hashed_json(checkpoint / VALIDATION, scores | {"manifest_sha256": compute_sha256(checkpoint / MANIFEST)})


def read_validation(checkpoint: Path) -> Validation | None:
    """Return the scores of a checkpoint's validation; None if it is not validated, or its loss is not finite.

    Raises RunError if the scores have been edited, or are those of another checkpoint.
    """
    path = checkpoint / VALIDATION
    if not path.exists():
        return None
    scores = read_hashed_json(path, "delete the file")
    if scores["manifest_sha256"] != compute_sha256(checkpoint / MANIFEST):
        raise RunError(f"{path}: the scores of another checkpoint; delete the file")
    loss = scores["loss"]
    return None if loss is None else Validation(0.0 if scores["accuracy"] == 1 else loss, scores.get("data"))


def _has_intact_manifest(checkpoint: Path) -> bool:
    try:
        read_manifest(checkpoint)
    except DamagedCheckpointError:
        return False
    return True
