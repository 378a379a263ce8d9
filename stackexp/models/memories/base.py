"""The interface of memories between layers.

To add a memory, subclass `Memory` in a file of your own, next to a dataclass with its options. Register both with
`@register("memory", "my_memory", config=MyMemoryConfig)`, list the file under `plugins:` and set
`model.memory.kind=my_memory`. The decoder builds one memory per layer and carries the state.
"""

from typing import Any

from torch import Tensor, nn

from stackexp.config.model import TransformerConfig

State = Any
Stats = dict[str, Tensor]
"""Scalar statistics by name: means over tokens and heads."""


class Memory(nn.Module):
    """The memory of one layer. Subclasses implement `empty_state` and `forward`.

    `axis` determines where a layer's input state comes from, and the leading dimensions of the state:
      depth        [B, T]: the same token in the previous layer; layer 0 starts empty.
      time         [B]: the previous token in the same layer; `forward` scans over its T tokens.
      token_major  [B]: the previous layer; layer 0 continues from the last layer of the previous token. T is 1.
    A state is any structure of tensors. It is never modified in place.
    """

    axis: str = "depth"
    site: str = "after_block"  # or after_attention, before_attention: where the block calls `forward`
    uses_random_numbers: bool = False  # whether `forward` draws random numbers in training
    entropy_weight: float = 0.0  # the loss includes entropy_weight * mean of stats["entropy"] over layers

    def __init__(self, config: Any, model: TransformerConfig, layer: int) -> None:
        """Build the memory of layer 0 <= `layer` < num_layers from its own options and those of the model."""
        super().__init__()

    def empty_state(self, h: Tensor) -> State:
        """Return the initial state for h [B, T, d]."""
        raise NotImplementedError

    def forward(self, h: Tensor, state: State, probe: bool = False) -> tuple[Tensor, State, Stats]:
        """Update the state with h [B, T, d]; return the new h [B, T, d], the new state and statistics.

        The statistic "entropy" keeps its gradient, for the loss. With `probe`, there may be more for the logged curves:
        push, pop, no_op, occupancy, read_share or names of your own.
        """
        raise NotImplementedError

    def init_weights(self) -> None:
        """Initialize the parameters; called when the decoder is built, and after moving from a meta device."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def set_step(self, step: int) -> None:
        """Prepare for training step 0 <= `step` < max_steps; for memories that follow a schedule."""

    def flops_per_token(self, context_length: int) -> float:
        """Return the FLOPs of one forward pass per token; a multiply-add counts 2."""
        return 2.0 * sum(parameter.numel() for parameter in self.parameters())
