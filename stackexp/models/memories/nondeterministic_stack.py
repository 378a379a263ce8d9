"""Nondeterministic stack attention (DuSell & Chiang 2024): a weighted pushdown automaton over the tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config.memory import NondeterministicStackConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.layers import Linear, init_weight_
from stackexp.models.memories.base import Memory, Stats, compute_read_share
from stackexp.stack import widen

MAX_LOGIT_GAP = (
    30.0  # moves are at most this much less likely, or weights and gradients of the only run could underflow
)


class NondeterministicStackState(NamedTuple):
    """The state after N tokens; see `SumRuns`."""

    segments: Tensor  # [B, G, (N+1) P, (N+1) Q]
    modes: Tensor  # [B, N+2, P]
    vectors: Tensor  # [B, N, m], the vectors of all pushes


class NondeterministicStack(Memory):
    """h_t + W_up r_t: the expected top of the stack over all runs of a pushdown automaton with Q states and G symbols.

    An element of the stack is a symbol with a vector. A transition depends on state and top symbol, and has a positive
    weight, the exponential of a linear map of h_t, at least e^-30 of the largest. It changes the state and

        pushes     a symbol with the vector v_t = sigmoid(W_v h_t),
        replaces   the top symbol, and keeps its vector, or
        pops       the top element, except the bottom one, which has symbol 0 and a learned vector.

    A run has the product of the weights of its transitions. r_t [P m], P = G Q, is the weight of the runs with each top
    symbol and state, times their top vector, divided by the weight of all runs.

    In the paper, r_t replaces the attention of the middle layer and reads a normalized h_t; here it is added after the
    block, by default of the middle layer, and h_t is not normalized. A forward pass takes O(T^3) multiply-adds and
    O(T^2) memory per sequence.
    """

    axis = "time"
    fans = {"transitions.weight": "in", "values.weight": "in", "up.weight": "out"}

    def __init__(self, config: NondeterministicStackConfig, model: TransformerConfig, layer: int) -> None:
        super().__init__(config, model, layer)
        self.num_modes = config.num_states * config.num_symbols  # P: symbol * Q + state
        self.is_active = config.layers == "all" or layer == model.num_layers // 2
        if self.is_active:
            num_moves = 2 * self.num_modes + config.num_states  # from each mode
            self.transitions = Linear(model.hidden_size, self.num_modes * num_moves, bias=True)
            self.values = Linear(model.hidden_size, config.head_dim, bias=True)
            self.bottom = nn.Parameter(torch.empty(config.head_dim))
            self.up = Linear(self.num_modes * config.head_dim, model.hidden_size)

    def init_weights(self) -> None:
        """Initialize the matrices as the decoder's weights, biases and the bottom to 0."""
        if self.is_active:
            for linear in (self.transitions, self.values):
                init_weight_(linear.weight, self.model)
                nn.init.zeros_(linear.bias)
            nn.init.zeros_(self.bottom)
            init_weight_(self.up.weight, self.model, output_of_layer=self.layer)

    def empty_state(self, h: Tensor) -> NondeterministicStackState:
        """Return the state before the first token of h [B, T, d]; see `Memory.empty_state`."""
        config, wide = self.config, widen(h)
        if not self.is_active:
            return NondeterministicStackState(*(wide.new_zeros(len(h), 0) for _ in range(3)))
        segments = wide.new_zeros(len(h), config.num_symbols, self.num_modes, config.num_states)
        segments[:, 0, 0, 0] = 1
        modes = F.one_hot(torch.zeros(len(h), 2, dtype=torch.int64, device=h.device), self.num_modes).to(wide.dtype)
        return NondeterministicStackState(segments, modes, wide.new_zeros(len(h), 0, self.config.head_dim))

    def forward(
        self, h: Tensor, state: NondeterministicStackState, previous: Tensor | None = None, probe: bool = False
    ) -> tuple[Tensor, NondeterministicStackState, Stats]:
        """Update with h [B, T, d], then read; see `Memory.forward`. Runs are summed in at least float32.

        Gradients flow to the weights of this call's tokens, not to those of earlier calls with a cache.
        """
        if not self.is_active:
            return h, state, {}
        logits = widen(self.transitions(h))
        logits = (logits - logits.amax(-1, keepdim=True)).clamp_min(-MAX_LOGIT_GAP)
        weights, pushed = logits.exp().unflatten(-1, (self.num_modes, -1)), widen(self.values(h)).sigmoid()
        moves = weights.split([self.num_modes, self.num_modes, self.config.num_states], -1)
        with torch.autocast(h.device.type, enabled=False):
            bottom = self.bottom.to(pushed.dtype).sigmoid().expand(len(h), 1, -1)
            vectors = torch.cat([bottom, state.vectors, pushed], 1)
            masses, segments, modes = SumRuns.apply(*moves, state.segments, state.modes)
            masses = masses / masses.sum((2, 3, 4), keepdim=True)
            read = (masses @ vectors[:, None, None]).flatten(2)  # [B, T, P * m]
        added = self.up(read.to(h.dtype))
        stats = {"read_share": compute_read_share(added, h)} if probe else {}
        return h + added, NondeterministicStackState(segments, modes, vectors[:, 1:]), stats

    def flops_per_token(self, context_length: int) -> float:
        """Count the projections, the pops (T^2 / 3 pairs of earlier tokens, averaged) and the dense read."""
        if not self.is_active:
            return 0.0
        config = self.config
        pops = context_length**2 / 3 * self.num_modes * config.num_symbols * config.num_states**2
        read = context_length * self.num_modes * (self.num_modes + config.head_dim)
        return 2.0 * (sum(p.numel() for p in self.parameters() if p.ndim == 2) + pops + read)


