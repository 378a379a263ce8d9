"""Run state in a checkpoint beyond its tensors, and the check that a config can resume it."""

import random
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from stackexp.config.compose import to_dict
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.yaml_files import flatten
from stackexp.errors import RunError
from stackexp.models.checkpoints import VERSION


class CheckpointState(pl.Callback):
    """What a checkpoint holds beyond Lightning's own: config, tokens, and the random number generators' states."""

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["stackexp"] = {
            "version": VERSION,
            "config": to_dict(module.config),
            "accumulate_grad_batches": module.config.accumulate_grad_batches,
            "tokens": module.tokens,
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
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        rescale(progress, state["accumulate_grad_batches"], module.config.accumulate_grad_batches)


def rescale(progress: dict[str, Any], then: int, now: int) -> None:
    """Lightning's count of micro-batches, where a step had `then` of them and has `now`: on other devices."""
    for counts in (progress["total"], progress["current"]):
        ready = counts["ready"]
        assert ready % then == 0, "a checkpoint is only ever made between two steps"
        for key, count in counts.items():  # Lightning completes the last micro-batch after the callbacks that save
            counts[key] = ready // then * now - (ready - count)


MAY_CHANGE = (
    *("name", "logging.", "plugins", "data.path", "data.validation.", "data.test.", "data.eval_", "data.num_workers"),
    *("data.micro_batch_size", "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy"),
    *("trainer.reshard_after_forward", "trainer.activation_checkpointing", "trainer.recompute", "trainer.compile"),
    *("trainer.cross_entropy", "model.attention", "trainer.max_steps"),
    *("trainer.max_time", "trainer.val_check_interval", "trainer.checkpoint_", "trainer.keep_checkpoints"),
    *("trainer.collective_timeout", "trainer.spike_threshold", "trainer.skip_spikes"),
    *("data.remote", "data.cache_limit", "data.download_", "data.hash_interval", "data.keep_remainder"),
)


"""Options (or beginnings of them) that a resumed run may change: where it runs, how long, and what it tells."""


PLACES = re.compile(r"data\.streams\..+\.(path|remote)")  # of the streams of a mixture: they may have moved


def check_resumable(path: Path, checkpoint: dict[str, Any], config: ExperimentConfig) -> None:
    """Raise RunError, naming the first option that differs, unless the config goes on with the checkpoint's run."""
    ours, theirs = flatten(to_dict(config)), flatten(checkpoint["stackexp"]["config"])
    for key in sorted(ours.keys() | theirs.keys(), key=lambda key: (not key.startswith("model."), key)):
        if ours.get(key) != theirs.get(key) and not (key.startswith(MAY_CHANGE) or PLACES.fullmatch(key)):
            what = "another architecture" if key.startswith("model.") else "another run"
            raise RunError(
                f"{path}: {what}: {key} is {theirs.get(key)} in the checkpoint, {ours.get(key)} in the config; "
                "resume with the run's own config.yaml, or start a new run"
            )
