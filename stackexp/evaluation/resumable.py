"""An evaluation of every set of a stage, resumed where a kill has ended it."""

import sys
from pathlib import Path

import lightning.pytorch as pl

from stackexp.config.experiment import ExperimentConfig
from stackexp.evaluation.partial_results import PartialResults, compute_keys
from stackexp.evaluation.progress import EvaluationProgress
from stackexp.evaluation.request import DataModule, Sets, Stage
from stackexp.modules.base import TrainingModule
from stackexp.training.processes import Processes


class ResumableEvaluation:
    """An evaluation of a checkpoint whose scored sets are kept next to `output` until the figures are written."""

    def __init__(
        self,
        stage: Stage,
        config: ExperimentConfig,
        data: DataModule,
        processes: Processes,
        checkpoint: Path,
        output: Path | None,
    ):
        data.setup(stage)
        self._stage, self._data = stage, data
        self._names = data.set_names(stage)
        path = output.with_suffix(".partial.jsonl") if output else None
        self._partial = PartialResults(path, compute_keys(stage, config, data, processes, checkpoint))
        self._scored: Sets = processes.agree(self._partial.load)
        self._progress = EvaluationProgress(self._partial, config.logging.progress_bar)
        if self._scored and processes.is_first:
            count = f"{len(self._scored)} of {len(self._names)} sets"
            print(f"{path}: resuming, {count} are scored already", file=sys.stderr, flush=True)

    def run(self, trainer: pl.Trainer, module: TrainingModule, known: Sets | None = None) -> None:
        """Score the sets that are neither in `known` nor scored before the kill."""
        self._scored |= known or {}
        if len(self._scored) == len(self._names):
            return
        trainer.callbacks.append(self._progress)  # type: ignore[attr-defined]  # set by Lightning without a type
        self._data.skipped_sets = frozenset(self._scored)
        evaluate = trainer.validate if self._stage == "validate" else trainer.test
        evaluate(module, self._data, verbose=False)
        self._data.skipped_sets = frozenset()
        self._scored |= module.set_metrics

    @property
    def sets(self) -> Sets:
        """Return the figures of every set, in the order of the sets."""
        return {name: self._scored[name] for name in self._names}

    def delete_partial_results(self) -> None:
        """Delete the saved sets, once the figures are written elsewhere. Called by rank 0."""
        self._partial.delete()