class SumRuns(torch.autograd.Function):
    """The sum over all runs, by Lang's algorithm.

    Tokens are 1 .. N, and time t is after token t. Let P = G Q modes p = (top symbol, state). The segment (a, e) of
    modes p and (y, r) is the weight of all ways from mode p before token a, which pushes an element, to mode (y, r) at
    time e, with that element on top and never popped in between. Its vector is that of token a. Token e makes it

        replace     sum_c segment(a, e-1)[p, c] replace_e[c, (y, r)]
        pop         sum_b sum_u segment(a, b-1)[p, (y, u)] popped_e(b)[(y, u), r],  a < b < e, where
                    popped_e(b)[c, r] = sum_c' segment(b, e-1)[c, c'] pop_e[c', r]
        push        push_e[p, (y, r)], if a = e

    The bottom is pushed by token 0 and never popped. mode_t[c] is the weight of all runs in mode c at time t. Each step
    divides the weights of its token by the sum of mode_t. This changes no read, and prevents overflow.

    Inputs: push and replace [B, T, P, P], pop [B, T, P, Q], segments [B, G, (n+1) P, (n+1) Q] with rows (a, p) and
    columns (e, r) for each y, and the modes [B, n+2, P] before tokens 0 .. n+1, both without gradient.
    Outputs: the weight of the runs by top symbol, state and the token of the top vector [B, T, G, Q, N+1], and the
    segments and modes after the last token, without gradient. The scale of a token's outputs is arbitrary; its gradient
    is that of a fixed scale, so normalize them.
    """

    @staticmethod
    def forward(
        ctx: Any, push: Tensor, replace: Tensor, pop: Tensor, earlier: Tensor, modes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fill the columns of `segments` token by token."""
        batch, length, num_modes, num_states = pop.shape
        symbols, first = earlier.shape[1], modes.shape[1] - 2
        segments = earlier.new_zeros(
            batch, symbols, (first + length + 1) * num_modes, (first + length + 1) * num_states
        )
        segments[:, :, : earlier.shape[2], : earlier.shape[3]] = earlier
        modes, scales = F.pad(modes, (0, 0, 0, length)), pop.new_empty(length, batch, 1, 1, 1)
        for i in range(length):
            e = first + i + 1
            rows, columns = e * num_modes, slice(e * num_states, (e + 1) * num_states)
            last = _join_modes(segments[:, :, :rows, (e - 1) * num_states : e * num_states])
            column = _split_modes(last @ replace[:, i], symbols)
            column += segments[:, :, :rows, : (e - 1) * num_states] @ _arrange_popped(last @ pop[:, i], symbols)
            column = torch.cat([column, _split_modes(push[:, i], symbols)], 2)
            mode = modes[:, None, None, : e + 1].flatten(3) @ column  # [B, G, 1, Q]
            scales[i] = mode.sum((1, 2, 3), keepdim=True)  # [B, 1, 1, 1]
            segments[:, :, : rows + num_modes, columns] = column / scales[i]
            modes[:, e + 1] = (mode / scales[i]).flatten(1)
        ctx.save_for_backward(push, replace, pop, segments, modes, scales)
        ctx.mark_non_differentiable(segments, modes)
        recent = segments[..., (first + 1) * num_states :].unflatten(2, (-1, num_modes)).unflatten(4, (length, -1))
        return torch.einsum("bap,byaptr->btyra", modes[:, :-1], recent), segments, modes

    @staticmethod
    @torch.autograd.function.once_differentiable
    @torch.autocast("cpu", enabled=False)  # the caller's autocast would round the products to 16 bits
    @torch.autocast("cuda", enabled=False)
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Go from the last token to the first, so that the gradient of a column is complete before its use.

        The use of a column in the pops of all later tokens is one product, from the gradients and `popped` of those.
        """
        push, replace, pop, segments, modes, scales = ctx.saved_tensors
        length, num_modes, num_states = pop.shape[1:]
        symbols, first = segments.shape[1], modes.shape[1] - 2 - length
        grad_push, grad_replace, grad_pop, grad_modes = map(torch.zeros_like, (push, replace, pop, modes))
        grad_columns = torch.zeros_like(segments[..., : length * num_states])
        popped = torch.zeros_like(segments[:, :, : segments.shape[3], : length * num_states])
        grad_last = 0.0
        for i in reversed(range(length)):
            e = first + i + 1
            rows, end = e * num_modes, (e + 1) * num_modes
            own, later = slice(i * num_states, (i + 1) * num_states), slice((i + 2) * num_states, None)
            at_e = slice(e * num_states, (e + 1) * num_states)
            grad_mass = grad[:, i, ..., : e + 1] + grad_modes[:, e + 1].unflatten(1, (symbols, -1)).unsqueeze(-1)
            column = segments[:, :, :end, at_e].unflatten(2, (-1, num_modes))  # [B, G, e+1, P, Q]
            grad_modes[:, : e + 1] += torch.einsum("byapr,byra->bap", column, grad_mass)
            grad_column = torch.einsum("bap,byra->byapr", modes[:, : e + 1], grad_mass).flatten(2, 3) + grad_last
            grad_column += grad_columns[:, :, :end, later] @ popped[:, :, at_e, later].mT
            grad_column = grad_column / scales[i]
            grad_push[:, i] = _join_modes(grad_column[:, :, rows:])
            grad_column = grad_columns[:, :, :rows, own] = grad_column[:, :, :rows]
            last = _join_modes(segments[:, :, :rows, (e - 1) * num_states : e * num_states])
            popped[:, :, : (e - 1) * num_states, own] = _arrange_popped(last @ pop[:, i], symbols)
            grad_popped = segments[:, :, :rows, : (e - 1) * num_states].mT @ grad_column  # [B, G, (e-1) Q, Q]
            grad_popped = grad_popped.unflatten(2, (e - 1, num_states)).transpose(1, 2).flatten(1, 3)
            grad_moved = _join_modes(grad_column), F.pad(grad_popped, (0, 0, num_modes, 0))
            grad_replace[:, i], grad_pop[:, i] = (last.mT @ moved for moved in grad_moved)
            grad_last = _split_modes(grad_moved[0] @ replace[:, i].mT + grad_moved[1] @ pop[:, i].mT, symbols)
        return grad_push, grad_replace, grad_pop, None, None


def _join_modes(x: Tensor) -> Tensor:
    """Reshape [B, G, rows, Q] to [B, rows, P]."""
    return x.transpose(1, 2).flatten(2)


def _split_modes(x: Tensor, symbols: int) -> Tensor:
    """Reshape [B, rows, P] to [B, G, rows, Q]."""
    return x.unflatten(2, (symbols, -1)).transpose(1, 2)


def _arrange_popped(popped: Tensor, symbols: int) -> Tensor:
    """Reshape [B, e P, Q], from the rows (b, (y, u)), to [B, G, (e-1) Q, Q] without the bottom, b = 0."""
    num_states = popped.shape[2]
    rows = popped.unflatten(1, (-1, symbols, num_states))[:, 1:]  # [B, e-1, G, Q, Q]
    return rows.transpose(1, 2).flatten(2, 3)
