"""What training has in common, whatever its objective: the weights, the optimizer's step, and what a step tells."""

import contextlib
import logging
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from stackexp.config import registry
from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import RunError
from stackexp.models.attention_backends import require
from stackexp.models.checkpoints import load_weights
from stackexp.models.cross_entropy import Losses
from stackexp.models.sharding import build_mesh, shard_
from stackexp.models.transformer import DecoderOutput
from stackexp.modules.metrics import StepMetrics
from stackexp.modules.spikes import SpikeDetector

log = logging.getLogger(__name__)


class TrainingModule(pl.LightningModule):
    """A model and how an optimizer step is made. Subclasses say what the loss is and what an evaluation measures.

    `step_metrics` collects what one optimizer step has to tell, `set_metrics` the result of the last evaluation,
    {set: figures}; `tokens` and `sequence_length` are what throughput is counted in.
    """

    trained_on = "samples"  # what the numbers tell that `_objective` is given

    def __init__(self, config: ExperimentConfig, weights: Path | None = None):
        """Freshly drawn, or with the `weights` of a checkpoint; a sharded model has them from `configure_model` on."""
        super().__init__()
        self.config, self.weights = config, weights
        self._sharded = False
        require(getattr(config.model, "attention", "sdpa"), config.trainer.device_type(torch.cuda.is_available()))
        with torch.device("meta") if config.trainer.sharded else contextlib.nullcontext():
            self.model = registry.build("model", config.model)
        self.model.checkpoint_blocks = config.trainer.recomputed
        if config.trainer.compile and not config.trainer.sharded:
            self.model.compile()
        if weights is not None and not config.trainer.sharded:
            load_weights(self.model, weights)
        self.step_metrics = StepMetrics()
        self.set_metrics: dict[str, dict[str, float]] = {}
        self.set_metrics_step: int | None = None  # the optimizer step they were measured after
        self.probe = False  # whether the next forward pass also measures what the memory does
        self._losses: list[Tensor] = []  # of the optimizer step under way: loss of each micro-batch
        self._samples: list[Tensor] = []  # and what it was trained on
        self._spikes = SpikeDetector()

    @property
    def tokens(self) -> int:
        """How many tokens all devices have trained on, up to the last step."""
        return self.global_step * self.config.data.global_batch_tokens

    @property
    def sequence_length(self) -> int:
        """Tokens of each sequence of the last batch."""
        return self.config.data.context_length

    def validation_tags(self) -> dict[str, float]:
        """What metrics.jsonl has of the last validation; `runs.AVERAGE_LOSS` is what the best checkpoint is best in."""
        raise NotImplementedError

    def configure_model(self) -> None:
        """Sharded strategies: shard the model, empty so far, and draw the weights that one process would have drawn."""
        trainer = self.config.trainer
        if not trainer.sharded or self._sharded:
            return
        device = self.trainer.strategy.root_device
        shard_(self.model, build_mesh(device.type, trainer), trainer)
        self.model.to_empty(device=device)
        torch.manual_seed(self.config.seed)
        self.model.init_weights()
        if self.weights is not None:
            load_weights(self.model, self.weights)
        self._sharded = True

    def on_train_start(self) -> None:
        """The schedule's rate for the next step, also where a resumed run has another max_steps than before."""
        scheduler = self.lr_schedulers()
        for group, base, factor in zip(
            self.optimizers().param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(scheduler.last_epoch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for memory in self.model.memories:
            memory.at_step(self.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["losses"] = list(self._spikes.losses)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._spikes.losses.extend(checkpoint["losses"])

    def _objective(self, losses: Losses, output: DecoderOutput, samples: Tensor) -> Tensor:
        """cross entropy + z_loss * mean squared log-partition function + lambda * mean action entropy.

        Keeps the cross entropy, of these `samples`, for the step's metrics and for `configure_gradient_clipping`.
        """
        self._samples.append(samples)
        self.step_metrics.add("loss/train", losses.cross_entropy)
        self._losses.append(losses.cross_entropy.float())
        for layer, probe in enumerate(output.probes or []):
            for name, value in probe.items():
                self.step_metrics.add(f"memory/{name}/layer_{layer:02d}", value)
        if losses.z is not None:
            self.step_metrics.add("loss/z", losses.z)
        if not self.model.entropy_weight:
            return losses.total
        self.step_metrics.add("loss/action_entropy", output.entropy)
        return losses.total + self.model.entropy_weight * output.entropy

    def configure_optimizers(self) -> dict[str, Any]:
        config = self.config
        optimizer = registry.build("optimizer", config.optimizer, self.model)
        factor = registry.build("schedule", config.schedule, config.trainer.max_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip by the global norm; stop at a loss or gradient that is not finite, and look out for spikes."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        loss = torch.stack(self._losses).mean()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        loss_value, norm_value = torch.stack([loss, norm.float()]).tolist()
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            raise RunError(self._not_finite(loss_value, norm_value))
        if self.config.trainer.gradient_clip_val is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters(), self.config.trainer.gradient_clip_val, norm)
        self.step_metrics.add("optimizer/grad_norm", norm)
        self.step_metrics.add("optimizer/lr", torch.tensor(optimizer.param_groups[0]["lr"], device=self.device))
        self._watch_for_spikes(loss_value)
        self._losses.clear()
        self._samples.clear()

    def _watch_for_spikes(self, loss: float) -> None:
        trainer = self.config.trainer
        deviations = 0.0 if trainer.spike_threshold is None else self._spikes.deviations(loss)
        if trainer.spike_threshold is None or deviations <= trainer.spike_threshold:
            self._spikes.add(loss)
            return
        self._spikes.add(loss, most=trainer.spike_threshold)
        self.step_metrics.add("loss/spike", torch.tensor(deviations, device=self.device))
        if trainer.skip_spikes:
            for parameter in self.parameters():
                parameter.grad = None  # the optimizer leaves it, and its moments, as they are
        log.warning(
            "step %d: loss %.4f is %.1f standard deviations above those before it; %s; %s %s of rank %d",
            *(self.global_step + 1, loss, deviations, "no update" if trainer.skip_spikes else "updated all the same"),
            *(self.trained_on, torch.cat(self._samples).tolist(), self.global_rank),
        )

    def _not_finite(self, loss: float, norm: float) -> str:
        """The message; every process hears which of them had the batch, and raises the same."""
        bad = any(not torch.isfinite(value) for value in self._losses)
        found = [(bad, self.global_rank, torch.cat(self._samples).tolist())]
        if dist.is_initialized():
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, (bad, self.global_rank, torch.cat(self._samples).tolist()))
        culprits = [entry for entry in found if entry[0]] or found  # none: the gradients alone are not finite
        samples = ", ".join(f"{numbers} of rank {rank}" for _, rank, numbers in culprits)
        return (
            f"step {self.global_step + 1}: loss {loss} with gradient norm {norm} on {self.trained_on} {samples}; "
            f"nothing was updated; lower optimizer.lr or look at these {self.trained_on}"
        )
