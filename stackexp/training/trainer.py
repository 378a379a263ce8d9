"""The Trainer of a config, the same for fit, validate and test."""

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
    """The Trainer of processes that run already. Raises RunError if the machine does not have the devices.

    Steps are optimizer steps in the config; Lightning counts validation in micro-batches, hence the product.
    """
    _quiet()
    try:
        trainer = pl.Trainer(**_options(config, processes, callbacks))
    except MisconfigurationException as error:
        where = f"trainer.accelerator={config.trainer.accelerator} trainer.devices={config.trainer.devices}"
        raise RunError(f"{where}: {first_line(error)}") from None
    # Lightning's own would run a collective within the handler; ours (StopRequest) are in place already.
    trainer._signal_connector.register_signal_handlers = lambda: None
    return trainer


def accelerator(config: ExperimentConfig) -> str:
    """ "cpu" or "cuda"; auto is cuda where there is one."""
    if config.trainer.accelerator != "auto":
        return config.trainer.accelerator
    return "cuda" if torch.cuda.is_available() else "cpu"


def _options(config: ExperimentConfig, processes: Processes, callbacks: list[pl.Callback]) -> dict[str, Any]:
    trainer = config.trainer
    watching = [processes.watchdog] if processes.watchdog else []
    never = trainer.max_steps + 1  # Lightning takes None for the end of every epoch
    return {
        "accelerator": accelerator(config),
        "devices": trainer.devices,
        "num_nodes": trainer.num_nodes,
        "strategy": build_strategy(config, accelerator(config)),
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
        "enable_progress_bar": any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks),
        "enable_model_summary": False,
        "callbacks": [*watching, *callbacks],
    }


def _quiet() -> None:
    """Our own lines say what is picked; the libraries' hints about workers, loggers and defaults say nothing here."""
    for library in ("lightning.pytorch", "streaming"):
        logging.getLogger(library).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # a view leaves a block: keys and values, no more
