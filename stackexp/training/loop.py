"""`stackexp fit`: train, resume, then evaluate, and leave a finished run folder."""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
from tqdm.contrib.logging import logging_redirect_tqdm

from stackexp import runs
from stackexp.config import registry
from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import RunError, Stopped
from stackexp.models import checkpoints
from stackexp.modules.base import TrainingModule
from stackexp.modules.objectives import build_module
from stackexp.runs import RunFolder
from stackexp.training import checkpointing
from stackexp.training.callbacks.checkpoint import StepCheckpoint, StopRequest, Wishes, misses_a_validation
from stackexp.training.callbacks.memory_probes import StackProbes
from stackexp.training.callbacks.metrics_log import RunRecord
from stackexp.training.callbacks.progress_bar import StepProgress
from stackexp.training.callbacks.throughput import Throughput
from stackexp.training.checkpointing import CheckpointState
from stackexp.training.keyboard import interruptible
from stackexp.training.processes import Processes, started
from stackexp.training.session import Session, objective
from stackexp.training.trainer import accelerator, build_trainer


class Start(NamedTuple):
    folder: RunFolder
    checkpoint: Path | None = None
    step: int = 0


def run(
    config: ExperimentConfig, ckpt_path: str | None, folder: str | None, beside: dict[str, ExperimentConfig]
) -> int:
    """Fit `config` in a new run folder, in `folder`, or go on from `ckpt_path` ("last", or a path).

    Then those `beside` it, in <folder>-<name> where `folder` is given, and shows all of them side by side. With "last"
    what is finished stays, they go on as well, and those that have not been begun are.
    """
    if not beside:
        train(config, ckpt_path, folder)
        return 0
    last = ckpt_path == "last"
    runs_of = {"": (last and _finished(config)) or train(config, ckpt_path, folder)}
    for name, other in beside.items():
        newest = runs.newest(other)
        begun = last and newest and newest.newest_checkpoint()
        place = f"{folder}-{name}" if folder else None
        runs_of[name] = (last and _finished(other)) or train(other, "last" if begun else None, place)
    print(f"\n{objective(config).side_by_side(config, runs_of)}", flush=True)
    return 0


def _finished(config: ExperimentConfig) -> RunFolder | None:
    """The newest run of a config's name, if it is finished."""
    newest = runs.newest(config)
    if newest is None or not newest.finished:
        return None
    print(f"{newest.path}: this run is finished (it has a result.json)")
    return newest


def train(config: ExperimentConfig, ckpt_path: str | None, folder: str | None) -> RunFolder:
    """One run, to its end; its folder."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("stackexp").setLevel(logging.INFO)
    stop = StopRequest(config.trainer.max_time)
    with started(config.trainer, accelerator(config)) as processes:
        start = processes.agree(lambda: _start(config, ckpt_path, folder))
        if start is not None:
            _fit(config, start, processes, stop)
        elif processes.first:
            print(f"{folder}: this run is finished (it has a result.json)")
    return start.folder if start else RunFolder(Path(folder))


def _fit(config: ExperimentConfig, start: Start, processes: Processes, stop: StopRequest) -> None:
    pl.seed_everything(config.seed, verbose=False)
    data = registry.build("data", config.data, seed=config.seed)
    processes.together(lambda: (data.prepare_data(), data.setup("fit")))
    started_at = time.perf_counter()
    at_end = start.step >= config.trainer.max_steps  # killed after its last step
    missed = processes.agree(lambda: misses_a_validation(start.folder, start.step, config.trainer, data))
    trained = at_end and not missed
    module = build_module(config, weights=start.checkpoint if trained else None)
    record = RunRecord(start.folder, config.logging.tensorboard, config.data.objective)
    trainer = build_trainer(config, processes, _callbacks(config, start.folder, record, stop))
    with start.folder.begin(config) if processes.first else contextlib.nullcontext():
        if processes.first:
            print(_header(config, module, start), flush=True)
            objective(config).begin(config, "fit")
        with _telling_the_checkpoint(start.folder), interruptible(trainer), logging_redirect_tqdm():
            if at_end and missed:
                trainer.fit_loop.epoch_loop.max_steps += 1  # or nothing begins: `StepCheckpoint` makes it up, and ends
            if not trained:
                trainer.fit(module, data, ckpt_path=start.checkpoint, weights_only=True)
            elif processes.first:
                record.open(start.step)
            session = Session(config, module, data, trainer, processes, start.folder, record, started_at)
            objective(config).finish(session)


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
    checkpointing.check_resumable(path, checkpoint, config)
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
        if folder.finished:
            raise type(error)(f"{folder.path}: this run is finished (it has a result.json)") from None
        state = f"newest checkpoint {newest.name}; go on with --ckpt_path last" if newest else "no checkpoint yet"
        raise type(error)(f"{folder.path}: {f'{error}; ' if str(error) else ''}{state}") from None


def _callbacks(config: ExperimentConfig, folder: RunFolder, record: RunRecord, stop: StopRequest) -> list[pl.Callback]:
    """In the order of their work: measure, write down, then save."""
    measuring = [StackProbes(config.logging.probe_interval), Throughput()]
    bar = [StepProgress(record)] if config.logging.progress_bar else []
    wishes = Wishes(stop, config.trainer.checkpoint_minutes)
    own = objective(config).callbacks(config, folder)
    return [*measuring, *own, wishes, record, *bar, CheckpointState(), StepCheckpoint(folder, config.trainer, stop)]


def _header(config: ExperimentConfig, module: TrainingModule, start: Start) -> str:
    parameters, memory = module.model.num_parameters(), module.model.num_parameters(memory=True)
    lines = [
        f"run folder  {start.folder.path}" + (f", resumed from {start.checkpoint.name}" if start.checkpoint else ""),
        f"model       {parameters:,} parameters, {memory:,} of them in the memory",
        f"training    {objective(config).trains_on(config)}",
    ]
    return "\n".join(lines)
