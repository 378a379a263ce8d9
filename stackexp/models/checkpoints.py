"""Save and load checkpoints: folders that are written in the background and renamed once they are complete.

<step>/
  state.pt               config, loops, schedule, data position, random number generators: everything but tensors
  .metadata, *.distcp    weights and optimizer state in torch.distributed.checkpoint's format, one file per process
  manifest.json          step, tokenizer and the SHA-256 of each of these files; see `stackexp.runs`
  validation.json        loss and accuracy of the validation at this step

Any number of processes can load a checkpoint, whatever number wrote it. The path <step>/ema is that of the averaged
weights in a checkpoint, which can be loaded wherever only weights are needed.

torch.distributed.checkpoint pickles its metadata and plain values. The readers accept only a list of permitted types,
so they never run code stored in a file.

A safetensors file has the weights of one checkpoint, or the mean of several, and the config as metadata.
"""

import contextlib
import io
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from stackexp.config.compose import to_yaml
from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import RunError, first_line
from stackexp.files import make_temporary_path, sync_file, sync_folder
from stackexp.models.sharding import copy_full_
from stackexp.runs import (
    EMA,
    MANIFEST,
    RunFolder,
    check_step,
    damaged_error,
    split_path,
    verify_manifest,
    write_manifest,
)

CHECKPOINT_VERSION = 3
POLL_SECONDS = 1.0
STATE = "state.pt"
WEIGHTS = ".safetensors"
CONFIG_KEY = "stackexp_config"  # in the metadata of a safetensors file: the YAML of the config
_DCP_TYPES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("Path", "PosixPath"),
}
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a single process has checkpoints too


# Save


class CheckpointWriter:
    """A background writer of one checkpoint at a time, from a copy of the state. Every rank must call every method.

    While a method waits for a checkpoint whose files grow, it calls `note_progress`.
    """

    def __init__(self, note_progress: Callable[[], None] = lambda: None) -> None:
        self.note_progress = note_progress
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._partial = Path()
        self._group: Any = None  # a process group

    def save(self, path: Path, tensors: dict[str, Any], state: dict[str, Any], on_saved: Callable[[], None]) -> None:
        """Wait for the previous checkpoint, then start writing `path`; rank 0 calls `on_saved` when it is complete."""
        self.wait()
        self._partial = partial = path.with_name(f".{path.name}")
        if _is_first_rank():
            _write_state(partial, state)
        if dist.is_initialized():
            dist.barrier()
            self._group = self._group or dist.new_group(backend="gloo")  # training uses the other groups meanwhile
        # The copy is on the CPU; copying ahead from a device would make every process use GPU 0.
        writer = dcp.FileSystemWriter(partial, per_thread_copy_ahead=0)
        written: Any = dcp.async_save(
            tensors, storage_writer=writer, process_group=self._group, no_dist=not dist.is_initialized()
        )
        manifest = (state["global_step"], state["stackexp"].get("tokenizer_sha256"))
        self._pending = self._executor.submit(_commit, written, partial, path, manifest, on_saved)

    def wait(self) -> None:
        """Wait until the pending checkpoint is complete. Raises OSError or RunError if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        size = 0
        while not futures.wait([pending], timeout=POLL_SECONDS).done:
            with contextlib.suppress(OSError):  # renamed in the meantime
                before, size = size, sum(path.stat().st_size for path in self._partial.iterdir())
                if size != before:
                    self.note_progress()
        pending.result()


def _write_state(partial: Path, state: dict[str, Any]) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with open(partial / STATE, "wb") as file:
            torch.save(state, file)
            sync_file(file)
        torch.load(partial / STATE, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = "the state of a callback, loader or data module has other values than tensors, numbers, text, lists"
        raise RunError(f"{partial}: {reason} and dicts, and could not be loaded again ({first_line(error)})") from None
    except (OSError, RuntimeError) as error:  # on a full disk torch's zip writer fails to close and hides the OSError
        shutil.rmtree(partial, ignore_errors=True)
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _commit(
    written: Future, partial: Path, path: Path, manifest: tuple[int, str | None], on_saved: Callable[[], None]
) -> None:
    """Rename a complete checkpoint into place, or delete an incomplete one."""
    try:
        written.result()
        if _is_first_rank():
            write_manifest(partial, *manifest)
    except (CheckpointException, Exception) as error:  # CheckpointException is a BaseException
        if _is_first_rank():
            shutil.rmtree(partial, ignore_errors=True)
        raise _find_cause(error, path) from None
    if _is_first_rank():
        os.replace(partial, path)
        sync_folder(path.parent)
        on_saved()


def _find_cause(error: BaseException, path: Path) -> Exception:
    """Return the OSError among the errors of all ranks, otherwise a RunError."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        error, failures = cause, getattr(cause, "failures", None)
        cause = next(iter(failures.values()))[0] if failures else cause.__cause__ or cause.__context__
    return RunError(f"{path}: could not be written ({first_line(error)}); free space or fix the disk, then resume")


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


