"""The Lightning Trainer of a config (for fit, validate and test), its callbacks, and a check that the model fits."""

import itertools
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from stackexp.config import registry
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.registry import build_class
from stackexp.errors import ConfigError, RunError, first_line
from stackexp.planning.memory_use import count_shards
from stackexp.training.callbacks.downstream import Downstream
from stackexp.training.callbacks.metrics_log import MetricsLog, Progress
from stackexp.training.callbacks.profiler import Profiler
from stackexp.training.callbacks.steps import MissedValidation, StepRequests, Throughput
from stackexp.training.checkpointing import Start, StepCheckpoint, build_strategy
from stackexp.training.lightning_internals import keep_signal_handlers
from stackexp.training.processes import Processes
from stackexp.training.signals import StopRequest

UNSUPPORTED: dict[type[pl.Callback], str] = {  # -> the option to set instead
    pl.callbacks.ModelCheckpoint: "trainer.checkpoint_interval",
    OnExceptionCheckpoint: "trainer.checkpoint_interval",
    pl.callbacks.GradientAccumulationScheduler: "data.micro_batch_size",
    pl.callbacks.BatchSizeFinder: "data.micro_batch_size",
    pl.callbacks.LearningRateFinder: "optimizer.lr",
    pl.callbacks.StochasticWeightAveraging: "trainer.ema_decay",
    pl.callbacks.WeightAveraging: "trainer.ema_decay",
    pl.callbacks.ModelPruning: "",
    pl.callbacks.BackboneFinetuning: "",
}
"""Callbacks of Lightning that save checkpoints, or change the weights or the steps, and so their record in the run."""


def build_trainer(
    config: ExperimentConfig, processes: Processes, callbacks: list[pl.Callback], loggers: Sequence[Logger] = ()
) -> pl.Trainer:
    """Build the Trainer for processes that are already connected.

    Config steps are optimizer steps, but Lightning counts the validation interval in micro-batches. Raises RunError
    if the machine has too few devices.
    """
    _silence_libraries()
    try:
        trainer = pl.Trainer(**_build_options(config, processes, callbacks), logger=list(loggers))
    except MisconfigurationException as error:
        where = f"trainer.accelerator={config.trainer.accelerator} trainer.devices={config.trainer.devices}"
        raise RunError(f"{where}: {first_line(error)}") from None
    keep_signal_handlers(trainer)
    return trainer


def build_callbacks(
    config: ExperimentConfig,
    start: Start,
    metrics_log: MetricsLog,
    stop: StopRequest,
    metric_callbacks: list[pl.Callback],
    tasks: Sequence[Any] = (),
) -> list[pl.Callback]:
    """Build the callbacks in the order in which they must run; `metric_callbacks` are the objective's callbacks.

    `tasks` are the benchmarks of `evaluation.tasks`. Raises ConfigError if one of `trainer.callbacks` cannot be built.

    1. Measure: throughput and `metric_callbacks` add their values to `module.step_metrics`.
    2. Request: stop and save requests are added to the same metrics.
    3. Log: one all-reduce shares metrics and requests. Rank 0 writes them to the log, and the progress shows them.
    4. Save: the checkpoint is written after the log. This callback also acts on the requests shared in step 3.
    5. Score benchmarks: a stop during them resumes from the checkpoint of step 4.

    Lightning moves callbacks of type Checkpoint (steps 4 and 5) to the end of the list, so the user's own callbacks run
    between steps 3 and 4. A resumed run first opens the log, then runs the validation that it missed. The profiler
    comes before all others, so that its trace includes them.
    """
    own = [build_class("trainer.callbacks", entry, pl.Callback) for entry in config.trainer.callbacks]
    for callback, (cls, option) in itertools.product(own, UNSUPPORTED.items()):
        if isinstance(callback, cls):
            problem = f"{type(callback).__name__} is not supported"
            raise ConfigError(f"trainer.callbacks: {problem}; remove it" + f", and set {option}" * bool(option))
    has_own_bar = any(isinstance(callback, pl.callbacks.ProgressBar) for callback in own)
    return [
        *([Profiler(start.folder.path, config.trainer.profile)] if config.trainer.profile else []),
        Throughput(),
        *metric_callbacks,
        StepRequests(stop, config.trainer.checkpoint_interval_minutes),
        metrics_log,
        *([] if has_own_bar else [Progress(config.logging, metrics_log)]),
        MissedValidation(start.folder, config.trainer, start.step),
        StepCheckpoint(start.folder, config.trainer, stop),
        *([Downstream(config, list(tasks), start.folder, metrics_log, stop)] if tasks else []),
        *own,
    ]


def find_device_type(config: ExperimentConfig) -> str:
    """Return "cpu" or "cuda"; accelerator auto is cuda if there is a GPU."""
    return config.trainer.device_type(torch.cuda.is_available())


def _build_options(config: ExperimentConfig, processes: Processes, callbacks: list[pl.Callback]) -> dict[str, Any]:
    trainer, device_type = config.trainer, find_device_type(config)
    never = trainer.max_steps + 1  # None would validate at the end of every epoch
    return {
        "accelerator": device_type,
        "devices": trainer.devices,
        "num_nodes": trainer.num_nodes,
        "strategy": build_strategy(config, device_type),
        "precision": trainer.precision,
        "max_steps": trainer.max_steps,
        "max_epochs": -1,
        "accumulate_grad_batches": config.accumulate_grad_batches,
        "val_check_interval": (trainer.val_check_interval or never) * config.accumulate_grad_batches,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "plugins": [processes.environment],
        "enable_checkpointing": any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks),
        "enable_progress_bar": any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks),
        "enable_model_summary": False,
        "callbacks": [*([processes.watchdog] if processes.watchdog else []), *callbacks],
    }


def _silence_libraries() -> None:
    """Hide hints of Lightning and Streaming about workers, loggers and defaults, which stackexp sets itself."""
    for library in ("lightning.pytorch", "streaming"):
        logging.getLogger(library).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # a block returns a view of its keys and values


def check_model_fits(config: ExperimentConfig) -> None:
    """Raise RunError if weights, gradients and the optimizer's state alone exceed the memory of the devices.

    AdamW needs four values per parameter, Muon at least three; `ema_decay` adds one, in float32 or wider. Activations
    are not counted; see `plan`.
    """
    with torch.device("meta"):
        parameters = registry.build("model", config.model).num_parameters()
    trainer, device_type = config.trainer, find_device_type(config)
    values_per_parameter = 3 if config.optimizer.kind == "muon" else 4
    num_bytes = {"bf16-true": 2, "64-true": 8}.get(trainer.precision, 4)
    average_bytes = max(num_bytes, 4) if trainer.ema_decay else 0
    needed = parameters * (values_per_parameter * num_bytes + average_bytes) // count_shards(trainer)
    if device_type == "cpu":
        needed *= trainer.devices
    if needed > (free := _read_free_bytes(device_type)):
        raise RunError(
            f"the model has {parameters:,} parameters; weights, gradients and optimizer state need {needed / 1e9:,.1f} "
            f"GB, but {free / 1e9:,.1f} GB are free; use a smaller model, or trainer=fsdp on more devices (see `plan`)"
        )


def _read_free_bytes(device_type: str) -> int:
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise RunError("trainer.accelerator=cuda: torch finds no GPU; use auto or cpu, or check nvidia-smi")
        return torch.cuda.mem_get_info()[0]
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
