"""Options of the stack memory that are not in the paper: normalized pushes, action inputs and noise, feedback."""

import math
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp import stack
from stackexp.config.memory import StackMemoryConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.memories.stack import NUM_ACTIONS, PUSH, StackMemory, new_parameter
from stackexp.stack import projection


class ExtendedStackMemory(StackMemory):
    """A stack memory with our extensions. With all of them off, it equals `StackMemory`.

    - `push_norm: head` divides x by its root mean square over D. Without it, the common direction of a growing h
      dominates A x, and every token gets the same action.
    - `action_bias`: a learned bias [H, 3] of the logits, which starts at this value for push and at 0 for the others.
    - `init_std`: the standard deviation of all initial weights except the gate.
    - `action_input: hidden`: A [H, 3, d] takes all of h instead of x.
    - `action_scale: slice` divides the action logits by sqrt(d / H); `action_sharpness` multiplies them.
    - `empty_slot` (axis depth): the read's softmax includes a slot of zeros with a learned score `empty_score` [H],
      which starts at 0.
    - `action_noise`: normal noise on the logits in training, which makes the model learn sharp actions. All ranks draw
      the same noise, each for its own part of the batch, so results depend on the number of ranks.
    - `feedback` (axis time): x_t and the logits are computed from h_t + F f(R_{t-1}), F = `feedback` [d, H*D].
    - `feedback_hidden_size: m`: a hidden layer u_t = f(U h_t + V R_{t-1}) adds P u_t to x_t and Q u_t to the logits.
      `feedback` is P and Q [H*D + H*3, m], `feedback_token` U [m, d], `feedback_read` V [m, H*D]; U and V have 2 m
      rows for `feedback_activation: gated`.
    """

    no_decay = ("action_bias", "empty_score")

    def __init__(self, config: StackMemoryConfig, model: TransformerConfig, layer: int) -> None:
        super().__init__(config, model, layer)
        self.uses_random_numbers = config.action_noise > 0
        heads, size, hidden = config.num_heads, config.head_dim, model.hidden_size
        if config.action_input == "hidden":
            self.actions = new_parameter(heads, NUM_ACTIONS, hidden)
            self.fans["actions"] = "in"
        is_wide = config.projection == "none"
        self.fans |= {
            "action_bias": "none",
            "empty_score": "none",
            "feedback": "both" if is_wide else "out",
            "feedback_token": "in",
        }
        self.fans["feedback_read"] = "in" if is_wide else "none"
        gate = self._parameters.pop("gate")
        self.action_bias = None if config.action_bias is None else new_parameter(heads, NUM_ACTIONS)
        self.empty_score = new_parameter(heads) if config.empty_slot else None
        self.feedback = self.feedback_token = self.feedback_read = None
        if units := config.feedback_hidden_size:
            rows = 2 * units if config.feedback_activation == "gated" else units
            self.feedback = new_parameter(heads * (size + NUM_ACTIONS), units)
            self.fans["feedback"] = "out" if is_wide else "none"
            self.feedback_token, self.feedback_read = new_parameter(rows, hidden), new_parameter(rows, heads * size)
        elif config.feedback:
            self.feedback = new_parameter(hidden, heads * size)
        self.gate = gate  # the last parameter: checkpoints hold optimizer states in the order of the parameters
        # The noise scale is a tensor because torch.compile recompiles when a Python number changes
        self.register_buffer("noise", torch.empty(()) if config.action_noise else None, persistent=False)

    def init_weights(self) -> None:
        """Initialize as in `StackMemory`, but set W_down and A to 0 if the feedback has a hidden layer.

        That layer also has h as input. W_down h and A x would start three times as large as its output and hide it.
        """
        super().init_weights()
        if self.config.init_std is not None:
            for name, weight in self.named_parameters():
                if name != "gate":
                    nn.init.normal_(weight, std=self.config.init_std)
        if self.action_bias is not None:
            nn.init.zeros_(self.action_bias)
            with torch.no_grad():
                self.action_bias[:, PUSH] = self.config.action_bias
        if self.empty_score is not None:
            nn.init.zeros_(self.empty_score)
        if self.feedback_token is not None:
            for weight in (self.down, self.actions):
                if weight is not None:
                    nn.init.zeros_(weight)
        if self.noise is not None:
            self.noise.fill_(self.config.action_noise)

    def set_step(self, step: int) -> None:
        """Set the noise of a training step; it grows linearly over the first `action_noise_warmup_steps` steps."""
        if self.noise is not None and self.config.action_noise_warmup_steps:
            self.noise.fill_(self.config.action_noise * min(1.0, step / self.config.action_noise_warmup_steps))

    def empty_state(self, h: Tensor) -> stack.StackState:
        """Return empty stacks as `StackMemory`; with `empty_slot` those of plain PyTorch."""
        if self.empty_score is None:
            return super().empty_state(h)
        return stack.empty((*h.shape[:2], self.config.num_heads), self.num_slots, self.config.head_dim, like=h)

    def project_down(self, h: Tensor) -> Tensor:
        """Return the push vectors [..., H, D] of h [..., d], normalized with `push_norm`."""
        return self._normalize(super().project_down(h))

    def _normalize(self, x: Tensor) -> Tensor:
        if self.config.push_norm == "none":
            return x
        return F.rms_norm(x, x.shape[-1:], eps=self.model.norm_eps).to(x.dtype)  # autocast on CUDA makes it float32

    def project(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the push vectors x [..., H, D] and the scaled action logits [..., H, 3] of h [..., d]."""
        config, heads = self.config, self.config.num_heads
        if config.action_input == "head":
            x, logits = super().project(h)
        elif config.projection == "low_rank":  # both in one matrix product
            both = F.linear(h, torch.cat([self.down, self.actions.flatten(0, 1)]))
            x, logits = (part.unflatten(-1, (heads, -1)) for part in both.tensor_split([len(self.down)], -1))
            x = self._normalize(x)
        else:
            x = self.project_down(h)
            logits = F.linear(h, self.actions.flatten(0, 1)).unflatten(-1, (heads, -1))
        return x, self._adjust_logits(logits)

    def choose_products(self, h: Tensor) -> ModuleType | None:
        """Return the products for the projections of h that share a gradient, or None for separate operations."""
        is_noisy = self.training and self.noise is not None  # noise depends on the strides of the logits
        return super().choose_products(h) if self.config.action_input == "head" and not is_noisy else None

    def project_fused(self, h: Tensor, products: ModuleType) -> tuple[Tensor, Tensor, projection.Link]:
        """Return the push vectors, the scaled action logits, and the link to `projection.project_up`."""
        if self.config.push_norm == "none":
            x, logits, link = super().project_fused(h, products)
        else:
            x, _, link = self.link_projections(h, products, None)
            x = self._normalize(x)
            logits = self.compute_logits(x)
        return x, self._adjust_logits(logits), link

    def _adjust_logits(self, logits: Tensor) -> Tensor:
        config = self.config
        if config.action_scale == "slice":
            logits = logits / math.sqrt(self.model.hidden_size / config.num_heads)
        if self.action_bias is not None:
            logits = logits + self.action_bias
        return logits if config.action_sharpness == 1 else config.action_sharpness * logits

    def update(
        self, state: stack.StackState, x: Tensor, logits: Tensor, h: Tensor
    ) -> tuple[stack.StackOutput, stack.StackState]:
        """Update and read the stacks as `StackMemory`, with noise, feedback and an empty slot."""
        if self.training and self.noise is not None:
            logits = logits + self.noise * torch.randn_like(logits)
        if self.empty_score is not None:
            return stack.step(state, x, logits, self.get_query(), empty_score=self.empty_score, **self.get_options())
        if self.feedback is None:
            return super().update(state, x, logits, h)
        options = self.get_options() | {"feedback_activation": self.config.feedback_activation}
        return stack.scan(state, x, logits, self.get_query(), self._build_feedback(h), **options)

    def _build_feedback(self, h: Tensor) -> tuple[Tensor, ...]:
        """Return the `feedback` of `stack.scan`: P [m, H, D], Q [m, H, 3] and, with a hidden layer, V and U h."""
        config = self.config
        if self.feedback_token is None:
            return self.project(self.feedback.T)  # x and the logits are linear in h, so F R adds P R and Q R
        push, logits = (
            part.unflatten(-1, (config.num_heads, -1))
            for part in self.feedback.T.tensor_split([config.num_heads * config.head_dim], -1)
        )
        return push, config.action_sharpness * logits, self.feedback_read, F.linear(h, self.feedback_token)

    def flops_per_token(self, context_length: int) -> float:
        """Count the FLOPs of `StackMemory` and the matrix products of the feedback."""
        config, matmuls = self.config, 0
        if config.feedback:
            matmuls += self.feedback.shape[1] * config.num_heads * (config.head_dim + NUM_ACTIONS)
        if config.feedback_hidden_size:
            matmuls += self.feedback_token.numel() + self.feedback_read.numel()
        return super().flops_per_token(context_length) + 2.0 * matmuls
