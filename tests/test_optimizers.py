"""Optimizers, their parameter groups, and learning rate schedules."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.config.experiment import AdamWConfig, CosineConfig, LinearConfig, MuonConfig, WarmupStableDecayConfig
from stackexp.errors import RunError
from stackexp.models.memories.base import Memory
from stackexp.modules.optimizers import build_adamw, build_muon, build_schedule

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


def build_decoder():
    torch.manual_seed(0)
    return registry.build("model", compose(["quickstart"], [*SMALL, "model.num_layers=2"]).model)


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        logits = model(torch.randint(0, 4096, (2, 8), generator=generator)).logits
        optimizer.zero_grad()
        logits.logsumexp(-1).mean().backward()
        optimizer.step()
    return model.state_dict()


def test_muon_updates_matrices_and_adamw_the_rest():
    config = MuonConfig(lr=0.1, memory_lr=0.2, weight_decay=0.3)
    model, plain = build_decoder(), build_decoder()
    optimizer = build_muon(config, model)
    names = {p: name for name, p in model.named_parameters()}
    train(model, optimizer, 1)
    by_muon = {names[p] for p, state in optimizer.state.items() if "momentum_buffer" in state}
    others = ("embedding.weight", *(f"layers.{layer}.memory.query" for layer in range(2)))
    matrices = {name for name, p in model.named_parameters() if p.ndim == 2 and name not in others}
    assert by_muon == matrices
    assert option_of_parameters(model, optimizer, "lr")["layers.0.memory.down"] == 0.2
    others = train(plain, build_adamw(AdamWConfig(lr=0.1, memory_lr=0.2, weight_decay=0.3), plain), 1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, others[name]) is (name not in matrices), name


class Undeclared(Memory):
    def __init__(self):
        super().__init__(None, None, 0)
        self.weight = nn.Parameter(torch.zeros(3, 32))


def test_muon_requires_the_fans_of_a_memory():
    model = build_decoder()
    model.layers[0].memory = Undeclared()
    assert build_adamw(AdamWConfig(), model), "without muP, AdamW needs no fans"
    with pytest.raises(RunError, match=r"Undeclared: muP and Muon require the fan of weight \[3, 32\]; add it to"):
        build_muon(MuonConfig(), model)


@pytest.mark.parametrize(("name", "matrix"), [("lstm", "weight_ih_l0"), ("stack_rnn", "recurrent")])
def test_muon_leaves_out_no_matrix(name, matrix):
    model = registry.build("model", compose([f"formal/{name}"], []).model)
    with pytest.raises(RunError, match=f"muon: layers.0.{matrix} is no weight of an nn.Linear; use adamw"):
        build_muon(MuonConfig(), model)


def test_muon_ignores_frozen_matrices():
    model = build_decoder()
    model.layers[0].table = torch.nn.Parameter(torch.ones(3, 4), requires_grad=False)
    assert build_muon(MuonConfig(), model).param_groups


def test_muon_requires_a_matrix():
    with pytest.raises(RunError, match="muon: the model has no matrix between embedding and output; use adamw"):
        build_muon(MuonConfig(), torch.nn.Embedding(3, 4))


def test_muon_resumes_bit_for_bit():
    config = MuonConfig(lr=0.01)
    whole = build_decoder()
    optimizer = build_muon(config, whole)
    train(whole, optimizer, 2, seed=1)
    resumed = build_decoder()
    resumed.load_state_dict(whole.state_dict())
    again = build_muon(config, resumed)
    set_optimizer_state_dict(resumed, again, copy.deepcopy(get_optimizer_state_dict(whole, optimizer)))
    for group in optimizer.param_groups + again.param_groups:
        group["lr"] = 0.02  # as a schedule does
    expected, found = train(whole, optimizer, 2, seed=2), train(resumed, again, 2, seed=2)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_memory_names_matrices_without_decay():
    overrides = [*SMALL, "model.memory=hyper_connections"]
    model = registry.build("model", compose(["quickstart"], overrides).model)
    decay = option_of_parameters(model, build_adamw(AdamWConfig(weight_decay=0.3), model), "weight_decay")
    assert decay["layers.0.memory.residual"] == 0.0
    assert decay["layers.0.attention_memory.maps"] == 0.3
    model = registry.build("model", compose(["quickstart"], [*SMALL, "model.memory=stacktrans-normalized"]).model)
    decay = option_of_parameters(model, build_adamw(AdamWConfig(weight_decay=0.3), model), "weight_decay")
    assert decay["layers.0.memory.action_bias"] == 0.0
    names = {p: name for name, p in model.named_parameters()}
    groups = build_muon(MuonConfig(), model).param_groups
    assert "layers.0.memory.action_bias" not in {names[p] for p in groups[0]["params"]}


def test_names_without_decay_may_have_dots_and_must_exist():
    model = registry.build("model", compose(["quickstart"], [*SMALL, "model.memory=value_skip"]).model)
    memory = model.layers[0].memory
    memory.no_decay = ("down.weight",)
    decay = option_of_parameters(model, build_adamw(AdamWConfig(weight_decay=0.3), model), "weight_decay")
    assert (decay["layers.0.memory.down.weight"], decay["layers.1.memory.down.weight"]) == (0.0, 0.3)
    memory.no_decay = ("down.wait",)
    with pytest.raises(RunError, match=r"ValueSkip.no_decay: the memory has no parameter down.wait"):
        build_adamw(AdamWConfig(), model)


WARMUP = {"warmup_steps": 10}


def build_wsd(max_steps: int, **options):
    return build_schedule(WarmupStableDecayConfig(**WARMUP, **options), max_steps)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (build_schedule(CosineConfig(**WARMUP, final_fraction=0.2), 110), {0: 0, 5: 0.5, 10: 1, 60: 0.6, 110: 0.2}),
        (build_schedule(LinearConfig(**WARMUP, final_fraction=0.2), 110), {0: 0, 10: 1, 35: 0.8, 110: 0.2, 120: 0.2}),
        (build_schedule(LinearConfig(warmup_steps=0, final_fraction=0), 4), {0: 1, 1: 0.75, 4: 0}),
        (build_wsd(100, decay_steps=40, decay="linear"), {5: 0.5, 10: 1, 60: 1, 80: 0.5, 100: 0}),
        (build_wsd(100, decay_steps=40, final_fraction=0.5), {60: 1, 70: 0.75, 100: 0.5}),
        (build_wsd(80, decay_fraction=0.0), {5: 0.5, 79: 1, 80: 1, 81: 1}),
    ],
)
def test_learning_rate_at_chosen_steps(schedule, expected):
    assert {step: schedule(step) for step in expected} == pytest.approx(expected)
