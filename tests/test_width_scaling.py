"""muP: with `mup_base_size`, hidden states and logits change equally fast at every width (a coordinate check)."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stackexp.config.experiment import AdamWConfig, MuonConfig
from stackexp.config.memory import (
    AttentionResidualConfig,
    DenseFormerConfig,
    HyperConnectionsConfig,
    ManifoldHyperConnectionsConfig,
    ResidualScaleConfig,
    ResidualStackConfig,
    StackAttentionConfig,
    StackMemoryConfig,
    ValueSkipConfig,
)
from stackexp.config.model import TransformerConfig
from stackexp.models.transformer import Transformer
from stackexp.modules.optimizers import build_adamw, build_muon

WIDTHS = (64, 128, 256)


@pytest.fixture(autouse=True)
def muon_in_float32(monkeypatch):
    """Let Muon compute its products in float32: many CPUs take 20 times as long in bfloat16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.to(torch.float32, copy=True))


def build(width, is_scaled, memory=None, **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": width, "num_layers": 2, "intermediate_size": 2 * width}
    sizes |= {"num_heads": width // 16, "num_kv_heads": width // 16, "embedding_std": 0.1}
    sizes |= {"mup_base_size": WIDTHS[0] if is_scaled else None}
    return Transformer(TransformerConfig(memory=memory, **(sizes | options)))


def compute_outputs(model, tokens):
    """Return the logits and the hidden states after each layer."""
    outputs = []
    hooks = [layer.register_forward_hook(lambda *call: outputs.append(call[2][0])) for layer in model.layers]
    outputs.insert(0, model(tokens).logits)
    for hook in hooks:
        hook.remove()
    return outputs


def train(model, optimizer, tokens):
    """Train for four steps on tokens [B, T + 1]."""
    for _ in range(4):
        logits = model(tokens[:, :-1]).logits
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


def measure_changes(is_scaled, memory=None, is_muon=False):
    """Return the root mean square of the change of each output over four steps [widths, outputs]."""
    build_optimizer, config = (build_muon, MuonConfig) if is_muon else (build_adamw, AdamWConfig)
    tokens = torch.randint(0, 64, (8, 33), generator=torch.Generator().manual_seed(1))
    changes = []
    for width in WIDTHS:
        model = build(width, is_scaled, memory)
        optimizer = build_optimizer(config(lr=3e-3, weight_decay=0.0), model)
        with torch.no_grad():
            first = compute_outputs(model, tokens[:, :-1])
        train(model, optimizer, tokens)
        with torch.no_grad():
            last = compute_outputs(model, tokens[:, :-1])
        changes.append([(new - old).square().mean().sqrt().item() for new, old in zip(last, first, strict=True)])
    return np.array(changes)


def compute_slopes(values):
    """Return the slope of log value over log width: 0 if the values [widths, ...] do not depend on the width."""
    return np.polyfit(np.log(WIDTHS), np.log(values), 1)[0]


STACK_WITH_NORM = StackMemoryConfig(num_slots=2, head_dim=8, push_norm="head")


@pytest.mark.parametrize(("memory", "is_muon"), [(None, False), (STACK_WITH_NORM, False), (None, True)])
def test_changes_do_not_grow_with_the_width(memory, is_muon):
    """Those of the logits fall a little, because the random part of tied logits shrinks with 1 / sqrt(width)."""
    logits, *layers = compute_slopes(measure_changes(True, memory, is_muon))
    assert is_muon or -0.35 < logits < 0.1
    assert layers == pytest.approx([0, 0], abs=0.05)
    logits, *layers = compute_slopes(measure_changes(False, memory, is_muon))
    assert is_muon or logits > 0.7, "without scaling they grow"
    assert min(layers) > (0.15 if is_muon else 0.3)


STACK = {"num_heads": 2, "head_dim": 8}
WIDE = {"num_heads": 2, "head_dim": WIDTHS[1] // 2, "projection": "none"}
HIDDEN = {"feedback_activation": "gated", "feedback_hidden_size": 8, "axis": "time", "feedback": True}


RATES = [
    (StackMemoryConfig(**STACK), {"down"}, {"down": 2, "up": 1}),
    (StackMemoryConfig(num_heads=4, head_dim=WIDTHS[1] // 4), {"down"}, {"down": 2, "up": 1}),  # H d_s = d
    (StackMemoryConfig(**WIDE), {"actions", "query"}, {}),
    (StackMemoryConfig(**STACK, projection="shared_slices"), {"down"}, {"down": 2, "up": 1}),
    (StackMemoryConfig(**STACK, action_input="hidden"), {"down", "actions"}, {"down": 2, "up": 1}),
    (StackMemoryConfig(**STACK, axis="time", feedback=True), {"down"}, {"down": 2, "up": 1, "feedback": 1}),
    (StackMemoryConfig(**STACK, **HIDDEN), {"down", "feedback_token"}, {"down": 2, "up": 1, "feedback_token": 2}),
    (StackAttentionConfig(), {"actions.weight"}, {"actions.weight": 2}),
    (AttentionResidualConfig(), {"query"}, {}),
    (HyperConnectionsConfig(), {"maps"}, {"maps": 2}),
    (ManifoldHyperConnectionsConfig(), {"maps"}, {"maps": 2}),
    (ResidualStackConfig(), {"maps", "actions"}, {"maps": 2, "actions": 2}),
    (ValueSkipConfig(), {"down.weight"}, {"down.weight": 2, "up.weight": 1}),
    (DenseFormerConfig(), set(), {}),
    (ResidualScaleConfig(), set(), {}),
]
"""Memory; its weights whose AdamW rate is halved at twice the base width; the divisors of its Muon rates there."""


@pytest.mark.parametrize(("memory", "adamw", "muon"), RATES)
def test_rates_of_memory_weights_follow_their_fans_and_not_their_shapes(memory, adamw, muon):
    model = build(WIDTHS[1], is_scaled=True, memory=memory)
    parameters = dict(model.memories[0].named_parameters())
    rates = {p: group["lr"] for group in build_adamw(AdamWConfig(), model).param_groups for p in group["params"]}
    assert {name for name, p in parameters.items() if rates[p] == AdamWConfig().lr / 2} == adamw
    groups = build_muon(MuonConfig(), model)._muon.param_groups
    rates = {p: group["lr"] for group in groups for p in group["params"]}
    assert {name: MuonConfig().lr / rates[p] for name, p in parameters.items() if p in rates} == muon


FANS = ("in", "out")  # "both" and "vectors" follow from the changes of the layers


def measure_map_changes(memory, is_muon):
    """Return the changes of the outputs of a memory's maps over four steps: {weight: [change at each width]}.

    Maps from hidden states are applied to those before the first step, with mean square 1; other maps to ones.
    """
    build_optimizer, config = (build_muon, MuonConfig) if is_muon else (build_adamw, AdamWConfig)
    tokens = torch.randint(0, 64, (8, 33), generator=torch.Generator().manual_seed(1))
    changes = {}
    for width in (32, *WIDTHS):
        model = build(width, True, memory)
        optimizer = build_optimizer(config(lr=3e-3, weight_decay=0.0, eps=1e-12), model)
        hidden = F.rms_norm(compute_outputs(model, tokens[:, :-1])[1].detach(), (width,))
        weights = {n: p for n, p in model.memories[0].named_parameters() if model.memories[0].fans.get(n) in FANS}
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        train(model, optimizer, tokens)
        for name, weight in weights.items():
            change = (weight.detach() - before[name]).flatten(0, -2)
            inputs = hidden.repeat(1, 1, -(-change.shape[-1] // width))[..., : change.shape[-1]]
            inputs = inputs if model.memories[0].fans[name] == "in" else torch.ones(1, change.shape[-1])
            changes.setdefault(name, []).append((inputs @ change.T).square().mean().sqrt().item())
    return changes


MAPPED = [memory for memory, adamw, muon in RATES if muon]
MUON = [MAPPED[0], ResidualStackConfig()]  # AdamW finds every wrong fan; CPUs are slow at Muon's products in bfloat16


@pytest.mark.parametrize(("memory", "is_muon"), [(m, False) for m in MAPPED] + [(m, True) for m in MUON])
def test_outputs_of_memory_maps_do_not_change_faster_at_larger_widths(memory, is_muon):
    """Wrong rates have larger slopes: AdamW without scaling 0.49 to 0.87, Muon with 1 / sqrt(d) 0.15 and 0.24."""
    slopes = {
        name: np.polyfit(np.log((32, *WIDTHS)), np.log(changes), 1)[0]
        for name, changes in measure_map_changes(memory, is_muon).items()
    }
    assert slopes
    assert max(slopes.values()) < (0.1 if is_muon else 0.3), slopes


def test_the_base_width_is_unchanged():
    tokens = torch.arange(10)[None]
    plain, scaled = build(WIDTHS[0], is_scaled=False), build(WIDTHS[0], is_scaled=True)
    assert torch.equal(plain(tokens).logits, scaled(tokens).logits)
    groups = [[g["lr"] for g in build_adamw(AdamWConfig(), model).param_groups] for model in (plain, scaled)]
    assert set(groups[0]) == set(groups[1])
