"""`match` finds the size at which two models are equal."""

import re

import pytest
import yaml

from stackexp.config.compose import compose
from stackexp.config.layers import get_shipped_folder
from stackexp.planning.cost import QUANTITIES, match_models

SMALL = ["model.hidden_size=64", "model.num_layers=3", "model.intermediate_size=96", "data.micro_batch_size=2"]


@pytest.mark.parametrize(
    ("by", "vary"), [("parameters", "hidden_size"), ("flops", "intermediate_size"), ("memory", "num_layers")]
)
def test_no_neighbor_is_closer(by, vary):
    plain, to = [*SMALL, "model.memory=null"], compose(["quickstart"], SMALL)
    target = QUANTITIES[by](to)
    found, quantity = match_models(["quickstart"], plain, target, by, vary)
    step = 2 * to.model.num_heads if vary == "hidden_size" else 1
    values = {}
    for value in (found - step, found, found + step):
        values[value] = QUANTITIES[by](compose(["quickstart"], [*plain, f"model.{vary}={value}"]))
    assert quantity == values[found]
    assert min(abs(value - target) for value in values.values()) == abs(quantity - target)


def test_the_printed_override_gives_the_printed_number(invoke):
    command = ["match", "--config", "quickstart", "model.memory=null", "--to", "quickstart"]
    printed = invoke(*command)
    override, parameters = re.search(r"use (\S+): ([\d,]+)", printed).groups()
    config = compose(["quickstart"], ["model.memory=null", override])
    assert f"{QUANTITIES['parameters'](config):,}" == parameters
    assert printed.startswith("parameters: 1,705,600, to match 1,805,446")


def test_options_that_follow_from_the_varied_one_are_composed_again():
    """num_slots of stacktrans-normalized is num_layers, head_dim of full_dim is hidden_size / num_heads."""
    deep = compose(["quickstart"], [*SMALL, "model.memory=null", "model.num_layers=40"])
    arm = [*SMALL, "model.memory=stacktrans-normalized"]
    value, flops = match_models(["quickstart"], arm, QUANTITIES["flops"](deep), "flops", "num_layers")
    assert QUANTITIES["flops"](compose(["quickstart"], [*arm, f"model.num_layers={value}"])) == flops
    arm = [*SMALL, "model.memory=full_dim"]
    assert match_models(["quickstart"], arm, QUANTITIES["parameters"](deep), "parameters", "hidden_size")[0] > 64


@pytest.mark.parametrize("name", ["ablation", "ablation_small", "depth_memories", "noise_micro"])
def test_wide_transformers_of_shipped_sweeps_equal_the_stack(name):
    sweep = yaml.safe_load((get_shipped_folder("sweep") / f"{name}.yaml").read_text())
    arms = {arm.pop("name"): arm for arm in sweep["list"]}
    configs = [
        compose([sweep["config"]], [f"{key}={value or 'null'}" for key, value in arms[arm].items()])
        for arm in ("transformer_wide", "stacktrans")
    ]
    wide, stack = map(QUANTITIES["parameters"], configs)
    assert wide == pytest.approx(stack, rel=1e-3)


SAME_SIZE = ("adapter", "queue", "push_only", "stacktrans-slow", "stacktrans-empty_slot", "stacktrans-normalized")


@pytest.mark.parametrize("name", ["tiny_english", "micro_english", "mini_english"])
def test_arms_of_shipped_verdicts_are_as_large_as_the_stack(name):
    question = yaml.safe_load((get_shipped_folder("verdict") / f"{name}.yaml").read_text())
    sizes = {}
    for arm in question["arms"]:
        overrides = [f"{key}={value or 'null'}" for key, value in arm.items() if key != "name"]
        sizes[arm["name"]] = QUANTITIES["parameters"](compose([question["config"]], overrides))
    widened = {arm["name"] for arm in question["arms"] if "model.intermediate_size" in arm}
    assert "transformer_wide" in widened
    for arm in widened:
        assert sizes[arm] == pytest.approx(sizes["stacktrans"], rel=1e-3), arm
    for arm in sizes.keys() & set(SAME_SIZE):
        assert sizes[arm] == pytest.approx(sizes["stacktrans"], rel=5e-3), arm


def test_a_model_without_heads(invoke):
    printed = invoke("match --config formal/lstm --to formal/stacktrans-depth --vary hidden_size")
    assert "use model.hidden_size=" in printed


def test_a_size_that_the_memory_cannot_have(invoke):
    narrow = ["--config", "quickstart", "model.memory.projection=none", "model.memory.head_dim=32"]
    error = invoke("match", *narrow, "--to", "quickstart", "--vary", "hidden_size", expect=1)
    assert "projection: none requires num_heads * head_dim" in error
    assert error.endswith("; vary another option")
    sliced = ["--config", "quickstart", "model.memory.projection=shared_slices", "model.memory.num_heads=16"]
    printed = invoke("match", *sliced, "--to", "quickstart", "--vary", "hidden_size")
    assert int(re.search(r"use model.hidden_size=(\d+)", printed)[1]) % 16 == 0


def test_a_model_that_cannot_be_as_small(invoke):
    small = ["model.hidden_size=256", "model.num_layers=8"]
    error = invoke("match --config quickstart", *small, "--to", "quickstart", "--vary", "intermediate_size", expect=1)
    assert "error: match: no model.intermediate_size makes the model as small" in error
