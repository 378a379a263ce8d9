"""Checkpoints: written whole or not at all, and read with one clear line where they do not fit."""

import os
import pickle
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import nn

from stackexp.config.compose import to_dict
from stackexp.config.schema import ExperimentConfig, TrainerConfig
from stackexp.errors import RunError
from stackexp.runs import RunFolder, checkpoint_name

VERSION = 1


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write beside the target, flush to disk, then rename: a kill leaves the old state or the new one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(temporary, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except RuntimeError as error:  # torch's zip writer, closing what it could not write, hides the cause
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        finally:
            temporary.unlink(missing_ok=True)


class CheckpointState(pl.Callback):
    """What a checkpoint holds beyond Lightning's own: the config and the states of the random number generators."""

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["stackexp"] = {
            "version": VERSION,
            "config": to_dict(module.config),
            "accumulate_grad_batches": module.config.accumulate_grad_batches,
            "python_rng": random.getstate(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all(),
        }

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["stackexp"]
        random.setstate(state["python_rng"])
        torch.set_rng_state(state["torch_rng"])
        if len(state["cuda_rng"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda_rng"])


class StepCheckpoint(pl.callbacks.Checkpoint):
    """<step>.ckpt every `checkpoint_interval` steps and after the last; the newest `keep_checkpoints` stay.

    Only ever between two optimizer steps, never inside an accumulation. Where a validation is due at the same step it
    comes first, so a run resumed from a checkpoint misses none. All ranks decide alike: saving is collective.
    """

    def __init__(self, folder: RunFolder, config: TrainerConfig):
        self._folder, self._config = folder, config

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._step = self._saved = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            return  # a micro-batch that did not end a step
        self._step = trainer.global_step
        interval = self._config.val_check_interval
        validates = interval and self._step % interval == 0 and trainer.datamodule.set_names("validate")
        if not validates:
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.state.fn == "fit":
            self._save_if_due(trainer)

    def _save_if_due(self, trainer: pl.Trainer) -> None:
        due = self._step % self._config.checkpoint_interval == 0 or self._step == self._config.max_steps
        if due and self._step != self._saved:
            trainer.save_checkpoint(self._folder.checkpoints / f"{checkpoint_name(self._step)}.ckpt")
            self._saved = self._step
            if trainer.is_global_zero:
                for old in self._folder.saved()[: -self._config.keep_checkpoints]:
                    old.unlink()


def read(path: Path) -> dict[str, Any]:
    """The checkpoint at `path`, its tensors mapped from the file. Raises RunError if missing, damaged or foreign."""
    if not path.is_file():
        raise RunError(f"{path}: no such checkpoint; give a .ckpt file of a run's checkpoints/ folder, or `last`")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, OSError) as error:
        raise RunError(f"{path}: damaged, or not a checkpoint ({_first_line(error)}); use an older one") from None
    if not isinstance(checkpoint, dict) or "stackexp" not in checkpoint:
        raise RunError(f"{path}: not a stackexp checkpoint (it holds no `stackexp` entry)")
    if (version := checkpoint["stackexp"]["version"]) != VERSION:
        raise RunError(f"{path}: checkpoint version {version}, but this stackexp reads version {VERSION}")
    return checkpoint


MAY_CHANGE = (
    *("name", "logging.", "plugins", "data.path", "data.validation.", "data.test.", "data.eval_", "data.num_workers"),
    *("data.micro_batch_size", "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy"),
    *("trainer.max_steps", "trainer.val_check_interval", "trainer.checkpoint_interval", "trainer.keep_checkpoints"),
    *("trainer.activation_checkpointing", "trainer.compile"),
)
"""Options (or beginnings of them) that a resumed run may change: where it runs, how long, and what it tells."""


def check_resumable(path: Path, checkpoint: dict[str, Any], config: ExperimentConfig) -> None:
    """Raise RunError, naming the first option that differs, unless the config goes on with the checkpoint's run."""
    ours, theirs = flatten(to_dict(config)), flatten(checkpoint["stackexp"]["config"])
    for key in sorted(ours.keys() | theirs.keys(), key=lambda key: (not key.startswith("model."), key)):
        if ours.get(key) != theirs.get(key) and not key.startswith(MAY_CHANGE):
            what = "another architecture" if key.startswith("model.") else "another run"
            raise RunError(
                f"{path}: {what}: {key} is {theirs.get(key)} in the checkpoint, {ours.get(key)} in the config; "
                "resume with the run's own config.yaml, or start a new run"
            )
    then, now = checkpoint["stackexp"]["accumulate_grad_batches"], config.accumulate_grad_batches
    if then != now:
        raise RunError(
            f"{path}: {then} micro-batches made a step, now it would be {now}, and the position in the data would be "
            "lost; change data.micro_batch_size and trainer.devices so that their product stays"
        )


def choose(run: RunFolder, ckpt_path: str | None) -> Path:
    """`ckpt_path`, or the run's newest checkpoint. Raises RunError if there is none."""
    path = Path(ckpt_path) if ckpt_path else run.newest_checkpoint()
    if path is None:
        raise RunError(f"{run.checkpoints}: no checkpoint yet; wait for the first one or give --ckpt_path")
    return path


def load_weights(module: nn.Module, path: Path) -> None:
    """Load a checkpoint's weights into a LanguageModeling. Raises RunError, naming the first one that does not fit."""
    state = read(path)["state_dict"]
    own = module.state_dict()
    for name in sorted(state.keys() | own.keys()):
        theirs, ours = (str(list(s[name].shape)) if name in s else "absent" for s in (state, own))
        if theirs != ours:
            raise RunError(
                f"{path}: another architecture: {name} is {theirs} in the checkpoint, {ours} in the config's model; "
                "use the run's own config.yaml"
            )
    module.load_state_dict(state)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
