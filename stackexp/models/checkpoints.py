"""Checkpoints, as folders: written in the background, whole or not at all, by and for any number of processes.

<step>/            renamed into place when whole
  state.pt         config, loops, schedule, data position, random number generators: what is no tensor of the model
  .metadata, *.distcp   weights and optimizer, in torch.distributed.checkpoint's format: each process writes its share
"""

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from stackexp.config.compose import to_yaml
from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import RunError, first_line
from stackexp.runs import RunFolder

VERSION = 2
STATE = "state.pt"
WEIGHTS = ".safetensors"
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process has checkpoints too


class CheckpointWriter:
    """Writes one checkpoint at a time, from a copy, while training goes on. Every process calls every method."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None

    def save(self, path: Path, tensors: dict[str, Any], state: dict[str, Any], then: Callable[[], None]) -> None:
        """Begin to write `path`; once it is in place, the first process calls `then`. Waits for the one before."""
        self.wait()
        partial = path.with_name(f".{path.name}")
        if _is_first():
            _begin(partial, state)
        if dist.is_initialized():
            dist.barrier()
            self._group = self._group or dist.new_group(backend="gloo")  # its own: training uses the others meanwhile
        # What is written lies on the CPU; copying ahead from a device would touch GPU 0 from every process.
        writer = dcp.FileSystemWriter(partial, per_thread_copy_ahead=0)
        written = dcp.async_save(
            tensors, storage_writer=writer, process_group=self._group, no_dist=not dist.is_initialized()
        )
        self._pending = self._executor.submit(_commit, written, partial, path, then)

    def wait(self) -> None:
        """Until what was begun is in place. Raises OSError or RunError if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def _begin(partial: Path, state: dict[str, Any]) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with open(partial / STATE, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch's zip writer, closing what it could not write, hides the cause
        shutil.rmtree(partial, ignore_errors=True)
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _commit(written: Future, partial: Path, path: Path, then: Callable[[], None]) -> None:
    """Rename a checkpoint that is whole, or remove what there is of it."""
    try:
        written.result()
    except (CheckpointException, Exception) as error:  # the former is a BaseException
        if _is_first():
            shutil.rmtree(partial, ignore_errors=True)
        raise _cause(error, path) from None
    if _is_first():
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        then()


def _cause(error: BaseException, path: Path) -> Exception:
    """What went wrong in one of the processes: an OSError where there is one below it."""
    failures = getattr(error, "failures", None)
    while failures or error.__cause__ or error.__context__:
        error = next(iter(failures.values()))[0] if failures else error.__cause__ or error.__context__
        failures = getattr(error, "failures", None)
        if isinstance(error, OSError):
            return error
    return RunError(f"{path}: could not be written ({first_line(error)})")


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def read(path: Path) -> dict[str, Any]:
    """The state of the checkpoint at `path`, without its tensors. Raises RunError if missing, damaged or foreign."""
    if path.is_file():
        raise RunError(f"{path}: checkpoints are folders now (version {VERSION}), this is a file; train again")
    if not path.is_dir():
        raise RunError(f"{path}: no such checkpoint; give a folder in a run's checkpoints/, `last` or `best`")
    try:
        checkpoint = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise RunError(f"{path}: not a stackexp checkpoint (it holds no {STATE})") from None
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, OSError) as error:
        raise RunError(f"{path}: damaged, or not a checkpoint ({first_line(error)}); use an older one") from None
    if not isinstance(checkpoint, dict) or "stackexp" not in checkpoint:
        raise RunError(f"{path}: not a stackexp checkpoint (its {STATE} holds no `stackexp` entry)")
    if (version := checkpoint["stackexp"]["version"]) != VERSION:
        raise RunError(f"{path}: checkpoint version {version}, but this stackexp reads version {VERSION}")
    return checkpoint


def load_tensors(tensors: dict[str, Any], path: Path) -> None:
    """Fill tensors, sharded or not, in place from a checkpoint. Raises RunError if it is damaged."""
    try:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=not dist.is_initialized())
    except (CheckpointException, Exception) as error:
        failures = getattr(error, "failures", None)
        cause = next(iter(failures.values()))[0] if failures else error
        raise RunError(f"{path}: damaged ({first_line(cause)}); use an older one") from None


def choose(run: RunFolder, ckpt_path: str | None) -> Path:
    """`ckpt_path`, or the run's checkpoint `last` (None) or `best`. Raises RunError if there is none."""
    if ckpt_path not in (None, "last", "best"):
        return Path(ckpt_path)
    path = run.best_checkpoint() if ckpt_path == "best" else run.newest_checkpoint()
    if path is None:
        missing = "none was made at a validation" if ckpt_path == "best" and run.saved() else "no checkpoint yet"
        raise RunError(f"{run.checkpoints}: {missing}; wait for the first one or give --ckpt_path PATH")
    return path


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the weights of a checkpoint, or of a consolidated file, into a model, sharded or not.

    Raises RunError, naming the first one that does not fit.
    """
    whole = _load_file(path) if path.suffix == WEIGHTS else None
    own = model.state_dict()
    theirs = {name: of.size for name, of in _stored(path).items()} if whole is None else _shapes(whole)
    _check_shapes(path, theirs, _shapes(own))
    if whole is not None:
        model.load_state_dict(whole)
    else:
        load_tensors({"model": own}, path)


def consolidate(path: Path, target: Path, config: ExperimentConfig) -> int:
    """Write a checkpoint's weights into one safetensors file, with the config beside them; how many tensors."""
    read(path)
    tensors = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in _stored(path).items()}
    load_tensors({"model": tensors}, path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        save_file(tensors, partial, metadata={"format": "pt", "stackexp_config": to_yaml(config)})
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return len(tensors)


def _load_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path}: cannot be read as safetensors ({first_line(error)})") from None


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def check_whole(path: Path) -> dict[str, Any]:
    """What a checkpoint's files hold, by name. Raises RunError if a file is missing or cut off."""
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise RunError(f"{path}: damaged ({first_line(error)}); use an older one") from None
    ends: dict[str, int] = {}  # of each file, in bytes
    for item in metadata.storage_data.values():
        ends[item.relative_path] = max(ends.get(item.relative_path, 0), item.offset + item.length)
    for name, end in ends.items():
        file = path / name
        if not file.is_file() or file.stat().st_size < end:
            raise RunError(f"{path}: damaged ({name} is missing or cut off); use an older one")
    return metadata.state_dict_metadata


def _stored(path: Path) -> dict[str, TensorStorageMetadata]:
    """Of each weight of a checkpoint. Raises RunError if it is none, or damaged."""
    read(path)
    stored = check_whole(path)
    return {name.removeprefix("model."): of for name, of in stored.items() if name.startswith("model.")}


def _check_shapes(path: Path, theirs: dict[str, torch.Size], ours: dict[str, torch.Size]) -> None:
    for name in sorted(theirs.keys() | ours.keys()):
        then, now = (str(list(shapes[name])) if name in shapes else "absent" for shapes in (theirs, ours))
        if then != now:
            raise RunError(
                f"{path}: another architecture: {name} is {then} in the checkpoint, {now} in the config's model; "
                "use the run's own config.yaml"
            )
