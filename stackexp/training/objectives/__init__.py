"""Training objectives: what differs between language modeling, formal languages and arithmetic.

This file has the base class, with the steps at the end of every run.
"""

import itertools
import pkgutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl

from stackexp.config.experiment import ExperimentConfig
from stackexp.datamodules.base import ExperimentData
from stackexp.errors import RunError
from stackexp.evaluation.request import EvaluationRequest, ResumableEvaluation, Sets, Stage, hash_validation
from stackexp.metric_tags import AVERAGE_ACCURACY, AVERAGE_LOSS, AVERAGED_STEPS, TRAIN_LOSS
from stackexp.models import checkpoints
from stackexp.modules.base import TrainingModule
from stackexp.run_result import RunResult
from stackexp.runs import DATE_FORMAT, RunFolder, read_validation, write_validation
from stackexp.training.callbacks.metrics_log import MetricsLog
from stackexp.training.processes import Processes

OBJECTIVES = {
    "language_modeling": "stackexp.training.objectives.language_modeling:LanguageModelingObjective",
    "arithmetic": "stackexp.training.objectives.arithmetic:ArithmeticObjective",
    "transduction": "stackexp.training.objectives.formal_language:FormalLanguageObjective",
}


@dataclass(frozen=True)
class Session:
    """One session of a run, from its start or the checkpoint it resumes."""

    folder: RunFolder
    processes: Processes
    data: ExperimentData
    module: TrainingModule
    trainer: pl.Trainer
    metrics_log: MetricsLog
    started_at: float  # time.perf_counter()


