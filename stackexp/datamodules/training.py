"""The sequences a run trains on: where they lie, in what order they come, and the loader that brings them."""

import signal
from pathlib import Path

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from stackexp.config.schema import DataConfig
from stackexp.data.shards import TokenSet
from stackexp.errors import RunError


class TrainingSet:
    """A prepared set, and its order. An epoch is a whole number of optimizer steps; see PretrainingData.

    Raises RunError if it is missing, does not fit the config, or holds less than one global batch.
    """

    def __init__(self, config: DataConfig, folder: str | Path, seed: int):
        self.config, self.seed = config, seed
        self.tokens = open_prepared(folder, config, f"--vocab-size {config.vocab_size}")
        self._check_epoch()

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step over all devices."""
        return self.config.global_batch_tokens // self.config.context_length

    def loader(self, trainer: pl.Trainer) -> DataLoader:
        """This process's share of the sequences, epoch after epoch."""
        from streaming import StreamingDataLoader

        from stackexp.datamodules.streaming import TokenStream, set_world

        config = self.config
        nodes = trainer.world_size // trainer.num_devices
        if nodes % config.num_canonical_nodes and config.num_canonical_nodes % nodes:
            raise RunError(
                f"data.num_canonical_nodes {config.num_canonical_nodes} and the {nodes} nodes of this run must divide "
                f"one another; set data.num_canonical_nodes={nodes}"
            )
        set_world(trainer.global_rank, trainer.world_size, trainer.num_devices)
        stream = TokenStream(
            local=str(self.tokens.folder),
            batch_size=config.micro_batch_size,
            epoch_size=len(self.tokens) // self.sequences_per_step * self.sequences_per_step,
            sampling_method="balanced" if config.shuffle else "fixed",
            shuffle=config.shuffle,
            shuffle_seed=self.seed,
            num_canonical_nodes=config.num_canonical_nodes,
        )
        workers = config.num_workers
        return StreamingDataLoader(
            stream,
            batch_size=config.micro_batch_size,
            num_workers=workers,
            persistent_workers=workers > 0,
            worker_init_fn=_leave_sigterm_to_the_run,
        )

    def _check_epoch(self) -> None:
        nodes, count = self.config.num_canonical_nodes, len(self.tokens)
        if self.sequences_per_step % nodes:  # the epoch would not be cut evenly: a last batch of another size
            raise RunError(
                f"data.num_canonical_nodes {nodes} does not divide the {self.sequences_per_step} sequences of a global "
                "batch; set it to the number of nodes, or to 1"
            )
        if count < self.sequences_per_step:
            raise RunError(
                f"{self.tokens.folder}: {count} sequences do not fill one global batch of {self.sequences_per_step}; "
                f"set data.global_batch_tokens={count * self.config.context_length} or less, or add text"
            )


def open_prepared(folder: str | Path, config: DataConfig, options: str) -> TokenSet:
    """A prepared set that fits the config. Raises RunError; what makes the set names `options`."""
    opened = TokenSet(folder, f"{options} --context-length {config.context_length}")
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


def _leave_sigterm_to_the_run(_: int) -> None:
    """In a loader's process: Slurm may signal every process of a task, and the run still needs it to save."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
