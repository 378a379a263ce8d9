"""Recurrent models beside the decoder, called as it is: the LSTM, and the StackRNN of Joulin & Mikolov (2015)."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config.recurrent import LSTMConfig, RecurrentConfig, StackRNNConfig
from stackexp.models.activation_checkpointing import recomputed
from stackexp.models.cross_entropy import Head
from stackexp.models.memories.base import Trace
from stackexp.models.transformer import Cache, DecoderOutput

LSTMState = tuple[Tensor, Tensor]  # each [1, B, d]
StackRNNState = tuple[Tensor, Tensor]  # h [B, d], slots [B, n, D]

EMPTY = -1.0  # every number of an empty slot, as in Joulin & Mikolov's code; a pushed number lies in (0, 1)


class Recurrent(nn.Module):
    """An embedding, recurrent layers on top of one another, an output projection. Subclasses give `build_layer`.

    Set `checkpoint_blocks` to recompute each layer in the backward pass instead of keeping its activations.
    """

    axis = None
    entropy_weight = 0.0

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks = False
        self.memories: list[nn.Module] = []
        with torch.random.fork_rng([]):  # on a meta device, constructing draws nothing
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(self.build_layer(config) for _ in range(config.num_layers))
            self.head = nn.Linear(config.hidden_size, config.output_vocab_size or config.vocab_size)
        self.init_weights()

    def build_layer(self, config: Any) -> nn.Module:
        """x [B, T, d] and a state (None: the first) -> y [B, T, d], new state, and a trace with probe=True."""
        raise NotImplementedError

    @property
    def output_head(self) -> Head:
        """What makes logits of `hidden`."""
        return Head(self.head.weight, self.head.bias)

    def forward(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        probe: bool = False,
        documents: Tensor | None = None,
        document_bounds: Tensor | None = None,
        return_hidden: bool = False,
    ) -> DecoderOutput:
        """tokens [B, T] int64, which follow those in `cache`, if given -> logits [B, T, V] of next tokens, or answers.

        Raises ValueError for `documents`: what a recurrent model remembers lasts from token to token. With `hidden`
        what would be projected onto the vocabulary, in place of the logits.
        """
        if documents is not None:
            raise ValueError("a recurrent model cannot tell documents apart; set data.document_mask=false")
        h, traces = self.embedding(tokens), []
        for i, layer in enumerate(self.layers):
            h, state, trace = self._run(layer, h, cache.states.get(i) if cache else None, probe)
            traces.append(trace)
            if cache:
                cache.states[i] = state
        if cache:
            cache.length += tokens.shape[1]
        entropy, probes = h.new_zeros((), dtype=torch.float32), traces if probe else None
        return (
            DecoderOutput(None, entropy, probes, h) if return_hidden else DecoderOutput(self.head(h), entropy, probes)
        )

    def _run(self, layer: nn.Module, *args: Any) -> tuple[Tensor, Any, Trace]:
        if self.checkpoint_blocks and torch.is_grad_enabled():
            return recomputed(layer, *args, selective=False)
        return layer(*args)

    def init_weights(self) -> None:
        """Draw all parameters afresh; needed after `to_empty` from the meta device."""
        nn.init.normal_(self.embedding.weight)
        for module in [*self.layers, self.head]:
            module.reset_parameters()

    def num_parameters(self, memory: bool | None = None) -> int:
        """All parameters, or the backbone's (False), which is the same; there is no memory between layers (True)."""
        return 0 if memory else sum(p.numel() for p in self.parameters())

    def flops_per_token(self, context_length: int) -> float:
        """Floating point operations of one training pass (3 x forward) per token: 2 per multiply-add."""
        matmuls = sum(p.numel() for p in self.parameters() if p.ndim == 2) - self.embedding.weight.numel()
        return 3 * 2.0 * (matmuls + sum(layer.other_multiply_adds(context_length) for layer in self.layers))


class LSTM(Recurrent):
    """torch.nn.LSTM."""

    config: LSTMConfig

    def build_layer(self, config: LSTMConfig) -> nn.Module:
        return LSTMLayer(config.hidden_size)


