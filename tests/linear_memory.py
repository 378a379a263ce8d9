"""A plugin whose memory has a torch layer of its own, which draws its weights at construction, as torch does."""

from dataclasses import dataclass

from torch import nn

from stackexp.config.registry import register
from stackexp.models.memories.base import Memory


@dataclass
class LinearMemoryConfig:
    kind: str = "linear_memory"


@register("memory", "linear_memory", config=LinearMemoryConfig)
class LinearMemory(Memory):
    def __init__(self, config, model, layer):
        super().__init__(config, model, layer)
        self.map = nn.Linear(model.hidden_size, model.hidden_size)

    def empty_state(self, h):
        return None

    def forward(self, h, state, previous, probe=False):
        return h + self.map(h), state, {}
