"""Manifold-constrained hyper-connections, mHC (Xie et al. 2025, arXiv 2512.24880)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config.memory import ManifoldHyperConnectionsConfig
from stackexp.config.model import TransformerConfig
from stackexp.errors import RunError
from stackexp.models.layers import init_weight_, widen
from stackexp.models.memories.hyper_connections import HyperConnections

SINKHORN_STEPS = 20  # the paper's value
SHARP = 4.0  # initial logit of the entries that start near 1; the paper prints no biases


class ManifoldHyperConnections(HyperConnections):
    """Hyper-connections whose R is doubly stochastic, by Sinkhorn normalization of exp(logits).

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
    matrix = logits.softmax(-2)  # the columns of the first step; exp(logits) could overflow
    for step in range(SINKHORN_STEPS):
        if step:
            matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix
