"""The Lightning Trainer of a config, shared by fit, validate and test."""

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import RunError, first_line
from stackexp.training.processes import Processes
from stackexp.training.strategies import build_strategy


def build_trainer(config: ExperimentConfig, processes: Processes, callbacks: list[pl.Callback]) -> pl.Trainer:
    """Build the Trainer for processes that are running already.

    Steps are optimizer steps in the config, but Lightning counts the validation interval in micro-batches. Raises
    RunError if the machine does not have the devices.
    """
    _silence_libraries()
    try:
        trainer = pl.Trainer(**_build_options(config, processes, callbacks))
    except MisconfigurationException as error:
        where = f"trainer.accelerator={config.trainer.accelerator} trainer.devices={config.trainer.devices}"
        raise RunError(f"{where}: {first_line(error)}") from None
    # Private: Lightning's handlers would run a collective inside a signal handler; `StopRequest` installed ours.
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return trainer


def find_device_type(config: ExperimentConfig) -> str:
    """Return "cpu" or "cuda"; accelerator auto is cuda if there is a GPU."""
    return config.trainer.device_type(torch.cuda.is_available())


def _build_options(config: ExperimentConfig, processes: Processes, callbacks: list[pl.Callback]) -> dict[str, Any]:
    trainer, device_type = config.trainer, find_device_type(config)
    never = trainer.max_steps + 1  # to Lightning, None is the end of every epoch
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
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [*([processes.watchdog] if processes.watchdog else []), *callbacks],
    }


def _silence_libraries() -> None:
    """Hide the hints of Lightning and Streaming about workers, loggers and defaults that stackexp sets itself."""
    for library in ("lightning.pytorch", "streaming"):
        logging.getLogger(library).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # a block returns a view of its keys and values
