"""Recurrent baselines with the interface of the decoder: the LSTM, and the StackRNN of Joulin & Mikolov (2015)."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config.model import LSTMConfig, RecurrentConfig, StackRNNConfig
from stackexp.models.cross_entropy import Head
from stackexp.models.memories.base import Stats, average_actions
from stackexp.models.recomputation import run_recomputed
from stackexp.models.sharding import full_parameters
from stackexp.models.transformer import Cache, DecoderOutput

LSTMState = tuple[Tensor, Tensor]  # hidden state and cell state, each [B, 1, d]
StackRNNState = tuple[Tensor, Tensor]  # hidden state h [B, d] and slots [B, n, D]
EMPTY = -1.0  # the value of empty slots, as in Joulin & Mikolov's code; pushed values are in (0, 1)


class Recurrent(nn.Module):
    """An embedding, recurrent layers and an output projection.

    A layer maps x [B, T, d], a state (None: initial) and `probe` to y, the new state and statistics. Set
    `checkpoint_blocks` to recompute each layer in the backward pass.
    """

    layer_type: type[nn.Module]
    axis = None
    entropy_weight = 0.0

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_blocks = False
        self.memories: list[nn.Module] = []
        with torch.random.fork_rng([]):  # constructors draw nothing on a meta device, so undo their draws
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(self.layer_type(config) for _ in range(config.num_layers))
            self.norm = self.build_norm()
            self.head = nn.Linear(config.hidden_size, config.output_vocab_size or config.vocab_size)
        self.init_weights()

    def build_norm(self) -> nn.Module:
        """Return the normalization before the output projection."""
        return nn.Identity()

    @property
    def output_head(self) -> Head:
        """The projection of hidden states to logits."""
        return Head(self.head.weight, self.head.bias)

    def forward(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        *,
        probe: bool = False,
        documents: Tensor | None = None,
        document_bounds: Tensor | None = None,
        return_hidden: bool = False,
    ) -> DecoderOutput:
        """Compute the logits [B, T, V] of tokens [B, T], with the arguments of `Transformer.forward`.

        Raises ValueError for `documents`, because recurrent states carry over from document to document.
        """
        if documents is not None:
            raise ValueError("recurrent models do not support documents; set data.document_mask=false")
        h, probes = self.embedding(tokens), []
        for i, layer in enumerate(self.layers):
            h, state, stats = self._run(layer, h, cache.states.get(i) if cache else None, probe)
            probes.append(stats)
            if cache:
                cache.states[i] = state
        if cache:
            cache.length += tokens.shape[1]
        h, entropy = self.norm(h), h.new_zeros((), dtype=torch.float32)
        if return_hidden:
            return DecoderOutput(None, entropy, probes if probe else None, h)
        return DecoderOutput(self.head(h), entropy, probes if probe else None)

    def _run(self, layer: nn.Module, *args: Any) -> tuple[Tensor, Any, Stats]:
        if self.checkpoint_blocks and torch.is_grad_enabled():
            return run_recomputed(layer, *args, selective=False)
        return layer(*args)

    def init_weights(self) -> None:
        """Initialize all parameters; required after `to_empty` from the meta device."""
        with full_parameters(self.embedding):
            nn.init.normal_(self.embedding.weight)
        for module in [*self.layers, self.norm, self.head]:
            with full_parameters(module):
                if not isinstance(module, nn.Identity):
                    module.reset_parameters()

    def num_parameters(self) -> int:
        """Count all parameters."""
        return sum(p.numel() for p in self.parameters())

    def num_memory_parameters(self) -> int:
        """Return 0: all parameters belong to the backbone."""
        return 0

    def flops_per_token(self, context_length: int) -> float:
        """Return the FLOPs of one training pass (3 x forward) per token; a multiply-add counts 2."""
        matmuls = sum(p.numel() for p in self.parameters() if p.ndim == 2) - self.embedding.weight.numel()
        return 3 * 2.0 * (matmuls + sum(layer.count_update_multiply_adds(context_length) for layer in self.layers))


class LSTMLayer(nn.LSTM):
    """One layer of torch.nn.LSTM with an initial forget gate bias of 1, so that it forgets little at first."""

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config.hidden_size, config.hidden_size, batch_first=True)

    def reset_parameters(self) -> None:
        """Initialize weights as torch.nn.LSTM does, the forget gate's bias to 1 and other biases to 0."""
        super().reset_parameters()
        with torch.no_grad():
            for bias in (self.bias_ih_l0, self.bias_hh_l0):
                bias.zero_()
            self.bias_ih_l0.chunk(4)[1].fill_(1)  # gates: input, forget, cell, output

    def forward(self, x: Tensor, state: LSTMState | None, probe: bool) -> tuple[Tensor, LSTMState, Stats]:
        """Run x [B, T, d]; return y [B, T, d], the new state and no statistics.

        Computed in the dtype of the weights, because autocast would run it in float16 on CUDA.
        """
        initial = _swap(state) if state else None
        with torch.autocast(x.device.type, enabled=False):
            y, last = super().forward(x.to(self.weight_ih_l0.dtype), initial)
        return y, _swap(last), {}

    def count_update_multiply_adds(self, context_length: int) -> float:
        """Return 0: an LSTM has no stack."""
        return 0


