"""muP: with `mup_base_size`, hidden states and logits change equally fast at every width (a coordinate check)."""

import numpy as np
import pytest
import torch
from config_files import BASE, compose_error
from torch.nn import functional as F

from stackexp.config.memory import (
    AttentionResidualConfig,
    ManifoldHyperConnectionsConfig,
    StackMemoryConfig,
    ValueSkipConfig,
)
from stackexp.config.model import TransformerConfig
from stackexp.config.optimizer import AdamWConfig, MuonConfig
from stackexp.models.transformer import Transformer
from stackexp.modules.optimizers import build_adamw, build_muon

WIDTHS = (64, 128, 256, 512)


def build(width, is_scaled, memory=None):
    torch.manual_seed(0)
    return Transformer(
        TransformerConfig(
            vocab_size=64,
            hidden_size=width,
            num_layers=2,
            num_heads=width // 16,
            num_kv_heads=width // 16,
            intermediate_size=2 * width,
            embedding_std=0.1,
            mup_base_size=WIDTHS[0] if is_scaled else None,
            memory=memory,
        )
    )


def compute_outputs(model, tokens):
    """Return the logits and the hidden states after each layer."""
    outputs = []
    hooks = [layer.register_forward_hook(lambda *call: outputs.append(call[2][0])) for layer in model.layers]
    outputs.insert(0, model(tokens).logits)
    for hook in hooks:
        hook.remove()
    return outputs


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
        for _ in range(4):
            logits = model(tokens[:, :-1]).logits
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
        with torch.no_grad():
            last = compute_outputs(model, tokens[:, :-1])
        changes.append([(new - old).square().mean().sqrt().item() for new, old in zip(last, first, strict=True)])
    return np.array(changes)


def test_changes_by_muon_hardly_depend_on_the_width():
    _, *layers = compute_slopes(measure_changes(True, is_muon=True))
    assert layers == pytest.approx([0, 0], abs=0.05)
    _, *layers = compute_slopes(measure_changes(False, is_muon=True))
    assert min(layers) > 0.15, "without scaling they grow"


def compute_slopes(values):
    """Return the slope of log value over log width: 0 if the values [widths, ...] do not depend on the width."""
    return np.polyfit(np.log(WIDTHS), np.log(values), 1)[0]


@pytest.mark.parametrize("memory", [None, StackMemoryConfig(num_slots=2, head_dim=8, push_norm="head")])
def test_changes_do_not_grow_with_the_width(memory):
    """Those of the logits fall a little, because the random part of tied logits shrinks with 1 / sqrt(width)."""
    logits, *layers = compute_slopes(measure_changes(True, memory))
    assert -0.35 < logits < 0.1
    assert layers == pytest.approx([0, 0], abs=0.05)
    logits, *layers = compute_slopes(measure_changes(False, memory))
    assert logits > 0.7, "without scaling they grow"
    assert min(layers) > 0.3


@pytest.mark.parametrize(
    ("memory", "names"),
    [
        (StackMemoryConfig(num_heads=2, head_dim=WIDTHS[1] // 2, projection="none"), {"actions", "query"}),
        (StackMemoryConfig(num_heads=2, head_dim=8, projection="shared_slices"), {"down"}),
        (StackMemoryConfig(num_heads=2, head_dim=8), {"down"}),
        (AttentionResidualConfig(), {"query"}),
        (ManifoldHyperConnectionsConfig(), {"maps"}),
        (ValueSkipConfig(), {"down.weight"}),
    ],
)
def test_weights_of_memories_scale_if_their_inputs_grow_with_the_width(memory, names):
    """Others, such as W_up [d, H d_s], have the same number of inputs at every width."""
    model = build(WIDTHS[1], is_scaled=True, memory=memory)
    rates = {p: group["lr"] for group in build_adamw(AdamWConfig(), model).param_groups for p in group["params"]}
    found = {name for name, p in model.memories[0].named_parameters() if rates[p] == AdamWConfig().lr / 2}
    assert found == names


def test_the_base_width_is_unchanged():
    tokens = torch.arange(10)[None]
    plain, scaled = build(WIDTHS[0], is_scaled=False), build(WIDTHS[0], is_scaled=True)
    assert torch.equal(plain(tokens).logits, scaled(tokens).logits)
    groups = [[g["lr"] for g in build_adamw(AdamWConfig(), model).param_groups] for model in (plain, scaled)]
    assert set(groups[0]) == set(groups[1])


def test_it_requires_a_fixed_scale_of_the_embedding():
    error = compose_error([BASE], "model.mup_base_size=64")
    assert "model.mup_base_size: requires init: fan_in and a value of embedding_std" in error
