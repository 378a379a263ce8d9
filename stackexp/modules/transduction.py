"""Training and testing on formal languages: a string is read whole, then its answer is given, all symbols at once."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from stackexp.models.cross_entropy import losses_of
from stackexp.modules.base import TrainingModule
from stackexp.runs import AVERAGE_ACCURACY, AVERAGE_LOSS

Batch = dict[str, Any]  # see `datamodules.formal_language`


class Transduction(TrainingModule):
    """L = mean cross entropy over all symbols of the answers + lambda * mean action entropy (Deletang et al. 2023).

    `data.label_smoothing` is of that cross entropy; the one that is logged has none.
    The logits of the last O positions, where the empty tokens stand, are the answer. Accuracy is the share of symbols
    that are right among those that count. `set_metrics`: {length_041: {accuracy, loss, sequences}, ...}.
    """

    trained_on = "lengths"
    _tokens = _sequence_length = 0

    @property
    def tokens(self) -> int:
        """Symbols and empty tokens trained on: lengths differ from step to step, so they are counted."""
        return self._tokens

    @property
    def sequence_length(self) -> int:
        return self._sequence_length

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._tokens = checkpoint["stackexp"]["tokens"]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        targets, length = batch["targets"], batch["length"]
        self._sequence_length = batch["tokens"].shape[1]
        self._tokens += self.config.data.batch_size * self._sequence_length
        output = self.model(batch["tokens"], probe=self.probe)
        logits = output.logits[:, -targets.shape[1] :]
        losses = losses_of(logits, targets, self.config.trainer.z_loss, self.config.data.label_smoothing)
        correct = (logits.argmax(-1) == targets) & batch["mask"]
        loss = self._objective(losses, output, torch.tensor([length]))
        self.step_metrics.add("accuracy/train", correct.sum() / batch["counted"])
        self.step_metrics.add("data/max_length", torch.tensor(float(batch["max_length"]), device=self.device))
        return loss

    def validation_tags(self) -> dict[str, float]:
        if not self.set_metrics:
            return {}
        mean = average(self.set_metrics)
        tags = {f"validation/accuracy/{name}": figures["accuracy"] for name, figures in self.set_metrics.items()}
        return {AVERAGE_ACCURACY: mean["accuracy"], AVERAGE_LOSS: mean["loss"]} | tags

    # Evaluation: `validate` and `test` differ only in their lengths.

    def on_validation_epoch_start(self) -> None:
        self._start_evaluation("validate", self.trainer.val_dataloaders)

    def on_test_epoch_start(self) -> None:
        self._start_evaluation("test", self.trainer.test_dataloaders)

    def _start_evaluation(self, stage: str, loaders: list) -> None:
        sets = self.trainer.datamodule.sets(stage)
        scores = [Scores(of.sequences, self.device) for of in sets]
        self._evaluated = list(zip(sets, scores, map(len, loaders), strict=True))
        self.set_metrics = {}

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """One batch of strings of one length; with the last one, the length's figures are in `set_metrics`."""
        of, scores, batches = self._evaluated[dataloader_idx]
        targets, mask = batch["targets"], batch["mask"]
        logits = self.model(batch["tokens"]).logits[:, -targets.shape[1] :].float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        scores.update(batch["index"], losses, (logits.argmax(-1) == targets) & mask, mask)
        if batch_idx + 1 == batches:
            self.set_metrics[of.name] = scores.figures()

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self.set_metrics_step = self.global_step


class Scores:
    """What each of N sequences adds to the figures of a length, whichever rank evaluates it; index -1 is padding.

    Sums over sequences in their order, so neither batch size nor devices change how they are added up.
    """

    def __init__(self, sequences: int, device: torch.device | str = "cpu"):
        self._sums = torch.zeros(3, sequences + 1, dtype=torch.float64, device=device)  # loss, right, counted

    def update(self, index: Tensor, losses: Tensor, right: Tensor, counted: Tensor) -> None:
        """index [B] of the sequences; losses in nats [B, O], of all symbols; right and counted bool [B, O]."""
        parts = (losses.double().mean(1), right.double().sum(1), counted.double().sum(1))
        self._sums[:, index] = torch.stack(parts)

    def figures(self) -> dict[str, float]:
        """accuracy, loss in nats per symbol, sequences. Every rank calls it."""
        if dist.is_initialized():
            dist.all_reduce(self._sums)  # exact: all ranks but one add zero to a sequence
        loss, right, counted = self._sums[:, :-1].cpu()
        accuracy = (right.sum() / counted.sum()).item()
        return {"accuracy": accuracy, "loss": loss.mean().item(), "sequences": len(loss)}


def average(sets: dict[str, dict[str, float]]) -> dict[str, float]:
    """Unweighted means over lengths, of accuracy and of loss."""
    return {key: sum(figures[key] for figures in sets.values()) / len(sets) for key in ("accuracy", "loss")}