# Load


def find_checkpoint(run: RunFolder, ckpt_path: str | None) -> Path:
    """Return the checkpoint that `ckpt_path` names. Raises RunError if the run has none.

    "last" and None name the newest checkpoint, "best" the best one, and "ema" the averaged weights in the newest. Any
    other `ckpt_path` is returned as a path.
    """
    if ckpt_path not in (None, "last", "best", EMA):
        return Path(ckpt_path)
    path = run.best_checkpoint() if ckpt_path == "best" else run.newest_checkpoint()
    if path is None:
        if run.is_finished and not run.checkpoints.exists():
            raise RunError(f"{run.path}: a copy without checkpoints; give the original run, or --ckpt_path PATH")
        if run.list_checkpoints():
            raise RunError(f"{run.checkpoints}: none was saved at a validation step; give --ckpt_path last or PATH")
        raise RunError(f"{run.checkpoints}: no checkpoint yet; wait for the first one, or give --ckpt_path PATH")
    return path / EMA if ckpt_path == EMA else path


def is_folder(path: Path) -> bool:
    """Return True for a checkpoint, or <step>/ema in one, and False for a file of weights."""
    return split_path(path)[0].is_dir()


def load_state(path: Path) -> dict[str, Any]:
    """Load everything but the tensors of a checkpoint. Raises RunError if it is missing, damaged or incompatible."""
    path, _ = split_path(path)
    if path.is_file():
        raise RunError(f"{path}: a checkpoint is a folder, but this is a file; give a folder in a run's checkpoints/")
    if not path.is_dir():
        raise RunError(f"{path}: no such checkpoint; give a folder in a run's checkpoints/")
    if not (path / STATE).exists():
        raise RunError(f"{path}: not a stackexp checkpoint (no {STATE}); give a folder in a run's checkpoints/")
    verify_manifest(path, only=STATE)
    try:
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, OSError) as error:
        raise damaged_error(path, error) from None
    if not isinstance(state, dict) or not isinstance(state.get("stackexp"), dict):
        raise RunError(f"{path}: not a stackexp checkpoint (no `stackexp` entry in {STATE}); choose another one")
    version = state["stackexp"].get("version")
    if version != CHECKPOINT_VERSION:
        raise RunError(f"{path}: checkpoint version {version} is not supported; use the stackexp that wrote it")
    check_step(path, state["global_step"])
    return state


def load_tensors(tensors: dict[str, Any], path: Path) -> None:
    """Load tensors, sharded or not, in place from a checkpoint. Raises RunError if it is damaged."""
    try:
        dcp.load(tensors, storage_reader=Reader(path), planner=LoadPlanner(), no_dist=not dist.is_initialized())
    except (CheckpointException, Exception) as error:
        failures = getattr(error, "failures", None)
        raise damaged_error(path, next(iter(failures.values()))[0] if failures else error) from None


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the weights of a checkpoint, or of a consolidated file, into a model, sharded or not.

    Raises RunError if a file is damaged, or names the first weight whose shape differs.
    """
    weights = model.state_dict()
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    check_shapes(f"{path}: different architecture", read_shapes(path), shapes, "use the run's own config.yaml")
    load_named_weights(model, path, weights)


def read_shapes(path: Path) -> dict[str, torch.Size]:
    """Return the shapes of the weights in a checkpoint, whose files are verified, or in a safetensors file.

    Raises RunError if a file is damaged.
    """
    if path.suffix == WEIGHTS:
        return {name: tensor.shape for name, tensor in read_safetensors(path).items()}
    load_state(path)
    return {name: stored.size for name, stored in _read_stored_weights(path).items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint. Raises RunError if it is damaged."""
    load_state(path)
    tensors = {name: torch.empty(s.size, dtype=s.properties.dtype) for name, s in _read_stored_weights(path).items()}
    folder, key = split_path(path)
    load_tensors({key: tensors}, folder)
    return tensors


def load_named_weights(model: nn.Module, path: Path, names: Collection[str]) -> None:
    """Load these weights, of known shapes, into a model, sharded or not; the others keep their values."""
    weights = model.state_dict()
    if path.suffix == WEIGHTS:
        stored = read_safetensors(path)
        for name in names:
            if stored[name].is_floating_point() != weights[name].is_floating_point():
                raise RunError(f"{path}: {name} is {stored[name].dtype}, not {weights[name].dtype}; write it again")
            copy_full_(weights[name], stored[name])
    else:
        folder, key = split_path(path)
        load_tensors({key: {name: weights[name] for name in names}}, folder)


