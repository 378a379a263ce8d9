"""Token data for language modeling: a training set of shards, and named evaluation sets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from stackexp.config.data import ShardsConfig, StdlibConfig
from stackexp.data import olmo
from stackexp.data.evaluation_sets import EvaluationSet, find_sets, open_set
from stackexp.data.path_checks import DataPaths, check_requested_sets, explain_unknown_set
from stackexp.data.stdlib import prepare_stdlib
from stackexp.data.token_files import Chunks
from stackexp.data.tokenizer import KnownTokenizer, count_token_bytes
from stackexp.datamodules.base import PADDING, ExperimentData, RankBatches
from stackexp.datamodules.training_set import TrainingSet
from stackexp.errors import RunError, SetNameError

SECTIONS = {"validate": "validation", "test": "test"}  # stage -> section of the data config


class PretrainingData(ExperimentData):
    """Batches of tokens int64 [B, T] with index int64 [B].

    In training, `index` is the number of a sequence over all sources. In evaluation, it is the position of a chunk
    among the scored chunks of its set (-1: padding).

    A training epoch is a whole number of optimizer steps. Sequences that do not fill the last global batch are skipped;
    these differ from epoch to epoch. Epochs repeat, each in a new order, until the trainer stops.

    Evaluation batches also have length int64 [B], the tokens of each chunk; see data/evaluation_sets.py.
    """

    def __init__(self, config: ShardsConfig | StdlibConfig, seed: int = 0):
        super().__init__()
        self.config, self.seed = config, seed
        self.train_set: TrainingSet | None = None
        self._tokenizer_path: Path | None = None
        self._paths: dict[str, dict[str, Path]] = {}  # stage -> name -> path, without folders of sets
        self._opened: dict[tuple[str, Path], EvaluationSet] = {}

    def data_paths(self) -> DataPaths:
        """Return the paths that the config names."""
        assert isinstance(self.config, ShardsConfig)
        return DataPaths(self.config.path, self.config.validation, self.config.test)

    def select_sets(self, stage: str, names: list[str]) -> None:
        """Evaluate on these sets instead of the config's.

        Args:
            stage: "validate" or "test".
            names: Names in the config, "v2" or "v3", one set of these such as "v2/4chan", or NAME=PATH.

        Raises:
            SetNameError: If a name is unknown or given twice.
        """
        needs_config = not all("=" in name for name in names)
        section = f"data.{SECTIONS[stage]}"
        check_requested_sets(names, self._evaluation_paths(stage) if needs_config else None, section)
        known = {version: olmo.DEFAULT_FOLDER / version for version in olmo.NAMES}
        known |= self._evaluation_paths(stage) if needs_config else {}
        selected: dict[str, Path] = {}
        for name in names:
            found = _select_sets(name, known, section)
            if duplicates := selected.keys() & found.keys():
                raise SetNameError(f"{min(duplicates)} is given twice; give each set once, or use other names")
            selected |= found
        self._paths[stage] = selected

    def list_set_paths(self, stage: str) -> dict[str, Path]:
        """Return name and path of the sets of a stage without the skipped ones, in the order of their loaders."""
        if stage not in self._paths:
            groups = self._evaluation_paths(stage).items()
            self._paths[stage] = {name: path for group in groups for name, path in find_sets(*group).items()}
        return {name: path for name, path in self._paths[stage].items() if name not in self.skipped_sets}

    def list_set_names(self, stage: str) -> list[str]:
        """Return the names of `sets`, without opening them."""
        return list(self.list_set_paths(stage))

    def sets(self, stage: str) -> list[EvaluationSet]:
        """Return the opened sets of a stage without the skipped ones, in the order of their loaders."""
        path = self._tokenizer_path
        known = KnownTokenizer(self.tokenizer, path) if self.tokenizer and path else None
        paths = self.list_set_paths(stage)
        for item in paths.items():
            if item not in self._opened:
                self._opened[item] = open_set(*item, self.config, known)
        return [self._opened[item] for item in paths.items()]

    def setup(self, stage: str) -> None:
        """Open and check the sets that a stage ("fit", "validate", "test") reads. Raises RunError."""
        eval_stage = "validate" if stage == "fit" else stage
        if stage == "fit":
            self.train_set = TrainingSet(self.config, self.data_paths().train, self.seed)
        if not (self.list_set_paths(eval_stage) or self.skipped_sets or self.train_set):
            section = SECTIONS[eval_stage]
            raise RunError(f"no {section} sets; add one with data.{section}.NAME=PATH")
        self._load_tokenizer(eval_stage)
        self.eval_limit = self.config.eval_sequences if stage == "fit" else None
        self.sets(eval_stage)

    def train_dataloader(self) -> DataLoader:
        """Return this rank's loader of training batches."""
        assert self.train_set is not None
        assert self.trainer is not None
        return self.train_set.build_loader(self.trainer)

    def build_eval_loader(self, dataset: EvaluationSet, rank: int, world_size: int) -> DataLoader:
        """Return a loader of one rank's share of a set."""
        return build_perplexity_loader(dataset.chunks, self.config.eval_batch_size, self.eval_limit, rank, world_size)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Check the token ids. On a GPU, an invalid id would end the process with a device assertion."""
        if (largest := int(batch["tokens"].max())) >= self.config.vocab_size:
            raise RunError(
                f"token id {largest} in sequences {batch['index'].tolist()} is not below data.vocab_size "
                f"{self.config.vocab_size}; the shards are damaged, prepare the set again"
            )
        return batch

    def _evaluation_paths(self, stage: str) -> dict[str, Path]:
        paths = self.data_paths()
        return {name: Path(path) for name, path in (paths.test if stage == "test" else paths.validation).items()}

    def _load_tokenizer(self, eval_stage: str) -> None:
        """Load the tokenizer of the training set or the run, otherwise the first next to an evaluation set."""
        if self.tokenizer is not None:
            return
        if self.train_set:
            tokens = self.train_set.tokens
            self.tokenizer, self._tokenizer_path = tokens.load_tokenizer(), tokens.folder / "tokenizer.json"
        else:
            folders = [self.data_paths().train, *self.list_set_paths(eval_stage).values()]
            files = [self.tokenizer_file, *(Path(folder, "tokenizer.json") for folder in folders if folder)]
            path = next((file for file in files if file and file.is_file()), None)
            if path is None:
                return
            known = KnownTokenizer.read(path)
            if known.vocab_size > self.config.vocab_size:
                raise RunError(
                    f"{path}: has {known.vocab_size} ids, more than data.vocab_size {self.config.vocab_size}; prepare "
                    "the set with the tokenizer of the run"
                )
            self.tokenizer, self._tokenizer_path = known.tokenizer, path
        self.token_bytes = count_token_bytes(self.tokenizer, self.config.vocab_size)


class StdlibData(PretrainingData):
    """The source of the Python standard library, prepared on first use."""

    _prepared: DataPaths | None = None

    def prepare_data(self) -> None:
        """Prepare the sets, unless they are in the cache."""
        self.data_paths()

    def data_paths(self) -> DataPaths:
        """Return the paths of the prepared sets."""
        assert isinstance(self.config, StdlibConfig)
        self._prepared = self._prepared or prepare_stdlib(self.config)
        return self._prepared


def _select_sets(request: str, known: Mapping[str, Path], section: str) -> dict[str, Path]:
    """Return name and path of the sets that one item of --sets selects."""
    name, equals, path = request.partition("=")
    if equals:
        return find_sets(name, Path(path))
    if name in known:
        return find_sets(name, known[name])
    group = name.split("/")[0]
    members = find_sets(group, known[group], warn_missing=False) if group in known and group != name else {}
    if name not in members:
        raise SetNameError(explain_unknown_set(name, [*known, *members], section))
    return {name: members[name]}


class ChunkDataset(Dataset):
    """Chunks as a map-style dataset: {"tokens": int64 [T], "index": int, "length": int}.

    A chunk of fewer than T tokens is padded with zeros. A `limit` keeps only that many chunks, evenly spaced. Index
    PADDING returns a row of length 0.
    """

    def __init__(self, chunks: Chunks, limit: int | None):
        self.chunks = chunks
        self.length = len(chunks) if limit is None else min(limit, len(chunks))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor | int]:
        row = torch.zeros(self.chunks.context_length, dtype=torch.int64)
        chunk = self.chunks[index * len(self.chunks) // self.length] if index != PADDING else np.empty(0)
        row[: len(chunk)] = torch.from_numpy(chunk.astype("int64"))
        return {"tokens": row, "index": index, "length": len(chunk)}


def build_perplexity_loader(
    chunks: Chunks, batch_size: int, limit: int | None = None, rank: int = 0, world_size: int = 1
) -> DataLoader:
    """Build a loader of one rank's share of a set; a `limit` keeps only that many chunks of the set."""
    dataset = ChunkDataset(chunks, limit)
    return DataLoader(dataset, batch_sampler=RankBatches(len(dataset), batch_size, rank, world_size))
