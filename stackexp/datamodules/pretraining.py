"""Token data for language modeling: a training set of shards, and named evaluation sets."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from stackexp.config.data import DataConfig, ShardsConfig, StdlibConfig, StreamConfig
from stackexp.data.evaluation_sets import EvaluationSet, find_sets, open_set
from stackexp.data.path_checks import DataPaths, check_requested_sets, explain_unknown_set, format_prepare_options
from stackexp.data.shards import TokenSet
from stackexp.data.stdlib import prepare_stdlib
from stackexp.data.token_files import Chunks
from stackexp.data.tokenizer import KnownTokenizer, count_token_bytes, get_end_of_text_id
from stackexp.datamodules.base import PADDING, ExperimentData, RankBatches
from stackexp.errors import RunError, SetNameError

SHUFFLE_BLOCK = 4_000_000  # sequences over all canonical nodes; the library's default, which determines the order
MIN_SHUFFLE_BLOCK = 1 << 18  # sequences per canonical node
SET_SECTIONS = {"validate": "validation", "test": "test"}  # stage -> section of the data config


class PretrainingData(ExperimentData):
    """Batches of tokens int64 [B, T] with index int64 [B].

    In training, `index` is the number of a sequence over all sources. In evaluation, it is the position of a chunk
    among the scored chunks of its set (-1: padding).

    A training epoch is a whole number of optimizer steps. Sequences that do not fill the last global batch are skipped;
    these differ from epoch to epoch, unless `shuffle` is off. Epochs repeat, each in a new order, until the trainer
    stops.

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
        section = f"data.{SET_SECTIONS[stage]}"
        known = check_requested_sets(names, self._evaluation_paths(stage) if needs_config else None, section)
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
        if stage == "fit" and self.train_set is None:  # Lightning calls this again
            seed = self.seed if self.config.shuffle_seed is None else self.config.shuffle_seed
            self.train_set = TrainingSet(self.config, self.data_paths().train, seed)
        if not (self.list_set_paths(eval_stage) or self.skipped_sets or self.train_set):
            section = SET_SECTIONS[eval_stage]
            raise RunError(f"no {section} sets; add one with data.{section}.NAME=PATH")
        self._load_tokenizer(eval_stage)
        self.eval_limit = self.config.eval_sequences if stage == "fit" else None
        self.sets(eval_stage)

    def train_dataloader(self) -> DataLoader:
        """Return this rank's loader of training batches."""
        assert self.train_set is not None
        assert self.trainer is not None
        return self.train_set.build_loader(self.trainer)

    def training_sources(self) -> dict[str, str]:
        """Return name and fingerprint of each source, in the order of their numbers in batches."""
        assert self.train_set is not None
        return {source.name: source.fingerprint for source in self.train_set.sources}

    def build_eval_loader(self, dataset: EvaluationSet, rank: int, world_size: int) -> DataLoader:
        """Return a loader of one rank's share of a set."""
        return build_perplexity_loader(dataset.chunks, self.config.eval_batch_size, self.eval_limit, rank, world_size)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Check the token ids. On a GPU, an invalid id would end the process with a device assertion."""
        if (largest := int(batch["tokens"].max())) >= self.config.vocab_size:
            raise RunError(
                f"token id {largest} in sequences {batch['index'].tolist()} is not below data.vocab_size "
                f"{self.config.vocab_size}, so a shard is damaged; prepare the set again"
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
    """Return name and path of the sets that one item of --sets selects, which `check_requested_sets` has checked."""
    name, equals, path = request.partition("=")
    if equals:
        return find_sets(name, Path(path))
    if name in known:
        return find_sets(name, known[name])
    group = name.split("/")[0]
    members = find_sets(group, known[group], warn_missing=False)
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
    batches = RankBatches(len(dataset), batch_size, rank, world_size)
    return DataLoader(dataset, batch_sampler=batches, generator=torch.Generator())  # draws no global random numbers


# The training set


@dataclass
class TrainingSource:
    """One prepared set, and the number of its sequences in each epoch."""

    name: str
    tokens: TokenSet
    remote: str | None
    sequences: int = 0

    @property
    def fingerprint(self) -> str:
        """A hash of the shards' hashes, which index.json holds, and of the tokenizer."""
        index = (self.tokens.folder / "index.json").read_bytes()
        return hashlib.sha256(index + self.tokens.corpus.tokenizer.encode()).hexdigest()


