"""Options of the recurrent baselines."""

from dataclasses import dataclass
from typing import Optional

from stackexp.config.fields import Errors, option
from stackexp.config.registry import register


@dataclass
class RecurrentConfig:
    """Options of all recurrent models: an embedding, `num_layers` layers of `hidden_size`, an output projection."""

    kind: str = ""
    vocab_size: int = "${data.vocab_size}"  # type: ignore[assignment]
    """Number of input token ids."""
    output_vocab_size: Optional[int] = option(None, min=1)
    """Number of output token ids; null takes vocab_size."""
    hidden_size: int = option(64, min=1, max=2**20)
    """Width of the hidden state."""
    num_layers: int = option(5, min=1, max=4096)
    """Number of layers."""


@register("model", "lstm", builds="stackexp.models.recurrent:LSTM")
@dataclass
class LSTMConfig(RecurrentConfig):
    """A multi-layer LSTM."""

    kind: str = "lstm"


@register("model", "stack_rnn", builds="stackexp.models.recurrent:StackRNN")
@dataclass
class StackRNNConfig(RecurrentConfig):
    """A tanh RNN that reads the top of a differentiable stack (Joulin & Mikolov 2015)."""

    kind: str = "stack_rnn"
    slot_size: int = option(8, min=1)
    """Size of an element of the stack."""
    num_slots: int = option(64, min=1, max=2**20)
    """Number of slots of the stack; independent of the parameter shapes."""
    eval_num_slots: Optional[int] = option(None, min=1, max=2**20, affects="evaluation", changes_scores=True)
    """Slots in evaluations; null takes num_slots."""

    def find_errors(self) -> Errors:
        """Yield the errors that involve several options."""
        if self.eval_num_slots is not None and self.eval_num_slots < self.num_slots:
            yield "eval_num_slots", f"must not be smaller than num_slots {self.num_slots}"
