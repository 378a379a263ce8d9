"""Token shards to train on, and the named sets to validate and test on."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from stackexp.config.data import ShardsConfig, StdlibConfig
from stackexp.config.suggestions import nearest
from stackexp.data import olmo
from stackexp.data.evaluation_sets import EvaluationSet, KnownTokenizer, find_sets, open_set
from stackexp.data.stdlib import StdlibSets, prepare_stdlib
from stackexp.data.tokenizer import count_token_bytes
from stackexp.datamodules.perplexity import perplexity_loader
from stackexp.datamodules.training import TrainingSet
from stackexp.errors import ConfigError, RunError

OPTION = {"validate": "data.validation", "test": "data.test"}


class PretrainingData(pl.LightningDataModule):
    """Batches of tokens int64 [B, T] with index int64 [B], each sequence's number in its set (-1: padding).

    An epoch of training is a whole number of optimizer steps: the sequences that do not fill the last global batch
    sit out, others in every epoch. Epochs repeat, each in a new order, until the trainer has had enough.

    Sets to validate and test on are chunks of tokens, with their lengths int64 [B]; see data/evaluation_sets.py.
    """

    def __init__(self, config: ShardsConfig | StdlibConfig, seed: int = 0):
        super().__init__()
        self.config, self.seed = config, seed
        self.tokenizer: Tokenizer | None = None  # unknown where there are token ids alone
        self.token_bytes: np.ndarray | None = None  # [V]: bytes of text a token stands for
        self.tokenizer_file: Path | None = None  # a run's: it goes before what lies beside the sets
        self.train_set: TrainingSet | None = None
        self.eval_limit: int | None = None
        self.leave_out: frozenset[str] = frozenset()  # sets whose figures are known already
        self._chosen: dict[str, dict[str, Path]] = {}  # of a stage, instead of the config's
        self._expanded: dict[str, dict[str, Path]] = {}
        self._opened: dict[tuple[str, Path], EvaluationSet] = {}

    def folders(self) -> dict[str, Any]:
        """Where the sets are: {"fit": folder, "validate": {name: place}, "test": {name: place}}."""
        return {"fit": self.config.path, "validate": self.config.validation, "test": self.config.test}

    def choose(self, stage: str, wanted: list[str]) -> None:
        """Evaluate on these instead: names of the config's sets, v2 or v3, one set of those as v2/4chan, NAME=PLACE.

        Raises ConfigError for a name that is none of these, or comes twice.
        """
        named = {} if all("=" in item for item in wanted) else self.folders()[stage]
        places = {version: olmo.DEFAULT_FOLDER / version for version in olmo.NAMES} | named
        chosen: dict[str, Path] = {}
        for item in wanted:
            name, _, place = item.partition("=")
            if not name or (not place and "=" in item):
                raise ConfigError(f"--sets: expected names and NAME=PATH, parted by single commas, found {item!r}")
            if place:
                found = find_sets(name, Path(place))
            elif name in places:
                found = find_sets(name, Path(places[name]))
            else:
                group = name.split("/")[0]
                has_group = group in places and group != name
                members = find_sets(group, Path(places[group]), warn_missing=False) if has_group else {}
                if name not in members:
                    hint = nearest(name, [*places, *members]) or f"; there are {', '.join([*places, *members])}"
                    path = f"NAME={name}" if Path(name).exists() else "NAME=PATH"
                    raise ConfigError(f"--sets: no set {name!r} in {OPTION[stage]}{hint} (or give {path})")
                found = {name: members[name]}
            if twice := chosen.keys() & found.keys():
                raise ConfigError(f"--sets: {min(twice)} comes twice; give every set once, or other names")
            chosen |= found
        self._chosen[stage] = chosen

    def places(self, stage: str) -> dict[str, Path]:
        """Names of the sets of stage "validate" or "test" and where they lie, in the order of their loaders."""
        if stage not in self._expanded:
            found = self._chosen.get(stage)
            if found is None:
                found = {}
                for name, place in self.folders()[stage].items():
                    found |= find_sets(name, Path(place))
            self._expanded[stage] = found
        return {name: place for name, place in self._expanded[stage].items() if name not in self.leave_out}

    def set_names(self, stage: str) -> list[str]:
        """Names of the sets of stage "validate" or "test", in the order of their loaders."""
        return list(self.places(stage))

    def sets(self, stage: str) -> list[EvaluationSet]:
        """The opened sets of stage "validate" or "test", in the order of their loaders."""
        known = KnownTokenizer(self.tokenizer, self._tokenizer_path) if self.tokenizer else None
        places = self.places(stage)
        for item in places.items():
            if item not in self._opened:
                self._opened[item] = open_set(*item, self.config, known)
        return [self._opened[item] for item in places.items()]

    def setup(self, stage: str) -> None:
        """Open and check the sets a stage ("fit", "validate", "test") reads. Raises RunError."""
        folders, kind = self.folders(), "test" if stage == "test" else "validate"
        if stage == "fit":
            self.train_set = TrainingSet(self.config, folders["fit"], self.seed)
        if not (self.places(kind) or self.leave_out or self.train_set):
            name = "validation" if stage == "validate" else stage
            raise RunError(f"no {name} sets; name one with data.{name}.NAME=PLACE")
        self._find_tokenizer(folders["fit"], kind)
        self.eval_limit = self.config.eval_sequences if stage == "fit" else None
        self.sets(kind)

    def _find_tokenizer(self, train: str | Path | None, kind: str) -> None:
        """The model's: of the training set or the run, else the first that lies in the folder of a set."""
        if self.tokenizer is not None:
            return
        if self.train_set:
            self.tokenizer, self._tokenizer_path = self.train_set.tokens.load_tokenizer(), self.train_set.tokens.folder
            self._tokenizer_path /= "tokenizer.json"
        else:
            files = [Path(folder, "tokenizer.json") for folder in (train, *self.places(kind).values()) if folder]
            files = ([self.tokenizer_file] if self.tokenizer_file else []) + files
            if (found := next((file for file in files if file.is_file()), None)) is None:
                return
            self.tokenizer, self._tokenizer_path = KnownTokenizer.read(found).tokenizer, found
        self.token_bytes = count_token_bytes(self.tokenizer, self.config.vocab_size)

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
        return [perplexity_loader(s.chunks, size, self.eval_limit, rank, world_size) for s in self.sets(kind)]


class StdlibData(PretrainingData):
    """The Python standard library's source, prepared on first use and looked up once."""

    _prepared: StdlibSets | None = None

    def prepare_data(self) -> None:
        self._prepared = self._prepared or prepare_stdlib(self.config)

    def folders(self) -> dict[str, Any]:
        self.prepare_data()
        return {"fit": self._prepared.train, "validate": self._prepared.validation, "test": self._prepared.test}
