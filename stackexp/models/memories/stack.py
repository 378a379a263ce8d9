"""The differentiable stack between layers, as in the paper (StackTrans, arXiv 2507.15343).

For each of H heads, with the down-projected hidden state x [D], D = d_s:

    a = softmax(A x)                       push, pop, no-op
    St, M = update(St, M, a, x)            S slots, top at 0; see `stack/reference.py`
    R = read(St, M, w_g)
    h' = g h + W_up concat(R)

`extensions.py` adds options that are not in the paper.
"""

from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp import stack
from stackexp.config.memory import StackMemoryConfig
from stackexp.config.model import TransformerConfig
from stackexp.errors import RunError
from stackexp.models.layers import get_matmul_dtype, init_weight_
from stackexp.models.memories.base import Memory, Stats, average_actions, compute_read_share
from stackexp.stack import dispatch, projection

NUM_ACTIONS, PUSH = 3, 0  # push, pop, no-op
MAX_CONSTANT_SPREAD = 0.01  # a head whose actions have a smaller standard deviation over the tokens is constant
MAX_FUSED_SIZE = 128  # of all push vectors or action logits of a token, padded; more would spill registers
IMPOSSIBLE_LOGIT = -1e4  # a logit whose probability is 0 in every precision


class StackMemory(Memory):
    """H differentiable stacks (or queues, or push-only stacks) of S slots of size D.

    Parameters, all without bias: `down` W_down [H*D, d], `up` W_up [d, H*D], `actions` A [H, 3, D], `query` w_g [H, D],
    `gate` g [1]. `projection: shared_slices` shares one `down` [D, d/H], `up` and `query` among the heads, and
    each head has its own slice of h. `projection: none` has neither `down` nor `up`.

    `discipline: push_only` pushes every x: a_push = 1 (the paper's ablation). It has no `actions` and no entropy term.
    """

    def __init__(self, config: StackMemoryConfig, model: TransformerConfig, layer: int) -> None:
        super().__init__(config, model, layer)
        self.axis, self.site = config.axis, config.site
        self.always_pushes = config.discipline == "push_only"
        self.entropy_weight = 0.0 if self.always_pushes else config.entropy_weight
        heads, size, hidden = config.num_heads, config.head_dim, model.hidden_size
        is_shared = config.projection == "shared_slices"
        is_wide = config.projection == "none"  # D grows with d
        self.fans = {"down": "in", "up": "out", "actions": "in" if is_wide else "none"}
        self.fans["query"] = "vectors" if is_wide else "none"
        self.down = self.up = self.actions = self.query = None
        if config.projection != "none":
            outer, inner = (hidden // heads, size) if is_shared else (hidden, heads * size)
            self.down, self.up = new_parameter(inner, outer), new_parameter(outer, inner)
        if not self.always_pushes:
            self.actions = new_parameter(heads, NUM_ACTIONS, size)
        if config.read == "global":
            self.query = new_parameter(1 if is_shared else heads, size)
        self.gate = new_parameter(1)  # FSDP2 does not support zero-dimensional parameters

    def init_weights(self) -> None:
        """Initialize the weights as those of the decoder (`init_weight_`), and the gate to 1."""
        for name, weight in self.named_parameters():
            init_weight_(weight, self.model, self.layer if name == "up" else None)
        nn.init.ones_(self.gate)

    def init_identity(self) -> None:
        """Set W_up to 0, so that h' = h; without W_up, set the gate of `residual_gate: read` to 0.

        A gate of 0 would also give h' = h, but W_up would hardly learn: its gradient is proportional to the gate.

        Raises RunError for `projection: none` with `residual_gate: hidden`, which always adds the read.
        """
        if self.up is not None:
            nn.init.zeros_(self.up)
        elif self.config.residual_gate == "read":
            nn.init.zeros_(self.gate)
        else:
            raise RunError("warm_start.memory: identity and projection: none require model.memory.residual_gate: read")

    @property
    def num_slots(self) -> int:
        """The number of slots S; in evaluation, `eval_num_slots` if it is set."""
        return self.config.num_slots if self.training else self.config.eval_num_slots or self.config.num_slots

    def empty_state(self, h: Tensor) -> stack.StackState:
        """Return empty stacks: one per token of h [B, T, d] for axis depth, one per sequence otherwise."""
        heads, size = self.config.num_heads, self.config.head_dim
        if self.axis != "depth":
            return stack.empty((h.shape[0], heads), self.num_slots, size, like=h)
        dtypes = {"auto": get_matmul_dtype(h), "float32": torch.float32, "bfloat16": torch.bfloat16}
        return stack.empty(
            (*h.shape[:2], heads),
            self.num_slots,
            size,
            like=h,
            axis="depth",
            dtype=dtypes[self.config.state_dtype],
            num_updates=self.model.num_layers * self.config.updates_per_layer,
        )

    def forward(
        self, h: Tensor, state: stack.StackState, previous: Tensor | None = None, probe: bool = False
    ) -> tuple[Tensor, stack.StackState, Stats]:
        """Update the stacks with h [B, T, d], then read them; see `Memory.forward`."""
        products = self.choose_products(h)
        if products is None:
            x, logits = self.project(h)  # [B, T, H, D], [B, T, H, 3]
        else:
            x, logits, link = self.project_fused(h, products)
        output, state = self.update(state, x, logits, h)
        read = output.read.to(x.dtype)
        new_h = self.add_read(h, read) if products is None else projection.project_up(link, read)
        stats = {"entropy": output.entropy.mean()}
        if probe:
            with torch.no_grad():
                added = self.scale_read(self.project_up(read))  # [B, T, d]
            stats |= average_actions(output.action)
            stats |= {"occupancy": output.occupancy.detach().mean(), "read_share": compute_read_share(added, h)}
            if self.axis != "token_major":  # each call has one token, without a spread
                stats |= _compute_spread(output.action)
        return new_h, state, stats

    def choose_products(self, h: Tensor) -> ModuleType | None:
        """Return the products for the projections of h that share a gradient, or None for separate operations."""
        config = self.config
        is_small = config.num_heads * max(config.head_dim, NUM_ACTIONS) <= MAX_FUSED_SIZE
        if not is_small or config.projection != "low_rank" or config.residual_gate != "hidden":
            return None
        return dispatch.choose_products(h, get_matmul_dtype(h))

    def project_fused(self, h: Tensor, products: ModuleType) -> tuple[Tensor, Tensor, projection.Link]:
        """Return x [B, T, H, D] and the logits [B, T, H, 3] as `project`, and the link to `projection.project_up`."""
        x, logits, link = self.link_projections(h, products, self.actions)
        return x, self.compute_logits(x) if logits is None else logits, link

    def link_projections(self, h: Tensor, products: ModuleType, actions: Tensor | None) -> tuple:
        """Return the results of `projection.project_down`."""
        heads, dtype = self.config.num_heads, get_matmul_dtype(h)
        return projection.project_down(products, h, self.down, actions, self.up, self.gate, heads, dtype)

    def add_read(self, h: Tensor, read: Tensor) -> Tensor:
        """Return h' [..., d] of h [..., d] and R [..., H, D]: the gated sum of h and W_up R."""
        up = self.project_up(read)
        summand, factor = (up, h) if self.config.residual_gate == "hidden" else (h, up)
        with torch.autocast(h.device.type, enabled=False):  # autocast would copy the read to float32
            return torch.addcmul(summand, factor, self.gate).to(h.dtype)

    def project(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the push vectors x [..., H, D] and the action logits A x [..., H, 3] of h [..., d]."""
        x = self.project_down(h)
        return x, self.compute_logits(x)

    def compute_logits(self, x: Tensor) -> Tensor:
        """Return the action logits A x [..., H, 3] of x [..., H, D].

        For push_only, the logits [..., H, 2] of push and no-op give a_push = 1 exactly.
        """
        if self.actions is None:
            push = x.new_zeros(x.shape[:-1])
            return torch.stack([push, push + IMPOSSIBLE_LOGIT], -1)
        if x.dim() == 4:  # [B, T, H, D]: one product per sequence, so that a GPU computes A's gradient in parallel
            return torch.einsum("bthd,bhad->btha", x, self.actions.expand(len(x), -1, -1, -1))
        return torch.einsum("...hd,had->...ha", x, self.actions)

    def project_down(self, h: Tensor) -> Tensor:
        """Return the push vectors W_down h [..., H, D] of h [..., d]."""
        heads = self.config.num_heads
        if self.down is None:
            return h.unflatten(-1, (heads, -1))
        if self.config.projection == "shared_slices":
            return F.linear(h.unflatten(-1, (heads, -1)), self.down)
        return F.linear(h, self.down).unflatten(-1, (heads, -1))

    def project_up(self, read: Tensor) -> Tensor:
        """Return W_up concat(R) [..., d] of the reads R [..., H, D]."""
        if self.up is None:
            return read.flatten(-2)
        if self.config.projection == "shared_slices":
            return F.linear(read, self.up).flatten(-2)
        return F.linear(read.flatten(-2), self.up)

    def scale_read(self, read: Tensor) -> Tensor:
        """Return the term added to the hidden state: W_up R [..., d], times the gate with `residual_gate: read`."""
        return read * self.gate if self.config.residual_gate == "read" else read

    def update(
        self, state: stack.StackState, x: Tensor, logits: Tensor, h: Tensor
    ) -> tuple[stack.StackOutput, stack.StackState]:
        """Update and read the stacks: one step per token for axis depth, a scan over the tokens otherwise.

        `h` [B, T, d] is for subclasses whose feedback depends on it.
        """
        if self.axis == "depth":
            return stack.step(
                state,
                x,
                logits,
                self.get_query(),
                checkpoint_every=self.config.checkpoint_every_layers,
                **self.get_options(),
            )
        return stack.scan(state, x, logits, self.get_query(), **self.get_options())

    def get_query(self) -> Tensor | None:
        """Return w_g [H, D]; None for `read: top`."""
        return None if self.query is None else self.query.expand(self.config.num_heads, -1)

    def get_options(self) -> dict[str, str | int]:
        """Return the options of `stack.step` and `stack.scan`."""
        config = self.config
        options = {"discipline": config.discipline, "read": config.read, "read_mask": config.read_mask}
        return {"num_slots": self.num_slots} | options

    def flops_per_token(self, context_length: int) -> float:
        """Count projections, actions, and multiply-adds per element of the occupied slots, averaged over the tokens.

        These are 3 for an update with push, pop and no-op, or 2 if every action is a push, and 2 for a global read.
        """
        config = self.config
        num_uses = config.num_heads if config.projection == "shared_slices" else 1  # shared: once per head
        matmuls = num_uses * sum(w.numel() for w in (self.down, self.up) if w is not None)
        matmuls += 0 if self.actions is None else self.actions.numel()
        occupied = self._count_updates(context_length).clamp(max=config.num_slots).double().mean().item()
        per_element = (2 if self.always_pushes else 3) + (0 if config.read == "top" else 2)
        return 2.0 * matmuls + 2.0 * per_element * config.num_heads * config.head_dim * occupied

    def _count_updates(self, context_length: int) -> Tensor:
        """Return the number of updates up to this memory's own, for each token of a sequence [T]."""
        tokens = torch.arange(context_length, device="cpu")
        if self.axis == "time":
            return tokens + 1
        per_layer = self.config.updates_per_layer
        own = per_layer * self.layer + 1 + (per_layer == 2 and self.site == "after_block")
        return own + tokens * (per_layer * self.model.num_layers if self.axis == "token_major" else 0)


def new_parameter(*shape: int) -> nn.Parameter:
    """Return an uninitialized parameter."""
    return nn.Parameter(torch.empty(shape))


@torch.no_grad()
def _compute_spread(action: Tensor) -> Stats:
    """Return the mean action spread, and the share of heads whose spread is below MAX_CONSTANT_SPREAD.

    Such heads give every token the same action, which the mean of the actions does not show.
    """
    spread = compute_action_spread(action)
    return {"action_spread": spread.mean(), "constant_heads": (spread < MAX_CONSTANT_SPREAD).float().mean()}


def compute_action_spread(action: Tensor) -> Tensor:
    """Return the standard deviation [B, H] of the actions [B, T, H, 3] over the tokens of a sequence."""
    return action.float().std(-3, correction=0).norm(dim=-1)
