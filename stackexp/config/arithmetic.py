"""Options of arithmetic datasets: two-digit problems as text, such as 37+58=95."""

from dataclasses import dataclass
from typing import ClassVar

from stackexp.config.experiment import ExperimentConfig
from stackexp.config.fields import Errors, option
from stackexp.config.registry import register

SYMBOLS = (*"0123456789+*=", "<|endoftext|>")
"""The symbol of each token id. The last one ends an answer and fills it up to the longest."""
OPERATORS = {"addition": "+", "multiplication": "*"}
ANSWER_LENGTHS = {"addition": 3, "multiplication": 4}
"""Digits of the largest sum and of the largest product of two-digit numbers."""
PROBLEM_LENGTH = len("37+58=")


@register("data", "arithmetic", builds="stackexp.datamodules.arithmetic:ArithmeticData")
@dataclass
class ArithmeticConfig:
    """All 8,100 problems with two numbers from 10 to 99. Training samples those that are not held out.

    The text is `37+58=95`. Only the answer is scored, in training too.
    """

    objective: ClassVar[str] = "arithmetic"
    lengths_vary: ClassVar[bool] = False
    vocab_size: ClassVar[int] = len(SYMBOLS)

    kind: str = "arithmetic"
    operation: str = option("addition", choices=tuple(OPERATORS), changes_scores=True)
    """The operation of all problems."""
    held_out: float = option(0.1, above=0, below=1, changes_scores=True)
    """Share of the problems that is never trained on."""
    split_seed: int = option(0, min=0, max=2**32 - 1, changes_scores=True)
    """Seed that chooses the held-out problems."""
    reversed_answers: bool = option(False, changes_scores=True)
    """Write answers least significant digit first, as in 37+58=59."""
    batch_size: int = option(256, min=1)
    """Problems per optimizer step over all devices."""
    eval_batch_size: int = option(512, min=1, affects="execution")
    """Problems per device and forward pass in an evaluation."""

    def find_experiment_errors(self, config: ExperimentConfig, is_training: bool) -> Errors:
        """Yield the errors that involve other sections; keys are full keys."""
        if not getattr(config.model, "causal", True):
            yield "model.causal", "arithmetic requires model.causal: true"
        if self.batch_size % config.trainer.world_size:
            multiple = f"trainer.devices * trainer.num_nodes = {config.trainer.world_size}"
            yield "data.batch_size", f"{self.batch_size} is not a multiple of {multiple}"

    @property
    def answer_length(self) -> int:
        """Return the symbols of an answer."""
        return ANSWER_LENGTHS[self.operation]

    @property
    def context_length(self) -> int:
        """Return the tokens that the model reads: the problem and all but the last symbol of its answer."""
        return PROBLEM_LENGTH + self.answer_length - 1

    @property
    def global_batch_tokens(self) -> int:
        """Return the tokens per optimizer step."""
        return self.batch_size * self.context_length
