"""`stackexp fit`: train, resume, then evaluate on every set, and leave a finished run folder."""

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
from tqdm.contrib.logging import logging_redirect_tqdm

from stackexp import runs
from stackexp.callbacks.data_record import DataRecord
from stackexp.callbacks.evaluation import EvaluationRecord
from stackexp.callbacks.progress import StepProgress
from stackexp.callbacks.run_record import RunRecord
from stackexp.callbacks.stack_probes import StackProbes
from stackexp.callbacks.step_checkpoint import StepCheckpoint, StopRequest, Wishes
from stackexp.callbacks.throughput import Throughput
from stackexp.config import registry
from stackexp.config.compose import to_dict
from stackexp.config.schema import ExperimentConfig
from stackexp.data import stream_record
from stackexp.errors import RunError, Stopped
from stackexp.modules import checkpoints
from stackexp.modules.checkpoints import CheckpointState, flatten
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.metrics import finite, group_averages, macro_average, set_tags
from stackexp.reports.tables import set_table
from stackexp.runs import RunFolder
from stackexp.verbs.evaluate import resumable
from stackexp.verbs.generate import sample
from stackexp.verbs.processes import Processes, started
from stackexp.verbs.trainer import accelerator, build_trainer, interruptible

HYPERPARAMETERS = ("model.", "data.global_batch_tokens", "data.context_length", "optimizer.", "schedule.", "seed")
"""What runs are compared by in the HParams tab; not where they ran and what they logged."""


class Start(NamedTuple):
    folder: RunFolder
    checkpoint: Path | None = None
    step: int = 0


def run(config: ExperimentConfig, ckpt_path: str | None, folder: str | None) -> int:
    """Fit `config` in a new run folder, in `folder`, or go on from `ckpt_path` ("last", or a path)."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("stackexp").setLevel(logging.INFO)
    stop = StopRequest(config.trainer.max_time)
    with started(config.trainer, accelerator(config)) as processes:
        start = processes.agree(lambda: _start(config, ckpt_path, folder))
        if start is not None:
            _fit(config, start, processes, stop)
        elif processes.first:
            print(f"{folder}: this run is finished (it has a result.json)")
    return 0


def _fit(config: ExperimentConfig, start: Start, processes: Processes, stop: StopRequest) -> None:
    pl.seed_everything(config.seed, verbose=False)
    data = registry.build("data", config.data, seed=config.seed)
    processes.together(lambda: (data.prepare_data(), data.setup("fit")))
    started_at = time.perf_counter()
    trained = start.step >= config.trainer.max_steps  # killed after its last step
    module = LanguageModeling(config, weights=start.checkpoint if trained else None)
    record = RunRecord(start.folder, config.logging.tensorboard)
    trainer = build_trainer(config, processes, _callbacks(config, start.folder, record, stop))
    with start.folder.begin(config) if processes.first else contextlib.nullcontext():
        if processes.first:
            print(_header(config, module, start), flush=True)
        with _telling_the_checkpoint(start.folder), interruptible(), logging_redirect_tqdm():
            if not trained:
                trainer.fit(module, data, ckpt_path=start.checkpoint, weights_only=True)
            elif processes.first:
                record.open(start.step)
            done = module.set_metrics_step == config.trainer.max_steps and config.data.eval_sequences is None
            with _evaluated(module, data, trainer, processes, start.folder, done):
                if processes.first:
                    _finish(config, module, data, start.folder, record, time.perf_counter() - started_at)


@contextlib.contextmanager
def _evaluated(
    module: LanguageModeling,
    data: pl.LightningDataModule,
    trainer: pl.Trainer,
    processes: Processes,
    folder: RunFolder,
    done: bool,
) -> Iterator[None]:
    """The module has the figures of every set, whole; those a kill left are kept until the run's result is written."""

    def evaluate(record: EvaluationRecord) -> dict[str, dict[str, float]]:
        trainer.callbacks.append(record)
        trainer.validate(module, data, verbose=False)
        return module.set_metrics

    if done or not data.set_names("validate"):
        yield
        return
    newest = processes.agree(folder.newest_checkpoint)
    file = folder.path / "validate.json"
    with resumable("validate", module.config, data, processes, newest, file) as whole:
        module.set_metrics = whole.figures(evaluate)
        yield


def _start(config: ExperimentConfig, ckpt_path: str | None, folder: str | None) -> Start | None:
    """Where to begin or to go on, checked against the config; None if `folder` holds a finished run."""
    if folder:
        run = RunFolder(Path(folder))
        if run.finished:
            return None
        newest = run.newest_checkpoint() or max(run.checkpoints.glob("*.ckpt"), default=None)  # the latter: refused
        return _resume(config, newest, run) if newest else Start(run)
    if ckpt_path is None:
        return Start(runs.new(config))
    path = runs.newest_unfinished(config).newest_checkpoint() if ckpt_path == "last" else Path(ckpt_path)
    return _resume(config, path, None)


