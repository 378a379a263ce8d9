"""Options of the recurrent baselines."""

from dataclasses import dataclass
from typing import Optional

from stackexp.config.fields import Problems, at_least
from stackexp.config.registry import register


@dataclass
class RecurrentConfig:
    """What the recurrent models share: an embedding, `num_layers` layers of `hidden_size`, an output projection."""

    kind: str = ""
    vocab_size: int = "${data.vocab_size}"  # type: ignore[assignment]
    output_vocab_size: Optional[int] = at_least(1, None)  # None: vocab_size
    hidden_size: int = at_least(1, 64)
    num_layers: int = at_least(1, 5)


@register("model", "lstm", builds="stackexp.models.recurrent:LSTM")
@dataclass
class LSTMConfig(RecurrentConfig):
    kind: str = "lstm"


@register("model", "stack_rnn", builds="stackexp.models.recurrent:StackRNN")
@dataclass
class StackRNNConfig(RecurrentConfig):
    """Joulin & Mikolov 2015: a tanh RNN that reads the top of a soft stack, and pushes, pops or leaves it."""

    kind: str = "stack_rnn"
    slot_size: int = at_least(1, 8)
    num_slots: int = at_least(1, 64)
    eval_num_slots: Optional[int] = at_least(1, None)  # None: num_slots; it shapes no parameter

    def problems(self) -> Problems:
        if self.eval_num_slots is not None and self.eval_num_slots < self.num_slots:
            yield "eval_num_slots", f"must not be smaller than num_slots {self.num_slots}"
