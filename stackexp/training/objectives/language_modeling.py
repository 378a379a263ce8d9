"""The objective of language modeling: next-token prediction, evaluated on named validation sets."""

import logging
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from stackexp.config.experiment import ExperimentConfig
from stackexp.config.memory import StackMemoryConfig
from stackexp.data import hash_log
from stackexp.evaluation.generation import continue_text
from stackexp.evaluation.request import EvaluationRequest, ResumableEvaluation, Sets, Stage, describe_evaluation
from stackexp.evaluation.scores import format_scores, score_bigrams
from stackexp.files import write_atomically, write_hashed_json
from stackexp.metric_tags import AVERAGE_LOSS
from stackexp.models import checkpoints
from stackexp.models.generation import NonFiniteLogitsError
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.scores import TAGGED_SCORES, average_groups, average_scores, tag_scores
from stackexp.runs import EMA, RunFolder
from stackexp.terminal import wrap_text
from stackexp.training.callbacks.data_record import DataRecord
from stackexp.training.loggers import write_points
from stackexp.training.objectives import Objective, Session

log = logging.getLogger(__name__)


class LanguageModelingObjective(Objective):
    """Next-token prediction. A run ends with the loss on all validation sets and a text sample."""

    final_stage = "validate"
    module_type = LanguageModeling
    _average_sets: Sets | None = None  # scores of the averaged weights, set by `evaluate`

    @property
    def validates_samples(self) -> bool:
        return self.config.data.eval_sequences is not None

    def warn_about_limits(self, stage: str) -> None:
        """Warn about options of a depth-axis stack with which reads are mostly empty or decided by rounding."""
        config = self.config.model
        memory = getattr(config, "memory", None)
        if stage != "fit" or not isinstance(memory, StackMemoryConfig) or memory.read != "global":
            return
        updates = config.num_layers * memory.updates_per_layer
        if memory.axis == "depth" and memory.read_mask == "multiply" and memory.num_slots > updates:
            log.warning(
                "model.memory.num_slots: %d slots, but a token has %d updates: empty slots take a share of the read; "
                "set num_slots=%d or read_mask=log",
                *(memory.num_slots, updates, updates),
            )
        if memory.read_mask == "additive" and self.config.trainer.precision != "64-true":
            log.warning(
                "model.memory.read_mask: additive lets rounding of the mask choose the slot once actions are nearly "
                "one-hot; set model.memory.read_mask=log"
            )

    def describe_training(self) -> str:
        config, count = self.config, self.config.accumulate_grad_batches
        return (
            f"{config.trainer.max_steps:,} steps of {config.data.global_batch_tokens:,} tokens "
            f"({count} micro-batch{'es' * (count != 1)}), {config.total_tokens:,} tokens in total"
        )

    def build_metric_callbacks(self, folder: RunFolder) -> list[pl.Callback]:
        return [DataRecord(folder.path, self.config.data.hash_interval)]

    def evaluate(self, session: Session) -> ResumableEvaluation:
        """Score every set with the final weights, and with `ema_decay` also with their moving average."""
        evaluation = super().evaluate(session)
        self._average_sets = None if self.config.trainer.ema_decay is None else self._score_average(session)
        return evaluation

    def _score_average(self, session: Session) -> Sets:
        """Score every set with the averaged weights in the last checkpoint; restores the final weights."""
        last, average = (
            session.processes.run_on_first(partial(checkpoints.find_checkpoint, session.folder, name))
            for name in ("last", EMA)
        )
        evaluation = ResumableEvaluation(
            self.final_stage, self.config, session.data, session.processes, average, output=None
        )
        checkpoints.load_weights(session.module.model, average)
        evaluation.run(session.trainer, session.module)
        checkpoints.load_weights(session.module.model, last)
        return evaluation.sets

    def build_result(self, session: Session, sets: Sets) -> dict[str, Any]:
        """Return the scores of model and bigram counts, the data hash, the sequences by source, and a text sample."""
        result: dict[str, Any] = _summarize(sets)
        if self._average_sets:
            result["ema"] = {"sets": self._average_sets, "average": average_scores(self._average_sets)}
        if lines := hash_log.read_hash_log(session.folder.path):
            result |= {"data_hash": {lines[-1]["step"]: lines[-1]["hash"]}, "sequences": lines[-1]["sequences"]}
        if session.processes.size == 1 and (
            bigrams := score_bigrams(self.config, session.data, session.trainer.global_step)
        ):
            result["bigrams"] = {"sets": bigrams, "average": average_scores(bigrams)}
        return result | {"sample": self._generate_sample(session)}

    def _generate_sample(self, session: Session) -> str | None:
        """Return a text sample; None without a tokenizer, with sharded weights, or if the weights have diverged."""
        tokenizer, trainer = session.data.tokenizer, self.config.trainer
        if tokenizer is None or trainer.is_sharded:  # generation needs the whole model on one device
            return None
        options: dict[str, Any] = {"max_new_tokens": 60, "temperature": 0.8, "top_p": 0.95, "seed": 0}
        try:
            return continue_text(session.module.model, tokenizer, prompt="", precision=trainer.precision, **options)
        except NonFiniteLogitsError:  # the scores are NaN, too
            return None

    def list_score_tags(self, set_names: list[str]) -> list[str]:
        sets = {name: dict.fromkeys(TAGGED_SCORES, 0.0) for name in set_names}
        return list(dict.fromkeys([AVERAGE_LOSS, *tag_scores(_choose_prefix(self.final_stage, self.config), sets)]))

    def list_final_scores(self, result: dict[str, Any]) -> dict[str, float]:
        return tag_scores(_choose_prefix(self.final_stage, self.config), result["sets"])

    def write_events(self, folder: RunFolder, result: dict[str, Any]) -> None:
        prefix, step = _choose_prefix(self.final_stage, self.config), result["steps"]
        _write_scores(folder.path, self.final_stage, prefix, step, result["sets"], skip=folder.find_logged_tags(step))

    def format_result(self, session: Session, result: dict[str, Any]) -> str:
        text = result["sample"]
        if text is None:
            text = f"python -m stackexp generate --run {session.folder.path}"
        lines = [format_scores(result["sets"])]
        if average := result.get("ema"):
            lines.append(f"moving average of the weights: average loss {average['average']['loss']:.4f}")
        if bigrams := result.get("bigrams"):
            loss = bigrams["average"]["loss"]
            lines.append(f"bigram counts of the same training tokens: average loss {loss:.4f}")
        if session.data.tokenizer is not None:
            lines.append(f"sample:\n{text}")
        return "\n\n".join(lines)

    def report(self, request: EvaluationRequest, checkpoint: Path, sets: Sets) -> Path | None:
        """Print the scores of the sets; with an output file, also write JSON, Markdown and TensorBoard events."""
        data = self.config.data
        rest = "every token scored" if data.score_remainder else "the incomplete last chunk of a set dropped"
        if data.max_chunks is not None:
            rest += f", at most {data.max_chunks:,} chunks of a set, evenly spaced"
        title = f"{checkpoint}, chunks of {data.context_length:,} tokens, {rest}"
        print(f"{wrap_text(title)}\n\n{format_scores(sets)}")
        if request.output is None:
            return None
        manner = {"context_length": data.context_length, "keep_remainder": data.score_remainder}
        record = describe_evaluation(request, checkpoint) | manner | _summarize(sets)
        write_hashed_json(request.output, record)
        write_atomically(request.output.with_suffix(".md"), f"{title}\n\n{format_scores(sets, style='markdown')}")
        if request.run and request.should_write_events and record["step"] is not None:
            prefix = _choose_prefix(request.stage, request.run_config)
            skip = request.run.find_logged_tags(record["step"])
            if request.sets:
                skip |= {tag for tag in tag_scores(prefix, sets) if tag.endswith("/average")}  # a mean over other sets
            request.write_events(lambda run: _write_scores(run, request.stage, prefix, record["step"], sets, skip))
        print(f"\nscores: {request.output}")
        return request.output


def _summarize(sets: Sets) -> dict[str, Any]:
    return {"sets": sets, "average": average_scores(sets) if sets else {}, "groups": average_groups(sets)}


def _choose_prefix(stage: Stage, config: ExperimentConfig) -> str:
    """Return the tag prefix for scores of whole sets in a run with this config; see `stackexp.metric_tags`."""
    if stage == "test":
        return "test"
    return "val" if config.data.eval_sequences is None else "val/whole"


def _write_scores(folder: Path, stage: Stage, prefix: str, step: int, sets: Sets, skip: Collection[str]) -> None:
    """Write the scores of whole sets to event files in `folder`, except the tags in `skip`.

    `step` is the step of the evaluated checkpoint. Each group, each set without a group, and the average have an event
    file of their own, which replaces the previous one.
    """
    files: dict[str, Sets] = {"average": sets}
    for name, scores in sets.items():
        files.setdefault(f"set.{name.split('/')[0]}", {})[name] = scores
    for file, members in files.items():
        points = [
            (tag, value, step)
            for tag, value in tag_scores(prefix, members).items()
            if tag.endswith("/average") == (file == "average") and tag not in skip
        ]
        if points:
            write_points(folder, f"{stage}.{file}.{step}", points)
