"""Hyper-connections (Zhu et al. 2024, arXiv 2409.19606).

The residual stream becomes n streams H [n, d]. Around sublayer k, f_k:

    input of the sublayer   h_k = a_k H_k
    streams after it        H_{k+1} = R_k H_k + b_k f_k(h_k)

with a_k [n], b_k [n] and R_k [n, n] learned, and in the dynamic form a function of the streams as well.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config.memory import HyperConnectionsConfig, ManifoldHyperConnectionsConfig
from stackexp.config.model import TransformerConfig
from stackexp.errors import RunError
from stackexp.models.layers import init_weight_
from stackexp.models.memories.base import EmbeddingSkip, Stats
from stackexp.stack import widen

SINKHORN_STEPS = 20  # the paper's value
SHARP = 4.0  # initial logit of the entries that start near 1; the paper prints no biases


class HyperConnections(EmbeddingSkip):
    """The connections between sublayer k and k + 1: R_k, b_k and a_{k+1}. The state holds H_{k+1} [B, T, n, d].

    Static: `residual` R [n, n] starts at the identity, `output` b [n] at 1, and `input` a [n] selects one stream, a
    different one for each sublayer. So the model starts as the plain Transformer. The paper sums the streams after the
    last sublayer; here the last a is learned and starts at 1.

    `dynamic` adds s * tanh(W RMSNorm(H)) to each. Stream j determines entry j of a and b, and column j of R, which is
    how much of it goes into each stream. `maps` W [n + 2, d], with n rows for R, one for b and one for a, starts at 0,
    and the scale s [3] at 0.01.

    The paper computes a_{k+1} at the start of sublayer k + 1, this class at the end of sublayer k; the values are the
    same. The input of sublayer 0 is the embedding. Autocast applies to W, not to the streams.
    """

    site = "each_sublayer"
    no_decay = ("residual",)
    fans = {"residual": "none", "maps": "in"}

    def __init__(self, config: HyperConnectionsConfig, model: TransformerConfig, layer: int) -> None:
        super().__init__(config, model, layer)
        n, d = config.num_streams, model.hidden_size
        self.residual = nn.Parameter(torch.empty(n, n))
        self.output = nn.Parameter(torch.empty(n))
        self.input = nn.Parameter(torch.empty(n))
        self.maps = self.scale = None
        if config.dynamic:
            self.maps, self.scale = nn.Parameter(torch.empty(n + 2, d)), nn.Parameter(torch.empty(3))

    def init_weights(self) -> None:
        """Initialize so that the model equals the plain Transformer, up to the epsilon of the last norm.

        Each sublayer takes a different stream as input. The last norm takes all of them: n h instead of h.
        """
        sublayer = 2 * self.layer + (self.site == "after_block") + 1  # the next one
        is_last = sublayer == 2 * self.model.num_layers
        nn.init.zeros_(self.input)
        nn.init.ones_(self.input if is_last else self.input[sublayer % self.config.num_streams :][:1])
        nn.init.eye_(self.residual)
        nn.init.ones_(self.output)
        if self.maps is not None:
            nn.init.zeros_(self.maps)
            nn.init.constant_(self.scale, 0.01)

    def empty_state(self, h: Tensor) -> Tensor:
        """Return n copies of the embedding [B, T, n, d]."""
        return h.unsqueeze(-2).expand(*h.shape[:-1], self.config.num_streams, -1)

    def forward(
        self, h: Tensor, state: Tensor, previous: Tensor | None = None, probe: bool = False
    ) -> tuple[Tensor, Tensor, Stats]:
        """Add the output of the sublayer to the streams, and mix the next input; see `Memory.forward`."""
        assert previous is not None
        residual, output = self.compute_residual(state)
        with torch.autocast(h.device.type, enabled=False):  # it would round the residual stream to bfloat16
            streams = residual.to(h.dtype) @ state + output.to(h.dtype).unsqueeze(-1) * (h - previous).unsqueeze(-2)
        stats = {"stream_spread": streams.detach().float().std(-2).mean()} if probe else {}
        weights = self.compute_input(streams).to(h.dtype)
        with torch.autocast(h.device.type, enabled=False):
            return (weights.unsqueeze(-2) @ streams).squeeze(-2), streams, stats

    def compute_residual(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Return R [..., n, n] and b [..., n] for streams [B, T, n, d], as float32."""
        n, residual, output = self.config.num_streams, self.residual, self.output
        if self.maps is not None:
            changes = self.map_streams(streams, slice(0, n + 1))
            residual = residual + self.scale[0] * changes[..., :n].mT
            output = output + self.scale[1] * changes[..., n]
        return residual, output

    def compute_input(self, streams: Tensor) -> Tensor:
        """Return a [..., n] for streams [B, T, n, d], as float32."""
        weights = self.input
        if self.maps is not None:
            weights = weights + self.scale[2] * self.map_streams(streams, slice(-1, None))[..., 0]
        return weights

    def map_streams(self, streams: Tensor, rows: slice) -> Tensor:
        """Return the changes [B, T, n, rows] of the connections.

        The map is linear, so the scale of the RMSNorm is applied after it. This stores no normalized streams for the
        backward pass.
        """
        values = widen(streams)
        return (self.compute_norm_scale(values) * F.linear(values, widen(self.maps)[rows])).tanh()

    def compute_norm_scale(self, values: Tensor) -> Tensor:
        """Return the factor [..., 1] by which RMSNorm multiplies values [..., d]."""
        norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        return torch.rsqrt(norm.square() / values.shape[-1] + self.model.norm_eps)

    def flops_per_token(self, context_length: int) -> float:
        """Count the maps, and for each stream n + 2 multiply-adds per element."""
        n, d = self.config.num_streams, self.model.hidden_size
        rows = 0 if self.maps is None else len(self.maps)
        return 2.0 * (rows + n + 2) * n * d