class Objective(ABC):
    """A training objective: it builds the module, runs the final evaluation and reports the scores.

    After the last step, `evaluate` scores the sets of `final_stage`, and `write_result` finishes the run folder.
    """

    final_stage: ClassVar[Stage]
    module_type: ClassVar[type[TrainingModule]]

    def __init__(self, config: ExperimentConfig):
        self.config = config

    def build_module(self, weights: Path | None = None) -> TrainingModule:
        """Build the LightningModule with initial weights, or with those of the checkpoint `weights`."""
        return self.module_type(self.config, weights)

    @abstractmethod
    def describe_training(self) -> str:
        """Return one line about steps and data for the header of a run."""

    @abstractmethod
    def report(self, request: EvaluationRequest, checkpoint: Path, sets: Sets) -> Path | None:
        """Print the scores of `validate` or `test`, write them if there is an output file, and return the file."""

    @abstractmethod
    def build_result(self, session: Session, sets: Sets) -> dict[str, Any]:
        """Return the fields of result.json that are specific to this objective."""

    @abstractmethod
    def list_final_scores(self, result: dict[str, Any]) -> dict[str, float]:
        """Return the scores of result.json by tag, for the loggers."""

    @abstractmethod
    def format_result(self, session: Session, result: dict[str, Any]) -> str:
        """Return the tables that end the output of `fit`."""

    # Optional steps

    @property
    def validates_samples(self) -> bool:
        """Return True if validations during training score only a sample of each set."""
        return False

    def list_score_tags(self, set_names: list[str]) -> list[str]:
        """Return the tags that the HParams tab shows next to the hyperparameters, from the first step on."""
        return [AVERAGE_ACCURACY, AVERAGE_LOSS]

    def warn_about_limits(self, stage: str) -> None:  # noqa: B027 (optional)
        """Warn about limits of the config, such as strings that are longer than the memory can hold."""

    def build_metric_callbacks(self, folder: RunFolder) -> list[pl.Callback]:
        """Build the callbacks that add measurements to each step."""
        return []

    def choose_checkpoint(self, run: RunFolder) -> Path:
        """Return the checkpoint that is evaluated by default: the newest."""
        return checkpoints.find_checkpoint(run, "last")

    def load_final_checkpoint(self, session: Session) -> Path:
        """Return the checkpoint to evaluate, after loading its weights.

        By default, it is the newest, whose weights the module already has.
        """
        return session.processes.run_on_first(lambda: self.choose_checkpoint(session.folder))

    def find_scored_sets(self, session: Session) -> Sets:
        """Return the scores of the last validation, if it ran after the last step and on the sets of `final_stage`."""
        is_final = self.final_stage == "validate" and session.module.set_metrics_step == session.trainer.global_step
        return session.module.set_metrics if is_final and not self.validates_samples else {}

    def write_events(self, folder: RunFolder, result: dict[str, Any]) -> None:  # noqa: B027 (optional)
        """Write final scores that training has not written to TensorBoard, in the event files of `final_stage`."""

    # The end of every run

    def evaluate(self, session: Session) -> ResumableEvaluation:
        """Score every set of `final_stage`, except those that were scored before the run was killed."""
        checkpoint = self.load_final_checkpoint(session)
        evaluation = ResumableEvaluation(
            self.final_stage, self.config, session.data, session.processes, checkpoint, output=session.folder.result
        )
        evaluation.run(session.trainer, session.module, self.find_scored_sets(session))
        return evaluation

    def _store_final_validation(self, session: Session, result: dict[str, Any]) -> None:
        """Store the final loss with the last checkpoint, unless it was validated or validations score only samples."""
        newest, loss = session.folder.newest_checkpoint(), result.get("average", {}).get("loss")
        if newest is None or int(newest.name) != result["steps"] or loss is None or self.validates_samples:
            return
        if read_validation(newest) is None:
            data = hash_validation(self.config, session.data)
            write_validation(newest, loss, result["average"].get("accuracy"), data)

    def write_result(self, session: Session, sets: Sets) -> None:
        """Write the final scores to TensorBoard, then to result.json, and print them. Call it on rank 0 only.

        Raises RunError if metrics.jsonl is empty.
        """
        seconds = time.perf_counter() - session.started_at
        lines = [line for line in session.folder.read_metrics() if TRAIN_LOSS in line]
        losses = [line[TRAIN_LOSS] for line in lines]
        if not losses:
            raise RunError(f"{session.folder.metrics}: deleted or emptied during the run; start a new run")
        steps = session.trainer.global_step  # fewer than trainer.max_steps if a callback has stopped the training
        final = RunResult(
            steps=steps,
            tokens=lines[-1]["tokens"],
            parameters=session.module.model.num_parameters(),
            memory_parameters=session.module.model.num_memory_parameters(),
            train_loss={"first": losses[0], "last_20_steps": average_last(losses)},
            seconds=round(seconds + sum_earlier_sessions(session.folder.read_sessions(), lines), 1),
            figures=self.build_result(session, sets),
        )
        result = final.to_dict()
        scores, train_loss = self.list_final_scores(result), result["train_loss"]["last_20_steps"]
        session.metrics_log.finish(steps, scores, train_loss, result.get("sample"))
        if "tensorboard" in self.config.logging.loggers:
            self.write_events(session.folder, result)
        self._store_final_validation(session, result)
        session.folder.write_result(final)
        print(
            f"\ntraining loss {losses[0]:.3f} (first step), {average_last(losses):.3f} (mean of the last "
            f"{AVERAGED_STEPS} steps); {seconds:.0f} s\n\n{self.format_result(session, result)}\n\n"
            f"run folder: {session.folder.path}\ncurves:     tensorboard --logdir {self.config.logging.root}",
            flush=True,
        )


def sum_earlier_sessions(sessions: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of all sessions but the last, each from its start to its last kept line of metrics.jsonl."""
    starts = [datetime.strptime(session["started"], DATE_FORMAT).timestamp() for session in sessions]
    total = 0.0
    for start, end in itertools.pairwise(starts):
        total += max((line["time"] - start for line in lines if start <= line["time"] < end), default=0.0)
    return total


def average_last(values: list[float]) -> float:
    """Return the mean of the last AVERAGED_STEPS values."""
    last = values[-AVERAGED_STEPS:]
    return sum(last) / len(last)


def build_objective(config: ExperimentConfig) -> Objective:
    """Build the objective that fits the config's kind of data."""
    return pkgutil.resolve_name(OBJECTIVES[config.data.objective])(config)
