"""A stack of hidden states over the depth whose top is the residual stream."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config.memory import ResidualStackConfig
from stackexp.config.model import TransformerConfig
from stackexp.errors import RunError
from stackexp.models.memories.base import Memory, Stats, average_actions
from stackexp.models.memories.stack import NUM_ACTIONS, compute_action_spread
from stackexp.stack import widen

ACTION_BIAS = (2.0, -2.0, 0.0)  # of push, pop and no-op: initially, the push probability is 0.87


class ResidualStackOutput(NamedTuple):
    """The results of one update, as float32."""

    read: Tensor  # a [B, T, S]
    action: Tensor | None  # p [B, T, 3]; None with `update: none`


class ResidualStack(Memory):
    """A stack H [S, d] whose top, slot 0, is the residual stream.

    Around each sublayer f:

        input of the sublayer   h = a H
        action                  p = softmax(A x + u), with x = RMSNorm(H[0])
        after it                H' = p_push push(H) + p_pop pop(H) + p_no_op H + b f(h)

    push copies the top: the slots become H[0], H[0], H[1], ..., without the last one. pop removes the top: they become
    H[1], H[2], ..., and the last one is repeated. All slots start as the embedding, so the actions of
    the first memory have no effect and no gradient.

    a and b [S] are sums of a learned constant and of s * tanh(W x), as in dynamic hyper-connections. The constants,
    `read` and `write`, start at 1 for the top and at 0 for the others; `scale` s [2] starts at 0.01, and `maps` W
    [2 S, d] at 0, with the rows of b first. `actions` A [3, d] starts at 0; `action_bias` is u [3].

    `update: none` is the control: it neither pushes nor pops (p_no_op = 1).
    """

    site = "each_sublayer"
    fans = {"maps": "in", "actions": "in"}

    def __init__(self, config: ResidualStackConfig, model: TransformerConfig, layer: int) -> None:
        super().__init__(config, model, layer)
        slots, d = config.num_slots, model.hidden_size
        self.read, self.write = nn.Parameter(torch.empty(slots)), nn.Parameter(torch.empty(slots))
        self.maps, self.scale = nn.Parameter(torch.empty(2 * slots, d)), nn.Parameter(torch.empty(2))
        self.actions = self.action_bias = None
        if config.update == "stack":
            self.actions = nn.Parameter(torch.empty(NUM_ACTIONS, d))
            self.action_bias = nn.Parameter(torch.empty(NUM_ACTIONS))

    def init_weights(self) -> None:
        """Initialize so that each sublayer reads the top and adds its output to it."""
        for weights in (self.read, self.write):
            nn.init.zeros_(weights)
            nn.init.ones_(weights[:1])
        nn.init.zeros_(self.maps)
        nn.init.constant_(self.scale, 0.01)
        if self.actions is not None:
            nn.init.zeros_(self.actions)
            with torch.no_grad():
                self.action_bias.copy_(torch.tensor(ACTION_BIAS))

    def init_identity(self) -> None:
        """Do nothing: without pushes and pops, `init_weights` gives the plain Transformer.

        Raises RunError for `update: stack`, which starts with a pop probability of 0.02.
        """
        if self.actions is not None:
            raise RunError(
                "warm_start.memory: identity does not support residual_stack with update: stack; use default"
            )

    def empty_state(self, h: Tensor) -> Tensor:
        """Return S copies of the embedding [B, T, S, d]."""
        return h.unsqueeze(-2).expand(*h.shape[:-1], self.config.num_slots, -1)

    def forward(
        self, h: Tensor, state: Tensor, previous: Tensor | None = None, probe: bool = False
    ) -> tuple[Tensor, Tensor, Stats]:
        """Move the slots, add the output of the sublayer, and read the next input; see `Memory.forward`."""
        assert previous is not None
        x = self.normalize_top(state)
        logits = None if self.actions is None else F.linear(x, widen(self.actions)) + self.action_bias
        output, slots = self.update(state, x, logits, h - previous)
        stats = {"read_share": compute_lower_share(output.read, slots).mean()} if probe else {}
        if probe and output.action is not None:
            stats |= average_actions(output.action)
            stats["action_spread"] = compute_action_spread(output.action.detach().unsqueeze(-2)).mean()
        with torch.autocast(h.device.type, enabled=False):  # it would round the residual stream to bfloat16
            return (output.read.to(h.dtype).unsqueeze(-2) @ slots).squeeze(-2), slots, stats

    def update(
        self, slots: Tensor, x: Tensor, logits: Tensor | None, added: Tensor
    ) -> tuple[ResidualStackOutput, Tensor]:
        """Move the slots [B, T, S, d], add the output of the sublayer `added` [B, T, d], and return p, a and the slots.

        x [B, T, d] is the normalized top, `logits` [B, T, 3] are A x + u.
        """
        write_map, read_map = widen(self.maps).chunk(2)
        write = self.write + self.scale[0] * F.linear(x, write_map).tanh()
        action = None if logits is None else logits.softmax(-1)
        if action is not None:
            slots = move(slots, action.to(added.dtype))
        slots = slots + write.to(added.dtype).unsqueeze(-1) * added.unsqueeze(-2)
        read = self.read + self.scale[1] * F.linear(self.normalize_top(slots), read_map).tanh()
        return ResidualStackOutput(read, action), slots

    def normalize_top(self, slots: Tensor) -> Tensor:
        """Return x [B, T, d] of slots [B, T, S, d], as float32."""
        return F.rms_norm(widen(slots[..., 0, :]), slots.shape[-1:], eps=self.model.norm_eps)

    def flops_per_token(self, context_length: int) -> float:
        """Count the maps, and per element of the slots 3 multiply-adds for the moves and 2 for writing and reading."""
        maps = self.maps.numel() + (0 if self.actions is None else self.actions.numel())
        return 2.0 * (maps + (2 if self.actions is None else 5) * self.config.num_slots * self.model.hidden_size)


def move(slots: Tensor, action: Tensor) -> Tensor:
    """Return slots [..., S, d] after push, pop and no-op with the probabilities action [..., 3]."""
    pushed = torch.cat([slots[..., :1, :], slots[..., :-1, :]], -2)
    popped = torch.cat([slots[..., 1:, :], slots[..., -1:, :]], -2)
    push, pop, no_op = action.unsqueeze(-2).split(1, -1)
    return push * pushed + pop * popped + no_op * slots


@torch.no_grad()
def compute_lower_share(read: Tensor, slots: Tensor) -> Tensor:
    """Return |a_1 H_1 + ... + a_S-1 H_S-1| / |a H| [B, T]: the share of the lower slots in the input of a sublayer."""
    parts = read.float().unsqueeze(-1) * slots.float()
    return parts[..., 1:, :].sum(-2).norm(dim=-1) / parts.sum(-2).norm(dim=-1)
