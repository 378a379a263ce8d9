"""The sequences a run trains on: where they lie, in what order they come, and the loader that brings them."""

import hashlib
import logging
import math
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from stackexp.config.data import DataConfig, StreamConfig
from stackexp.data.shards import TokenSet, token_dtype
from stackexp.data.tokenizer import get_end_of_text_id
from stackexp.errors import RunError

SHUFFLED = 4_000_000  # sequences over all canonical nodes: the library's default, which fixes the order
log = logging.getLogger(__name__)
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}  # of sizes such as 200gb


@dataclass
class TrainingSource:
    """One prepared set, and how many sequences of it there are in each epoch."""

    name: str
    tokens: TokenSet
    remote: str | None
    sequences: int = 0

    @property
    def fingerprint(self) -> str:
        """What tells the set from every other: the hashes of its shards, which index.json holds, and its tokenizer."""
        index = (self.tokens.folder / "index.json").read_bytes()
        return hashlib.sha256(index + self.tokens.corpus.tokenizer.encode()).hexdigest()


class TrainingSet:
    """Prepared sets, and the order of their sequences: a function of the seed and the config's sources alone.

    In whatever order a config names the sources: here they stand in the order of their names.

    An epoch is a whole number of optimizer steps; see PretrainingData. Raises RunError if a set is missing, does not
    fit the config, has another tokenizer than the first, or if an epoch would hold less than one global batch.
    """

    def __init__(self, config: DataConfig, folder: str | Path | None, seed: int):
        """`folder`: of the only source, where the config names no `streams`."""
        self.config, self.seed = config, seed
        streams = getattr(config, "streams", {}) or {
            "train": StreamConfig(path=folder and str(folder), remote=getattr(config, "remote", None))
        }
        streams = dict(sorted(streams.items()))
        self.sources = [self._open(name, stream) for name, stream in streams.items()]
        self.tokens = self.sources[0].tokens
        self._check_tokenizers()
        self._fill_epoch(list(streams.values()))
        self.end = (
            get_end_of_text_id(self.tokens.load_tokenizer(), self.tokens.folder) if config.document_mask else None
        )

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step over all devices."""
        return self.config.global_batch_tokens // self.config.context_length

    @property
    def names(self) -> list[str]:
        """Of the streams of a mixture, in the order of the numbers that batches have for them."""
        return [source.name for source in self.sources]

    def loader(self, trainer: pl.Trainer) -> DataLoader:
        """This process's share of the sequences, epoch after epoch.

        One source is shuffled by the library's py1e, which spreads the downloads; but a large shard comes late in it,
        so a mixture, whose shares are to hold at any time, takes py1br.
        """
        from stackexp.datamodules.remote import Remote
        from stackexp.datamodules.streaming import Loader, Source, TokenStream, collate, set_world

        config = self.config
        nodes = trainer.world_size // trainer.num_devices
        if nodes % config.num_canonical_nodes and config.num_canonical_nodes % nodes:
            raise RunError(
                f"data.num_canonical_nodes {config.num_canonical_nodes} and the {nodes} nodes of this run must divide "
                f"one another; set data.num_canonical_nodes={nodes}"
            )
        set_world(trainer.global_rank, trainer.world_size, trainer.num_devices)
        limit = getattr(config, "cache_limit", None)
        if limit is not None and trainer.global_rank == 0:
            self._warn_of_thrashing(bytes_of(limit))
        workers = config.num_workers
        stream = TokenStream(
            [
                Source(
                    source.tokens.folder,
                    source.sequences,
                    Remote(source.remote, config.download_timeout_seconds, config.download_retries)
                    if source.remote
                    else None,
                )
                for source in self.sources
            ],
            cache_limit=None if limit is None else bytes_of(limit),
            processes=trainer.num_devices * max(1, workers),
            batch_size=config.micro_batch_size,
            sampling_method="balanced" if config.shuffle else "fixed",
            shuffle=config.shuffle,
            shuffle_algo="py1br" if len(self.sources) > 1 else "py1e",
            shuffle_seed=self.seed,
            num_canonical_nodes=config.num_canonical_nodes,
            shuffle_block_size=self._block,
        )
        return Loader(
            stream,
            batch_size=config.micro_batch_size,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=partial(collate, end_of_document=self.end),
        )

    @property
    def _block(self) -> int:
        """How many sequences are shuffled together on a canonical node. Of a mixture, all are replaced at once."""
        least = 1 << 18
        return least if len(self.sources) > 1 else max(SHUFFLED // self.config.num_canonical_nodes, least)

    def _warn_of_thrashing(self, limit: int) -> None:
        """Sequences are drawn from all shards that are shuffled together: these should fit, of a mixture twice."""
        cached = [source for source in self.sources if source.remote]
        together = self._block * (2 if len(self.sources) > 1 else 1) if self.config.shuffle else 0
        itemsize = token_dtype(self.tokens.corpus.vocab_size).itemsize
        size = min(sum(len(s.tokens) for s in cached), together) * self.config.context_length * itemsize
        if limit < size:
            log.warning(
                "data.cache_limit: %s of the %s bytes that are shuffled together fit, so shards will be downloaded "
                "again and again within an epoch; a limit of more than the latter avoids it",
                *(f"{limit:,}", f"{size:,}"),
            )

    def _open(self, name: str, stream: StreamConfig) -> TrainingSource:
        config, folder = self.config, stream.path
        if stream.remote is not None:
            from stackexp.datamodules.remote import Remote, cache_on_this_node

            remote = Remote(stream.remote, config.download_timeout_seconds, config.download_retries)
            folder = cache_on_this_node(remote, stream.path)
        options = f"--vocab-size {config.vocab_size}"
        return TrainingSource(
            name, open_prepared(folder, config, options, cache=stream.remote is not None), stream.remote
        )

    def _check_tokenizers(self) -> None:
        for source in self.sources[1:]:
            if source.tokens.corpus.tokenizer != self.tokens.corpus.tokenizer:
                raise RunError(
                    f"{source.tokens.folder}: made with another tokenizer than {self.tokens.folder}; prepare it with "
                    f"--tokenizer {self.tokens.folder}/tokenizer.json"
                )

    def _fill_epoch(self, streams: list[StreamConfig]) -> None:
        """Set how many sequences of each source come in an epoch.

        By proportion: as many in all as the sources have; by repeat: so often each. The last global batch is full.
        """
        nodes, step = self.config.num_canonical_nodes, self.sequences_per_step
        if step % nodes:  # the epoch would not be cut evenly: a last batch of another size
            raise RunError(
                f"data.num_canonical_nodes {nodes} does not divide the {step} sequences of a global "
                "batch; set it to the number of nodes, or to 1"
            )
        sizes = [len(source.tokens) for source in self.sources]
        if streams[0].proportion is None:
            shares = [(stream.repeat or 1) * size for stream, size in zip(streams, sizes, strict=True)]
            count = int(sum(shares))
        else:
            shares, count = [stream.proportion for stream in streams], sum(sizes)
        if count < step:
            raise RunError(
                f"{', '.join(str(source.tokens.folder) for source in self.sources)}: {count} sequences do not fill one "
                f"global batch of {step}; set data.global_batch_tokens={count * self.config.context_length} or less, "
                "or add text"
            )
        for source, sequences in zip(self.sources, apportion(count // step * step, shares), strict=True):
            source.sequences = sequences
            if not sequences:
                raise RunError(
                    f"data.streams.{source.name}: its share of an epoch of {count // step * step} sequences is less "
                    "than one; raise it, or leave the stream out"
                )


def apportion(total: int, shares: list[float]) -> list[int]:
    """Whole numbers that are as the shares are, as nearly as can be, and add up to `total`."""
    exact = [total * share / math.fsum(shares) for share in shares]
    whole = [math.floor(number) for number in exact]
    for i in sorted(range(len(shares)), key=lambda i: whole[i] - exact[i])[: total - sum(whole)]:
        whole[i] += 1
    return whole


def bytes_of(size: str) -> int:
    """The number of bytes in a size such as 200gb (1 kb = 1024 b)."""
    number, unit = re.fullmatch(r"([\d.]+) *([kmgt]?)b?", size.lower()).groups()
    return int(float(number) * UNITS[unit])


def open_prepared(folder: str | Path, config: DataConfig, options: str, cache: bool = False) -> TokenSet:
    """A prepared set that fits the config. Raises RunError; what makes the set names `options`."""
    opened = TokenSet(folder, f"{options} --context-length {config.context_length}", cache)
    corpus = opened.corpus
    if corpus.context_length != config.context_length:
        raise RunError(
            f"{folder}: prepared with context length {corpus.context_length}, but data.context_length is "
            f"{config.context_length}; set data.context_length={corpus.context_length} or prepare it again"
        )
    if corpus.vocab_size > config.vocab_size:
        raise RunError(
            f"{folder}: its tokenizer has {corpus.vocab_size} tokens, but data.vocab_size is {config.vocab_size}; "
            f"set data.vocab_size={corpus.vocab_size}"
        )
    return opened
