"""Parameter groups of the optimizer."""

import pytest
import torch
from torch import nn

from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.config.optimizer import AdamWConfig
from stackexp.modules.optimizers import build_adamw

SMALL = ["model.hidden_size=32", "model.intermediate_size=32"]


def option_of_parameters(model: nn.Module, optimizer: torch.optim.Optimizer, option: str) -> dict[str, float]:
    """Return {parameter name: value of an option of its group}; every parameter is in one group."""
    values = [(p, group[option]) for group in optimizer.param_groups for p in group["params"]]
    by_parameter = dict(values)
    assert len(by_parameter) == len(values) == len(list(model.parameters()))
    return {name: by_parameter[p] for name, p in model.named_parameters()}


@pytest.mark.parametrize("memory", ["stacktrans", "null"])
@pytest.mark.parametrize("tied", [True, False])
def test_in_the_decoder_embedding_norms_and_gates_do_not_decay(memory, tied):
    overrides = [*SMALL, f"model.memory={memory}", f"model.tie_embeddings={str(tied).lower()}"]
    model = registry.build("model", compose(["quickstart"], overrides).model)
    decay = option_of_parameters(model, build_adamw(AdamWConfig(weight_decay=0.3), model), "weight_decay")
    kept = {"attention_norm.weight", "feed_forward_norm.weight"} | ({"memory.gate"} if memory != "null" else set())
    kept = {f"layers.{i}.{name}" for i in range(6) for name in kept} | {"embedding.weight", "norm.weight"}
    assert decay == {name: 0.0 if name in kept else 0.3 for name in decay}
    assert kept < decay.keys()
    assert ("head.weight" in decay) is not tied


@pytest.mark.parametrize("memory", ["stacktrans", "null"])
def test_memories_have_a_separate_learning_rate(memory):
    model = registry.build("model", compose(["quickstart"], [*SMALL, f"model.memory={memory}"]).model)
    optimizer = build_adamw(AdamWConfig(lr=0.1, memory_lr=0.3, weight_decay=0.2), model)
    rates = option_of_parameters(model, optimizer, "lr")
    assert rates == {name: 0.3 if ".memory." in name else 0.1 for name in rates}
    plain = build_adamw(AdamWConfig(lr=0.1, weight_decay=0.2), model)
    decays = [option_of_parameters(model, o, "weight_decay") for o in (optimizer, plain)]
    assert decays[0] == decays[1]
    assert len(optimizer.param_groups) == (2 if memory == "null" else 4)


def test_options_reach_adamw():
    defaults = build_adamw(AdamWConfig(lr=0.5, beta1=0.8, beta2=0.7, eps=1e-3), nn.Linear(2, 2)).defaults
    assert (defaults["lr"], defaults["betas"], defaults["eps"], defaults["fused"]) == (0.5, (0.8, 0.7), 1e-3, True)
