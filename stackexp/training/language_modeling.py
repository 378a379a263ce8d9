"""Language modeling in the verbs: the record of the data, every set at the end, tables of losses, a sample."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from stackexp import runs
from stackexp.config.experiment import ExperimentConfig
from stackexp.data import stream_record
from stackexp.evaluation.generation import sample
from stackexp.evaluation.progress import EvaluationRecord
from stackexp.evaluation.requests import Evaluation, Sets, resumable
from stackexp.models import checkpoints
from stackexp.modules.metrics import finite, group_averages, macro_average, set_tags
from stackexp.reports.compare import markdown
from stackexp.reports.tables import format_scores
from stackexp.runs import RunFolder
from stackexp.training.callbacks.data_record import DataRecord
from stackexp.training.callbacks.tensorboard import write_scalars
from stackexp.training.session import Session, hyperparameters

HYPERPARAMETERS = ("model.", "data.global_batch_tokens", "data.context_length", "optimizer.", "schedule.", "seed")
"""What runs are compared by in the HParams tab; not where they ran and what they logged."""


def begin(config: ExperimentConfig, stage: str) -> None:
    """Nothing to warn of."""


def trains_on(config: ExperimentConfig) -> str:
    return (
        f"{config.trainer.max_steps:,} steps of {config.data.global_batch_tokens:,} tokens "
        f"({config.accumulate_grad_batches} micro-batches), {config.total_tokens:,} tokens in all"
    )


def callbacks(config: ExperimentConfig, folder: RunFolder) -> list[pl.Callback]:
    return [DataRecord(folder.path, config.data.hash_interval)]


def checkpoint_of(run: RunFolder) -> Path:
    """What is evaluated unless another is asked for: the newest."""
    return checkpoints.choose(run, "last")


def finish(session: Session) -> None:
    """Every set, whole; then table, sample, hyperparameters; result.json last."""
    config = session.config
    done = session.module.set_metrics_step == config.trainer.max_steps and config.data.eval_sequences is None
    with _evaluated(session, done):
        if session.processes.first:
            _finish(session)


@contextlib.contextmanager
def _evaluated(session: Session, done: bool) -> Iterator[None]:
    """The module has the figures of every set, whole; those a kill left are kept until the run's result is written."""
    module, data, folder = session.module, session.data, session.folder

    def evaluate(record: EvaluationRecord) -> Sets:
        session.trainer.callbacks.append(record)
        session.trainer.validate(module, data, verbose=False)
        return module.set_metrics

    if done or not data.set_names("validate"):
        yield
        return
    newest = session.processes.agree(folder.newest_checkpoint)
    file = folder.path / "validate.json"
    with resumable("validate", module.config, data, session.processes, newest, file) as whole:
        module.set_metrics = whole.figures(evaluate)
        yield


def _finish(session: Session) -> None:
    config, module, folder = session.config, session.module, session.folder
    seconds = time.perf_counter() - session.started_at
    losses = [line["loss/train"] for line in folder.read_metrics() if "loss/train" in line]
    text = f"python -m stackexp generate --run {folder.path}"  # needs the whole model on one device
    if not config.trainer.sharded:
        text = sample(
            module.model, session.data.tokenizer, prompt="", max_new_tokens=60, temperature=0.8, top_p=0.95, seed=0
        )
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
    session.record.finish(hyperparameters(config, HYPERPARAMETERS), figures, config.trainer.max_steps)
    runs.write_atomically(folder.result, json.dumps(finite(result), indent=2))
    print(
        f"\ntraining loss {losses[0]:.3f} at the first step, {result['train_loss']['last_20_steps']:.3f} "
        f"over the last 20; {seconds:.0f} s\n\n{format_scores(module.set_metrics)}\n\nsample:\n{text}\n\n"
        f"run folder: {folder.path}\ncurves:     tensorboard --logdir {config.logging.root}",
        flush=True,
    )


def _data_result(folder: RunFolder) -> dict[str, Any]:
    """The hash of all that was trained on, by the last step, and how many sequences of each source that were."""
    lines = list(stream_record.read(folder.path))
    return {"data_hash": {lines[-1]["step"]: lines[-1]["hash"]}, "sequences": lines[-1]["sequences"]} if lines else {}


def side_by_side(config: ExperimentConfig, folders: dict[str, RunFolder]) -> str:
    return markdown(list(folders.values()))


def report(asked: Evaluation, checkpoint: Path, sets: Sets) -> None:
    print(f"{_about(asked, checkpoint)}\n\n{format_scores(sets)}")
    if asked.record:
        _write(asked, checkpoint, sets)
        print(f"\nfigures: {asked.record}")


def _write(asked: Evaluation, checkpoint: Path, sets: Sets) -> None:
    step = checkpoints.read(checkpoint)["global_step"] if checkpoint.is_dir() else None
    record = {
        "checkpoint": str(checkpoint),
        "step": step,
        "overrides": list(asked.overrides),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "context_length": asked.config.data.context_length,
        "keep_remainder": asked.config.data.keep_remainder,
        "sets": sets,
        "average": macro_average(sets),
        "groups": group_averages(sets),
    }
    runs.write_atomically(asked.record, json.dumps(finite(record), indent=2))
    table = f"{_about(asked, checkpoint)}\n\n{format_scores(sets, style='markdown')}"
    runs.write_atomically(asked.record.with_suffix(".md"), table)
    if asked.has_tags and step is not None:
        _write_scalars(asked, step, sets)


def _about(asked: Evaluation, checkpoint: Path) -> str:
    """What the figures depend on besides the model."""
    scored = "every token scored" if asked.config.data.keep_remainder else "what is left at a set's end dropped"
    return f"{checkpoint}, chunks of {asked.config.data.context_length:,} tokens, {scored}"


def _write_scalars(asked: Evaluation, step: int, sets: Sets) -> None:
    """At the checkpoint's step `v2/<set>`, `v2/average/...` and, of other sets, `validation/<figure>/<set>`.

    `whole/<figure>/<set>` where the fit's own are over a part of each set; `test/...` of test. Each group, and each set
    of none, has an event file that takes the place of its last. What the fit itself has recorded is left to it.
    """
    fitted = "validation" if asked.own_config.data.eval_sequences is None else "whole"
    prefix, lead = (fitted, "") if asked.stage == "validate" else ("test", None)
    recorded = {tag for line in asked.run.read_metrics() if line["step"] == step for tag in line}
    parts = {"average": {}} if asked.sets else {"average": sets}
    for name, figures in sets.items():
        parts.setdefault(f"set.{name.split('/')[0]}", {})[name] = figures
    with asked.event_folder() as folder:
        for what, part in parts.items():
            tags = set_tags(prefix, part, lead)
            tags = {
                t: v for t, v in tags.items() if t.endswith("/average") == (what == "average") and t not in recorded
            }
            if tags:
                write_scalars(folder, tags, step, f"{asked.stage}.{what}")
