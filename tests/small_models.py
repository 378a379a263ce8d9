"""Build small decoders with or without a memory, and the tokens they run on."""

from typing import Any

import torch

from stackexp.config.memory import (
    AttentionResidualConfig,
    DenseFormerConfig,
    HyperConnectionsConfig,
    ManifoldHyperConnectionsConfig,
    NondeterministicStackConfig,
    ResidualScaleConfig,
    ResidualStackConfig,
    StackAttentionConfig,
    StackMemoryConfig,
    StratifiedStackConfig,
    ValueSkipConfig,
)
from stackexp.config.model import TransformerConfig
from stackexp.models.transformer import Transformer

VOCAB, B, T = 13, 2, 9
VARIANTS = {
    "transformer": None,
    "stacktrans": {},
    "queue": {"discipline": "queue", "site": "after_attention", "num_heads": 1, "read": "top"},
    "push_only": {"discipline": "push_only", "read_mask": "log"},
    "full_dim": {"projection": "none", "head_dim": 8, "action_noise": 0.5, "action_sharpness": 2.0},
    "authors_code": {"site": "after_attention", "projection": "shared_slices", "residual_gate": "read"}
    | {"action_input": "hidden", "action_scale": "slice", "read_mask": "additive"},
    "attention_residual": AttentionResidualConfig(),
    "dense_former": DenseFormerConfig(),
    "hyper_connections": HyperConnectionsConfig(),
    "mhc": ManifoldHyperConnectionsConfig(),
    "residual_scale": ResidualScaleConfig(),
    "residual_stack": ResidualStackConfig(),
    "value_skip": ValueSkipConfig(rank=3),
}
"""The Transformer and every memory over the depth: a config, or the options of a stack; see `make_model`."""

STACKS = {
    "none": None,
    "depth": {"axis": "depth"},
    "queue": {"axis": "depth", "discipline": "queue", "site": "after_attention"},
    "push_only": {"axis": "depth", "discipline": "push_only", "projection": "shared_slices"},
    "time": {"axis": "time", "read_mask": "log"},
    "feedback": {"axis": "time", "feedback": True, "read": "top"},
    "feedback_hidden": {"axis": "time", "feedback": True, "feedback_activation": "gated", "feedback_hidden_size": 6},
    "token_major": {"axis": "token_major", "site": "before_attention"},
}
"""The Transformer and stacks on every axis."""

TOKEN_MEMORIES = {
    "stack_attention": StackAttentionConfig(),
    "stratified_stack": StratifiedStackConfig(num_heads=2, head_dim=3),
    "nondeterministic_stack": NondeterministicStackConfig(head_dim=3, layers="all"),
}
"""The other memories over the tokens."""

MEMORIES = VARIANTS | STACKS | TOKEN_MEMORIES


def make_model(memory: Any = None, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Transformer:
    """Build a decoder of three layers; `memory` is a config, or the options of a stack with three slots."""
    torch.manual_seed(seed)
    if isinstance(memory, dict):
        memory = StackMemoryConfig(**{"num_heads": 2, "head_dim": 4, "num_slots": 3} | memory)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 3, "intermediate_size": 24}
    sizes |= {"num_heads": 4, "num_kv_heads": 2}
    return Transformer(TransformerConfig(**sizes | options, memory=memory)).to(dtype)


def make_tokens(length: int = T, batch: int = B) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))
