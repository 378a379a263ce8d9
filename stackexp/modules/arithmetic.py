"""Training and evaluation on arithmetic: the model reads a problem and continues it with the answer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from stackexp.metric_tags import AVERAGE_ACCURACY, AVERAGE_LOSS
from stackexp.models.cross_entropy import compute_losses
from stackexp.modules.base import Batch, TrainingModule
from stackexp.modules.metrics import SequenceScores


class Arithmetic(TrainingModule):
    """Next-token prediction of answers: L = mean cross entropy over answer symbols + lambda x mean action entropy.

    `trainer.z_loss` adds z_loss x mean squared log-partition function.

    Accuracy is the share of answers with every symbol right, each predicted from the right ones before it. That equals
    the accuracy of greedy generation: a first wrong symbol makes an answer wrong either way.

    A batch has tokens int64 [B, T], targets int64 [B, O] and index int64 [B]; see `datamodules.arithmetic`.
    """

    sample_name = "problems"

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the objective of a batch of problems."""
        output = self.model(batch["tokens"], probe=self.probe)
        logits = output.logits[:, -batch["targets"].shape[1] :]
        losses = compute_losses(logits, batch["targets"], self.config.trainer.z_loss)
        loss = self.compute_objective(losses, output, batch["index"])
        self.step_metrics.add("train/accuracy", (logits.argmax(-1) == batch["targets"]).all(1).float().mean())
        return loss

    def new_set_metric(self, dataset: Any, loader: DataLoader) -> SequenceScores:
        """Return an empty metric with one entry per problem."""
        return SequenceScores(len(dataset.problems))

    def update_set_metric(self, metric: SequenceScores, batch: Batch) -> None:
        """Score one batch of problems."""
        targets = batch["targets"]
        logits = self.model(batch["tokens"]).logits[:, -targets.shape[1] :].float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        is_right = (logits.argmax(-1) == targets).all(1, keepdim=True)
        metric.update(batch["index"], losses, is_right, torch.ones_like(is_right))

    def validation_tags(self) -> dict[str, float]:
        """Return accuracy and loss of the held-out problems."""
        (scores,) = self.set_metrics.values()
        return {AVERAGE_ACCURACY: scores["accuracy"], AVERAGE_LOSS: scores["loss"]}
