"""Optimizers and their parameter groups."""

import torch
from torch import nn

from stackexp.config.optimizer import AdamWConfig


def build_adamw(config: AdamWConfig, model: nn.Module) -> torch.optim.AdamW:
    """Build AdamW with two groups: matrices decay; embeddings, norms, biases, gates and other scalars do not.

    With `memory_lr`, the parameters of memories form two more groups.
    """
    embeddings = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    memories = getattr(model, "memories", ()) if config.memory_lr else ()
    memory_parameters = {p for memory in memories for p in memory.parameters()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    rates = {False: config.lr} | ({True: config.memory_lr} if memory_parameters else {})
    groups = []
    for is_memory, lr in rates.items():
        members = [p for p in parameters if (p in memory_parameters) == is_memory]
        decayed = [p for p in members if p.ndim >= 2 and p not in embeddings]
        kept = [p for p in members if p.ndim < 2 or p in embeddings]
        groups.append({"params": decayed, "lr": lr, "weight_decay": config.weight_decay})
        groups.append({"params": kept, "lr": lr, "weight_decay": 0.0})
    has_fused_kernel = all(p.device.type in ("cpu", "cuda") for p in parameters)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=has_fused_kernel)
