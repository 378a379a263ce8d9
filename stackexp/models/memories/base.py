"""The interface of memories between layers.

To add a memory, subclass `Memory` in a file of your own, next to a dataclass with its options. Register both with
`@register("memory", "my_memory", config=MyMemoryConfig)`, list the file under `plugins:` and set
`model.memory.kind=my_memory`. The decoder builds one memory per layer and carries the state.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from stackexp.config.model import TransformerConfig
from stackexp.errors import RunError

CONTRACT = "see Memory.forward in stackexp/models/memories/base.py"
AXES = ("depth", "time", "token_major")
SITES = ("after_block", "after_attention", "before_attention", "each_sublayer")
EACH_SUBLAYER = ("after_attention", "after_block")  # the sites of `site = "each_sublayer"`

Fan = Literal["in", "out", "both", "none", "vectors"]
"""The sides of a weight [..., outputs, inputs] that grow with the hidden size d.

in       the inputs: a map from hidden states
out      the outputs: a map to hidden states
both     a map between hidden states
none     neither
vectors  not a map, but separate vectors [..., inputs] whose size grows with d, or one such vector [inputs]
"""

State = Any
Stats = dict[str, Tensor]
"""Scalar statistics by name: means over tokens and heads."""


class Memory(nn.Module):
    """The memory at one site of a block. Subclasses implement `empty_state` and `forward`.

    `axis` determines where the input state comes from, and the leading dimensions of the state:
      depth        [B, T]: the same token at the previous site, in this block or the one below; the first site of the
                   model starts empty.
      time         [B]: the previous token at the same site; `forward` scans over its T tokens.
      token_major  [B]: the previous site; the first one continues from the last one of the previous token. T is 1.
    A state is any structure of tensors. It is never modified in place.

    `site` is where the block calls `forward`: before_attention, after_attention or after_block. With each_sublayer, the
    block has two memories with separate parameters, after_attention and after_block, and `site` names the memory's own.
    """

    axis: str = "depth"
    site: str = "after_block"
    no_decay: tuple[str, ...] = ()  # matrices without weight decay; vectors and scalars never decay
    fans: dict[str, Fan] = {}  # of each parameter with two or more dimensions; muP and Muon require it
    uses_random_numbers: bool = False  # whether `forward` draws random numbers in training
    reports: dict[str, str] = {}  # name -> meaning of the values that `forward` gives to `report`
    reporter: Callable[[dict[str, Tensor]], None] | None = None  # set by `inspect`
    entropy_weight: float = 0.0  # the loss includes entropy_weight * mean of stats["entropy"] over memories

    def __init__(self, config: Any, model: TransformerConfig, layer: int) -> None:
        """Store its own options, those of the model, and its layer, 0 <= `layer` < num_layers."""
        super().__init__()
        self.config, self.model, self.layer = config, model, layer

    def empty_state(self, h: Tensor) -> State:
        """Return the initial state for h [B, T, d], the input of the block: in layer 0, the embedding."""
        raise NotImplementedError

    def forward(
        self, h: Tensor, state: State, previous: Tensor | None = None, probe: bool = False
    ) -> tuple[Tensor, State, Stats]:
        """Update the state with h [B, T, d]; return the new h [B, T, d], the new state and statistics.

        `previous` [B, T, d] is the hidden state before the sublayers that end at this site, so h - previous is their
        output. At before_attention, `previous` is h.

        Every parameter must get a gradient in the first training step. The statistic "entropy" must keep its gradient,
        because the loss includes it. With `probe`, return more statistics to be logged: push, pop, no_op, occupancy,
        read_share, or names of your own.
        """
        raise NotImplementedError

    def init_weights(self) -> None:
        """Initialize the parameters; called when the decoder is built, and after it moves from the meta device."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def report(self, **values: Tensor) -> None:
        """Pass values of each token [B, T], or of each token and head [B, T, H], to `inspect`; outside it, do nothing.

        Call it in `forward` with the names that `reports` lists, such as push, read and occupancy.
        """
        if self.reporter is not None:
            self.reporter(values)

    def init_identity(self) -> None:
        """Change the initialized parameters so that `forward` returns h, for `warm_start.memory: identity`.

        Some parameter must have a nonzero gradient, so that the memory learns. Raises RunError if there is no such
        start.
        """
        name = type(self).__name__
        raise RunError(
            f"warm_start.memory: identity is not supported by {name}; use default, or define {name}.init_identity"
        )

    def set_step(self, step: int) -> None:
        """Prepare for training step 0 <= `step` < max_steps; for memories that follow a schedule."""

    def flops_per_token(self, context_length: int) -> float:
        """Return the FLOPs of one forward pass per token; a multiply-add counts 2."""
        return 2.0 * sum(parameter.numel() for parameter in self.parameters())


def average_actions(action: Tensor) -> Stats:
    """Return the detached means of push, pop and no-op over all but the last dimension of action [..., 3]."""
    return dict(zip(("push", "pop", "no_op"), action.detach().flatten(0, -2).mean(0).unbind(), strict=True))


def compute_read_share(read: Tensor, h: Tensor) -> Tensor:
    """Return the detached mean over tokens of |read| / |h|, both [B, T, d]."""
    return (read.detach().float().norm(dim=-1) / h.detach().float().norm(dim=-1)).mean()


class EmbeddingSkip(Memory):
    """A memory that uses the embedding in every layer. Subclasses must start as the plain Transformer."""

    def init_identity(self) -> None:
        """Do nothing: `init_weights` gives the plain Transformer."""

    def empty_state(self, h: Tensor) -> State:
        """Return the embedding."""
        return h


def check_interface(memory: Memory) -> None:
    """Raise RunError for an unknown axis or site, both unsupported together, or a missing argument of `forward`."""
    name = type(memory).__name__
    for key, choices in (("axis", AXES), ("site", SITES)):
        if (found := getattr(memory, key)) not in choices:
            raise RunError(f"{name}.{key}: expected one of {', '.join(choices)}, found {found!r}")
    if missing := {"previous", "probe"} - inspect.signature(memory.forward).parameters.keys():
        raise RunError(f"{name}.forward: has no argument {', '.join(sorted(missing))}; {CONTRACT}")
    if memory.site == "each_sublayer" and memory.axis == "time":
        raise RunError(f"{name}: site each_sublayer requires axis depth or token_major, found time")


def apply_memory(memory: Memory, h: Tensor, state: State, previous: Tensor, probe: bool) -> tuple[Tensor, State, Stats]:
    """Call a memory. Raises RunError if it does not return what `Memory.forward` specifies."""
    output = memory(h, state, previous=previous, probe=probe)
    if not isinstance(output, tuple):
        found = type(output).__name__
    elif len(output) != 3:
        found = f"{len(output)} values"
    elif not isinstance(output[0], Tensor) or output[0].shape != h.shape:
        new_h = list(output[0].shape) if isinstance(output[0], Tensor) else type(output[0]).__name__
        found = f"h {new_h} instead of {list(h.shape)}"
    elif not isinstance(output[2], dict) or not all(isinstance(value, Tensor) for value in output[2].values()):
        found = f"the statistics {output[2]!r:.60}, not a dict of tensors"
    else:
        new_h, state, stats = output
        return new_h, state, {key: value.clone() for key, value in stats.items()}  # FSDP frees a weight that one views
    name = type(memory).__name__
    raise RunError(f"{name}.forward: expected (h [B, T, d], state, statistics), found {found}; {CONTRACT}")
