"""A training run, from its config to result.json."""

import contextlib
import logging
import time
from collections.abc import Collection, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tqdm.contrib.logging import logging_redirect_tqdm

from stackexp.config import registry
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.model import TransformerConfig
from stackexp.errors import DamagedCheckpointError, RunError, StoppedError, first_line
from stackexp.files import compute_sha256
from stackexp.models.attention import choose_cuda_kernel
from stackexp.models.warm_start import WarmStart, prepare_warm_start
from stackexp.modules.base import TrainingModule
from stackexp.runs import MANIFEST, RunFolder, format_resume_command
from stackexp.terminal import set_up_log, wrap_text
from stackexp.training.callbacks.data_record import DataRecord, check_sources
from stackexp.training.callbacks.downstream import load_tasks
from stackexp.training.callbacks.metrics_log import MetricsLog
from stackexp.training.checkpointing import Start, find_start
from stackexp.training.loggers import build_loggers
from stackexp.training.objectives import Objective, Session, build_objective
from stackexp.training.processes import Processes, start_processes
from stackexp.training.signals import StopRequest
from stackexp.training.trainer import build_callbacks, build_trainer, check_model_fits, find_device_type


def train(
    config: ExperimentConfig,
    ckpt_path: str | None = None,
    run_folder: str | None = None,
    overridden: Collection[str] = (),
) -> RunFolder:
    """Train the model of `config`, evaluate it, and return the finished run folder.

    The run starts in a new folder, or in `run_folder`. It resumes from `ckpt_path` ("last" for the newest unfinished
    run of this name, or the path of a checkpoint), or from the newest checkpoint in `run_folder`. `overridden` are the
    keys that this command sets, such as trainer.max_steps; in a resumed run, no other training option may change.

    Raises:
        ConfigError: a package, backend or benchmark of the config is not available.
        RunError: the run cannot start or continue because of its checkpoint, data, devices or loss.
        StoppedError: a requested stop (SIGTERM, SIGUSR1, max_time) has been checkpointed.
    """
    set_up_log()
    stop = StopRequest(config.trainer.max_time, config.trainer.stop_grace_seconds)
    objective = build_objective(config)
    with start_processes(config.trainer, find_device_type(config)) as processes:
        logging.getLogger("stackexp").setLevel(logging.INFO if processes.is_first else logging.WARNING)
        start = processes.run_on_first(lambda: find_start(config, ckpt_path, run_folder, overridden))
        if start.is_finished:
            if processes.is_first:
                print(f"{start.folder.path}: this run is finished (it has a result.json)")
            return start.folder
        check_model_fits(config)
        warm_start = None if start.checkpoint else processes.run_on_first(lambda: prepare_warm_start(config))
        pl.seed_everything(config.seed, verbose=False)
        data = registry.build("data", config.data, seed=config.seed)
        processes.run_on_all(lambda: (data.prepare_data(), data.setup("fit")))
        if sources := start.sources:  # checked before the folder changes
            processes.run_on_all(lambda: check_sources(sources, data.training_sources()))
        tasks = processes.run_on_all(lambda: load_tasks(config, data.tokenizer))
        started_at = time.perf_counter()
        module = objective.build_module()
        module.warm_start = warm_start
        loggers = _build_loggers(config, start.folder, processes)
        metrics_log = MetricsLog(start.folder, config, loggers, objective.list_score_tags)
        metric_callbacks = objective.build_metric_callbacks(start.folder)
        if start.checkpoint and not start.sources and any(isinstance(x, DataRecord) for x in metric_callbacks):
            raise RunError(f"{start.checkpoint}: has no record of its training data; start a new run")
        callbacks = build_callbacks(config, start, metrics_log, stop, metric_callbacks, tasks)
        trainer = build_trainer(config, processes, callbacks, loggers)
        session = Session(start.folder, processes, data, module, trainer, metrics_log, started_at)

        with _work_in_folder(session, start, objective), stop.handle_interrupts(), logging_redirect_tqdm():
            metrics_log.open_loggers(trainer)
            trainer.fit(module, data, ckpt_path=start.checkpoint, weights_only=True)
            evaluation = objective.evaluate(session)
            stop.end_grace_period()  # a pending stop must not exit while the result is written
            if processes.is_first:
                objective.write_result(session, evaluation.sets)
                evaluation.delete_partial_results()
    return start.folder


def _build_loggers(config: ExperimentConfig, folder: RunFolder, processes: Processes) -> list[Logger]:
    """Build the loggers on rank 0, which alone sends data; those of other ranks do nothing when callbacks use them."""
    loggers: list[Logger] = [DummyLogger() for _ in config.logging.loggers]

    def build() -> None:
        loggers[:] = build_loggers(config, folder)

    processes.run_on_first(build)
    return loggers


