"""The interface of all data modules: training batches and named evaluation sets."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.fabric.utilities.data import sized_len
from tokenizers import Tokenizer
from torch.utils.data import Sampler

from stackexp.errors import RunError

PADDING = -1  # the index of a row that fills up a batch and is not scored


class ExperimentData(pl.LightningDataModule):
    """Training batches, and evaluation sets that are independent of seed, batch size and number of ranks.

    An evaluation set has a `name` and an `identity`, which changes with its contents. Each set belongs to a stage,
    "validate" or "test".

    Attributes:
        tokenizer: The model's tokenizer; None if it is unknown or the data is not text.
        tokenizer_file: The tokenizer of the evaluated run; it takes precedence over those next to the sets.
        token_bytes: Bytes of text of each token [V]; None without a tokenizer.
        eval_limit: Chunks of each set to score; None: all.
        skipped_sets: Names of sets to skip, because they have been scored already.
    """

    tokenizer: Tokenizer | None = None
    tokenizer_file: Path | None = None
    token_bytes: np.ndarray | None = None
    eval_limit: int | None = None
    skipped_sets: frozenset[str] = frozenset()

    def training_sources(self) -> dict[str, str]:
        """Return name and fingerprint of each source of training data; a resumed run refuses others."""
        return {"train": ""}

    def select_sets(self, stage: str, names: list[str]) -> None:
        """Evaluate on these sets instead of the config's. Raises SetNameError for unknown names."""
        raise NotImplementedError

    def sets(self, stage: str) -> list[Any]:
        """Return the sets of a stage without the skipped ones, in the order of their loaders."""
        raise NotImplementedError

    def list_set_names(self, stage: str) -> list[str]:
        """Return the names of `sets`."""
        return [dataset.name for dataset in self.sets(stage)]

    def build_eval_loader(self, dataset: Any, rank: int, world_size: int) -> Any:
        """Build a loader of one rank's share of an evaluation set."""
        raise NotImplementedError

    def val_dataloader(self) -> list[Any]:
        """Return this rank's loaders of the sets of stage "validate"."""
        return self._build_eval_loaders("validate")

    def test_dataloader(self) -> list[Any]:
        """Return this rank's loaders of the sets of stage "test"."""
        return self._build_eval_loaders("test")

    def _build_eval_loaders(self, stage: str) -> list[Any]:
        return [self.build_eval_loader(dataset, *self.rank_and_world_size) for dataset in self.sets(stage)]

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        """The global rank of this process and the number of processes."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)


def check_resumable(loader: Any) -> None:
    """Raise RunError for a training loader without a state or a length: a resumed run would repeat or skip batches."""
    if isinstance(loader, StepBatches):
        return
    has_state = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    if not has_state or sized_len(loader) is None:  # without a length, Lightning loads one batch ahead
        missing, effect = ("length", "skip") if has_state else ("state_dict", "repeat")
        raise RunError(
            f"{type(loader).__name__}: the training loader has no {missing}, so a resumed run would {effect} batches; "
            "return StepBatches, or a loader with a length, state_dict and load_state_dict"
        )


class RankBatches(Sampler[list[int]]):
    """Batches of item numbers for one rank. Every rank has the same number of batches, all of the same size.

    Over all ranks, each item of 0..length-1 occurs once. PADDING fills the last batches.
    """

    def __init__(self, length: int, batch_size: int, rank: int, world_size: int):
        self.length, self.batch_size, self.rank, self.world_size = length, batch_size, rank, world_size

    def __len__(self) -> int:
        return -(-self.length // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self)):
            begin = (number * self.world_size + self.rank) * self.batch_size
            yield [i if i < self.length else PADDING for i in range(begin, begin + self.batch_size)]


class StepBatches:
    """An endless loader of the micro-batches after the trainer's current step.

    `sample` returns micro-batch n >= 1 of this process. Without gradient accumulation, n is the step.
    """

    def __init__(self, data: ExperimentData, sample: Callable[[int], dict[str, Any]]):
        self._data, self._sample = data, sample

    def __iter__(self) -> Iterator[dict[str, Any]]:
        trainer = self._data.trainer
        assert trainer is not None
        return map(self._sample, itertools.count(trainer.global_step * trainer.accumulate_grad_batches + 1))


class SetBatches:
    """One rank's share of a set. With one rank, the last batch may be smaller; with several, it is padded.

    Each iteration loads the set, and builds each batch from it and the numbers of the items [B].
    """

    def __init__(
        self, load: Callable[[], Any], build: Callable[[Any, np.ndarray], dict[str, Any]], batches: RankBatches
    ):
        self._load, self._build, self._batches = load, build, batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        items = self._load()
        for numbers in self._batches:
            index = np.array(numbers)
            yield self._build(items, index[index != PADDING] if self._batches.world_size == 1 else index)
