"""Strings of a formal language: training batches sampled at each step, and one evaluation set per length."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stackexp.config.data import FormalLanguageConfig
from stackexp.datamodules.base import ExperimentData, RankBatches, SetBatches, StepBatches
from stackexp.errors import SetNameError
from stackexp.files import hash_values
from stackexp.tasks import NO_TARGET, TASKS, Task, TaskBatch

# An evaluation set is sampled from the seed [length, 0, stage seed], a training batch from [seed, step], which numpy
# treats as [seed, step, 0]. They never coincide, because steps begin at 1 and no stage seed is 0. The stage seeds 2
# and 3 were used to explore recipes, so they are not used again.
STAGE_SEEDS = {"validate": 1, "test": 4}


@dataclass(frozen=True)
class LengthSet:
    """The evaluation strings of one length, the same in every run."""

    task: Task
    stage: str
    length: int
    sequences: int

    @property
    def name(self) -> str:
        """The name in results and metric tags, such as length_041."""
        return f"length_{self.length:03d}"

    @property
    def identity(self) -> str:
        """A hash of all parameters that determine the strings."""
        return hash_values([self.task.name, STAGE_SEEDS[self.stage], self.length, self.sequences])

    @property
    def seed(self) -> list[int]:
        """The seed of the strings."""
        return [self.length, 0, STAGE_SEEDS[self.stage]]

    def sample(self) -> TaskBatch:
        """Return all strings of the set."""
        return self.task.sample(np.random.default_rng(self.seed), self.sequences, self.length)


class FormalLanguageData(ExperimentData):
    """Batches of strings of one length L with answers of O symbols.

    Every batch has tokens int64 [B, L + O] (the symbols, then O empty tokens; [B, O] for tasks that answer at every
    token), targets int64 [B, O] and mask bool [B, O], True for the symbols that accuracy counts. Training batches also
    have `length`, `max_length` (the curriculum's maximum at this step), `counted` and `answers` (the counted symbols
    and the targets per rank, means over ranks). Evaluation batches also have index int64 [B], the numbers of the
    strings (-1: padding).
    """

    def __init__(self, config: FormalLanguageConfig, seed: int = 0):
        super().__init__()
        self.config, self.seed, self.task = config, seed, TASKS[config.task]

    def select_sets(self, stage: str, names: list[str]) -> None:
        """Raise SetNameError, because the config determines the sets of a formal language."""
        raise SetNameError(
            "sets of a formal language have no files; choose lengths with data.eval_max_length and "
            "data.eval_length_stride"
        )

    def sets(self, stage: str) -> list[LengthSet]:
        """Return the sets of a stage without the skipped ones, one for each length."""
        config = self.config
        if stage == "validate":
            lengths: Any = range(config.first_unseen_length, config.validation_max_length + 1)
            sequences = config.validation_sequences
        else:
            lengths, sequences = config.tested_lengths, config.eval_sequences
        sets = [LengthSet(self.task, stage, n, sequences) for n in lengths if n >= self.task.min_length]
        return [strings for strings in sets if strings.name not in self.skipped_sets]

    def sample_training_batch(self, step: int) -> dict[str, Any]:
        """Return this rank's rows of the batch at an optimizer step >= 1; they depend only on seed and step."""
        max_length, rng = compute_max_length(self.config, step), np.random.default_rng([self.seed, step])
        length = int(rng.integers(self.task.min_length, max_length + 1))
        if self.config.longest_fraction and rng.random() < self.config.longest_fraction:
            length = max_length
        rank, world_size = self.rank_and_world_size
        strings = self.task.sample(rng, self.config.batch_size, length, self.config.loop_fraction)
        counted, answers = (float(x.sum()) / world_size for x in (strings.mask, strings.targets != NO_TARGET))
        rows = TaskBatch(*(part[rank::world_size] for part in strings))
        means = {"counted": counted, "answers": answers}
        return build_string_batch(rows, self.task) | {"length": length, "max_length": max_length} | means

    def train_dataloader(self) -> StepBatches:
        """Return an endless loader that starts after the trainer's current step."""
        return StepBatches(self, self.sample_training_batch)

    def build_eval_loader(self, dataset: LengthSet, rank: int, world_size: int) -> SetBatches:
        """Return a loader of one rank's share of a set."""
        batches = RankBatches(dataset.sequences, self.config.eval_batch_size, rank, world_size)
        return SetBatches(dataset.sample, self._build_evaluation_batch, batches)

    def _build_evaluation_batch(self, strings: TaskBatch, index: np.ndarray) -> dict[str, Any]:
        rows = TaskBatch(*(part[index] for part in strings))  # padding repeats the last string
        return build_string_batch(rows, self.task) | {"index": torch.from_numpy(index)}


def compute_max_length(config: FormalLanguageConfig, step: int) -> int:
    """Return the maximal string length of a step >= 1: max_length, or the curriculum's length, rounded down."""
    if step > config.curriculum_steps:
        return config.max_length
    start = config.curriculum_start
    return start + (config.max_length - start) * (step - 1) // config.curriculum_steps


def build_string_batch(strings: TaskBatch, task: Task) -> dict[str, torch.Tensor]:
    """Return tokens [B, L + O] (the symbols, then O empty tokens), targets [B, O] and mask [B, O].

    A task that answers at every token has tokens [B, O], without empty tokens.
    """
    tokens = strings.inputs
    if not task.answers_every_token:
        tokens = np.concatenate([tokens, np.full(strings.targets.shape, task.num_symbols)], 1)
    return {
        "tokens": torch.from_numpy(np.ascontiguousarray(tokens)),
        "targets": torch.from_numpy(np.ascontiguousarray(strings.targets)),
        "mask": torch.from_numpy(np.ascontiguousarray(strings.mask)),
    }
