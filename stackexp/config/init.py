"""Options of the initial weights of a new run."""

from dataclasses import dataclass
from typing import Literal, Optional

from stackexp.config.fields import Errors, option


@dataclass
class InitConfig:
    """The start from given weights. `model.init` is something else: the distribution of random initial weights."""

    weights: Optional[str] = None
    """Start a new run from these weights instead of random ones: a run folder (its last checkpoint), a checkpoint, or
    a safetensors file. Optimizer, schedule and data start from the beginning; a resumed run ignores this option.
    """
    memory: Literal["default", "identity"] = "default"
    """Start of a memory that the weights lack: its own initialization (default), or without effect (identity), so that
    the first loss is that of the model without the memory.
    """
    skip: list[str] = option([])
    """Tensors that are initialized at random although the weights have them, by name or part of it: embedding, head,
    memory, layers.0. An asterisk matches any text, as in layers.*.memory.up."""

    def find_errors(self) -> Errors:
        """Yield the errors that involve several options."""
        if self.skip and self.weights is None:
            yield "skip", "requires init.weights"
