"""The Trainer of a config, the same for fit, validate and test."""

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch

from stackexp.config.schema import ExperimentConfig
from stackexp.modules.checkpoints import AtomicCheckpointIO


def build_trainer(config: ExperimentConfig, callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    """Steps are optimizer steps in the config; Lightning counts validation in micro-batches, hence the product."""
    _quiet()
    trainer = config.trainer
    accelerator = trainer.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    interval = trainer.val_check_interval and trainer.val_check_interval * config.accumulate_grad_batches
    return pl.Trainer(
        accelerator=accelerator,
        devices=trainer.devices,
        num_nodes=trainer.num_nodes,
        strategy=trainer.strategy,
        precision=trainer.precision,
        max_steps=trainer.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=config.accumulate_grad_batches,
        val_check_interval=interval,
        check_val_every_n_epoch=None,
        limit_val_batches=1.0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        plugins=[AtomicCheckpointIO()],
        logger=False,
        enable_checkpointing=any(isinstance(callback, pl.callbacks.ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks),
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )


def _quiet() -> None:
    """Our own lines say what is picked; Lightning's hints about workers, loggers and intervals say nothing here."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