class ManifoldHyperConnections(HyperConnections):
    """Hyper-connections whose R is doubly stochastic, by Sinkhorn normalization of exp(logits): mHC (arXiv 2512.24880).

    a = sigmoid(logits) and b = 2 sigmoid(logits). W maps all streams together, [n (n + 2), n d], and has no tanh.
    """

    def __init__(self, config: ManifoldHyperConnectionsConfig, model: TransformerConfig, layer: int) -> None:
        super().__init__(config, model, layer)
        if config.dynamic:
            n = config.num_streams
            self.maps = nn.Parameter(torch.empty(n * (n + 2), n * model.hidden_size))

    def init_weights(self) -> None:
        """Initialize near the plain Transformer, with logits that select the streams of `HyperConnections`."""
        super().init_weights()
        with torch.no_grad():
            self.input.mul_(2).sub_(1).mul_(SHARP)
            self.residual.mul_(SHARP)
            self.output.zero_()
        if self.maps is not None:
            init_weight_(self.maps, self.model)

    def init_identity(self) -> None:
        """Raise RunError: the model starts only near the plain Transformer."""
        raise RunError("warm_start.memory: identity is not supported by mhc; use default")

    def compute_residual(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Return R [..., n, n] and b [..., n] for streams [B, T, n, d], as float32."""
        residual, output = super().compute_residual(streams)
        return normalize_sinkhorn(residual), 2 * output.sigmoid()

    def compute_input(self, streams: Tensor) -> Tensor:
        """Return a [..., n] for streams [B, T, n, d], as float32."""
        return super().compute_input(streams).sigmoid()

    def map_streams(self, streams: Tensor, rows: slice) -> Tensor:
        """Return the changes [B, T, n, rows] of the logits."""
        n = self.config.num_streams
        values, maps = widen(streams).flatten(-2), widen(self.maps).unflatten(0, (n, n + 2))[:, rows]
        return (self.compute_norm_scale(values) * F.linear(values, maps.flatten(0, 1))).unflatten(-1, (n, -1))


def normalize_sinkhorn(logits: Tensor) -> Tensor:
    """Return exp(logits) [..., n, n], scaled to columns and rows that sum to 1 (Sinkhorn & Knopp 1967).

    A step normalizes the columns, then the rows, as in the paper: T_r(T_c(M)). So rows sum to 1 exactly, and each new
    stream is a weighted mean of the old ones.
    """
    for _ in range(SINKHORN_STEPS):  # of logarithms: exp(logits) could overflow, or a whole row could become 0
        logits = logits.log_softmax(-2).log_softmax(-1)
    return logits.exp()
