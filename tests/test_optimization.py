"""Parameter groups and schedules."""

import pytest
import torch
from torch import nn

from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.config.optimizer import AdamWConfig
from stackexp.config.schedule import CosineConfig, LinearConfig, WarmupStableDecayConfig
from stackexp.modules.optimizers import build_adamw, cosine, linear, warmup_stable_decay


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.RMSNorm(4)
        self.actions = nn.Parameter(torch.ones(2, 3, 4))
        self.gate = nn.Parameter(torch.ones(()))


def test_only_matrices_decay():
    model = Toy()
    optimizer = build_adamw(AdamWConfig(weight_decay=0.3), model)
    names = {p: name for name, p in model.named_parameters()}
    decayed, kept = ({names[p] for p in group["params"]} for group in optimizer.param_groups)
    assert decayed == {"linear.weight", "actions"}
    assert kept == {"embedding.weight", "linear.bias", "norm.weight", "gate"}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


@pytest.mark.parametrize("memory", ["stacktrans", "null"])
@pytest.mark.parametrize("tied", [True, False])
def test_of_the_decoder_embedding_norms_and_gates_do_not_decay_and_all_else_does(memory, tied):
    small = ["model.hidden_size=32", "model.intermediate_size=32", f"model.memory={memory}"]
    config = compose(["quickstart"], [*small, f"model.tie_embeddings={str(tied).lower()}"])
    model = registry.build("model", config.model)
    optimizer = build_adamw(AdamWConfig(weight_decay=0.3), model)
    weight_decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    of_layer = {"attention_norm.weight", "feed_forward_norm.weight"} | ({"memory.gate"} if memory != "null" else set())
    kept = {f"layers.{i}.{name}" for i in range(6) for name in of_layer} | {"embedding.weight", "norm.weight"}
    found = {name: weight_decay.pop(p) for name, p in model.named_parameters()}
    assert found == {name: 0.0 if name in kept else 0.3 for name in found}
    assert kept < found.keys()
    assert not weight_decay
    matrices = {"attention.o_proj.weight", "feed_forward.down_proj.weight"}
    matrices |= {"memory.actions", "memory.query", "memory.down", "memory.up"} if memory != "null" else set()
    assert all(found[f"layers.5.{name}"] == 0.3 for name in matrices)
    assert ("head.weight" in found) is not tied


@pytest.mark.parametrize("memory", ["stacktrans", "null"])
def test_memories_have_a_rate_of_their_own(memory):
    config = compose(["quickstart"], ["model.hidden_size=32", "model.intermediate_size=32", f"model.memory={memory}"])
    model = registry.build("model", config.model)
    optimizer = build_adamw(AdamWConfig(lr=0.1, memory_lr=0.3, weight_decay=0.2), model)
    groups = [(group["lr"], group["weight_decay"], group["params"]) for group in optimizer.param_groups]
    rates = {p: (lr, decay) for lr, decay, params in groups for p in params}
    found = {name: rates.pop(p) for name, p in model.named_parameters()}
    assert not rates
    for name, (lr, _) in found.items():
        assert lr == (0.3 if ".memory." in name else 0.1), name
    plain = build_adamw(AdamWConfig(lr=0.1, weight_decay=0.2), model)
    assert {g["lr"] for g in plain.param_groups} == {0.1}
    decays = {p: group["weight_decay"] for group in plain.param_groups for p in group["params"]}
    assert {name: decay for name, (_, decay) in found.items()} == {n: decays[p] for n, p in model.named_parameters()}
    assert len(groups) == (2 if memory == "null" else 4)


def test_options_reach_adamw():
    optimizer = build_adamw(AdamWConfig(lr=0.5, beta1=0.8, beta2=0.7, eps=1e-3), Toy())
    assert optimizer.defaults["lr"] == 0.5
    assert optimizer.defaults["betas"] == (0.8, 0.7)
    assert optimizer.defaults["eps"] == 1e-3
    assert optimizer.defaults["fused"]


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (cosine(CosineConfig(warmup_steps=10, final_fraction=0.2), 110), {0: 0, 5: 0.5, 10: 1, 60: 0.6, 110: 0.2}),
        (linear(LinearConfig(warmup_steps=10, final_fraction=0.2), 110), {0: 0, 10: 1, 35: 0.8, 110: 0.2, 120: 0.2}),
        (linear(LinearConfig(warmup_steps=0, final_fraction=0), 4), {0: 1, 1: 0.75, 4: 0}),
        (
            warmup_stable_decay(WarmupStableDecayConfig(warmup_steps=10, decay_steps=40, decay="linear"), 100),
            {5: 0.5, 10: 1, 60: 1, 80: 0.5, 100: 0},
        ),
        (
            warmup_stable_decay(WarmupStableDecayConfig(warmup_steps=10, decay_steps=40, final_fraction=0.5), 100),
            {60: 1, 70: 0.75, 100: 0.5},
        ),
        (
            warmup_stable_decay(WarmupStableDecayConfig(warmup_steps=10, decay_fraction=0.25, decay="linear"), 80),
            {60: 1, 70: 0.5, 80: 0},
        ),
    ],
)
def test_schedules(factor, expected):
    assert {step: factor(step) for step in expected} == pytest.approx(expected)
