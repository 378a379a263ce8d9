"""Next-token training and evaluation of a decoder with a memory between its layers."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from stackexp.data.evaluation_sets import EvaluationSet
from stackexp.modules.metrics import ChunkLosses, set_figures, set_tags
from stackexp.modules.training import TrainingModule

Batch = dict[str, Tensor]  # tokens [B, T] int64; index [B] int64: number of the sample in its set, -1 for padding


class LanguageModeling(TrainingModule):
    """L = L_LM + lambda * mean action entropy (+ z_loss * mean squared log-partition function).

    As in OLMo, a sample of T tokens gives T - 1 predictions. For `set_metrics` see `set_figures`.
    """

    def setup(self, stage: str) -> None:
        table = self.trainer.datamodule.token_bytes
        unknown = torch.zeros(self.config.data.vocab_size, dtype=torch.int64)
        self.register_buffer("token_bytes", unknown if table is None else torch.from_numpy(table), persistent=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        output = self.model(batch["tokens"], probe=self.probe, documents=batch.get("documents"))
        loss = per_token_loss(output.logits, batch["tokens"]).mean()
        return self._objective(loss, output.logits[:, :-1], output, batch["index"])

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
        losses = per_token_loss(self.model(batch["tokens"]).logits, batch["tokens"])
        chunk_losses.update(batch["index"], batch["length"], losses, self.token_bytes[batch["tokens"][:, 1:]])
        if batch_idx + 1 == batches:
            whole = self.trainer.datamodule.eval_limit is None
            self.set_metrics[of.name] = set_figures(chunk_losses.gather(), of.bytes_per_token, interval=whole)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self.set_metrics_step = self.global_step

    on_test_epoch_end = on_validation_epoch_end


def per_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy in nats, [B, T - 1], of the next token; logits [B, T, V], tokens [B, T]; computed in float32."""
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view_as(
        tokens[:, 1:]
    )
