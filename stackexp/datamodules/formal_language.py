"""Strings of a formal language: to train on, drawn as they are needed; to validate and test on, by their length."""

import hashlib
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from stackexp.config.experiment import ExperimentConfig
from stackexp.config.formal_language import FormalLanguageConfig
from stackexp.errors import ConfigError
from stackexp.tasks import TASKS, Task
from stackexp.tasks import Batch as Strings

log = logging.getLogger(__name__)

SEEDS = {"validate": 1, "test": 4}  # 2, 3: the strings that were tested while recipes were explored
"""Third words of the seeds [length, 0, .] of what is evaluated on. Those of training are [seed, step], to numpy
the same as [seed, step, 0]; steps count from 1, and no word here is 0, so that all differ."""
assert 0 not in SEEDS.values()


@dataclass(frozen=True)
class LengthSet:
    """The strings of one length: a set to validate or test on, the same whatever the run, batch size and devices."""

    task: Task
    stage: str  # validate or test
    length: int
    sequences: int

    @property
    def name(self) -> str:
        return f"length_{self.length:03d}"

    @property
    def identity(self) -> str:
        """A hash of all its strings' cause."""
        cause = [self.task.name, SEEDS[self.stage], self.length, self.sequences]
        return hashlib.sha256(json.dumps(cause).encode()).hexdigest()

    @property
    def seed(self) -> list[int]:
        return [self.length, 0, SEEDS[self.stage]]

    def draw(self) -> Strings:
        return self.task.sample(np.random.default_rng(self.seed), self.sequences, self.length)


class FormalLanguageData(pl.LightningDataModule):
    """Batches of one length: tokens int64 [B, L + O], symbols and then the empty token; targets int64 [B, O]; mask
    bool [B, O], of what accuracy counts.

    Those of training have besides: length, max_length (of this step of the curriculum), and counted, how many symbols
    accuracy counts on this rank in the mean over ranks. Those of evaluation: index int64 [B], -1 for padding.
    """

    tokenizer = token_bytes = eval_limit = None  # as sets of text have them

    def __init__(self, config: FormalLanguageConfig, seed: int = 0):
        super().__init__()
        self.config, self.seed, self.task = config, seed, TASKS[config.task]
        self.leave_out: frozenset[str] = frozenset()  # sets whose figures are known already

    def choose(self, stage: str, wanted: list[str]) -> None:
        raise ConfigError(
            "--sets: strings of formal languages are told apart by their length alone; choose lengths with "
            "data.eval_max_length and data.eval_length_stride"
        )

    def sets(self, stage: str) -> list[LengthSet]:
        """The lengths of stage "validate" or "test", in the order of their loaders."""
        config = self.config
        between = range(config.max_length + 1, config.validation_max_length + 1)
        lengths, sequences = {
            "validate": (between, config.validation_sequences),
            "test": (config.tested_lengths, config.eval_sequences),
        }[stage]
        sets = [LengthSet(self.task, stage, n, sequences) for n in lengths if n >= self.task.min_length]
        return [of for of in sets if of.name not in self.leave_out]

    def set_names(self, stage: str) -> list[str]:
        return [of.name for of in self.sets(stage)]

    def training_batch(self, step: int) -> dict[str, Any]:
        """What the optimizer's `step` (from 1 on) is made from, a function of seed and step; this process's rows."""
        longest, rng = longest_of(self.config, step), np.random.default_rng([self.seed, step])
        length = int(rng.integers(self.task.min_length, longest + 1))
        if self.config.longest_fraction and rng.random() < self.config.longest_fraction:
            length = longest
        rank, world_size = _place(self.trainer)
        strings = self.task.sample(rng, self.config.batch_size, length)
        counted = float(strings.mask.sum()) / world_size
        rows = Strings(*(part[rank::world_size] for part in strings))
        return tensors(rows, self.task) | {"length": length, "max_length": longest, "counted": counted}

    def train_dataloader(self) -> "TrainingBatches":
        return TrainingBatches(self)

    def val_dataloader(self) -> list["LengthBatches"]:
        return self._loaders("validate")

    def test_dataloader(self) -> list["LengthBatches"]:
        return self._loaders("test")

    def _loaders(self, stage: str) -> list["LengthBatches"]:
        return [LengthBatches(of, self.config.eval_batch_size, *_place(self.trainer)) for of in self.sets(stage)]


