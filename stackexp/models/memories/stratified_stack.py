"""The stratified stack (Grefenstette et al. 2015): a stack over the tokens whose elements have strengths."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from stackexp.config.memory import StratifiedStackConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.layers import Linear, init_weight_
from stackexp.models.memories.base import Memory, Stats, compute_read_share
from stackexp.stack import widen


class StratifiedStackState(NamedTuple):
    """The state after P tokens."""

    sums: Tensor  # [B, H, P]: the strength of each element and all above it
    values: Tensor  # [B, H, P, D]


class StratifiedStack(Memory):
    """h_t + W_up r_t: each head pops the strength u_t, pushes v_t with strength d_t, and reads the top strength of 1.

    v_t = tanh(W_v h_t), and d_t and u_t are sigmoids of a linear map with bias. With the strengths s_t [t+1]:

        s_t[i] = max(0, s_{t-1}[i] - max(0, u_t - sum_{i < j < t} s_{t-1}[j])) for i < t,    s_t[t] = d_t
        r_t = sum_i min(s_t[i], max(0, 1 - sum_{j > i} s_t[j])) v_i

    The paper's controller is an RNN that receives r_{t-1}; here it is the Transformer, whose next layer receives r_t.
    A forward pass takes O(T^2) memory per sequence, head and layer.
    """

    axis = "time"
    fans = {"values.weight": "in", "strengths.weight": "in", "up.weight": "out"}

    def __init__(self, config: StratifiedStackConfig, model: TransformerConfig, layer: int) -> None:
        super().__init__(config, model, layer)
        self.values = Linear(model.hidden_size, config.num_heads * config.head_dim)
        self.strengths = Linear(model.hidden_size, 2 * config.num_heads, bias=True)  # push, pop
        self.up = Linear(config.num_heads * config.head_dim, model.hidden_size)

    def init_weights(self) -> None:
        """Initialize the matrices as the decoder's weights and the bias to 0."""
        for linear in (self.values, self.strengths):
            init_weight_(linear.weight, self.model)
        init_weight_(self.up.weight, self.model, output_of_layer=self.layer)
        torch.nn.init.zeros_(self.strengths.bias)

    def empty_state(self, h: Tensor) -> StratifiedStackState:
        """Return the state before the first token of h [B, T, d]; see `Memory.empty_state`."""
        size = (len(h), self.config.num_heads, 0)
        return StratifiedStackState(widen(h).new_zeros(size), widen(h).new_zeros(*size, self.config.head_dim))

    def forward(
        self, h: Tensor, state: StratifiedStackState, previous: Tensor | None = None, probe: bool = False
    ) -> tuple[Tensor, StratifiedStackState, Stats]:
        """Update with h [B, T, d], then read; see `Memory.forward`. Strengths and values are at least float32."""
        values = widen(self.values(h)).tanh().unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)
        push, pop = widen(self.strengths(h)).sigmoid().mT.chunk(2, 1)  # [B, H, T]
        with torch.autocast(h.device.type, enabled=False):
            weights, sums = compute_weights(push, pop, state.sums)
            values = torch.cat([state.values, values], 2)
            read = (weights @ values).transpose(1, 2).flatten(2)  # [B, T, H * D]
        added = self.up(read.to(h.dtype))
        stats = {}
        if probe:
            stats = {
                "push": push.detach().mean(),
                "pop": pop.detach().mean(),
                "read_share": compute_read_share(added, h),
            }
        return h + added, StratifiedStackState(sums, values), stats

    def flops_per_token(self, context_length: int) -> float:
        """Count the projections and the dense read of T vectors."""
        read = context_length * self.config.num_heads * self.config.head_dim
        return 2.0 * (sum(p.numel() for p in self.parameters() if p.ndim == 2) + read)


def compute_weights(push: Tensor, pop: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the read weights of all tokens at once.

    Let c_t[i] be the strength of element i and all above it. A pop and a push give c_t[i] = max(0, c_{t-1}[i] - u_t) +
    d_t and c_t[t] = d_t, so with n_t = sum_{k <= t} (d_k - u_k)

        c_t[i] = n_t + max_{i <= k <= t} (d_k - n_k),    weight of i at t = min(1, c_t[i]) - min(1, c_t[i+1])

    Args:
        push: Strengths d [B, H, T].
        pop: Strengths u [B, H, T].
        earlier: c [B, H, P] of the elements of earlier tokens.

    Returns:
        The weights [B, H, T, P+T], and c [B, H, P+T] after the last token.
    """
    length, num_earlier = push.shape[-1], earlier.shape[-1]
    net = (push - pop).cumsum(-1)
    candidates = (push - net).unsqueeze(-2).expand(*push.shape[:2], num_earlier + length, length)
    steps = torch.arange(length, device=push.device)
    is_future = steps < torch.arange(-num_earlier, length, device=push.device).unsqueeze(1)  # [P+T, T]: t before i
    start = F.pad(earlier, (0, length), value=-torch.inf).unsqueeze(-1)
    peaks = torch.cat([start, candidates.masked_fill(is_future, -torch.inf)], -1).cummax(-1).values[..., 1:]
    sums = peaks + net.unsqueeze(-2)  # [B, H, P+T, T]
    clipped = sums.clamp(0, 1)
    return (clipped - F.pad(clipped[:, :, 1:], (0, 0, 0, 1))).mT, sums[..., -1]