@contextlib.contextmanager
def _work_in_folder(session: Session, start: Start, objective: Objective) -> Iterator[None]:
    """Hold the run folder for one session: rank 0 locks it, writes config and environment, and prints a header.

    On all ranks, errors and stops get the newest checkpoint or the command that resumes appended.
    """
    with contextlib.ExitStack() as stack:
        if session.processes.is_first:
            tokenizer = session.data.tokenizer.to_str(pretty=True) if session.data.tokenizer else None
            origin = _describe_origin(session.module.warm_start, start)
            new = start.folder.start_session(objective.config, start.step, start.newest, origin, tokenizer)
            stack.enter_context(new)
            print(_format_header(objective, session.module, start), flush=True)
            objective.warn_about_limits("fit")
        if session.processes.watchdog:
            session.processes.watchdog.advice = f"resume with `{format_resume_command(start.folder)}`"
        with _append_advice(start.folder):
            yield


def _describe_origin(warm_start: WarmStart | None, start: Start) -> dict[str, Any] | None:
    """Return path, step and SHA-256 of the weights that a run starts from; None for random weights and on resume."""
    if start.checkpoint and start.is_branch:
        path = start.checkpoint.resolve()
        return {"path": str(path), "step": start.step, "sha256": compute_sha256(path / MANIFEST), "is_branch": True}
    return warm_start.to_dict() if warm_start and warm_start.path else None


@contextlib.contextmanager
def _append_advice(folder: RunFolder) -> Iterator[None]:
    """Append the newest checkpoint, or the command that resumes, to the message of an error or a stop."""
    try:
        yield
    except DamagedCheckpointError:
        raise
    except RunError as error:
        raise RunError(f"{error}; last good checkpoint: {folder.newest_checkpoint() or 'none yet'}") from None
    except (RuntimeError, MisconfigurationException) as error:
        reason = first_line(error).rstrip(".")
        if "DataLoader worker" in reason:  # torch's handler of SIGCHLD raises a plain RuntimeError
            reason += "; if it ran out of memory, lower data.num_workers"
        elif isinstance(error, MisconfigurationException) or reason.startswith("Early stopping conditioned on"):
            reason = f"trainer.callbacks: {reason}"  # Lightning's callbacks check their options during training
        else:
            raise
        raise RunError(f"{reason}; last good checkpoint: {folder.newest_checkpoint() or 'none yet'}") from None
    except (OSError, MemoryError) as error:
        error.add_note(f"resume with `{format_resume_command(folder)}`")
        raise
    except (StoppedError, KeyboardInterrupt) as error:
        if folder.is_finished:
            raise type(error)(f"{folder.path}: this run is finished (it has a result.json)") from None
        newest, reason = folder.newest_checkpoint(), f"{error}; " if str(error) else ""
        state = f"newest checkpoint {newest.name}" if newest else "no checkpoint yet"
        raise type(error)(f"{folder.path}: {reason}{state}; resume with `{format_resume_command(folder)}`") from None


def _format_header(objective: Objective, module: TrainingModule, start: Start) -> str:
    """Return the first lines of a run: folder, model size, training and, on CUDA, kernels."""
    parameters, memory = module.model.num_parameters(), module.model.num_memory_parameters()
    origin = f", {'branched' if start.is_branch else 'resumed'} from {start.checkpoint}" if start.checkpoint else ""
    if module.warm_start and module.warm_start.path:
        origin = f", weights from {module.warm_start.path}"
    lines = [
        f"run folder  {start.folder.path}{origin}",
        f"model       {parameters:,} parameters, {memory:,} of them in the memory",
        f"training    {objective.describe_training()}",
    ]
    if find_device_type(objective.config) == "cuda" and isinstance(objective.config.model, TransformerConfig):
        lines.append(f"kernels     {describe_kernels(objective.config, module.is_compiled)}")
    return "\n".join(wrap_text(line, indent=12) for line in lines)


def describe_kernels(config: ExperimentConfig, is_compiled: bool, device: str = "cuda") -> str:
    """Return what a decoder runs on CUDA: the attention kernel, and whether the rest is compiled."""
    model, attention = config.model, config.model.attention
    if attention == "sdpa":
        dtypes = {"32-true": torch.float32, "64-true": torch.float64}
        dtype = dtypes.get(config.trainer.precision, torch.bfloat16)
        head_size = model.hidden_size // model.num_heads
        name, repeats = choose_cuda_kernel(dtype, model.num_heads, model.num_kv_heads, head_size, device)
        attention += f" with {name} (without a mask)" + (", keys and values repeated" if repeats else "")
    return f"attention {attention}; {'compiled' if is_compiled else 'not compiled'} (trainer.compile)"