def _resume(config: ExperimentConfig, path: Path, folder: RunFolder | None) -> Start:
    """Go on from `path` in `folder`, or else in the folder it lies in, if that is an unfinished run of this name."""
    checkpoint = checkpoints.read(path)
    checkpoints.check_resumable(path, checkpoint, config)
    checkpoints.check_whole(path)
    if folder is None:
        folder = RunFolder(path.parent.parent)
        of_this_name = folder.path.parent.resolve() == Path(config.logging.root, config.name).resolve()
        if not (of_this_name and folder.config.is_file()) or folder.finished:
            folder = runs.new(config)  # a copied checkpoint, a branch of another name, or on from a finished run
    step, last = checkpoint["global_step"], config.trainer.max_steps
    if step > last or (step == last and not folder.config.is_file()):
        raise RunError(
            f"{path}: already at step {step} of trainer.max_steps {last}; raise trainer.max_steps to train on"
        )
    return Start(folder, path, step)


@contextlib.contextmanager
def _telling_the_checkpoint(folder: RunFolder) -> Iterator[None]:
    """What stops the run is told with the checkpoint it goes on from."""
    try:
        yield
    except RunError as error:
        raise RunError(f"{error}; last good checkpoint: {folder.newest_checkpoint() or 'none yet'}") from None
    except (Stopped, KeyboardInterrupt) as error:
        newest = folder.newest_checkpoint()
        state = f"newest checkpoint {newest.name}; go on with --ckpt_path last" if newest else "no checkpoint yet"
        raise type(error)(f"{folder.path}: {f'{error}; ' if str(error) else ''}{state}") from None


def _callbacks(config: ExperimentConfig, folder: RunFolder, record: RunRecord, stop: StopRequest) -> list[pl.Callback]:
    """In the order of their work: measure, write down, then save."""
    measuring = [StackProbes(config.logging.probe_interval), Throughput()]
    bar = [StepProgress(record)] if config.logging.progress_bar else []
    wishes = Wishes(stop, config.trainer.checkpoint_minutes)
    data = DataRecord(folder.path, config.data.hash_interval)
    return [*measuring, data, wishes, record, *bar, CheckpointState(), StepCheckpoint(folder, config.trainer, stop)]


def _header(config: ExperimentConfig, module: LanguageModeling, start: Start) -> str:
    parameters, memory = module.model.num_parameters(), module.model.num_parameters(memory=True)
    lines = [
        f"run folder  {start.folder.path}" + (f", resumed from {start.checkpoint.name}" if start.checkpoint else ""),
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
    text = f"python -m stackexp generate --run {folder.path}"  # needs the whole model on one device
    if not config.trainer.sharded:
        text = sample(module.model, data.tokenizer, prompt="", max_new_tokens=60, temperature=0.8, top_p=0.95, seed=0)
    result: dict[str, Any] = {
        "steps": config.trainer.max_steps,
        "tokens": config.total_tokens,
        "parameters": module.model.num_parameters(),
        "memory_parameters": module.model.num_parameters(memory=True),
        "train_loss": {"first": losses[0], "last_20_steps": sum(losses[-20:]) / len(losses[-20:])},
        "sets": module.set_metrics,
        "average": macro_average(module.set_metrics) if module.set_metrics else {},
        "groups": group_averages(module.set_metrics),
        **_data_result(folder),
        "seconds_of_last_session": round(seconds, 1),
        "sample": None if config.trainer.sharded else text,
    }
    figures = {"final/loss/train": result["train_loss"]["last_20_steps"]}
    figures |= set_tags("final", module.set_metrics)
    record.finish(_hyperparameters(config), figures, config.trainer.max_steps)
    runs.write_atomically(folder.result, json.dumps(finite(result), indent=2))
    print(
        f"\ntraining loss {losses[0]:.3f} at the first step, {result['train_loss']['last_20_steps']:.3f} "
        f"over the last 20; {seconds:.0f} s\n\n{set_table(module.set_metrics)}\n\nsample:\n{text}\n\n"
        f"run folder: {folder.path}\ncurves:     tensorboard --logdir {config.logging.root}",
        flush=True,
    )


def _data_result(folder: RunFolder) -> dict[str, Any]:
    """The hash of all that was trained on, by the last step, and how many sequences of each source that were."""
    lines = list(stream_record.read(folder.path))
    return {"data_hash": {lines[-1]["step"]: lines[-1]["hash"]}, "sequences": lines[-1]["sequences"]} if lines else {}


def _hyperparameters(config: ExperimentConfig) -> dict[str, Any]:
    return {key: value for key, value in flatten(to_dict(config)).items() if key.startswith(HYPERPARAMETERS)}
