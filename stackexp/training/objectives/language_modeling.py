"""The objective of language modeling: next-token prediction, evaluated on named validation sets."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from stackexp.data import hash_log
from stackexp.evaluation import named_sets
from stackexp.evaluation.generation import continue_text
from stackexp.evaluation.request import EvaluationRequest, Sets
from stackexp.evaluation.score_tables import format_scores
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.scores import average_groups, average_scores, tag_scores
from stackexp.runs import RunFolder
from stackexp.training.callbacks.data_record import DataRecord
from stackexp.training.objectives.base import Objective, Session


class LanguageModelingObjective(Objective):
    """Next-token prediction. A run ends with the loss on all validation sets and a text sample."""

    final_stage = "validate"

    def build_module(self, weights: Path | None = None) -> LanguageModeling:
        """Build the next-token module."""
        return LanguageModeling(self.config, weights)

    def describe_training(self) -> str:
        """Return steps, micro-batches and tokens."""
        config = self.config
        return (
            f"{config.trainer.max_steps:,} steps of {config.data.global_batch_tokens:,} tokens "
            f"({config.accumulate_grad_batches} micro-batches), {config.total_tokens:,} tokens in total"
        )

    def build_measurements(self, folder: RunFolder) -> list[pl.Callback]:
        """Build the record of the training data."""
        return [DataRecord(folder.path, self.config.data.hash_interval)]

    def find_known_sets(self, session: Session) -> Sets:
        """Return the last validation's figures, if it ran after the last step and on full sets."""
        is_final = session.module.set_metrics_step == self.config.trainer.max_steps
        return session.module.set_metrics if is_final and self.config.data.eval_sequences is None else {}

    def build_result(self, session: Session, sets: Sets) -> dict[str, Any]:
        """Return the scores of the sets, the data hash and a sample."""
        return {
            "sets": sets,
            "average": average_scores(sets) if sets else {},
            "groups": average_groups(sets),
            **_summarize_data(session.folder),
            "sample": self._sample_text(session),
        }

    def _sample_text(self, session: Session) -> str | None:
        if self.config.trainer.is_sharded:
            return None  # generating needs the whole model on one device
        model, tokenizer = session.module.model, session.data.tokenizer
        return continue_text(model, tokenizer, prompt="", max_new_tokens=60, temperature=0.8, top_p=0.95, seed=0)

    def list_final_figures(self, result: dict[str, Any]) -> dict[str, float]:
        """Return the scores of the sets."""
        return tag_scores(named_sets.choose_prefix(self.final_stage, self.config), result["sets"])

    def write_events(self, folder: RunFolder, result: dict[str, Any]) -> None:
        """Write the scores of the sets."""
        prefix = named_sets.choose_prefix(self.final_stage, self.config)
        skip = folder.find_logged_tags(result["steps"])
        named_sets.write_events(folder.path, self.final_stage, prefix, result["steps"], result["sets"], skip)

    def format_result(self, session: Session, result: dict[str, Any]) -> str:
        """Return the table of the sets and the sample."""
        text = result["sample"]
        if text is None:
            text = f"python -m stackexp generate --run {session.folder.path}"
        return f"{format_scores(result['sets'])}\n\nsample:\n{text}"

    def report(self, request: EvaluationRequest, checkpoint: Path, sets: Sets) -> None:
        """Report the scores of the sets."""
        named_sets.report(request, checkpoint, sets)


def _summarize_data(folder: RunFolder) -> dict[str, Any]:
    """Return the hash of all training data, by the last step, and the number of sequences of each source."""
    lines = hash_log.read_hash_log(folder.path)
    return {"data_hash": {lines[-1]["step"]: lines[-1]["hash"]}, "sequences": lines[-1]["sequences"]} if lines else {}
