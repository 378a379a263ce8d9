"""DeltaNet and DeltaProduct: linear recurrences whose state changes by generalized Householder matrices."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config.model import DeltaNetConfig
from stackexp.models.attention import check_backend
from stackexp.models.layers import FeedForward, Linear, RMSNorm, init_weight_
from stackexp.models.memories.base import Stats
from stackexp.models.recurrent import Recurrent
from stackexp.stack import widen

DeltaState = tuple[
    Tensor, Tensor
]  # S [B, H, D, D], keys x values; the last inputs of the convolution [B, conv_size-1, C]
CHUNK_STEPS = 64  # updates of S in a chunk


class DeltaNetLayer(nn.Module):
    """A block h + DeltaNet(RMSNorm(h)), then h + SwiGLU(RMSNorm(h)); Yang et al. 2024 (arXiv 2406.06484).

    Each head updates S [D, D] by n = num_householder steps per token (n > 1: DeltaProduct, Siems et al. 2025), then
    reads it:

        S <- S + beta k (v - S^T k)^T = (I - beta k k^T) S + beta k v^T,    y = S^T q

    q, k, v = SiLU(conv(W x)) with a causal convolution over `conv_size` tokens per channel; q and k have norm 1.
    beta = sigmoid(w x), or twice that with `allow_negative_eigenvalues`, so that I - beta k k^T has an eigenvalue in
    (-1, 1) (Grazzi et al. 2024). y has an RMSNorm per head before the output projection, and no gate.
    """

    layer = 0  # index in the model, for initialization

    def __init__(self, config: DeltaNetConfig) -> None:
        super().__init__()
        self.config = config
        size, steps = config.hidden_size, config.num_householder
        self.delta_norm = RMSNorm(size, config.norm_eps)
        self.q_proj, self.k_proj, self.v_proj = (Linear(size, n * size) for n in (1, steps, steps))
        self.beta_proj = Linear(size, steps * config.num_heads)
        channels = (1 + 2 * steps) * size
        self.conv = None
        if config.conv_size:
            self.conv = nn.Conv1d(channels, channels, config.conv_size, groups=channels, bias=False)
        self.head_norm = RMSNorm(size // config.num_heads, config.norm_eps)
        self.o_proj = Linear(size, size)
        self.feed_forward_norm = RMSNorm(size, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def reset_parameters(self) -> None:
        """Initialize the matrices as the decoder's, the convolution as torch.nn.Conv1d and norms to 1."""
        ffn = self.feed_forward
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.beta_proj, ffn.gate_proj, ffn.up_proj):
            init_weight_(linear.weight, self.config)
        for linear in (self.o_proj, ffn.down_proj):
            init_weight_(linear.weight, self.config, output_of_layer=self.layer)
        for module in (self.conv, self.delta_norm, self.head_norm, self.feed_forward_norm):
            if module is not None:
                module.reset_parameters()

    def forward(self, h: Tensor, state: DeltaState | None, probe: bool) -> tuple[Tensor, DeltaState, Stats]:
        """Run h [B, T, d]; return the new h, the new state and no statistics."""
        config, x = self.config, self.delta_norm(h)
        num_heads, size = config.num_heads, config.hidden_size // config.num_heads
        projected = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)  # [B, T, C]
        recurrent, earlier = state or (widen(x).new_zeros(len(h), num_heads, size, size), None)
        projected, earlier = self._convolve(projected, earlier)
        widths = [self.q_proj.out_features, self.k_proj.out_features, self.v_proj.out_features]
        # n steps of H heads per token: [B, n T, H, D]
        q, k, v = (part.reshape(len(h), -1, num_heads, size) for part in F.silu(projected).split(widths, -1))
        beta = self.beta_proj(x).sigmoid().reshape(len(h), -1, num_heads)
        beta = 2 * beta if config.allow_negative_eigenvalues else beta
        with torch.autocast(h.device.type, enabled=False):
            q, k, v, beta = map(widen, (q, k, v, beta))
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            y, recurrent = (apply_fla if config.kernel == "fla" else apply_delta_rule)(q, k, v, beta, recurrent)
        h = h + self.o_proj(self.head_norm(y).to(x.dtype).flatten(2))
        return h + self.feed_forward(self.feed_forward_norm(h)), (recurrent, earlier), {}

    def _convolve(self, x: Tensor, earlier: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve x [B, T, C] over the tokens; return it and the inputs for the tokens to come."""
        if self.conv is None:
            return x, x[:, :0]
        num_earlier = self.config.conv_size - 1
        padded = F.pad(x, (0, 0, num_earlier, 0)) if earlier is None else torch.cat([earlier, x], 1)
        y = F.conv1d(padded.mT, self.conv.weight.to(x.dtype), groups=x.shape[-1])
        return y.mT, padded[:, padded.shape[1] - num_earlier :]

    def count_update_multiply_adds(self, context_length: int) -> float:
        """Count the convolution and, per head, two products with S per step and one per read."""
        config, steps = self.config, self.config.num_householder
        convolution = (1 + 2 * steps) * config.hidden_size * (config.conv_size or 0)
        return convolution + (2 * steps + 1) * config.hidden_size**2 / config.num_heads


class DeltaNet(Recurrent):
    """Residual blocks of DeltaNet and SwiGLU, with an RMSNorm before the output projection."""

    layer_type = DeltaNetLayer

    def build_norm(self) -> nn.Module:
        """Return an RMSNorm."""
        return RMSNorm(self.config.hidden_size, self.config.norm_eps)

    def init_weights(self) -> None:
        """Initialize all parameters; see `Recurrent.init_weights`."""
        for i, layer in enumerate(self.layers):
            layer.layer = i
        super().init_weights()


def apply_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, chunk_steps: int = CHUNK_STEPS
) -> tuple[Tensor, Tensor]:
    """Run the delta rule over the tokens in chunks, as products of matrices (the WY form).

    Within a chunk that starts from S, let u_j = beta_j (v_j - S_{j-1}^T k_j), so that S_j = S + sum_{i <= j} k_i u_i^T.
    The rows u_j of U solve the triangular system (I + tril(diag(beta) K K^T, -1)) U = diag(beta) (V - K S).

    Args:
        q: Queries [B, T, H, D].
        k: Keys [B, n T, H, D], n updates per token.
        v: Values [B, n T, H, D].
        beta: Step sizes [B, n T, H].
        state: S [B, H, D, D], keys x values.
        chunk_steps: Maximal number of updates in a chunk, at least n.

    Returns:
        The reads S^T q after the last update of each token, [B, T, H, D], and the new S.
    """
    length, steps = q.shape[1], k.shape[1] // q.shape[1]
    tokens = min(length, max(1, chunk_steps // steps))

    def split(x: Tensor, size: int) -> Tensor:
        """Reshape [B, N, H, D] into chunks [B, H, N / size, size, D]; zeros at the end change nothing."""
        return F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4)

    q = split(q, tokens)
    k, v, beta = (split(x, tokens * steps) for x in (k, v, beta.unsqueeze(-1)))
    system = ((beta * k) @ k.mT).tril(-1)
    solved = torch.linalg.solve_triangular(system, beta * torch.cat([v, k], -1), upper=False, unitriangular=True)
    u_fixed, u_of_state = solved.chunk(2, -1)
    last_step = steps * torch.arange(1, tokens + 1, device=q.device).unsqueeze(1)
    visible = torch.arange(tokens * steps, device=q.device) < last_step  # [tokens, steps]
    scores = (q @ k.mT) * visible
    reads = []
    for c in range(q.shape[2]):
        u = u_fixed[:, :, c] - u_of_state[:, :, c] @ state
        reads.append(q[:, :, c] @ state + scores[:, :, c] @ u)
        state = state + k[:, :, c].mT @ u
    return torch.cat(reads, 2)[:, :, :length].transpose(1, 2), state


def apply_fla(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run `apply_delta_rule` with the package flash-linear-attention, in bfloat16 on CUDA."""
    check_backend("fla", q.device.type)
    from fla.ops.delta_rule import chunk_delta_rule

    steps = k.shape[1] // q.shape[1]
    queries = F.pad(q.unsqueeze(2), (0, 0, 0, 0, steps - 1, 0)).flatten(1, 2)  # zeros before the last step of a token
    inputs = (x.bfloat16().contiguous() for x in (queries, k, v, beta))
    y, state = chunk_delta_rule(*inputs, scale=1.0, initial_state=state, output_final_state=True)
    return y[:, steps - 1 :: steps].to(q.dtype), state