class LSTMLayer(nn.LSTM):
    """One layer of torch.nn.LSTM, which forgets little at first: its forget gate begins with a bias of 1."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, hidden_size, batch_first=True)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            for bias in (self.bias_ih_l0, self.bias_hh_l0):
                bias.zero_()
            self.bias_ih_l0.chunk(4)[1].fill_(1)  # gates: input, forget, cell, output

    def forward(self, x: Tensor, state: LSTMState | None, probe: bool) -> tuple[Tensor, LSTMState, Trace]:
        y, state = super().forward(x, state)
        return y, state, {}

    def other_multiply_adds(self, context_length: int) -> float:
        return 0


class StackRNN(Recurrent):
    """RNNs that each read the top of a soft stack of their own, and push to it, pop it or leave it."""

    config: StackRNNConfig

    def build_layer(self, config: StackRNNConfig) -> nn.Module:
        return StackRNNLayer(config)


class StackRNNLayer(nn.Module):
    """One layer; slots 0..S-1 of size D, the top at 0, all -1 when empty. Joulin & Mikolov's equations, tanh for h.

    h_t = tanh(W x_t + U h_{t-1} + P s_{t-1}[0] + b),  a = softmax(A h_t + b_a): push, pop, no-op
    s_t[j] = a_push s_{t-1}[j-1] + a_pop s_{t-1}[j+1] + a_noop s_{t-1}[j],  s[-1] = sigmoid(V h_t + b_v),  s[S] = -1
    """

    def __init__(self, config: StackRNNConfig) -> None:
        super().__init__()
        self.config = config
        hidden, size = config.hidden_size, config.slot_size
        self.input = nn.Linear(hidden, hidden)  # W, b
        self.recurrent = nn.Parameter(torch.empty(hidden, hidden + size))  # U, P
        self.stack_input = nn.Linear(hidden, 3 + size)  # A, V

    def reset_parameters(self) -> None:
        self.input.reset_parameters()
        self.stack_input.reset_parameters()
        bound = 1 / math.sqrt(self.recurrent.shape[1])
        nn.init.uniform_(self.recurrent, -bound, bound)

    @property
    def num_slots(self) -> int:
        """S; outside training `eval_num_slots`, where set."""
        return self.config.num_slots if self.training else self.config.eval_num_slots or self.config.num_slots

    def forward(self, x: Tensor, state: StackRNNState | None, probe: bool) -> tuple[Tensor, StackRNNState, Trace]:
        """Computed in float32 at least. A state has n = min(t, S) slots: what nothing was pushed to is not kept."""
        projected, size = self.input(x), self.config.slot_size
        dtype = torch.promote_types(projected.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            weights = (w.to(dtype) for w in (self.recurrent, self.stack_input.weight, self.stack_input.bias))
            projected = projected.to(dtype).transpose(0, 1)  # [T, B, d]
            h, slots = state or (projected.new_zeros(x[:, 0].shape), projected.new_zeros(len(x), 0, size))
            hidden, actions, slots = StackRNNScan.apply(projected, h, slots, *weights, self.num_slots)
        trace = dict(zip(("push", "pop", "no_op"), actions.mean((0, 1)), strict=True)) if probe else {}
        return hidden.transpose(0, 1).to(x.dtype), (hidden[-1], slots), trace

    def other_multiply_adds(self, context_length: int) -> float:
        """Of the update: 3 for each occupied number."""
        return 3 * self.config.slot_size * min(context_length, self.config.num_slots)


class StackRNNScan(torch.autograd.Function):
    """The loop over the tokens, with a backward pass of its own: autograd's, step by step, takes longer.

    projected [T, B, d] = W x + b; h [B, d] and slots [B, n, D] before; `recurrent` [d, d+D] = U, P; `weight` [3+D, d]
    and `bias` = A, V -> h [T, B, d], actions [T, B, 3] without gradient, slots after.
    """

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        h: Tensor,
        slots: Tensor,
        recurrent: Tensor,
        weight: Tensor,
        bias: Tensor,
        limit: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        size, ctx.num_slots_before = slots.shape[2], slots.shape[1]
        top = slots[:, 0] if slots.shape[1] else slots.new_full((len(h), size), EMPTY)
        joint, hidden, actions, values, stacks = [], [], [], [], []
        for projected_t in projected:
            joint.append(torch.cat([h, top], 1))
            h = torch.addmm(projected_t, joint[-1], recurrent.T).tanh_()
            action, value = torch.addmm(bias, h, weight.T).split([3, size], 1)
            actions.append(action.softmax(1))
            values.append(value.sigmoid())
            hidden.append(h)
            stacks.append(between(values[-1], slots, limit))
            slots = update(stacks[-1], actions[-1])
            top = slots[:, 0]
        hidden, actions = torch.stack(hidden), torch.stack(actions)
        ctx.save_for_backward(torch.stack(joint), hidden, actions, torch.stack(values), recurrent, weight, *stacks)
        ctx.mark_non_differentiable(actions)
        return hidden, actions, slots

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_hidden: Tensor, _: Tensor, of_slots: Tensor) -> tuple[Tensor | None, ...]:
        joint, hidden, actions, values, recurrent, weight, *stacks = ctx.saved_tensors
        num_slots = [ctx.num_slots_before, *(stack.shape[1] - 2 for stack in stacks)]
        of_sums, of_logits = torch.empty_like(hidden), hidden.new_empty(*hidden.shape[:2], len(weight))
        of_h = torch.zeros_like(hidden[0])
        for t in reversed(range(len(hidden))):
            h, action, value = hidden[t], actions[t], values[t]
            of_stack, of_action = update_backward(stacks[t], action, of_slots)
            of_logits[t, :, :3] = action * (of_action - (action * of_action).sum(1, keepdim=True))
            of_logits[t, :, 3:] = of_stack[:, 0] * value * (1 - value)
            of_h = torch.addmm(of_h + of_hidden[t], of_logits[t], weight)
            of_sums[t] = of_h * (1 - h * h)
            of_h, of_top = (of_sums[t] @ recurrent).split([h.shape[1], value.shape[1]], 1)
            of_slots = of_stack[:, 1 : 1 + num_slots[t]]
            of_slots[:, :1] += of_top[:, None]
        of_recurrent = of_sums.flatten(0, 1).T @ joint.flatten(0, 1)
        of_weight = of_logits.flatten(0, 1).T @ hidden.flatten(0, 1)
        return of_sums, of_h, of_slots, of_recurrent, of_weight, of_logits.sum((0, 1)), None


def between(value: Tensor, slots: Tensor, limit: int) -> Tensor:
    """What the next slots look at, min(n + 1, limit) of them: value [B, D], slots [B, n, D], and empty ones below."""
    below = min(slots.shape[1] + 1, limit) + 1 - slots.shape[1]
    return F.pad(torch.cat([value[:, None], slots], 1), (0, 0, 0, below), value=EMPTY)


def update(stack: Tensor, action: Tensor) -> Tensor:
    """The next slots [B, n, D] of what they look at [B, n+2, D]: each one the mean of three neighbours."""
    push, pop, no_op = action[:, :, None, None].unbind(1)
    return (push * stack[:, :-2]).addcmul_(no_op, stack[:, 1:-1]).addcmul_(pop, stack[:, 2:])


def update_backward(stack: Tensor, action: Tensor, of_slots: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `update`'s inputs from that of its output."""
    push, pop, no_op = action[:, :, None, None].unbind(1)
    of_stack = F.pad(push * of_slots, (0, 0, 0, 2))
    of_stack[:, 1:-1].addcmul_(no_op, of_slots)
    of_stack[:, 2:].addcmul_(pop, of_slots)
    neighbours = (stack[:, :-2], stack[:, 2:], stack[:, 1:-1])
    return of_stack, torch.stack([(of_slots * values).sum((1, 2)) for values in neighbours], 1)
