"""Two-digit problems as text: training problems sampled at each step, and the held-out ones as evaluation set."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from stackexp.config.data import ARITHMETIC_SYMBOLS, OPERATORS, PROBLEM_LENGTH, ArithmeticConfig
from stackexp.datamodules.base import ExperimentData, RankBatches, SetBatches, StepBatches
from stackexp.errors import ConfigError, SetNameError

HELD_OUT = "held-out"


@dataclass(frozen=True)
class ProblemSet:
    """The held-out problems of a config."""

    config: ArithmeticConfig
    name: str = HELD_OUT

    @property
    def identity(self) -> str:
        """A hash of all that determines the problems."""
        return hashlib.sha256(self.problems.tobytes()).hexdigest()

    @cached_property
    def problems(self) -> np.ndarray:
        """The token ids of all problems [N, context_length + 1]."""
        return split_problems(self.config)[1]


class ArithmeticData(ExperimentData):
    """Batches of problems: tokens int64 [B, T], without the last symbol; targets int64 [B, O], the whole answers.

    The last O of the T positions predict the answer. index int64 [B] are the numbers of the problems (-1: padding).
    """

    def __init__(self, config: ArithmeticConfig, seed: int = 0):
        super().__init__()
        self.config, self.seed = config, seed
        self.tokenizer = build_tokenizer()

    def select_sets(self, stage: str, names: list[str]) -> None:
        """Accept the only set. Raises SetNameError for other names."""
        if names != [HELD_OUT]:
            raise SetNameError(f"no set {','.join(names)!r}; the only set of arithmetic is {HELD_OUT}")

    def sets(self, stage: str) -> list[ProblemSet]:
        """Return the held-out problems, unless they are skipped. Raises ConfigError for the stage "test"."""
        if stage == "test":
            raise ConfigError("test: arithmetic has no test set; use `validate`, which scores the held-out problems")
        return [] if HELD_OUT in self.skipped_sets else [ProblemSet(self.config)]

    def sample_training_batch(self, step: int) -> dict[str, Any]:
        """Return this rank's rows of the batch at an optimizer step >= 1; they depend only on seed and step."""
        rank, world_size = self.rank_and_world_size
        numbers = np.random.default_rng([self.seed, step]).integers(len(self._problems), size=self.config.batch_size)
        return build_problem_batch(self._problems, numbers[rank::world_size], self.config.answer_length)

    @cached_property
    def _problems(self) -> np.ndarray:
        return split_problems(self.config)[0]

    def train_dataloader(self) -> StepBatches:
        """Return an endless loader that starts after the trainer's current step."""
        return StepBatches(self, self.sample_training_batch)

    def build_eval_loader(self, dataset: ProblemSet, rank: int, world_size: int) -> SetBatches:
        """Return a loader of one rank's share of a set, or of `eval_limit` evenly spread problems."""
        problems = dataset.problems
        if self.eval_limit is not None:
            problems = problems[np.linspace(0, len(problems) - 1, min(self.eval_limit, len(problems))).astype(int)]
        batches = RankBatches(len(problems), self.config.eval_batch_size, rank, world_size)
        return SetBatches(lambda: problems, self._build_evaluation_batch, batches)

    def _build_evaluation_batch(self, problems: np.ndarray, index: np.ndarray) -> dict[str, Any]:
        return build_problem_batch(problems, index, self.config.answer_length)


def build_problem_batch(problems: np.ndarray, index: np.ndarray, answer_length: int) -> dict[str, Any]:
    """Return tokens [B, T], targets [B, O] and index [B] of the problems with these numbers."""
    rows = torch.from_numpy(problems[index])
    return {"tokens": rows[:, :-1], "targets": rows[:, -answer_length:], "index": torch.from_numpy(index)}


def split_problems(config: ArithmeticConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the training problems and the held-out ones as token ids [N, context_length + 1]."""
    problems = encode_problems(config.operation, config.answer_length, config.reversed_answers)
    is_held_out = select_held_out(config.held_out, config.split_seed)
    return problems[~is_held_out], problems[is_held_out]


def select_held_out(fraction: float, split_seed: int) -> np.ndarray:
    """Return a mask [8100] of the held-out problems. 37+58 and 58+37 are on the same side of the split."""
    a, b = np.triu_indices(90)
    order = np.random.default_rng(split_seed).permutation(len(a))
    a, b = a[order], b[order]
    is_chosen = np.cumsum(np.where(a == b, 1, 2)) <= min(max(2, round(fraction * 8100)), 8098)
    mask = np.zeros((90, 90), bool)
    mask[a[is_chosen], b[is_chosen]] = mask[b[is_chosen], a[is_chosen]] = True
    return mask.ravel()


def encode_problems(operation: str, answer_length: int, is_reversed: bool) -> np.ndarray:
    """Return the token ids of all problems, in the order of their numbers."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    results = [a + b if operation == "addition" else a * b for a, b in pairs]
    answers = [str(result)[::-1] if is_reversed else str(result) for result in results]
    texts = [f"{a}{OPERATORS[operation]}{b}={answer}" for (a, b), answer in zip(pairs, answers, strict=True)]
    end, length = len(ARITHMETIC_SYMBOLS) - 1, PROBLEM_LENGTH + answer_length
    ids = [[ARITHMETIC_SYMBOLS.index(symbol) for symbol in text] for text in texts]
    return np.array([row + [end] * (length - len(row)) for row in ids])


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer with one token for each symbol."""
    ids, end = {symbol: i for i, symbol in enumerate(ARITHMETIC_SYMBOLS)}, ARITHMETIC_SYMBOLS[-1]
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=end))
    tokenizer.add_special_tokens([end])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def check_symbols(option: str, text: str) -> None:
    """Raise ConfigError for a symbol that arithmetic does not have. `option` names where the text was given."""
    symbols = ARITHMETIC_SYMBOLS[:-1]  # the last one ends an answer; a text cannot contain it
    unknown = next((symbol for symbol in text if symbol not in symbols), None)
    if unknown:
        known = " ".join(symbols).replace(" ".join("0123456789"), "0-9")
        raise ConfigError(f"{option}: the model has no symbol {unknown!r}; use {known}")
