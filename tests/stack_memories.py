"""Build stack memories, and the decoder configs they need, for the memory tests."""

import torch

from stackexp.config.memory import StackMemoryConfig
from stackexp.config.model import TransformerConfig
from stackexp.models.memories.extensions import ExtendedStackMemory as StackMemory

HIDDEN, B, T = 12, 2, 5
ACTION_INPUTS = [("head", "none"), ("hidden", "none"), ("hidden", "slice")]
PROJECTIONS = ["low_rank", "none", "shared_slices"]


def decoder_config(num_layers=2, hidden_size=HIDDEN, **memory):
    memory = {"num_heads": 2, "head_dim": 6 if memory.get("projection") == "none" else 3, "num_slots": 4} | memory
    model = TransformerConfig(
        vocab_size=11,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=16,
        memory=StackMemoryConfig(**memory),
    )
    assert not [*model.find_errors(), *model.memory.find_errors(model)]
    return model


def make_memory(layer=0, seed=0, **options):
    torch.manual_seed(seed)
    model = decoder_config(**options)
    memory = StackMemory(model.memory, model, layer).double()
    memory.init_weights()
    return memory


def hidden_states(seed=1, tokens=T):
    return torch.randn(B, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
