"""Checkpoint files: a manifest of hashes, and readers that never run code stored in a file.

The manifest holds the SHA-256 of every other file and is written last. It detects a changed bit, a missing file, and a
file of another checkpoint. Tensors are stored by torch.distributed.checkpoint, which pickles its metadata and plain
values; the readers here accept only a list of permitted types.
"""

import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from stackexp.errors import DamagedCheckpointError, RunError, first_line
from stackexp.files import compute_sha256, read_json, write_json

MANIFEST = "manifest.json"
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


def write_manifest(folder: Path) -> None:
    """Write the hashes of all files of a complete checkpoint, atomically."""
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    with ThreadPoolExecutor() as threads:
        hashes = list(threads.map(compute_sha256, files))
    write_json(folder / MANIFEST, {file.name: sha256 for file, sha256 in zip(files, hashes, strict=True)})


def verify_manifest(folder: Path, only: str | None = None) -> None:
    """Raise DamagedCheckpointError if a file, or the file `only`, does not have the hash in the manifest.

    Reads every byte: about 1 second per GB and core.
    """
    if not (folder / MANIFEST).exists():
        raise damaged_error(folder, f"{MANIFEST} is missing")
    try:
        hashes: dict[str, str] = read_json(folder / MANIFEST)
        names = sorted(hashes) if only is None else [only]
        with ThreadPoolExecutor() as threads:
            found = list(threads.map(lambda name: compute_sha256(folder / name), names))
        changed = [name for name, sha256 in zip(names, found, strict=True) if hashes.get(name) != sha256]
    except (OSError, RunError, AttributeError, TypeError) as error:
        raise damaged_error(folder, error) from None
    if changed:
        raise damaged_error(folder, f"{changed[0]} has changed since it was written")


def damaged_error(path: Path, reason: BaseException | str) -> DamagedCheckpointError:
    """Return the error for a checkpoint that cannot be read."""
    reason = reason if isinstance(reason, str) else first_line(reason)
    return DamagedCheckpointError(f"{path}: damaged ({reason}); use an older one")


class Reader(dcp.FileSystemReader):
    """A checkpoint reader whose metadata may contain only types of torch.distributed.checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the file .metadata. Raises pickle.UnpicklingError if it contains another type."""
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
