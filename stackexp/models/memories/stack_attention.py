"""Stack attention (Li et al. 2024): a stack over the tokens, represented by a distribution over its top element."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stackexp.config.memory import StackAttentionConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.layers import init_weight_
from stackexp.models.memories.base import Memory, Stats, average_actions, compute_read_share
from stackexp.stack import widen


class StackAttentionState(NamedTuple):
    """The state after P tokens."""

    tops: Tensor  # [B, P+1, P], row j: alpha_{j-1}, the distribution of the top before token j
    h: Tensor  # [B, P, d], the elements


class StackAttention(Memory):
    """h_t + sum_j alpha_t[j] h_j: one full-width stack, whose elements are the hidden states of the tokens.

    a_t = softmax(A h_t + b) are push, pop and no-op. alpha_t, a distribution over the tokens 0 .. t, is the mixture of

        push   all mass on t
        pop    sum_j alpha_{t-1}[j] alpha_{j-1}: the tops before each token that may be on top now
        no-op  alpha_{t-1}

    As in the authors' code, alpha_{-1} is all on token 0, the bottom, which is never popped, and A has a bias.

    A forward pass takes O(T^3) multiply-adds and O(T^2) memory per sequence and layer.
    """

    axis = "time"
    fans = {"actions.weight": "in"}

    def __init__(self, config: StackAttentionConfig, model: TransformerConfig, layer: int) -> None:
        super().__init__(config, model, layer)
        self.actions = nn.Linear(model.hidden_size, 3)

    def init_weights(self) -> None:
        """Initialize A as the decoder's weights and its bias to 0."""
        init_weight_(self.actions.weight, self.model)
        nn.init.zeros_(self.actions.bias)

    def empty_state(self, h: Tensor) -> StackAttentionState:
        """Return the state before the first token of h [B, T, d]; see `Memory.empty_state`."""
        wide = widen(h)
        return StackAttentionState(wide.new_zeros(len(h), 1, 0), h[:, :0])

    def forward(
        self, h: Tensor, state: StackAttentionState, previous: Tensor | None = None, probe: bool = False
    ) -> tuple[Tensor, StackAttentionState, Stats]:
        """Update with h [B, T, d], then read; see `Memory.forward`. Distributions are at least float32."""
        with torch.autocast(h.device.type, enabled=False):
            logits = nn.functional.linear(h, self.actions.weight.to(h.dtype), self.actions.bias.to(h.dtype))
            actions = logits.to(state.tops.dtype).softmax(-1)
            tops, elements = ComputeTops.apply(actions, state.tops), torch.cat([state.h, h], 1)
            read = (tops[:, -h.shape[1] :] @ elements.to(tops.dtype)).to(h.dtype)
        stats = average_actions(actions) | {"read_share": compute_read_share(read, h)} if probe else {}
        return h + read, StackAttentionState(tops, elements), stats

    def flops_per_token(self, context_length: int) -> float:
        """Count the actions, the pops (T^2 / 3, averaged over a sequence), and the dense read (T vectors)."""
        pops, read = context_length**2 / 3, context_length * self.model.hidden_size
        return 2.0 * (self.actions.weight.numel() + pops + read)


class ComputeTops(torch.autograd.Function):
    """The recurrence of alpha: actions [B, T, 3] and earlier tops [B, P+1, P] -> all tops [B, N+1, N], N = P + T.

    Each step is one product of a vector and the earlier tops, [B, t] x [B, t, t]; so is each half of its backward.
    """

    @staticmethod
    def forward(ctx: Any, actions: Tensor, earlier: Tensor) -> Tensor:
        """Compute the tops token by token."""
        batch, length, first = *actions.shape[:2], earlier.shape[2]
        tops = actions.new_zeros(batch, first + length + 1, first + length)
        tops[:, : first + 1, :first] = earlier
        tops[:, : 1 if first else 2, 0] = 1  # the bottom: alpha_{-1}, and alpha_0 for any action
        push, pop, no_op = actions.unsqueeze(-1).unbind(2)  # [B, T, 1]
        for t in range(max(first, 1), first + length):
            i, last = t - first, tops[:, t, :t]
            mixed = torch.baddbmm((no_op[:, i] * last).unsqueeze(1), (pop[:, i] * last).unsqueeze(1), tops[:, :t, :t])
            tops[:, t + 1, :t] = mixed.squeeze(1)
            tops[:, t + 1, t] = push[:, i, 0]
        ctx.save_for_backward(actions, tops)
        ctx.first = first
        return tops

    @staticmethod
    @torch.autograd.function.once_differentiable
    @torch.autocast("cpu", enabled=False)  # the caller's autocast would round the products to 16 bits
    @torch.autocast("cuda", enabled=False)
    def backward(ctx: Any, grad_tops: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute gradients from the last token to the first, so that a row's gradient is complete before its use.

        Row r, alpha_{r-1}, has two uses: step r reads it as the last top, and the pop of each later step s takes the
        share tops[s, r] of it.
        """
        (actions, tops), first = ctx.saved_tensors, ctx.first
        grad, grad_actions, end = grad_tops.clone(), torch.zeros_like(actions), tops.shape[2]
        _, pop, no_op = actions.unsqueeze(-1).unbind(2)
        popped = (pop * tops[:, first:-1]).mT.contiguous()  # [B, N, T]: the share of a row in the pop of a step
        for t in range(end - 1, max(first, 1) - 1, -1):
            i, last, grad_row = t - first, tops[:, t, :t], grad[:, t + 1]
            if t + 2 < end:
                later_pops = popped[:, t + 1, None, i + 2 :]
                grad_row[:, : t + 1] += torch.bmm(later_pops, grad[:, t + 3 :, : t + 1]).squeeze(1)
            grad_mixed = grad_row[:, :t]
            grad_popped = torch.bmm(tops[:, :t, :t], grad_mixed.unsqueeze(2)).squeeze(2)
            grad_actions[:, i] = torch.stack(
                [grad_row[:, t], (grad_popped * last).sum(1), (grad_mixed * last).sum(1)], 1
            )
            grad[:, t, :t] += pop[:, i] * grad_popped + no_op[:, i] * grad_mixed
        if not ctx.needs_input_grad[1]:
            return grad_actions, None
        return grad_actions, grad[:, : first + 1, :first] + popped[:, : first + 1] @ grad[:, first + 1 :, :first]
