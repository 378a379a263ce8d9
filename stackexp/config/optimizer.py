"""Options of the optimizer."""

from dataclasses import dataclass
from typing import Optional

from stackexp.config.fields import above, at_least, from_up_to
from stackexp.config.registry import register


@register("optimizer", "adamw", builds="stackexp.modules.optimizers:build_adamw")
@dataclass
class AdamWConfig:
    """AdamW; norms, biases, embeddings and scalars are not decayed."""

    kind: str = "adamw"
    lr: float = above(0, 4e-4)
    memory_lr: Optional[float] = above(0, None)  # of the memory's parameters, if there is one; None: lr
    beta1: float = from_up_to(0, 1, 0.9)
    beta2: float = from_up_to(0, 1, 0.95)
    eps: float = above(0, 1e-5)
    weight_decay: float = at_least(0, 0.1)
