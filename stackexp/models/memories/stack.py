"""The differentiable stack between layers (StackTrans)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp import stack
from stackexp.config.memory import StackMemoryConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.initialization import init_weight_
from stackexp.models.memories.base import Memory, Trace


class StackMemory(Memory):
    """H differentiable stacks of S slots of size D = d_s (queues, push-only): every option of `StackMemoryConfig`.

    x = W_down h  [H, D],  a = softmax(A x),  St, M <- update,  R = read with w_g,  h' = g h + W_up concat(R).
    Parameters (no biases): down d -> H*D, actions A [H, 3, D], query w_g [H, D], up H*D -> d, gate g [1]; with
    `feedback` F [d, H*D] or, with a hidden layer of m units, P and Q [H*D + H*3, m], U [m, d] and V [m, H*D] (gated: U
    and V of 2 m rows).
    With `action_noise` every rank draws the same numbers for its own part of a batch: N devices do not train as one.
    """

    def __init__(self, config: StackMemoryConfig, model: TransformerConfig, layer: int) -> None:
        super().__init__(config, model, layer)
        self.config, self.model, self.layer = config, model, layer
        self.axis, self.site, self.entropy_weight = config.axis, config.site, config.entropy_weight
        self.draws = config.action_noise > 0
        heads, size, hidden = config.num_heads, config.head_dim, model.hidden_size
        shared = config.projection == "shared_slices"
        num_actions = 2 if config.discipline == "push_only" else 3
        self.down = self.up = self.query = self.feedback = self.feedback_token = self.feedback_read = None
        if config.projection != "none":  # shared_slices: one map for all heads, from and to their slice of h
            outer, inner = (hidden // heads, size) if shared else (hidden, heads * size)
            self.down, self.up = _parameter(inner, outer), _parameter(outer, inner)
        self.actions = _parameter(heads, num_actions, size if config.action_input == "head" else hidden)
        if config.read == "global":
            self.query = _parameter(1 if shared else heads, size)
        if config.feedback_hidden_size:
            inner = (2 if config.feedback_activation == "gated" else 1) * config.feedback_hidden_size
            self.feedback = _parameter(heads * (size + num_actions), config.feedback_hidden_size)
            self.feedback_token, self.feedback_read = _parameter(inner, hidden), _parameter(inner, heads * size)
        elif config.feedback:
            self.feedback = _parameter(hidden, heads * size)
        self.gate = _parameter(1)
        noise = torch.empty(()) if config.action_noise else None  # a tensor, which may change without compiling anew
        self.register_buffer("noise", noise, persistent=False)

    def init_weights(self) -> None:
        """As the decoder's: see `init_weight_`; the gate is 1. Beside a hidden layer of the feedback, which sees h as
        well, W_down and A begin at 0: what they give is three times as large as what it does, and would hide it."""
        for name, weight in self.named_parameters():
            init_weight_(weight, self.model, self.layer if name == "up" else None)
        nn.init.ones_(self.gate)
        if self.feedback_token is not None:
            for weight in (self.down, self.actions):
                if weight is not None:
                    nn.init.zeros_(weight)
        if self.noise is not None:
            self.noise.fill_(self.config.action_noise)

    def set_step(self, step: int) -> None:
        """The noise grows linearly over the first `action_noise_warmup_steps` steps."""
        if self.noise is not None and self.config.action_noise_warmup_steps:
            self.noise.fill_(self.config.action_noise * min(1.0, step / self.config.action_noise_warmup_steps))

    @property
    def num_slots(self) -> int:
        """S; outside training `eval_num_slots`, where set."""
        return self.config.num_slots if self.training else self.config.eval_num_slots or self.config.num_slots

    def empty_state(self, h: Tensor) -> stack.StackState:
        heads, size = self.config.num_heads, self.config.head_dim
        if self.axis != "depth":
            return stack.empty((h.shape[0], heads), self.num_slots, size, like=h)
        dtype = {"auto": _precision(h), "float32": torch.float32, "bfloat16": torch.bfloat16}[self.config.state_dtype]
        shape = (*h.shape[:2], heads)
        return stack.empty(shape, self.num_slots, size, like=h, layers=self.model.num_layers, dtype=dtype)

    def forward(
        self, h: Tensor, state: stack.StackState, probe: bool = False
    ) -> tuple[Tensor, stack.StackState, Trace]:
        config = self.config
        x, logits = self._project(h)
        if self.training and self.noise is not None:  # to stand that, it must act sharply; entropy and probes see it
            logits = logits + self.noise * torch.randn_like(logits)
        query = self.query if self.query is None else self.query.expand(config.num_heads, -1)
        options = {"num_slots": self.num_slots, "discipline": config.discipline, "read": config.read}
        options["read_mask"] = config.read_mask
        if self.axis == "depth":
            output, state = stack.step(state, x, logits, query, segment=config.checkpoint_every_layers, **options)
        else:
            options["feedback_activation"] = config.feedback_activation
            output, state = stack.scan(state, x, logits, query, self._fed_back(h), **options)
        read = self._read_out(output.read.to(h.dtype))
        plain, gated = (read, h) if config.residual_gate == "hidden" else (h, read)
        new_h = torch.addcmul(plain, gated, self.gate)
        trace = {"entropy": output.entropy.mean()}
        if probe:
            trace |= _probes(output, read, h)
        return new_h.to(h.dtype), state, trace

    def _project(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., H, D] = W_down h [..., d] and the logits of the actions [..., H, 3]: A x, or A h for `action_input:
        hidden`, times `action_sharpness`. W_down and an A that reads all of h are one matrix product."""
        config, heads = self.config, self.config.num_heads
        if config.action_input == "head":
            x = self._push_vectors(h)
            logits = torch.einsum("...hd,had->...ha", x, self.actions)
        elif config.projection == "low_rank":
            both = F.linear(h, torch.cat([self.down, self.actions.flatten(0, 1)]))
            x, logits = (part.unflatten(-1, (heads, -1)) for part in both.tensor_split([len(self.down)], -1))
        else:
            x = self._push_vectors(h)
            logits = F.linear(h, self.actions.flatten(0, 1)).unflatten(-1, (heads, -1))
        if config.action_scale == "slice":
            logits = logits / math.sqrt(self.model.hidden_size / heads)
        return x, logits if config.action_sharpness == 1 else config.action_sharpness * logits

    def _push_vectors(self, h: Tensor) -> Tensor:
        if self.down is None:
            return h.unflatten(-1, (self.config.num_heads, -1))
        if self.config.projection == "shared_slices":
            return F.linear(h.unflatten(-1, (self.config.num_heads, -1)), self.down)
        return F.linear(h, self.down).unflatten(-1, (self.config.num_heads, -1))

    def _read_out(self, read: Tensor) -> Tensor:
        """W_up concat(R) [..., d] of R [..., H, D]."""
        if self.up is None:
            return read.flatten(-2)
        if self.config.projection == "shared_slices":
            return F.linear(read, self.up).flatten(-2)
        return F.linear(read.flatten(-2), self.up)

    def _fed_back(self, h: Tensor) -> tuple[Tensor, ...] | None:
        """What u_t [m] adds to x_t and to the logits, as maps P, Q of it. Without a hidden layer u_t is f(R_{t-1}), and
        P, Q are of F u_t in the place of h; with one, V and U h_t follow, of u_t = f(U h_t + V R_{t-1})."""
        if self.feedback is None:
            return None
        if self.feedback_token is None:
            return self._project(self.feedback.T)  # [m, d]: h for each number of u; both maps are linear in h
        width = self.config.num_heads * self.config.head_dim
        push, logits = (
            part.unflatten(-1, (self.config.num_heads, -1)) for part in self.feedback.T.tensor_split([width], -1)
        )
        return push, self.config.action_sharpness * logits, self.feedback_read, F.linear(h, self.feedback_token)

    def flops_per_token(self, context_length: int) -> float:
        """Projections, actions, and the update (3) and the read (2 multiply-adds) of each occupied number."""
        config = self.config
        copies = config.num_heads if config.projection == "shared_slices" else 1  # the one map serves every head
        matmuls = copies * sum(w.numel() for w in (self.down, self.up) if w is not None) + self.actions.numel()
        updates = {"depth": self.layer + 1, "time": context_length, "token_major": context_length}[config.axis]
        numbers = config.num_heads * config.head_dim
        if config.feedback:
            matmuls += self.feedback.shape[1] * (numbers + config.num_heads * self.actions.shape[1])
        if config.feedback_hidden_size:
            matmuls += self.feedback_token.numel() + self.feedback_read.numel()
        return 2.0 * matmuls + 2.0 * 5 * numbers * min(updates, config.num_slots)


def _precision(h: Tensor) -> torch.dtype:
    """What matrix products of h come in."""
    kind = h.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h.dtype


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


@torch.no_grad()
def _probes(output: stack.StackOutput, read: Tensor, h: Tensor) -> Trace:
    """Means over tokens and heads; occupancy is the sum of M, read_share |W_up R| / |h|."""
    push, pop, no_op = output.action.flatten(0, -2).mean(0)
    share = read.float().norm(dim=-1) / h.float().norm(dim=-1)
    return {
        "push": push,
        "pop": pop,
        "no_op": no_op,
        "occupancy": output.occupancy.mean(),
        "read_share": share.mean(),
    }
