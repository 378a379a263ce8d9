"""Token shards to train on, and the named sets to validate and test on."""

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
from stackexp.datamodules.training import TrainingSet, open_prepared
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
        self.train_set: TrainingSet | None = None
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
            self.train_set = TrainingSet(self.config, folders["fit"], self.seed)
            opened.append(self.train_set.tokens)
        kind = "test" if stage == "test" else "validate"
        tokenizer = f"--tokenizer {folders['fit']}/tokenizer.json"
        self.sets[kind] = {
            name: open_prepared(folder, self.config, tokenizer) for name, folder in folders[kind].items()
        }
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
        return self.train_set.loader(self.trainer)

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

    def _loaders(self, kind: str) -> list[DataLoader]:
        trainer, size = self.trainer, self.config.eval_batch_size
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        return [perplexity_loader(s, size, self.eval_limit, rank, world_size) for s in self.sets[kind].values()]


class StdlibData(PretrainingData):
    """The Python standard library's source, prepared on first use and looked up once."""

    _prepared: Prepared | None = None

    def prepare_data(self) -> None:
        self._prepared = self._prepared or prepare_stdlib(self.config)

    def folders(self) -> dict[str, Any]:
        self.prepare_data()
        return {"fit": self._prepared.train, "validate": self._prepared.validation, "test": self._prepared.test}
