"""The training set: its sources, the composition and order of an epoch, and the loader."""

import hashlib
import logging
import math
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from stackexp.config.data import DataConfig, ShardsConfig, StreamConfig
from stackexp.data.path_checks import format_prepare_options
from stackexp.data.shards import TokenSet, choose_token_dtype
from stackexp.data.tokenizer import get_end_of_text_id
from stackexp.errors import RunError

if TYPE_CHECKING:
    from stackexp.datamodules.download import RemoteFolder

SHUFFLE_BLOCK = 4_000_000  # sequences over all canonical nodes; the library's default, which determines the order
MIN_SHUFFLE_BLOCK = 1 << 18  # sequences per canonical node
SIZE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
log = logging.getLogger(__name__)


@dataclass
class TrainingSource:
    """One prepared set, and the number of its sequences in each epoch."""

    name: str
    tokens: TokenSet
    remote: "RemoteFolder | None"
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

    @property
    def names(self) -> list[str]:
        """The names of the sources, in the order of their numbers in batches."""
        return [source.name for source in self.sources]

    def build_loader(self, trainer: pl.Trainer) -> DataLoader:
        """Build a loader of this rank's share of the sequences, epoch after epoch.

        A single source uses the library's shuffle py1e, which spreads downloads over time. It places large shards late,
        so mixtures use py1br, which keeps the proportions at any time.
        """
        from stackexp.datamodules.loader import TokenLoader, collate
        from stackexp.datamodules.shared_memory import check_space
        from stackexp.datamodules.token_stream import TokenSource, TokenStream, set_world

        config, options = self.config, self._options
        self._check_nodes(trainer.world_size // trainer.num_devices)
        set_world(trainer.global_rank, trainer.world_size, trainer.num_devices)
        limit = None if options.cache_limit is None else parse_size(options.cache_limit)
        if limit is not None and trainer.global_rank == 0:
            self._warn_about_small_cache(limit)
        sources = [TokenSource(source.tokens.folder, source.sequences, source.remote) for source in self.sources]
        batch_bytes = config.micro_batch_size * config.context_length * 8 * (2 if config.document_mask else 1)
        samples = sum(source.sequences for source in self.sources)
        check_space(samples, trainer.num_devices * config.num_workers, batch_bytes)
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
            shuffle_block_size=self._shuffle_block,
        )
        return TokenLoader(
            stream,
            batch_size=config.micro_batch_size,
            num_workers=config.num_workers,
            persistent_workers=config.num_workers > 0,
            collate_fn=partial(collate, end_of_document=self._end_of_document),
        )

    @property
    def _is_mixture(self) -> bool:
        return len(self.sources) > 1

    @property
    def _shuffle_block(self) -> int:
        """The number of sequences that are shuffled together on a canonical node."""
        if self._is_mixture:
            return MIN_SHUFFLE_BLOCK
        return max(SHUFFLE_BLOCK // self.config.num_canonical_nodes, MIN_SHUFFLE_BLOCK)

    def _check_nodes(self, nodes: int) -> None:
        canonical = self.config.num_canonical_nodes
        if nodes % canonical and canonical % nodes:
            raise RunError(
                f"data.num_canonical_nodes: {canonical} and the {nodes} nodes of this run must divide one another; "
                f"set data.num_canonical_nodes={nodes}"
            )

    def _warn_about_small_cache(self, limit: int) -> None:
        """Warn if the shards of a shuffle block do not fit into the cache."""
        cached = [source for source in self.sources if source.remote]
        # In a mixture, all shards of a block are replaced at once, so the cache holds the shards of two blocks.
        block = self._shuffle_block * (2 if self._is_mixture else 1) if self.config.shuffle else 0
        itemsize = choose_token_dtype(self.tokens.corpus.vocab_size).itemsize
        size = min(sum(len(s.tokens) for s in cached), block) * self.config.context_length * itemsize
        if limit < size:
            log.warning(
                "data.cache_limit: %s bytes are less than the %s bytes that are shuffled together, so shards will be "
                "downloaded several times per epoch; raise the limit to avoid this",
                *(f"{limit:,}", f"{size:,}"),
            )

    def _open_source(self, name: str, stream: StreamConfig) -> TrainingSource:
        folder, remote = stream.path, None
        if stream.remote is not None:
            from stackexp.datamodules.cache_folder import open_node_cache
            from stackexp.datamodules.download import RemoteFolder

            remote = RemoteFolder(stream.remote, self._options.download_timeout_seconds, self._options.download_retries)
            folder = str(open_node_cache(remote, stream.path))
        assert folder is not None
        return TrainingSource(name, open_prepared_set(folder, self.config, is_cache=remote is not None), remote)

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


def parse_size(size: str) -> int:
    """Return the number of bytes in a size such as 200gb (1 kb = 1024 b)."""
    match = re.fullmatch(r"([\d.]+) *([kmgt]?)b?", size.lower())
    assert match, "checked by the config"
    number, unit = match.groups()
    return int(float(number) * SIZE_UNITS[unit])


def open_prepared_set(folder: str | Path, config: DataConfig, is_cache: bool = False) -> TokenSet:
    """Open a prepared set for training. Raises RunError if it is missing, damaged or does not fit the config."""
    tokens = TokenSet(folder, format_prepare_options(config), is_cache)
    corpus = tokens.corpus
    if corpus.context_length != config.context_length:
        raise RunError(
            f"{folder}: prepared with context length {corpus.context_length}, but data.context_length is "
            f"{config.context_length}; set data.context_length={corpus.context_length} or prepare it again"
        )
    tokens.check_vocab_size(config.vocab_size)
    return tokens
