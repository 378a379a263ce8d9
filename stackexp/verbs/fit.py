"""`stackexp fit`: train, resume, then evaluate on every set, and leave a finished run folder."""

import json
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from stackexp import runs
from stackexp.callbacks.progress import StepProgress
from stackexp.callbacks.run_record import RunRecord, set_tags
from stackexp.callbacks.stack_probes import StackProbes
from stackexp.callbacks.throughput import Throughput
from stackexp.config import registry
from stackexp.config.compose import to_dict
from stackexp.config.schema import ExperimentConfig
from stackexp.errors import RunError
from stackexp.modules import checkpoints
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.metrics import macro_average
from stackexp.reports.tables import set_table
from stackexp.runs import RunFolder
from stackexp.verbs.generate import sample
from stackexp.verbs.trainer import build_trainer

HYPERPARAMETERS = ("model", "optimizer", "schedule", "seed")


def run(config: ExperimentConfig, ckpt_path: str | None) -> int:
    """Fit `config` in a new run folder, or go on from `ckpt_path` ("last", or a file) in that run's own folder."""
    folder, checkpoint = _resume(config, ckpt_path) if ckpt_path else (None, None)
    pl.seed_everything(config.seed, verbose=False)
    data = registry.build("data", config.data, seed=config.seed)
    data.prepare_data()
    data.setup("fit")  # an unusable corpus leaves no run folder behind
    folder = folder or _new_folder(config)
    module = LanguageModeling(config)
    record = RunRecord(folder, config.logging.tensorboard)
    trainer = build_trainer(config, _callbacks(config, folder, record))
    started = time.perf_counter()
    if trainer.is_global_zero:
        lock = folder.lock()
        folder.describe(config)
        print(_header(config, module, folder, checkpoint), flush=True)
    _train(trainer, module, data, folder, checkpoint)
    if data.set_names("validate"):
        trainer.validate(module, data, verbose=False)
    if trainer.is_global_zero:
        _finish(config, module, data, folder, record, time.perf_counter() - started)
        lock.close()
    return 0


def _train(
    trainer: pl.Trainer,
    module: LanguageModeling,
    data: pl.LightningDataModule,
    folder: RunFolder,
    checkpoint: Path | None,
) -> None:
    """Up to the last step and its checkpoint. What stops it earlier is told with the last good checkpoint."""
    try:
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    except RunError as error:
        raise RunError(f"{error}; last good checkpoint: {folder.newest_checkpoint() or 'none yet'}") from None
    except SystemExit:  # what Lightning makes of a KeyboardInterrupt
        newest = folder.newest_checkpoint()
        state = f"newest checkpoint {newest.name}; go on with --ckpt_path last" if newest else "no checkpoint yet"
        raise KeyboardInterrupt(f"{folder.path}: {state}") from None
    last = folder.checkpoints / f"{trainer.global_step:08d}.ckpt"
    if not last.exists():
        trainer.save_checkpoint(last)


def _new_folder(config: ExperimentConfig) -> RunFolder:
    """Made by the first process; those that Lightning starts (it sets LOCAL_RANK) find it in their environment."""
    if "LOCAL_RANK" in os.environ and runs.FOLDER_VARIABLE in os.environ:
        return RunFolder(Path(os.environ[runs.FOLDER_VARIABLE]))
    folder = runs.create(config)
    os.environ[runs.FOLDER_VARIABLE] = str(folder.path)
    return folder


def _resume(config: ExperimentConfig, ckpt_path: str) -> tuple[RunFolder | None, Path]:
    """The folder to go on in (None: a new one) and the checkpoint, checked against the config."""
    if ckpt_path == "last":
        folder = runs.newest_unfinished(config)
        path = folder.newest_checkpoint()
    else:
        path = Path(ckpt_path)
        folder = RunFolder(path.parent.parent)
        if not folder.config.is_file() or folder.finished:
            folder = None  # a copied checkpoint, or a finished run to go on from: in a folder of its own
    checkpoint = checkpoints.read(path)
    checkpoints.check_fits(path, checkpoint, config)
    if checkpoint["global_step"] >= config.trainer.max_steps:
        raise RunError(
            f"{path}: already at step {checkpoint['global_step']} of trainer.max_steps {config.trainer.max_steps}; "
            "raise trainer.max_steps to train on"
        )
    return folder, path


def _callbacks(config: ExperimentConfig, folder: RunFolder, record: RunRecord) -> list[pl.Callback]:
    """In the order of their work: measure, write down, then save."""
    saver = ModelCheckpoint(
        dirpath=folder.checkpoints,
        filename="{step:08d}",
        auto_insert_metric_name=False,
        monitor="step",
        mode="max",
        save_top_k=config.trainer.keep_checkpoints,
        every_n_train_steps=config.trainer.checkpoint_interval,
    )
    bar = [StepProgress(record)] if config.logging.progress_bar else []
    state = checkpoints.CheckpointState()
    return [StackProbes(config.logging.probe_interval), Throughput(), record, *bar, state, saver]


def _header(config: ExperimentConfig, module: LanguageModeling, folder: RunFolder, checkpoint: Path | None) -> str:
    parameters, memory = module.model.num_parameters(), module.model.num_parameters(memory=True)
    lines = [
        f"run folder  {folder.path}" + (f", resumed from {checkpoint.name}" if checkpoint else ""),
        f"model       {parameters:,} parameters, {memory:,} of them in the memory",
        f"training    {config.trainer.max_steps:,} steps of {config.data.global_batch_tokens:,} tokens "
        f"({config.accumulate_grad_batches} micro-batches), {config.total_tokens:,} tokens in all",
    ]
    return "\n".join(lines)


def _finish(
    config: ExperimentConfig,
    module: LanguageModeling,
    data: pl.LightningDataModule,
    folder: RunFolder,
    record: RunRecord,
    seconds: float,
) -> None:
    """Table, sample, hyperparameters; result.json last."""
    losses = [line["loss/train"] for line in folder.read_metrics() if "loss/train" in line]
    text = sample(module.model, data.tokenizer, prompt="", max_new_tokens=60, temperature=0.8, top_p=0.95, seed=0)
    result: dict[str, Any] = {
        "steps": config.trainer.max_steps,
        "tokens": config.total_tokens,
        "parameters": module.model.num_parameters(),
        "memory_parameters": module.model.num_parameters(memory=True),
        "train_loss": {"first": losses[0], "last_20_steps": sum(losses[-20:]) / len(losses[-20:])},
        "sets": module.set_metrics,
        "average": macro_average(module.set_metrics) if module.set_metrics else {},
        "seconds": round(seconds, 1),
        "sample": text,
    }
    figures = {"final/loss/train": result["train_loss"]["last_20_steps"]}
    figures |= set_tags("final", module.set_metrics)
    record.finish(_hyperparameters(config), figures, config.trainer.max_steps)
    runs.write_atomically(folder.result, json.dumps(result, indent=2))
    print(
        f"\ntraining loss {losses[0]:.3f} at the first step, {result['train_loss']['last_20_steps']:.3f} "
        f"over the last 20; {seconds:.0f} s\n\n{set_table(module.set_metrics)}\n\nsample:\n{text}\n\n"
        f"run folder: {folder.path}\ncurves:     tensorboard --logdir {config.logging.root}",
        flush=True,
    )


def _hyperparameters(config: ExperimentConfig) -> dict[str, Any]:
    """What a run is compared by; not where it ran and what it logged."""
    chosen = {name: section for name, section in to_dict(config).items() if name in HYPERPARAMETERS}
    return checkpoints.flatten(chosen)
