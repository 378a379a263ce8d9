"""Next-token training and evaluation of a decoder with a memory between its layers."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stackexp.config.experiment import ExperimentConfig
from stackexp.data.evaluation_sets import EvaluationSet
from stackexp.models.cross_entropy import NextTokenLoss
from stackexp.modules.base import TrainingModule
from stackexp.modules.metrics import ChunkLosses, set_figures, set_tags

Batch = dict[str, Tensor]  # tokens [B, T] int64; index [B] int64: number of the sample in its set, -1 for padding


class LanguageModeling(TrainingModule):
    """L = L_LM + lambda * mean action entropy (+ z_loss * mean squared log-partition function).

    As in OLMo, a sample of T tokens gives T - 1 predictions. For `set_metrics` see `set_figures`.
    """

    def __init__(self, config: ExperimentConfig, weights: Path | None = None):
        super().__init__(config, weights)
        self.criterion = NextTokenLoss.of(config.trainer)

    def setup(self, stage: str) -> None:
        table = self.trainer.datamodule.token_bytes
        unknown = torch.zeros(self.config.data.vocab_size, dtype=torch.int64)
        self.register_buffer("token_bytes", unknown if table is None else torch.from_numpy(table), persistent=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        documents, bounds = batch.get("documents"), batch.get("document_bounds")
        output = self.model(
            batch["tokens"],
            probe=self.probe,
            documents=documents,
            document_bounds=bounds,
            hidden=self.criterion.of_hidden,
        )
        return self._objective(self.criterion(self.model, output, batch["tokens"]), output, batch["index"])

    def validation_tags(self) -> dict[str, float]:
        lead = "" if self.trainer.datamodule.eval_limit is None else "sample/"  # `v2/...` are figures of whole sets
        return set_tags("validation", self.set_metrics, lead)

    # Evaluation: `validate` and `test` differ only in their sets.

    def on_validation_epoch_start(self) -> None:
        self._start_evaluation(self.trainer.datamodule.sets("validate"), self.trainer.val_dataloaders)

    def on_test_epoch_start(self) -> None:
        self._start_evaluation(self.trainer.datamodule.sets("test"), self.trainer.test_dataloaders)

    def _start_evaluation(self, sets: list[EvaluationSet], loaders: list[DataLoader]) -> None:
        losses = [ChunkLosses(len(loader.dataset), self.device) for loader in loaders]
        self._evaluated = list(zip(sets, losses, map(len, loaders), strict=True))
        self.set_metrics = {}

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """One batch of chunks; with the last one of a set, its figures are in `set_metrics`."""
        of, chunk_losses, batches = self._evaluated[dataloader_idx]
        output = self.model(batch["tokens"], hidden=self.criterion.of_hidden)
        losses = self.criterion.per_token(self.model, output, batch["tokens"])
        chunk_losses.update(batch["index"], batch["length"], losses, self.token_bytes[batch["tokens"][:, 1:]])
        if batch_idx + 1 == batches:
            whole = self.trainer.datamodule.eval_limit is None
            self.set_metrics[of.name] = set_figures(chunk_losses.gather(), of.bytes_per_token, interval=whole)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self.set_metrics_step = self.global_step

    on_test_epoch_end = on_validation_epoch_end