def _swap(state: LSTMState) -> LSTMState:
    """Swap batch and layer: torch.nn.LSTM has states [1, B, d]."""
    hidden, cell = (x.transpose(0, 1).contiguous() for x in state)
    return hidden, cell


class StackRNNLayer(nn.Module):
    """One layer with slots 0 .. S-1 of size D, top at 0: Joulin & Mikolov's equations, with tanh for h.

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
        """Initialize all weights as torch.nn.Linear does."""
        self.input.reset_parameters()
        self.stack_input.reset_parameters()
        bound = 1 / math.sqrt(self.recurrent.shape[1])
        nn.init.uniform_(self.recurrent, -bound, bound)

    @property
    def num_slots(self) -> int:
        """The number of slots S; in evaluation, `eval_num_slots` if it is set."""
        return self.config.num_slots if self.training else self.config.eval_num_slots or self.config.num_slots

    def forward(self, x: Tensor, state: StackRNNState | None, probe: bool) -> tuple[Tensor, StackRNNState, Stats]:
        """Run x [B, T, d]; return y [B, T, d], the new state and, with `probe`, the mean actions.

        Computed in at least float32. A state holds only the n = min(t, S) slots that can be occupied.
        """
        projected, size = self.input(x), self.config.slot_size
        dtype = torch.promote_types(projected.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            weights = (self.recurrent, self.stack_input.weight, self.stack_input.bias)
            recurrent, weight, bias = (w.to(dtype) for w in weights)
            projected = projected.to(dtype).transpose(0, 1)  # [T, B, d]
            h, slots = state or (projected.new_zeros(x[:, 0].shape), projected.new_zeros(len(x), 0, size))
            hidden, actions, slots = scan_stack_rnn(projected, h, slots, recurrent, weight, bias, self.num_slots)
            if len(hidden) == 1:  # nothing reads its push; DDP requires gradients of all weights, here zeros
                hidden = hidden + 0 * slots.sum()
        stats = average_actions(actions) if probe else {}
        return hidden.transpose(0, 1).to(x.dtype), (hidden[-1], slots), stats

    def count_update_multiply_adds(self, context_length: int) -> float:
        """Return the multiply-adds of one stack update, the mean over the tokens: three per occupied element."""
        full = min(context_length, self.config.num_slots)
        occupied = full * (full + 1) / 2 + (context_length - full) * full  # the sum over all tokens
        return 3 * self.config.slot_size * occupied / context_length


class LSTM(Recurrent):
    """A multi-layer LSTM."""

    layer_type = LSTMLayer


class StackRNN(Recurrent):
    """A multi-layer RNN in which each layer has a soft stack."""

    layer_type = StackRNNLayer


def scan_stack_rnn(
    projected: Tensor, h: Tensor, slots: Tensor, recurrent: Tensor, weight: Tensor, bias: Tensor, max_slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the recurrence token by token. Return h [T, B, d], actions [T, B, 3] and the slots after the last token.

    `projected` is W x + b [T, B, d]; h [B, d] and slots [B, n, D] are those before the first token; `recurrent` is
    (U, P) [d, d+D], `weight` (A, V) [3+D, d], `bias` its bias.
    """
    size, hidden, actions = slots.shape[2], [], []
    top = slots[:, 0] if slots.shape[1] else slots.new_full((len(h), size), EMPTY)
    for projected_t in projected:
        h = torch.addmm(projected_t, torch.cat([h, top], 1), recurrent.T).tanh()
        action, value = torch.addmm(bias, h, weight.T).split([3, size], 1)
        action = action.softmax(1)
        slots = mix_slots(pad_slots(value.sigmoid(), slots, max_slots), action)
        top = slots[:, 0]
        hidden.append(h)
        actions.append(action)
    return torch.stack(hidden), torch.stack(actions), slots


def pad_slots(value: Tensor, slots: Tensor, max_slots: int) -> Tensor:
    """Return the pushed value [B, D], slots [B, n, D] and empty slots, concatenated along the slots.

    `mix_slots` computes the next min(n + 1, max_slots) slots from these: it needs two more than it returns.
    """
    num_empty = min(slots.shape[1] + 1, max_slots) + 1 - slots.shape[1]
    return F.pad(torch.cat([value[:, None], slots], 1), (0, 0, 0, num_empty), value=EMPTY)


def mix_slots(source: Tensor, action: Tensor) -> Tensor:
    """Return the next slots [B, n, D]: each the mean of three neighbors of source [B, n+2, D], weighted by action."""
    push, pop, no_op = action[:, :, None, None].unbind(1)
    return (push * source[:, :-2]).addcmul_(no_op, source[:, 1:-1]).addcmul_(pop, source[:, 2:])
