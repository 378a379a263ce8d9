"""A record of the training data: a hash that proves that two runs used the same data, and counts per source."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from stackexp.data.hash_log import FILE_NAME, hash_sequence, truncate_hash_log, update_hash
from stackexp.errors import RunError
from stackexp.files import append_json_line
from stackexp.modules.base import TrainingModule
from stackexp.training.callbacks.steps import StepCallback

KEY = "data_record"  # the entry in checkpoints


def check_sources(saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise RunError if a run with the sources `saved` {name: fingerprint} cannot resume with the sources `now`."""
    if saved.keys() != now.keys():
        raise RunError(
            f"the run began with the training data {', '.join(saved)}, now it is {', '.join(now)}; "
            "restore data.path or data.streams, or start a new run from these weights with warm_start.weights"
        )
    for name, fingerprint in now.items():
        if saved[name] != fingerprint:
            raise RunError(
                f"training data {name!r}: the sequences have changed since the run began; restore data.path or "
                "data.streams, and the dataset, or start a new run"
            )


class DataRecord(StepCallback):
    """Writes a line of data.jsonl every `interval` steps and after the last step; see `stackexp.data.hash_log`.

    With several sources, the step metrics also include `train/sequences/<name>`: how many sequences of each source
    have been used (rounded to float32; data.jsonl has the exact counts). Checkpoints hold the hash, the counts and the
    fingerprint of every source, so that a resumed run continues them exactly; see `check_sources`.
    """

    def __init__(self, folder: Path, interval: int):
        self._folder, self._interval = folder, interval
        self._hash = ""
        self._counts: list[int] = []  # per source
        self._fingerprints: dict[str, str] = {}  # source -> fingerprint
        self._batches: list[tuple[np.ndarray, np.ndarray]] = []  # hashes [B] and sources [B] of the current step
        self._steps: list[tuple[np.ndarray, np.ndarray]] = []  # those of steps not yet in the hash, [N / ranks]

    def on_load_checkpoint(self, trainer: pl.Trainer, module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        self._hash, self._counts = checkpoint[KEY]["hash"], checkpoint[KEY]["sequences"]

    def on_save_checkpoint(self, trainer: pl.Trainer, module: TrainingModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            self._update(trainer, module)
            checkpoint[KEY] = {"hash": self._hash, "sequences": self._counts, "sources": self._fingerprints}

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Open the file."""
        super().on_train_start(trainer, module)
        self._fingerprints = trainer.datamodule.training_sources()
        self._names = list(self._fingerprints)
        self._counts = self._counts or [0] * len(self._names)
        if trainer.is_global_zero:
            truncate_hash_log(self._folder, self._step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: TrainingModule, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        """Collect the hashes of a batch; a dataset may leave them out, and `source` if it has only one."""
        hashes = batch.get("hash")
        if hashes is None:
            hashes = np.array([hash_sequence(row) for row in batch["tokens"].cpu().numpy()], np.uint64)
        self._batches.append((hashes, batch.get("source", np.zeros(len(hashes), np.int64))))
        super().on_train_batch_end(trainer, module)

    def on_step_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        hashes, sources = (np.concatenate(parts) for parts in zip(*self._batches, strict=True))
        self._batches.clear()
        self._steps.append((hashes, sources))
        if self._step % self._interval == 0 or self._step == trainer.max_steps:
            self._update(trainer, module)
            self._write(trainer, module)

    def on_train_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Write the line of the last step, which a callback or a lower `max_steps` may have chosen only now."""
        if trainer.is_global_zero:
            truncate_hash_log(self._folder, self._step - 1)  # `on_step_end` may have written the line
        self._update(trainer, module)
        self._write(trainer, module)

    def _update(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Add the steps of all ranks since the last update to the hash and the counts. Every rank must call it."""
        if not self._steps:
            return
        local = np.stack([np.stack([hashes.view(np.int64), sources]) for hashes, sources in self._steps])
        self._steps.clear()
        gathered = trainer.strategy.all_gather(torch.from_numpy(local).to(module.device))
        gathered = gathered.view(-1, *local.shape)  # [ranks, steps, 2, N / ranks]
        for hashes, sources in gathered.cpu().numpy().transpose(1, 2, 0, 3):  # for each step, [ranks, N / ranks]
            self._hash = update_hash(self._hash, hashes.ravel().view(np.uint64))
            counts = np.bincount(sources.ravel(), minlength=len(self._counts))
            self._counts = [total + int(new) for total, new in zip(self._counts, counts, strict=True)]

    def _write(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        sequences = dict(zip(self._names, self._counts, strict=True))
        if len(sequences) > 1:
            for name, count in sequences.items():
                module.step_metrics.add(f"train/sequences/{name}", float(count))
        if trainer.is_global_zero:
            tokens = self._step * module.config.data.global_batch_tokens
            line = {"step": self._step, "tokens": tokens, "hash": self._hash, "sequences": sequences}
            append_json_line(self._folder / FILE_NAME, line)  # no checkpoint is ahead of the log