class TrainingBatches:
    """The batches after the trainer's last step, without end."""

    def __init__(self, data: FormalLanguageData):
        self._data = data

    def __iter__(self) -> Iterator[dict[str, Any]]:
        step = self._data.trainer.global_step
        while True:
            step += 1
            yield self._data.training_batch(step)


class LengthBatches:
    """A rank's share of a set: every rank has as many batches, padded with strings of index -1."""

    def __init__(self, of: LengthSet, batch_size: int, rank: int = 0, world_size: int = 1):
        self._of, self._size, self._rank, self._world_size = of, batch_size, rank, world_size

    def __len__(self) -> int:
        return math.ceil(self._of.sequences / (self._size * self._world_size))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        strings, count = self._of.draw(), self._of.sequences
        for batch in range(len(self)):
            wanted = (batch * self._size + np.arange(self._size)) * self._world_size + self._rank
            if self._world_size == 1:
                wanted = wanted[wanted < count]
            rows = Strings(*(part[np.minimum(wanted, count - 1)] for part in strings))
            yield tensors(rows, self._of.task) | {"index": torch.from_numpy(np.where(wanted < count, wanted, -1))}


def longest_of(config: FormalLanguageConfig, step: int) -> int:
    """The longest string of a step (from 1 on): max_length, or what the curriculum has reached, rounded down."""
    if step > config.curriculum_steps:
        return config.max_length
    start = config.curriculum_start
    return start + (config.max_length - start) * (step - 1) // config.curriculum_steps


def tensors(strings: Strings, task: Task) -> dict[str, torch.Tensor]:
    """tokens [B, L + O]: the symbols, then an empty token for each symbol of the answer; targets, mask [B, O]."""
    empty = np.full(strings.targets.shape, task.num_symbols)
    return {
        "tokens": torch.from_numpy(np.concatenate([strings.inputs, empty], 1)),
        "targets": torch.from_numpy(np.ascontiguousarray(strings.targets)),
        "mask": torch.from_numpy(np.ascontiguousarray(strings.mask)),
    }


def _place(trainer: pl.Trainer | None) -> tuple[int, int]:
    """Rank and number of the processes."""
    return (trainer.global_rank, trainer.world_size) if trainer else (0, 1)


def warn_of_slots(config: ExperimentConfig, stage: str) -> None:
    """Say what a stack keeps that is too small for the longest strings of the stage, and of training for "fit"."""
    data, memory = config.data, getattr(config.model, "memory", None) or config.model
    num_slots = getattr(memory, "num_slots", None)
    if num_slots is None or getattr(memory, "axis", "time") == "depth":
        return
    section = "model" if memory is config.model else "model.memory"
    longest = data.validation_max_length if stage == "validate" else data.eval_max_length
    asked = [("eval_num_slots", memory.eval_num_slots or num_slots, longest)]
    if stage == "fit":
        asked.insert(0, ("num_slots", num_slots, data.max_length))
    for key, slots, length in asked:
        needed = TASKS[data.task].required_slots(length)
        if needed is None or slots >= needed:
            continue
        kept = f"a stack of {slots} slots keeps {slots} of up to {needed} symbols"
        if data.task == "reverse_string" and length > data.max_length:
            best = ceiling(slots, range(data.max_length + 1, length + 1))
            kept += f" and scores 0.5 + 0.5 min(1, {slots}/L), {best:.2f} over {data.max_length + 1}..{length}"
        key = f"{section}.{key}"
        log.warning("%s: %s at length %d: %s; set %s=%d", key, data.task, length, kept, key, needed)


def ceiling(slots: int, lengths: range) -> float:
    """The mean accuracy over these lengths of a stack that reverses as many symbols as it has slots, and guesses."""
    return sum(0.5 + 0.5 * min(1.0, slots / length) for length in lengths) / len(lengths)
