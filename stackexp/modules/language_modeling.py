"""Next-token training and evaluation of a decoder with a memory between its layers."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stackexp.config.experiment import ExperimentConfig
from stackexp.data.evaluation_sets import EvaluationSet
from stackexp.models.cross_entropy import NextTokenLoss
from stackexp.modules.base import Batch, TrainingModule
from stackexp.modules.metrics import ChunkLosses
from stackexp.modules.scores import Scores, compute_set_scores, tag_scores


class LanguageModeling(TrainingModule):
    """Next-token prediction: L = L_LM + lambda x mean action entropy (+ z_loss x mean squared log-partition function).

    As in OLMo, a sample of T tokens gives T - 1 predictions.

    A batch has tokens int64 [B, T] and index int64 [B]; see `datamodules.pretraining.PretrainingData`.
    """

    has_fixed_lengths = True

    def __init__(self, config: ExperimentConfig, weights: Path | None = None):
        super().__init__(config, weights)
        self.criterion = NextTokenLoss.from_config(config.trainer, self.is_compiled)

    def setup(self, stage: str) -> None:
        """Register the number of text bytes of each token id; zeros if the tokenizer is unknown."""
        table = self.trainer.datamodule.token_bytes
        unknown = torch.zeros(self.config.data.vocab_size, dtype=torch.int64)
        self.register_buffer("token_bytes", unknown if table is None else torch.from_numpy(table), persistent=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the objective of a micro-batch."""
        output = self.model(
            batch["tokens"],
            probe=self.probe,
            documents=batch.get("documents"),
            document_bounds=batch.get("document_bounds"),
            return_hidden=self.criterion.needs_hidden,
        )
        losses = self.criterion(self.model, output, batch["tokens"])
        return self.compute_training_loss(losses, output, batch["index"])

    def new_set_metric(self, dataset: EvaluationSet, loader: DataLoader) -> ChunkLosses:
        """Return an empty metric with one entry per chunk that the loader yields."""
        return ChunkLosses(len(loader.dataset))  # type: ignore[arg-type]  # map-style, so it has a length

    def update_set_metric(self, metric: ChunkLosses, batch: Batch) -> None:
        """Score one batch of chunks."""
        output = self.model(batch["tokens"], return_hidden=self.criterion.needs_hidden)
        losses = self.criterion.compute_token_losses(self.model, output, batch["tokens"])
        metric.update(batch["index"], batch["length"], losses, self.token_bytes[batch["tokens"][:, 1:]])

    def compute_set_scores(self, dataset: EvaluationSet, metric: ChunkLosses) -> Scores:
        """Return loss, perplexity and bits per byte; an interval only if the whole set was scored."""
        sums, is_whole = metric.compute(), self.trainer.datamodule.eval_limit is None
        if is_whole:
            self.chunk_losses[dataset.name] = sums[:2]
        if not dataset.has_exact_bytes:
            sums[2] = 0
        return compute_set_scores(sums, dataset.bytes_per_token, with_interval=is_whole)

    def tag_validation_scores(self) -> Scores:
        """Return the tags of the last validation."""
        return tag_scores("val", self.set_metrics)