def check_files(path: Path) -> dict[str, Any]:
    """Verify all files of a checkpoint, and return the metadata of its tensors.

    Raises DamagedCheckpointError if a file is missing or has changed.
    """
    names = verify_manifest(path)
    try:
        metadata = Reader(path).read_metadata()
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
        raise damaged_error(path, error) from None
    for item in metadata.storage_data.values():
        if item.relative_path not in names:
            raise damaged_error(path, f"{item.relative_path} is not in its {MANIFEST}")
    return metadata.state_dict_metadata


def _read_stored_weights(path: Path) -> dict[str, TensorStorageMetadata]:
    folder, key = split_path(path)
    prefix = f"{key}."
    stored = {name: tensor for name, tensor in check_files(folder).items() if name.startswith(prefix)}
    if key == EMA and not stored:
        raise RunError(f"{folder}: has no averaged weights; train with trainer.ema_decay")
    return {name.removeprefix(prefix): tensor for name, tensor in stored.items()}


def check_shapes(
    where: object, stored: Mapping[str, torch.Size], expected: Mapping[str, torch.Size], advice: str
) -> None:
    """Raise RunError if the names or shapes of stored tensors are not those of the model; names the first."""
    for name in sorted(stored.keys() | expected.keys()):
        theirs, ours = (str(list(shapes[name])) if name in shapes else "absent" for shapes in (stored, expected))
        if theirs != ours:
            raise RunError(f"{where}: {name} is {theirs}, but {ours} in the model; {advice}")


class Reader(dcp.FileSystemReader):
    """A checkpoint reader whose metadata may contain only types of torch.distributed.checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the file .metadata. Raises pickle.UnpicklingError if it is something else."""
        metadata = _MetadataUnpickler(io.BytesIO((Path(self.path) / ".metadata").read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"{type(metadata).__name__} instead of Metadata")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class LoadPlanner(dcp.DefaultLoadPlanner):
    """A planner that loads tensors and plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a plain value. Raises pickle.UnpicklingError if it is of a type that can run code."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def _get_memory_format(enum: type, name: str) -> Any:
    """Return a memory format by its name, and nothing else: a few versions of Python pickle it with `getattr`."""
    if enum is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f".metadata contains an attribute of {enum!r:.60}, which no checkpoint needs")
    return _MEM_FORMAT_ENCODING[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _get_memory_format
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _DCP_TYPES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata contains {module}.{name}, which no checkpoint needs")


# Safetensors files


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, mapped from the file. Raises RunError if it cannot be read."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path}: cannot be read as safetensors ({first_line(error)}); write or copy it again") from None


def average_checkpoints(paths: Sequence[Path], target: Path, config: ExperimentConfig) -> int:
    """Write the mean of the weights of checkpoints to one safetensors file; return the tensor count.

    Sums are in float64; a mean has the dtype of its weights.
    """
    sums: dict[str, Tensor] = {}
    for path in paths:
        weights = read_weights(path)
        sums = {name: sums.get(name, 0) + tensor.double() for name, tensor in weights.items()}
    means = {name: (total / len(paths)).to(weights[name].dtype) for name, total in sums.items()}
    return write_weights(means, target, to_yaml(config))


def write_weights(tensors: dict[str, Tensor], target: Path, config: str) -> int:
    """Write tensors and the YAML of a config to one safetensors file, atomically; return the tensor count.

    Raises RunError if the file cannot be written.
    """
    partial = make_temporary_path(target)
    try:
        save_file(tensors, partial, metadata={CONFIG_KEY: config})  # one key: safetensors orders several at random
        with open(partial, "rb") as file:
            sync_file(file)
        os.replace(partial, target)
    except SafetensorError as error:
        raise RunError(f"{target}: cannot be written ({error}); check the free space and the permissions") from error
    finally:
        partial.unlink(missing_ok=True)
    return len(tensors)


def read_config(path: Path) -> dict[str, Any]:
    """Return the config that a checkpoint or a safetensors file stores; {} for a file without one.

    Raises RunError if a safetensors file stores something else.
    """
    if is_folder(path):
        return load_state(path)["stackexp"]["config"]
    try:
        with safe_open(path, "pt") as file:
            config = yaml.safe_load((file.metadata() or {}).get(CONFIG_KEY, "{}"))
    except yaml.YAMLError:
        config = None
    if not isinstance(config, dict):
        raise RunError(f"{path}: its metadata has no valid config; write the file again")
    return config
