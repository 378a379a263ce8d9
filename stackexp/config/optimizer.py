"""Options of the optimizer."""

from dataclasses import dataclass
from typing import Optional

from stackexp.config.fields import option
from stackexp.config.registry import register


@register("optimizer", "adamw", builds="stackexp.modules.optimizers:build_adamw")
@dataclass
class AdamWConfig:
    """AdamW. Norms, biases, embeddings and scalars have no weight decay."""

    kind: str = "adamw"
    lr: float = option(4e-4, above=0)
    """Peak learning rate."""
    memory_lr: Optional[float] = option(None, above=0)
    """Peak learning rate of the memory parameters; null takes lr."""
    beta1: float = option(0.9, min=0, below=1)
    """Decay of the first moment."""
    beta2: float = option(0.95, min=0, below=1)
    """Decay of the second moment."""
    eps: float = option(1e-5, above=0)
    """Epsilon of the denominator."""
    weight_decay: float = option(0.1, min=0)
    """Decoupled weight decay of all matrices."""


@register("optimizer", "muon", builds="stackexp.modules.optimizers:build_muon")
@dataclass
class MuonConfig(AdamWConfig):
    """Muon for the matrices between embedding and output projection (Jordan et al. 2024), AdamW for everything else.

    The updates of Muon are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so lr serves both. Not
    for sharded models: orthogonalization needs whole matrices.
    """

    kind: str = "muon"
    momentum: float = option(0.95, min=0, below=1)
    """Momentum of Muon."""
