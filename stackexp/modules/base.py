"""The base LightningModule of all objectives: weights, optimizer step, step metrics, evaluation of named sets."""

import contextlib
import logging
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from stackexp.config import registry
from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import RunError
from stackexp.metric_tags import TRAIN_LOSS
from stackexp.models.attention import check_backend
from stackexp.models.checkpoints import load_weights
from stackexp.models.cross_entropy import Losses
from stackexp.models.memories.base import Stats
from stackexp.models.sharding import build_mesh, shard_model
from stackexp.models.transformer import DecoderOutput
from stackexp.models.warm_start import WarmStart
from stackexp.modules.metrics import ItemSums, SpikeDetector, StepMetrics, probe_memories, read_first_rows
from stackexp.modules.optimizers import WeightAverage
from stackexp.stack.dispatch import HAS_TRITON

log = logging.getLogger(__name__)
TRUE_PRECISIONS = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
"""Types of the weights, if they are not float32."""
Batch = dict[str, Any]
"""A batch of a data module: tensors by name, and numpy arrays and numbers that stay on the CPU."""


def compile_model(model: Any, choice: bool | str, device_type: str, has_fixed_lengths: bool) -> bool:
    """Compile a model according to `choice`, the value of `trainer.compile`, and return True if it is compiled.

    A model without `compile_body` is compiled whole, but not by `auto`.
    """
    compile_body = getattr(model, "compile_body", None)
    has_fixed_shapes = has_fixed_lengths and model.axis != "token_major"
    if choice == "auto":  # torch.compile generates Triton kernels for CUDA
        choice = device_type == "cuda" and HAS_TRITON and has_fixed_shapes and compile_body is not None
    if choice:
        (compile_body or model.compile)(dynamic=False if has_fixed_shapes else None)
    return bool(choice)


class TrainingModule(pl.LightningModule):
    """A model and its optimizer step. Subclasses define the loss and the metric of an evaluation set.

    Attributes:
        step_metrics: Scalars of the current optimizer step.
        validation_probes: Measurements of the memory in the current validation.
        set_metrics: Scores of the last evaluation, {set: {score: value}}.
        set_metrics_step: The optimizer step after which they were measured.
        chunk_losses: {set: [2, N]}, loss in nats and number of predictions of each chunk; only sets scored whole.
        probe: True if the training step also measures the memory.
        is_compiled: True if model and loss use torch.compile.
        warm_start: The weights from which training starts, if it starts neither at random nor from a checkpoint.
    """

    sample_name = "samples"  # what messages call the ids in `samples`
    has_fixed_lengths = False  # whether all batches have the same number of tokens

    def __init__(self, config: ExperimentConfig, weights: Path | None = None):
        """Build the model with new weights, or with those of a checkpoint.

        A sharded model is built on the meta device and gets its weights in `configure_model`. Raises ConfigError if the
        attention backend cannot be used.
        """
        super().__init__()
        self.config, self.weights = config, weights
        self.warm_start: WarmStart | None = None
        self._is_configured = False
        device_type = config.trainer.device_type(torch.cuda.is_available())
        for option in ("attention", "kernel"):
            check_backend(getattr(config.model, option, ""), device_type)
        with torch.device("meta") if config.trainer.is_sharded else contextlib.nullcontext():
            self.model = registry.build("model", config.model)
        self.model.checkpoint_blocks = config.trainer.recompute_mode
        self.is_compiled = compile_model(self.model, config.trainer.compile, device_type, self.has_fixed_lengths)
        if weights is not None and not config.trainer.is_sharded:
            self.model.to(TRUE_PRECISIONS.get(config.trainer.precision, torch.float32))
            load_weights(self.model, weights)
        self.step_metrics = StepMetrics()
        self.validation_probes = StepMetrics()
        self.set_metrics: dict[str, dict[str, float]] = {}
        self.set_metrics_step: int | None = None
        self.chunk_losses: dict[str, np.ndarray] = {}
        self.probe = False
        self._losses: list[Tensor] = []  # one per micro-batch of the current optimizer step
        self._samples: list[Tensor] = []
        self._spikes = SpikeDetector()
        self._evaluated: list[tuple[Any, ItemSums, int]] = []  # (dataset, metric, batches of this rank)

    # To define in a subclass

    def new_set_metric(self, dataset: Any, loader: DataLoader[Any]) -> ItemSums:
        """Return an empty metric for an evaluation set."""
        raise NotImplementedError

    def update_set_metric(self, metric: ItemSums, batch: Batch) -> None:
        """Score one batch of an evaluation set."""
        raise NotImplementedError

    def compute_set_scores(self, dataset: Any, metric: Any) -> dict[str, float]:
        """Return the scores of a set from its complete metric. Every rank calls this."""
        return metric.compute()

    def tag_validation_scores(self) -> dict[str, float]:
        """Return the scores of the last validation by tag.

        That of `metric_tags.AVERAGE_LOSS` selects the best checkpoint.
        """
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """Tokens that all devices have trained on up to the last step."""
        return self.global_step * self.config.data.global_batch_tokens

    @property
    def sequence_length(self) -> int:
        """Tokens of each sequence of the last batch."""
        return self.config.data.context_length

    # Weights, optimizer and loss

    def configure_model(self) -> None:
        """Shard the model if the strategy does, then apply the warm start."""
        if self._is_configured:  # Lightning calls this hook more than once
            return
        self._is_configured = True
        if self.config.trainer.is_sharded:
            self._shard_model()
        if self.warm_start is not None:
            self.warm_start.apply(self.model)

    def _shard_model(self) -> None:
        """Shard an empty model, then draw the same weights as a single process would."""
        trainer = self.config.trainer
        device = self.trainer.strategy.root_device
        shard_model(self.model, build_mesh(device.type, trainer), trainer)
        self.model.to_empty(device=device)
        torch.manual_seed(self.config.seed)
        self.model.init_weights()
        if self.weights is not None:
            load_weights(self.model, self.weights)

    def configure_optimizers(self) -> dict[str, Any]:
        """Build the optimizer and the learning rate schedule of the config."""
        config = self.config
        optimizer = registry.build("optimizer", config.optimizer, self.model)
        schedule = registry.build("schedule", config.schedule, config.trainer.max_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps_done: schedule(steps_done + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @cached_property
    def weight_average(self) -> WeightAverage | None:
        """Return the moving average of the weights, which starts at the first use; None without `ema_decay`."""
        decay = self.config.trainer.ema_decay
        return None if decay is None else WeightAverage(self.model, decay)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Update the weights, then their average, which the checkpoint of the step includes."""
        average = self.weight_average  # created before the first update, it starts at the initial weights
        super().optimizer_step(*args, **kwargs)
        if average is not None:
            average.update(self.global_step + 1)

    def compute_training_loss(self, losses: Losses, output: DecoderOutput, samples: Tensor) -> Tensor:
        """Return cross entropy + z_loss x mean squared log-partition function + lambda x mean action entropy.

        `samples` int64 [n] are the ids that errors and spike warnings list. The terms go to `step_metrics`; losses and
        ids are kept until `configure_gradient_clipping`.
        """
        self._samples.append(samples)
        self._losses.append(losses.cross_entropy.float())
        self.step_metrics.add(TRAIN_LOSS, losses.cross_entropy)
        self._add_probes(self.step_metrics, "memory", output.probes or [])
        if losses.z is not None:
            self.step_metrics.add("train/z_loss", losses.z)
        if not self.model.entropy_weight:
            return losses.total
        self.step_metrics.add("train/action_entropy", output.entropy)
        return losses.total + self.model.entropy_weight * output.entropy

    def _add_probes(self, metrics: StepMetrics, namespace: str, probes: list[Stats]) -> None:
        for i, probe in enumerate(probes):
            for name, value in probe.items():
                metrics.add(f"{namespace}/{name}/{self._name_memory(i)}", value)

    def _name_memory(self, index: int) -> str:
        """Return layer_03 for a probe, or layer_03_after_block where each layer has several memories."""
        memories, num_layers = self.model.memories, len(self.model.layers)
        per_layer = max(1, len(memories) // num_layers)
        site = f"_{memories[index].site}" if per_layer > 1 else ""
        return f"layer_{index // per_layer:02d}{site}"

    def on_train_start(self) -> None:
        """Set the learning rate of the next step, because `max_steps` of the schedule may have changed on resume."""
        scheduler = self.lr_schedulers()
        groups = self.optimizers().param_groups
        for group, base_lr, schedule in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = base_lr * schedule(scheduler.last_epoch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Pass the step number to the memories; probe them at the first step and every `probe_interval`-th step."""
        for memory in self.model.memories:
            memory.set_step(self.global_step)
        step = self.global_step + 1
        self.probe = step == 1 or step % self.config.logging.probe_interval == 0

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        """Clip by the global norm, and detect spikes.

        Raises RunError if the loss or a gradient is not finite, or if a parameter has no gradient in the first step:
        its optimizer state would be missing in checkpoints, and DDP would wait for it.
        """
        if self.global_step == 0:
            self._check_that_all_parameters_are_used()
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        loss = torch.stack(self._losses).mean()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        loss_value, norm_value = torch.stack([loss, norm.float()]).tolist()  # one transfer from the device
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            raise RunError(self._describe_non_finite(loss_value, norm_value))
        if self.config.trainer.gradient_clip_val is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters(), self.config.trainer.gradient_clip_val, norm)
        self.step_metrics.add("train/grad_norm", norm)
        group = optimizer.param_groups[0]  # muP scales its rate
        peak = getattr(
            self.config.optimizer, "lr", group["initial_lr"]
        )  # an optimizer of a plugin may have other options
        self.step_metrics.add("train/lr", peak * group["lr"] / group["initial_lr"])
        self._handle_spike(loss_value)
        self._losses.clear()
        self._samples.clear()

    def _check_that_all_parameters_are_used(self) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise RunError(f"{name}: has no gradient; use this parameter in forward, or make it a buffer")

    def _handle_spike(self, loss: float) -> None:
        """Log a loss spike with its samples; with `skip_spikes`, drop the gradients so that nothing is updated."""
        trainer = self.config.trainer
        threshold = math.inf if trainer.spike_threshold is None else trainer.spike_threshold
        deviations = self._spikes.measure_deviation(loss)
        self._spikes.add(loss, max_deviations=threshold)
        if deviations <= threshold:
            return
        self.step_metrics.add("train/spike", deviations)
        if trainer.skip_spikes:
            for parameter in self.parameters():
                parameter.grad = None  # the optimizer skips parameters without a gradient
        log.warning(
            "step %d: loss %.4f is %.1f standard deviations above the previous losses; update %s; %s %s of rank %d",
            *(self.global_step + 1, loss, deviations, "skipped" if trainer.skip_spikes else "applied"),
            *(self.sample_name, torch.cat(self._samples).tolist(), self.global_rank),
        )

    def _describe_non_finite(self, loss: float, norm: float) -> str:
        """Return the error message, the same on every rank, with the samples of the ranks that caused it."""
        is_at_fault = any(not torch.isfinite(value) for value in self._losses)
        entry = (is_at_fault, self.global_rank, torch.cat(self._samples).tolist())
        entries: list[Any] = [entry]
        if dist.is_initialized():
            entries = [None] * dist.get_world_size()
            dist.all_gather_object(entries, entry)
        at_fault = [entry for entry in entries if entry[0]] or entries  # none: only the gradients are not finite
        samples = ", ".join(f"{ids} of rank {rank}" for _, rank, ids in at_fault)
        return (
            f"step {self.global_step + 1}: loss {loss} with gradient norm {norm} on {self.sample_name} {samples}; "
            f"nothing was updated; lower optimizer.lr or inspect these {self.sample_name}"
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the recent losses of spike detection."""
        checkpoint["losses"] = list(self._spikes.losses)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the recent losses of spike detection."""
        self._spikes.losses.extend(checkpoint["losses"])

    # Evaluation: `validate` and `test` differ only in their sets

    def on_validation_epoch_start(self) -> None:
        """Start the evaluation of the validation sets."""
        self._start_evaluation("validate", self.trainer.val_dataloaders)

    def on_test_epoch_start(self) -> None:
        """Start the evaluation of the test sets."""
        self._start_evaluation("test", self.trainer.test_dataloaders)

    def _start_evaluation(self, stage: str, loaders: Any) -> None:
        datasets = self.trainer.datamodule.sets(stage)
        self._evaluated = [
            (dataset, self.new_set_metric(dataset, loader).to(self.device), len(loader))
            for dataset, loader in zip(datasets, loaders, strict=True)
        ]
        self.set_metrics = {}

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Score one batch. After the last batch of a set, its scores are in `set_metrics`.

        During training, the memory is also measured on the first rows of each set.
        """
        dataset, metric, num_batches = self._evaluated[dataloader_idx]
        if batch_idx == 0 and self.trainer.state.fn == "fit":
            probes = probe_memories(self.model, read_first_rows(self.trainer.datamodule, dataset).to(self.device))
            self._add_probes(self.validation_probes, "memory_val", probes)
        self.update_set_metric(metric, batch)
        if batch_idx + 1 == num_batches:
            self.set_metrics[dataset.name] = self.compute_set_scores(dataset, metric)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Record the step of the scores, and pass them to callbacks that monitor them, such as EarlyStopping."""
        self.set_metrics_step = self.global_step
        if self.trainer.state.fn == "fit":
            self.log_dict(self.tag_validation_scores(), logger=False)

    def on_test_epoch_end(self) -> None:
        """Record the step of the scores."""
        self.set_metrics_step = self.global_step
