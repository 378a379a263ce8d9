"""Token shards to train on, and the named sets to validate and test on."""

import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from stackexp.config.schema import ShardsConfig, StdlibConfig
from stackexp.data.shards import TokenSet
from stackexp.data.stdlib import Prepared, prepare_stdlib
from stackexp.data.tokenizer import token_bytes
from stackexp.datamodules.perplexity import perplexity_loader
from stackexp.errors import RunError


class PretrainingData(pl.LightningDataModule):
    """Batches of tokens int64 [B, T] with index int64 [B], each sequence's number in its set (-1: padding).

    An epoch of training is a whole number of optimizer steps: the sequences that do not fill the last global batch
    sit out, others in every epoch. Epochs repeat, each in a new order, until the trainer has had enough.
    """

    def __init__(self, config: ShardsConfig | StdlibConfig, seed: int = 0):
        super().__init__()
        self.config, self.seed = config, seed
        self.tokenizer: Tokenizer | None = None
        self.token_bytes: np.ndarray | None = None  # [V]: bytes of text a token stands for
        self.train_set: TokenSet | None = None
        self.sets: dict[str, dict[str, TokenSet]] = {"validate": {}, "test": {}}
        self.eval_limit: int | None = None

    def folders(self) -> dict[str, Any]:
        """Where the prepared sets are: {"fit": folder, "validate": {name: folder}, "test": {name: folder}}."""
        return {"fit": self.config.path, "validate": self.config.validation, "test": self.config.test}

    def set_names(self, stage: str) -> list[str]:
        """Names of the sets of stage "validate" or "test", in the order of their loaders."""
        return list(self.folders()[stage])

    def setup(self, stage: str) -> None:
        """Open and check the sets a stage ("fit", "validate", "test") reads. Raises RunError."""
        folders = self.folders()
        opened: list[TokenSet] = []
        if stage == "fit":
            self.train_set = self._open(folders["fit"], f"--vocab-size {self.config.vocab_size}")
            self._check_epoch(self.train_set)
            opened.append(self.train_set)
        kind = "test" if stage == "test" else "validate"
        tokenizer = f"--tokenizer {folders['fit']}/tokenizer.json"
        self.sets[kind] = {name: self._open(folder, tokenizer) for name, folder in folders[kind].items()}
        opened += self.sets[kind].values()
        if not opened:
            if self.train_set:  # validating at the end of a fit without sets
                return
            name = "validation" if stage == "validate" else stage
            raise RunError(f"no {name} sets; name one with data.{name}.NAME=FOLDER")
        for other in opened[1:]:
            if other.corpus.tokenizer != opened[0].corpus.tokenizer:
                raise RunError(
                    f"{other.folder}: made with another tokenizer than {opened[0].folder}; prepare it with "
                    f"--tokenizer {opened[0].folder}/tokenizer.json"
                )
        self.tokenizer = opened[0].tokenizer()
        self.token_bytes = token_bytes(self.tokenizer, self.config.vocab_size)
        self.eval_limit = self.config.eval_sequences if stage == "fit" else None

    def train_dataloader(self) -> DataLoader:
        from streaming import StreamingDataLoader

        from stackexp.datamodules.streaming import TokenStream, set_world

        config, trainer = self.config, self.trainer
        nodes = trainer.world_size // trainer.num_devices
        if nodes % config.num_canonical_nodes and config.num_canonical_nodes % nodes:
            raise RunError(
                f"data.num_canonical_nodes {config.num_canonical_nodes} and the {nodes} nodes of this run must divide "
                f"one another; set data.num_canonical_nodes={nodes}"
            )
        set_world(trainer.global_rank, trainer.world_size, trainer.num_devices)
        stream = TokenStream(
            local=str(self.train_set.folder),
            batch_size=config.micro_batch_size,
            epoch_size=len(self.train_set) // self.sequences_per_step * self.sequences_per_step,
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

    def val_dataloader(self) -> list[DataLoader]:
        return self._loaders("validate")

    def test_dataloader(self) -> list[DataLoader]:
        return self._loaders("test")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Check token ids while they are still on the CPU: on a GPU the embedding would only say "device assert"."""
        if (largest := int(batch["tokens"].max())) >= self.config.vocab_size:
            raise RunError(
                f"token id {largest} in sequences {batch['index'].tolist()} is not below data.vocab_size "
                f"{self.config.vocab_size}; the shards are damaged, prepare the set again"
            )
        return batch

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step over all devices."""
        return self.config.global_batch_tokens // self.config.context_length

    def _loaders(self, kind: str) -> list[DataLoader]:
        trainer, size = self.trainer, self.config.eval_batch_size
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        return [perplexity_loader(s, size, self.eval_limit, rank, world_size) for s in self.sets[kind].values()]

    def _open(self, folder: str | Path, tokenizer_option: str) -> TokenSet:
        config = self.config
        opened = TokenSet(folder, f"{tokenizer_option} --context-length {config.context_length}")
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

    def _check_epoch(self, tokens: TokenSet) -> None:
        nodes = self.config.num_canonical_nodes
        if self.sequences_per_step % nodes:  # the epoch would not be cut evenly: a last batch of another size
            raise RunError(
                f"data.num_canonical_nodes {nodes} does not divide the {self.sequences_per_step} sequences of a global "
                "batch; set it to the number of nodes, or to 1"
            )
        if len(tokens) < self.sequences_per_step:
            raise RunError(
                f"{tokens.folder}: {len(tokens)} sequences do not fill one global batch of {self.sequences_per_step}; "
                f"set data.global_batch_tokens={len(tokens) * self.config.context_length} or less, or add text"
            )


def _leave_sigterm_to_the_run(_: int) -> None:
    """In a loader's process: Slurm may signal every process of a task, and the run still needs it to save."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class StdlibData(PretrainingData):
    """The Python standard library's source, prepared on first use and looked up once."""

    _prepared: Prepared | None = None

    def prepare_data(self) -> None:
        self._prepared = self._prepared or prepare_stdlib(self.config)

    def folders(self) -> dict[str, Any]:
        self.prepare_data()
        return {"fit": self._prepared.train, "validate": self._prepared.validation, "test": self._prepared.test}
