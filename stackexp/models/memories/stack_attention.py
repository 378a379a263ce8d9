"""StackAttn (Li et al. 2024): a stack over the tokens, kept as a distribution over which of them is on top."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stackexp.config.memory import StackAttentionConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.initialization import init_weight_
from stackexp.models.memories.base import Memory, Trace


class StackAttentionState(NamedTuple):
    """Of the P tokens so far."""

    tops: Tensor  # [B, P+1, P], row j: alpha_{j-1}, which token is on top before token j is read; row P: now
    h: Tensor  # [B, P, d], what a token on top reads


class StackAttention(Memory):
    """h_t + sum_j alpha_t[j] h_j: one full-width stack, whose elements are the tokens' own h.

    a_t = softmax(A h_t + b): push, pop, no-op. alpha_t, over the tokens 0 .. t, is their mean of: all on t (push);
    sum_j alpha_{t-1}[j] alpha_{j-1}, what was on top before each token that is there now (pop); alpha_{t-1} (no-op).
    As in the authors' code alpha_{-1} is all on token 0, the bottom, which no pop removes; the actions have a bias.

    A pass costs O(T^3) multiply-adds a sequence and layer, and holds [T+1, T] numbers of each.
    """

    axis = "time"

    def __init__(self, config: StackAttentionConfig, model: TransformerConfig, layer: int) -> None:
        super().__init__(config, model, layer)
        self.model = model
        self.actions = nn.Linear(model.hidden_size, 3)

    def init_weights(self) -> None:
        init_weight_(self.actions.weight, self.model)
        nn.init.zeros_(self.actions.bias)

    def empty_state(self, h: Tensor) -> StackAttentionState:
        wide = h if h.dtype == torch.float64 else h.float()
        return StackAttentionState(wide.new_zeros(len(h), 1, 0), h[:, :0])

    def forward(
        self, h: Tensor, state: StackAttentionState, probe: bool = False
    ) -> tuple[Tensor, StackAttentionState, Trace]:
        """As `Memory.forward`. The distributions are float32 at least, also under autocast."""
        with torch.autocast(h.device.type, enabled=False):
            logits = nn.functional.linear(h, self.actions.weight.to(h.dtype), self.actions.bias.to(h.dtype))
            actions = logits.to(state.tops.dtype).softmax(-1)
            tops, elements = Tops.apply(actions, state.tops), torch.cat([state.h, h], 1)
            read = (tops[:, -h.shape[1] :] @ elements.to(tops.dtype)).to(h.dtype)
        trace = _probes(actions, read, h) if probe else {}
        return h + read, StackAttentionState(tops, elements), trace

    def flops_per_token(self, context_length: int) -> float:
        """Actions, and in the mean over the tokens of a sequence the pops (T^2 / 3) and the read (T / 2 vectors)."""
        pops, read = context_length**2 / 3, context_length / 2 * self.model.hidden_size
        return 2.0 * (self.actions.weight.numel() + pops + read)


class Tops(torch.autograd.Function):
    """actions [B, T, 3] and the tops before them [B, P+1, P] -> all tops so far [B, N+1, N], N = P + T.

    Each step is one product of a vector with the tops before it, [B, t] x [B, t, t]; so is each half of its backward.
    """

    @staticmethod
    def forward(ctx: Any, actions: Tensor, past: Tensor) -> Tensor:
        batch, length, first = *actions.shape[:2], past.shape[2]
        tops = actions.new_zeros(batch, first + length + 1, first + length)
        tops[:, : first + 1, :first] = past
        tops[:, : 1 if first else 2, 0] = 1  # the bottom: alpha_{-1}, and alpha_0 whatever the action
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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """From the last token to the first: by then all is known that later tokens took from the row of a token.

        Row r, alpha_{r-1}, is the last top of step r, and a pop of each later step s takes tops[s, r] of it.
        """
        (actions, tops), first = ctx.saved_tensors, ctx.first
        total, of_actions, end = gradient.clone(), torch.zeros_like(actions), tops.shape[2]
        _, pop, no_op = actions.unsqueeze(-1).unbind(2)
        popped = (pop * tops[:, first:-1]).mT.contiguous()  # [B, N, T]: how much of a row a step's pop takes
        for t in range(end - 1, max(first, 1) - 1, -1):
            i, last, row = t - first, tops[:, t, :t], total[:, t + 1]
            if t + 2 < end:
                taken = popped[:, t + 1, None, i + 2 :]  # by the steps after the next
                row[:, : t + 1] += torch.bmm(taken, total[:, t + 3 :, : t + 1]).squeeze(1)
            of_row = row[:, :t]
            of_popped = torch.bmm(tops[:, :t, :t], of_row.unsqueeze(2)).squeeze(2)
            of_actions[:, i] = torch.stack([row[:, t], (of_popped * last).sum(1), (of_row * last).sum(1)], 1)
            total[:, t, :t] += pop[:, i] * of_popped + no_op[:, i] * of_row
        if not ctx.needs_input_grad[1]:
            return of_actions, None
        of_past = total[:, : first + 1, :first] + popped[:, : first + 1] @ total[:, first + 1 :, :first]
        return of_actions, of_past


@torch.no_grad()
def _probes(actions: Tensor, read: Tensor, h: Tensor) -> Trace:
    """Means over the tokens; read_share is |read| / |h|."""
    push, pop, no_op = actions.flatten(0, -2).mean(0)
    share = read.float().norm(dim=-1) / h.float().norm(dim=-1)
    return {"push": push, "pop": pop, "no_op": no_op, "read_share": share.mean()}
