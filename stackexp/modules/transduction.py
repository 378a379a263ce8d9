"""Training and evaluation on formal languages and arithmetic: the model reads a string and gives the answer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stackexp.datamodules.formal_language import LengthSet
from stackexp.metric_tags import AVERAGE_ACCURACY, AVERAGE_LOSS
from stackexp.models.cross_entropy import compute_losses
from stackexp.modules.base import Batch, TrainingModule
from stackexp.modules.metrics import SequenceScores
from stackexp.tasks import NO_TARGET, TASKS

LIKELY = 0.8
"""The share of the probability of all rivals that a prediction needs."""


class Transduction(TrainingModule):
    """Sequence transduction: L = mean cross entropy over answer symbols + lambda x mean action entropy.

    The logits of the last O positions, those of the empty tokens, are the answer (Deletang et al. 2023). A task that
    answers at every token has O = L and no empty tokens. Targets NO_TARGET do not count. Accuracy is the share of
    correct symbols among those that the mask counts; with `Task.rivals`, the correct
    one must have at least 80 % of their probability (Hewitt et al. 2020).

    `trainer.z_loss` adds z_loss x mean squared log-partition function. `data.label_smoothing` applies to the objective,
    not to the logged loss. Evaluation sets are lengths: `set_metrics` is {length_041: {accuracy, loss, ...}, ...}.

    A batch has tokens int64 [B, L + O] or [B, O], targets int64 [B, O] and mask bool [B, O]; see
    `datamodules.formal_language`.
    """

    sample_name = "lengths"
    _tokens = _sequence_length = 0

    @property
    def tokens(self) -> int:
        """Symbols and empty tokens trained on so far; they are counted, because lengths vary from step to step."""
        return self._tokens

    @property
    def sequence_length(self) -> int:
        """Symbols and empty tokens of each string of the last batch."""
        return self._sequence_length

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the number of tokens trained on."""
        super().on_load_checkpoint(checkpoint)
        self._tokens = checkpoint["stackexp"]["tokens"]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the objective of a batch of strings of one length."""
        targets = batch["targets"]
        self._sequence_length = batch["tokens"].shape[1]
        self._tokens += self.config.data.batch_size * self._sequence_length
        output = self.model(batch["tokens"], probe=self.probe)
        logits = output.logits[:, -targets.shape[1] :]
        losses = compute_losses(logits, targets, self.config.trainer.z_loss, self.config.data.label_smoothing)
        share = (targets != NO_TARGET).sum().float() / batch[
            "answers"
        ]  # 1, unless the strings of a task have other numbers
        is_correct = (self.predict(logits) == targets) & batch["mask"]
        loss = self.compute_training_loss(losses.scale(share), output, torch.tensor([batch["length"]]))
        self.step_metrics.add("train/accuracy", is_correct.sum().float() / batch["counted"])
        self.step_metrics.add("train/max_length", float(batch["max_length"]))
        return loss

    def new_set_metric(self, dataset: LengthSet, loader: DataLoader) -> SequenceScores:
        """Return an empty metric with one entry per string."""
        return SequenceScores(dataset.sequences)

    def update_set_metric(self, metric: SequenceScores, batch: Batch) -> None:
        """Score one batch of strings of one length."""
        logits, losses = compute_answer_losses(self.model, batch)
        targets = batch["targets"]
        losses *= targets.shape[1] / (targets != NO_TARGET).sum(1, keepdim=True).float()  # the mean of each string
        is_right = self.predict(logits) == targets
        metric.update(batch["index"], losses, is_right & batch["mask"], batch["mask"])

    def predict(self, logits: Tensor) -> Tensor:
        """Return the predicted output ids [B, O] for logits [B, O, V]; NO_TARGET where no rival is likely enough."""
        rivals = TASKS[self.config.data.task].rivals
        if rivals is None:
            return logits.argmax(-1)
        ids = torch.tensor(rivals, device=logits.device)
        probability, choice = logits[..., ids].softmax(-1).max(-1)
        return ids[choice].where(probability >= LIKELY, NO_TARGET)

    def tag_validation_scores(self) -> dict[str, float]:
        """Return the means over lengths and the accuracy at each length."""
        if not self.set_metrics:
            return {}
        mean = average_lengths(self.set_metrics)
        tags = {f"val/accuracy/{name}": scores["accuracy"] for name, scores in self.set_metrics.items()}
        return {AVERAGE_ACCURACY: mean["accuracy"], AVERAGE_LOSS: mean["loss"]} | tags


def average_lengths(sets: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return unweighted means over lengths, of accuracy and of loss."""
    return {key: sum(scores[key] for scores in sets.values()) / len(sets) for key in ("accuracy", "loss")}


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
        loss = self.compute_training_loss(losses, output, batch["index"])
        self.step_metrics.add("train/accuracy", (logits.argmax(-1) == batch["targets"]).all(1).float().mean())
        return loss

    def new_set_metric(self, dataset: Any, loader: DataLoader) -> SequenceScores:
        """Return an empty metric with one entry per problem."""
        return SequenceScores(len(dataset.problems))

    def update_set_metric(self, metric: SequenceScores, batch: Batch) -> None:
        """Score one batch of problems."""
        logits, losses = compute_answer_losses(self.model, batch)
        is_right = (logits.argmax(-1) == batch["targets"]).all(1, keepdim=True)
        metric.update(batch["index"], losses, is_right, torch.ones_like(is_right))

    def tag_validation_scores(self) -> dict[str, float]:
        """Return accuracy and loss of the held-out problems."""
        (scores,) = self.set_metrics.values()
        return {AVERAGE_ACCURACY: scores["accuracy"], AVERAGE_LOSS: scores["loss"]}


def compute_answer_losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the logits of the answer [B, O, V] and the loss of each symbol in nats [B, O], 0 without a target."""
    targets = batch["targets"]
    logits = model(batch["tokens"]).logits[:, -targets.shape[1] :].float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=NO_TARGET)
    return logits, losses.view_as(targets)
