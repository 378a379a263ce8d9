"""Full and selective activation checkpointing: recomputed operators, saved tensors and gradients."""

from collections import Counter

import pytest
import torch
from operators import OperatorRecord
from small_models import STACKS, VARIANTS, make_model, make_tokens
from torch.utils.checkpoint import SelectiveCheckpointContext

from stackexp import stack
from stackexp.config.compose import compose
from stackexp.errors import RunError
from stackexp.models.cross_entropy import NextTokenLoss
from stackexp.models.recomputation import run_recomputed
from stackexp.models.transformer import Transformer
from stackexp.modules.base import TrainingModule
from stackexp.planning.memory_use import track_pass
from stackexp.stack.dispatch import choose_step_module

LAYERS = 3
MEMORIES = {name: STACKS[name] for name in ("none", "depth", "queue", "time")}
MEMORIES |= {name: VARIANTS[name] for name in ("full_dim", "authors_code")}  # full_dim has noise
aten = torch.ops.aten


def compute_gradients(model: Transformer, recompute: bool | str) -> list[torch.Tensor]:
    model.checkpoint_blocks = recompute
    torch.manual_seed(2)
    output = model(make_tokens())
    return torch.autograd.grad(output.logits.logsumexp(-1).sum() + output.entropy, list(model.parameters()))


@pytest.mark.parametrize("implementation", ["auto", "eager"])
@pytest.mark.parametrize("recompute", [True, "selective"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_recomputation_without_autocast_gives_identical_gradients(memory, recompute, implementation):
    model = make_model(MEMORIES[memory], torch.float32)
    with stack.use_implementation(implementation):
        assert all(map(torch.equal, compute_gradients(model, recompute), compute_gradients(model, False)))


def test_selective_runs_the_kernels_in_both_passes():
    chosen = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        chosen.append(choose_step_module(x).__name__)
        return x * x  # the backward pass needs x, so it runs the layer again

    run_recomputed(layer, torch.ones(2, 3, requires_grad=True), selective=True).sum().backward()
    assert chosen == ["stackexp.stack.numba.time_scan"] * 2


@pytest.mark.skipif(
    not hasattr(SelectiveCheckpointContext(is_recompute=False), "op_output"), reason="this torch passes no output"
)
@pytest.mark.parametrize("change", [lambda x: torch.nn.functional.silu(x, inplace=True), lambda x: x.add_(1)])
def test_selective_refuses_changes_of_what_it_saves(change):
    """The backward pass would use the changed values: torch does not see that a product shares its reshaped result."""
    inner, outer = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(3, 4, bias=False)
    h = torch.ones(2, 3, 4, requires_grad=True)
    with pytest.raises(RunError, match=r"trainer\.recompute: selective: .* changes the output of a matrix product"):
        run_recomputed(lambda h: outer(change(inner(h))), h, selective=True)
    run_recomputed(lambda h: outer(change(2 * inner(h))), h, selective=True).sum().backward()
    assert torch.isfinite(h.grad).all()


def count_backward_calls(recompute: bool | str) -> Counter:
    model = make_model(MEMORIES["depth"], torch.float32)
    model.checkpoint_blocks = recompute
    with stack.use_implementation("eager"):  # kernels are no operators
        loss = model(make_tokens()).logits.sum()
        with OperatorRecord() as record:
            loss.backward()
    return Counter(operator for operator, *_ in record.calls)


def test_selective_recomputes_only_cheap_operators():
    kept, whole, selective = (count_backward_calls(recompute) for recompute in (False, True, "selective"))
    in_block = {aten.mm.default: 9, aten._scaled_dot_product_flash_attention_for_cpu.default: 1}  # 7, and two of W
    for operator, times in in_block.items():
        assert whole[operator] - kept[operator] == pytest.approx(LAYERS * times, abs=LAYERS), operator
        assert selective[operator] == kept[operator], operator
    for operator in (aten.silu.default, aten._softmax.default, aten.cat.default):
        assert whole[operator] > kept[operator], operator
        assert selective[operator] == whole[operator], operator


def test_selective_saves_more_than_full_and_less_than_none():
    peaks = {}
    for recompute in (False, "selective", True):
        model = make_model({}, torch.float32, num_layers=4, hidden_size=64, intermediate_size=192).to("meta")
        model.checkpoint_blocks = recompute
        peaks[recompute] = track_pass(model, (4, 64), False, NextTokenLoss()).total()
    assert peaks[True] < 0.8 * peaks["selective"] < 0.64 * peaks[False], peaks


def test_config_selects_recomputation():
    options = {"": False, "trainer.activation_checkpointing=true": True}
    selective = "trainer.activation_checkpointing=true trainer.recompute=selective"
    for overrides, expected in (options | {selective: "selective"}).items():
        config = compose(["quickstart"], ["model.memory=null", "model.num_layers=1", *overrides.split()])
        assert config.trainer.recompute_mode == expected
        assert TrainingModule(config).model.checkpoint_blocks == expected
