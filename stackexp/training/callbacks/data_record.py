"""Writes down what the run trains on: a hash by which two runs prove that they saw the same data, and counts."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist

from stackexp.data.stream_record import DataFile, next_hash
from stackexp.datamodules.training import TrainingSet
from stackexp.errors import RunError

KEY = "data_record"  # in checkpoints
log = logging.getLogger(__name__)


class DataRecord(pl.Callback):
    """A line of data.jsonl every `interval` steps and after the last; see `stackexp.data.stream_record`.

    With several sources, how many sequences of each came so far is in the step's metrics too, as
    `data/sequences/<name>` (in float32; exact in data.jsonl). Checkpoints hold hash and counts, so that a resumed run
    continues them exactly, and what the sources held: on other data it raises RunError.
    """

    def __init__(self, folder: Path, interval: int):
        self._folder, self._interval = folder, interval
        self._hash: str | None = ""  # None: not known from a checkpoint of an earlier stackexp
        self._counts: list[int] = []  # of each source
        self._sources: dict[str, str] = {}  # name -> fingerprint
        self._batches: list[tuple[np.ndarray, np.ndarray]] = []  # since the last step: hashes [B] and sources [B]
        self._steps: list[tuple[np.ndarray, np.ndarray]] = []  # the same of each step not yet in the hash, [N / ranks]

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(KEY)
        self._hash, self._counts = (saved["hash"], saved["sequences"]) if saved else (None, [])
        self._sources = saved["sources"] if saved else {}

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            self._advance(module.device)
            record = {"hash": self._hash, "sequences": self._counts, "sources": self._sources}
            checkpoint[KEY] = record if self._hash is not None else None
            if trainer.is_global_zero:
                self._file.sync()

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        train_set: TrainingSet = trainer.datamodule.train_set
        self._names = train_set.names
        before, self._sources = self._sources, {source.name: source.fingerprint for source in train_set.sources}
        for source in train_set.sources:
            if before.get(source.name, source.fingerprint) != source.fingerprint:
                raise RunError(
                    f"{source.remote or source.tokens.folder}: holds other sequences than when the run began; "
                    "bring that set back, or start a new run"
                )
        self._counts = self._counts or [0] * len(self._names)
        if trainer.is_global_zero:
            self._file = DataFile(self._folder, self._step)
            if self._hash is None:
                log.warning("the checkpoint is of a stackexp without a record of its data: this run will have none")

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        if self._hash is None:
            return
        self._batches.append((batch["hash"], batch["source"]))
        if trainer.global_step == self._step:
            return  # a micro-batch that did not end a step
        self._step = trainer.global_step
        hashes, sources = (np.concatenate(parts) for parts in zip(*self._batches, strict=True))
        self._batches.clear()
        self._steps.append((hashes, sources))
        if self._step % self._interval == 0 or self._step == trainer.max_steps:
            self._advance(module.device)
            self._write(trainer, module)

    def _advance(self, device: torch.device) -> None:
        """Take what all ranks have trained on since the last time into hash and counts. Every rank calls it."""
        if not self._steps:
            return
        ours = np.stack([np.stack([hashes.view(np.int64), sources]) for hashes, sources in self._steps])
        self._steps.clear()
        gathered = torch.from_numpy(ours).to(device)[None]  # [ranks, steps, 2, N / ranks]
        if dist.is_initialized():
            parts = [torch.empty_like(gathered[0]) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, gathered[0])
            gathered = torch.stack(parts)
        for hashes, sources in gathered.cpu().numpy().transpose(1, 2, 0, 3):  # of each step, [ranks, N / ranks]
            self._hash = next_hash(self._hash, hashes.ravel().view(np.uint64))
            counts = np.bincount(sources.ravel(), minlength=len(self._counts))
            self._counts = [before + int(new) for before, new in zip(self._counts, counts, strict=True)]

    def _write(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        sequences = dict(zip(self._names, self._counts, strict=True))
        if len(sequences) > 1:
            for name, count in sequences.items():
                module.step_metrics.add(f"data/sequences/{name}", torch.tensor(float(count), device=module.device))
        if trainer.is_global_zero:
            tokens = self._step * module.config.data.global_batch_tokens
            self._file.write({"step": self._step, "tokens": tokens, "hash": self._hash, "sequences": sequences})