class TrainingSet:
    """Prepared sets, sorted by name. The order of their sequences depends only on the seed and the sources.

    An epoch is a whole number of optimizer steps; see PretrainingData.
    """

    def __init__(self, config: DataConfig, folder: str | Path | None, seed: int):
        """Open the sources: the streams of the config, or else the set in `folder`.

        Raises RunError if a set is missing, does not fit the config or has another tokenizer than the first one, or if
        an epoch has no full global batch.
        """
        self.config, self.seed = config, seed
        self._options = config if isinstance(config, ShardsConfig) else ShardsConfig()
        path = None if folder is None else str(folder)
        streams = self._options.streams or {"train": StreamConfig(path=path, remote=self._options.remote)}
        streams = dict(sorted(streams.items()))
        self.sources = [self._open_source(name, stream) for name, stream in streams.items()]
        self.tokens = self.sources[0].tokens
        self._check_tokenizers()
        self._set_epoch_sizes(list(streams.values()))
        tokenizer = self.tokens.load_tokenizer() if config.document_mask else None
        self._end_of_document = get_end_of_text_id(tokenizer, self.tokens.folder) if tokenizer else None

    def build_loader(self, trainer: pl.Trainer) -> DataLoader:
        """Build a loader of this rank's share of the sequences, epoch after epoch.

        A single source uses the library's shuffle py1e, which spreads downloads over time. It places large shards late,
        so mixtures use py1br, which keeps the proportions at any time.
        """
        from streaming.base.util import bytes_to_int

        from stackexp.datamodules.node_storage import check_shared_memory, check_temporary_folder
        from stackexp.datamodules.token_stream import TokenLoader, TokenSource, TokenStream, collate, set_world

        config, options = self.config, self._options
        self._check_nodes(trainer.world_size // trainer.num_devices)
        set_world(trainer.global_rank, trainer.world_size, trainer.num_devices)
        limit = None if options.cache_limit is None else bytes_to_int(options.cache_limit)
        shuffle_block = MIN_SHUFFLE_BLOCK
        if not self._is_mixture:
            shuffle_block = max(SHUFFLE_BLOCK // config.num_canonical_nodes, MIN_SHUFFLE_BLOCK)
        sources = [TokenSource(s.tokens.folder, s.sequences, s.remote, *self._downloads) for s in self.sources]
        batch_bytes = config.micro_batch_size * config.context_length * 8 * (2 if config.document_mask else 1)
        samples = sum(source.sequences for source in self.sources)
        check_temporary_folder(config.num_workers)
        check_shared_memory(samples, trainer.num_devices * config.num_workers, batch_bytes)
        stream = TokenStream(
            sources,
            cache_limit=limit,
            num_loaders=trainer.num_devices * max(1, config.num_workers),
            batch_size=config.micro_batch_size,
            sampling_method="balanced" if config.shuffle else "fixed",
            shuffle=config.shuffle,
            shuffle_algo="py1br" if self._is_mixture else "py1e",
            shuffle_seed=self.seed,
            num_canonical_nodes=config.num_canonical_nodes,
            shuffle_block_size=shuffle_block,
        )
        return TokenLoader(
            stream,
            batch_size=config.micro_batch_size,
            num_workers=config.num_workers,
            persistent_workers=config.num_workers > 0,
            collate_fn=partial(collate, end_of_document=self._end_of_document),
        )

    @property
    def _downloads(self) -> tuple[float, int]:
        """The timeout of a download in seconds, and the number of attempts."""
        return self._options.download_timeout_seconds, 1 + self._options.download_retries

    @property
    def _is_mixture(self) -> bool:
        return len(self.sources) > 1

    def _check_nodes(self, nodes: int) -> None:
        canonical = self.config.num_canonical_nodes
        if nodes % canonical and canonical % nodes:
            raise RunError(
                f"data.num_canonical_nodes: {canonical} and the {nodes} nodes of this run must divide one another; "
                f"set data.num_canonical_nodes={nodes}"
            )

    def _open_source(self, name: str, stream: StreamConfig) -> TrainingSource:
        folder, remote = stream.path, None
        if stream.remote is not None:
            from stackexp.datamodules.node_storage import open_node_cache

            remote = stream.remote.rstrip("/")
            folder = str(open_node_cache(remote, stream.path, *self._downloads))
        assert folder is not None
        tokens = TokenSet(folder, format_prepare_options(self.config), cache=remote is not None)
        length, expected = tokens.corpus.context_length, self.config.context_length
        if length != expected:
            raise RunError(
                f"{folder}: prepared with context length {length}, but data.context_length is {expected}; "
                f"set data.context_length={length} or prepare it again"
            )
        tokens.check_vocab_size(self.config.vocab_size)
        return TrainingSource(name, tokens, remote)

    def _check_tokenizers(self) -> None:
        for source in self.sources[1:]:
            if source.tokens.corpus.tokenizer != self.tokens.corpus.tokenizer:
                raise RunError(
                    f"{source.tokens.folder}: made with another tokenizer than {self.tokens.folder}; prepare it with "
                    f"--tokenizer {self.tokens.folder}/tokenizer.json"
                )

    def _set_epoch_sizes(self, streams: list[StreamConfig]) -> None:
        """Set the number of sequences of each source in an epoch, so that every global batch is full.

        With `proportion`, an epoch has as many sequences as all sources together. With `repeat`, each source occurs
        that many times.
        """
        nodes, batch = self.config.num_canonical_nodes, self.config.global_batch_tokens // self.config.context_length
        if batch % nodes:  # the last batches of an epoch would be smaller
            raise RunError(
                f"data.num_canonical_nodes: {nodes} does not divide the {batch} sequences of a global batch; set it to "
                "the number of nodes, or to 1"
            )
        sizes = [len(source.tokens) for source in self.sources]
        if streams[0].proportion is None:
            shares = [(stream.repeat or 1) * size for stream, size in zip(streams, sizes, strict=True)]
            count = int(round(sum(shares), 6))  # 0.29 * 100 is 28.999...
        else:
            shares, count = [stream.proportion or 0 for stream in streams], sum(sizes)
        if count < batch:
            raise RunError(
                f"{', '.join(str(source.tokens.folder) for source in self.sources)}: {count} sequences do not fill a "
                f"global batch of {batch}; set data.global_batch_tokens={count * self.config.context_length} or less, "
                "or add text"
            )
        for source, sequences in zip(self.sources, apportion(count // batch * batch, shares), strict=True):
            source.sequences = sequences
            if not sequences:
                raise RunError(
                    f"data.streams.{source.name}: its share of an epoch of {count // batch * batch} sequences is less "
                    "than one; raise it, or remove the stream"
                )


def apportion(total: int, shares: list[float]) -> list[int]:
    """Split `total` into integers that are proportional to `shares`, by the largest remainder method."""
    exact = [total * share / math.fsum(shares) for share in shares]
    whole = [math.floor(number) for number in exact]
    for i in sorted(range(len(shares)), key=lambda i: whole[i] - exact[i])[: total - sum(whole)]:
        whole[i] += 1
    return whole
