"""AdamW and the learning-rate schedules, each a function from the optimizer step to a factor of the peak rate."""

import math
from collections.abc import Callable

import torch
from torch import nn

from stackexp.config.optimizer import AdamWConfig
from stackexp.config.schedule import CosineConfig, LinearConfig, ScheduleConfig, WarmupStableDecayConfig

Factor = Callable[[int], float]


def build_adamw(config: AdamWConfig, model: nn.Module) -> torch.optim.AdamW:
    """AdamW in two groups: matrices decay; embeddings, norms, biases, gates and other scalars do not.

    With `memory_lr` the parameters of memories are two groups of their own, after those.
    """
    embeddings = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    memories = getattr(model, "memories", ()) if config.memory_lr else ()
    in_memory = {p for memory in memories for p in memory.parameters()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = []
    for rate, own in ((config.lr, False), (config.memory_lr, True))[: 1 + bool(in_memory)]:
        there = [p for p in parameters if (p in in_memory) == own]
        decays = [p.ndim >= 2 and p not in embeddings for p in there]
        for decayed, weight_decay in ((True, config.weight_decay), (False, 0.0)):
            members = [p for p, d in zip(there, decays, strict=True) if d == decayed]
            groups.append({"params": members, "lr": rate, "weight_decay": weight_decay})
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)


def cosine(config: CosineConfig, max_steps: int) -> Factor:
    return _decaying(config, max_steps, lambda done: 0.5 * (1 + math.cos(math.pi * done)))


def linear(config: LinearConfig, max_steps: int) -> Factor:
    return _decaying(config, max_steps, lambda done: 1 - done)


def _decaying(config: ScheduleConfig, max_steps: int, shape: Factor) -> Factor:
    """From 1 after the warm-up to `final_fraction` at max_steps, as `shape` goes from 1 to 0."""

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return step / config.warmup_steps
        done = min(1.0, (step - config.warmup_steps) / (max_steps - config.warmup_steps))
        return config.final_fraction + (1 - config.final_fraction) * shape(done)

    return factor


def warmup_stable_decay(config: WarmupStableDecayConfig, max_steps: int) -> Factor:
    """Constant between warm-up and the decay at the end (SmolLM's recipes)."""
    decay_steps = config.decay_steps_of(max_steps)
    shape = {"linear": lambda done: 1 - done, "one_minus_sqrt": lambda done: 1 - math.sqrt(done)}[config.decay]

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return step / config.warmup_steps
        done = min(1.0, max(0.0, (step - (max_steps - decay_steps)) / decay_steps))
        return config.final_fraction + (1 - config.final_fraction) * shape(done)

    return factor
