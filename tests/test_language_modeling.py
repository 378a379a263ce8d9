"""The training step: objective, gradient clipping, probes, and errors for values that are not finite."""

import math
from types import SimpleNamespace

import pytest
import torch

from stackexp.config.compose import compose
from stackexp.errors import RunError
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.metrics import read_first_rows
from stackexp.sweeps.trials import DIVERGED

SMALL = ["model.hidden_size=16", "model.num_layers=2", "model.intermediate_size=16", "model.num_heads=2"]
SMALL += ["model.num_kv_heads=1", "model.vocab_size=50", "data.kind=shards", "data.path=none", "data.vocab_size=50"]


def build(*overrides: str) -> LanguageModeling:
    torch.manual_seed(0)
    return LanguageModeling(compose(["quickstart"], [*SMALL, "data.context_length=8", *overrides]))


@pytest.fixture
def batch():
    tokens = torch.randint(50, (3, 8), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens, "index": torch.tensor([4, 5, 6])}


def test_gradients_are_clipped_by_the_global_norm(batch):
    lm = build("trainer.gradient_clip_val=0.01")
    lm.training_step(batch, 0).backward()
    before = torch.cat([p.grad.flatten() for p in lm.parameters()])
    optimizer = lm.configure_optimizers()["optimizer"]
    lm.configure_gradient_clipping(optimizer)
    after = torch.cat([p.grad.flatten() for p in lm.parameters()])
    assert before.norm() > 0.01
    torch.testing.assert_close(after, before * 0.01 / before.norm(), rtol=1e-3, atol=1e-9)
    assert lm.step_metrics.drain()["train/grad_norm"] == pytest.approx(before.norm().item(), rel=1e-5)
    lm = build("trainer.gradient_clip_val=null")
    lm.training_step(batch, 0).backward()
    before = [p.grad.clone() for p in lm.parameters()]
    lm.configure_gradient_clipping(lm.configure_optimizers()["optimizer"])
    assert all(torch.equal(a, p.grad) for a, p in zip(before, lm.parameters(), strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_logged_learning_rate_is_the_one_of_the_schedule(batch, optimizer):
    """With muP, the first group of Muon has half of it."""
    mup = ["model.mup_base_size=4", "model.init=fan_in", "model.embedding_std=0.02"]
    lm = build(f"optimizer.kind={optimizer}", "optimizer.lr=4e-3", "schedule.warmup_steps=4", *mup)
    lm.training_step(batch, 0).backward()
    lm.configure_gradient_clipping(lm.configure_optimizers()["optimizer"])
    assert lm.step_metrics.drain()["train/lr"] == pytest.approx(1e-3)


def test_an_optimizer_of_a_plugin_needs_no_option_lr(batch):
    lm = build("schedule.warmup_steps=4")
    lm.training_step(batch, 0).backward()
    optimizer = lm.configure_optimizers()["optimizer"]
    lm.config.optimizer = SimpleNamespace(kind="mine", rate=1.0)
    lm.configure_gradient_clipping(optimizer)
    assert lm.step_metrics.drain()["train/lr"] == pytest.approx(optimizer.param_groups[0]["lr"])


def test_non_finite_gradient_error_has_step_and_samples(batch):
    lm = build()
    lm.training_step(batch, 0).backward()
    next(lm.parameters()).grad[0, 0] = math.nan
    with pytest.raises(RunError, match=r"^step 1: loss .* gradient norm nan on samples \[4, 5, 6\]") as error:
        lm.configure_gradient_clipping(lm.configure_optimizers()["optimizer"])
    assert DIVERGED.search(str(error.value)), "so sweeps and verdicts recognize it"


def test_probes_are_recorded_for_each_layer_on_request(batch):
    lm = build()
    lm.training_step(batch, 0)
    assert not any(tag.startswith("memory/") for tag in lm.step_metrics.drain())
    lm.probe = True
    lm.training_step(batch, 0)
    metrics = lm.step_metrics.drain()
    for layer in ("layer_00", "layer_01"):
        total = sum(metrics[f"memory/{action}/{layer}"] for action in ("push", "pop", "no_op"))
        assert total == pytest.approx(1, abs=1e-5)
        assert 0 <= metrics[f"memory/occupancy/{layer}"] <= 2
        assert metrics[f"memory/read_share/{layer}"] > 0


@pytest.mark.parametrize(
    ("memory", "names"),
    [
        ("stacktrans", ["layer_00", "layer_01", "layer_02"]),
        ("mhc", [f"layer_{i:02d}_{site}" for i in range(3) for site in ("after_attention", "after_block")]),
    ],
)
def test_probes_are_named_by_layer_and_site(memory, names):
    config = compose(["quickstart"], ["model.num_layers=3", "model.hidden_size=32", f"model.memory={memory}"])
    module = LanguageModeling(config)
    assert [module._name_memory(i) for i in range(len(module.model.memories))] == names


def test_probed_rows_are_complete_chunks():
    """An incomplete last chunk is padded; alone, it is cut."""

    def read(*lengths: int) -> list[list[int]]:
        rows = torch.tensor([[i] * length + [0] * (4 - length) for i, length in enumerate(lengths, 1)])
        parts = zip(rows.split(2), torch.arange(len(rows)).split(2), torch.tensor(lengths).split(2), strict=True)
        batches = [{"tokens": tokens, "index": index, "length": length} for tokens, index, length in parts]
        return read_first_rows(SimpleNamespace(build_eval_loader=lambda *_, **__: batches), None).tolist()

    assert read(4, 4, 2) == [[1] * 4, [2] * 4]
    assert read(2) == [[1] * 2]
