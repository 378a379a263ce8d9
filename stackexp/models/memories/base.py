"""Memories between layers: what fills the one slot of the decoder (`transformer.py`).

To add one, subclass `Memory` in a file of your own together with a dataclass of its options, register both with
`@register("memory", "my_memory", config=MyMemoryConfig)`, name the file under `plugins:` and set
`model.memory.kind=my_memory`. The decoder makes one memory per layer and threads the state.
"""

from typing import Any

from torch import Tensor, nn

from stackexp.config.model import TransformerConfig

State = Any
Trace = dict[str, Tensor]


class Memory(nn.Module):
    """A memory of one layer. Subclasses set the three attributes and give `empty_state` and `forward`.

    `axis` says where the state a layer gets comes from, and which leading dimensions `...` it has:
      depth        the layer before, for the same token; layer 0 gets an empty one. [B, T]: a state per token.
      time         the same layer, at the token before: `forward` scans its T tokens. [B]
      token_major  the layer before; layer 0 gets the last layer's at the token before. [B], and always T = 1.
    A state may be anything made of tensors; it is never changed in place.
    """

    axis: str = "depth"
    site: str = "after_block"  # or after_attention, before_attention: where in a block `forward` is called
    draws: bool = False  # whether `forward` draws random numbers in training
    entropy_weight: float = 0.0  # the loss adds entropy_weight x the mean of trace["entropy"] over the layers

    def __init__(self, config: Any, model: TransformerConfig, layer: int) -> None:
        """`config`: the memory's own section; `model`: the decoder's; `layer`: 0 .. num_layers - 1."""
        super().__init__()

    def empty_state(self, h: Tensor) -> State:
        """The state before the first update, for h [B, T, d]."""
        raise NotImplementedError

    def forward(self, h: Tensor, state: State, probe: bool = False) -> tuple[Tensor, State, Trace]:
        """h [B, T, d] and state -> new h [B, T, d], new state, trace.

        A trace holds scalars: means over tokens and heads. "entropy" keeps its gradient, for the loss; with `probe`
        there may be more, for the curves: push, pop, no_op, occupancy, read_share or names of your own.
        """
        raise NotImplementedError

    def init_weights(self) -> None:
        """Draw the parameters afresh; called when the decoder is built, and again after a meta device."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def set_step(self, step: int) -> None:
        """Called before each training step, 0 .. max_steps - 1: for what changes as training goes on."""

    def flops_per_token(self, context_length: int) -> float:
        """Floating point operations of one forward pass per token: 2 per multiply-add."""
        return 2.0 * sum(parameter.numel() for parameter in self.parameters())
