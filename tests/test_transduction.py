"""Training on formal languages: loss, accuracy, token counts and validation tags."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stackexp.config.compose import compose
from stackexp.datamodules.formal_language import FormalLanguageData, build_string_batch
from stackexp.errors import RunError
from stackexp.modules.metrics import SequenceScores
from stackexp.modules.transduction import Transduction
from stackexp.tasks import NO_TARGET, TASKS

SMALL = ["model.hidden_size=16", "model.num_layers=2", "model.intermediate_size=16", "data.batch_size=12"]
SMALL += ["model.memory.axis=depth", "data.task=stack_manipulation", "model.memory.action_noise=0"]
SMALL += ["model.memory.entropy_weight=0.001"]


def build(*overrides: str) -> Transduction:
    torch.manual_seed(0)
    return Transduction(compose(["formal/stacktrans"], [*SMALL, *overrides]))


def draw_batch(step: int = 1, rank: int = 0, world_size: int = 1) -> dict:
    data = FormalLanguageData(compose(["formal/stacktrans"], SMALL).data)
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
    return data.sample_training_batch(step)


def test_loss_is_the_mean_over_answer_symbols():
    model, strings = build("model.memory.entropy_weight=0.5"), draw_batch()
    loss = model.training_step(strings, 0)
    output = model.model(strings["tokens"])
    answers = strings["targets"].shape[1]
    logits = output.logits[:, -answers:].log_softmax(-1)
    expected = -logits.gather(-1, strings["targets"][..., None]).mean()
    assert loss.item() == pytest.approx((expected + 0.5 * output.entropy).item(), rel=1e-5)
    assert model.step_metrics.drain()["train/loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_label_smoothing_changes_the_objective_not_the_logged_loss():
    models = [build("model.memory.entropy_weight=0", f"data.label_smoothing={share}") for share in (0, 0.1)]
    plain, smooth = (model.training_step(draw_batch(), 0) for model in models)
    strings, model = draw_batch(), models[0]
    logits = model.model(strings["tokens"]).logits[:, -strings["targets"].shape[1] :]
    expected = 0.9 * plain - 0.1 * logits.log_softmax(-1).mean()
    assert smooth.item() == pytest.approx(expected.item(), rel=1e-5)
    assert smooth.item() != pytest.approx(plain.item(), rel=1e-3)
    logged = [model.step_metrics.drain()["train/loss"] for model in models]
    assert logged == pytest.approx([plain.item()] * 2, rel=1e-6)


def test_memories_receive_the_step_number(monkeypatch):
    model = build("model.memory.action_noise=2.0", "model.memory.action_noise_warmup_steps=10")
    for step, noise in ((0, 0.0), (5, 1.0), (20, 2.0)):
        monkeypatch.setattr(Transduction, "global_step", step)
        model.on_train_batch_start({}, 0)
        assert [memory.noise.item() for memory in model.model.memories] == [noise, noise]


def test_accuracy_counts_masked_symbols_only():
    model, strings = build(), draw_batch()
    assert not strings["mask"].all()
    model.training_step(strings, 0)
    answers = model.model(strings["tokens"]).logits[:, -strings["targets"].shape[1] :].argmax(-1)
    right = (answers == strings["targets"])[strings["mask"]]
    metrics = model.step_metrics.drain()
    assert metrics["train/accuracy"] == pytest.approx(right.double().mean().item(), rel=1e-6)
    assert metrics["train/max_length"] == 40


def test_rank_average_equals_the_full_batch_metrics():
    model = build()
    model.training_step(draw_batch(), 0)
    whole = model.step_metrics.drain()
    for rank in range(3):
        model.training_step(draw_batch(rank=rank, world_size=3), 0)
    parts = model.step_metrics.drain()  # means over what were ranks
    for tag in ("train/loss", "train/accuracy", "train/action_entropy"):
        assert parts[tag] == pytest.approx(whole[tag], rel=1e-5)


def test_ranks_with_other_numbers_of_answers_train_on_the_loss_of_the_whole_batch(monkeypatch):
    """A task outside the repository may have strings with different numbers of answers."""
    task = TASKS["stack_manipulation"]

    def sample(self, *args, **kwargs):
        batch = original(self, *args, **kwargs)
        targets = batch.targets.copy()
        for row, length in enumerate(range(len(targets))):
            targets[row, 1 + length :] = NO_TARGET
        return batch._replace(targets=targets, mask=batch.mask & (targets != NO_TARGET))

    original = type(task).sample
    monkeypatch.setattr(type(task), "sample", sample)
    model = build("trainer.z_loss=0.1", "model.memory.entropy_weight=0", "data.label_smoothing=0.1")
    whole = model.training_step(draw_batch(), 0).item()
    parts = [model.training_step(draw_batch(rank=rank, world_size=3), 0).item() for rank in range(3)]
    assert np.mean(parts) == pytest.approx(whole, rel=1e-6)
    counts = [(draw_batch(rank=rank, world_size=3)["targets"] != NO_TARGET).sum().item() for rank in range(3)]
    assert len(set(counts)) == 3


def test_tokens_are_counted_and_resumed():
    model, seen = build(), 0
    for step in (1, 2, 3):
        strings = draw_batch(step)
        model.training_step(strings, 0)
        seen += strings["tokens"].numel()
        assert (model.tokens, model.sequence_length) == (seen, strings["tokens"].shape[1])
    resumed = build()
    resumed.on_load_checkpoint({"losses": [], "stackexp": {"tokens": seen}})
    resumed.training_step(draw_batch(4), 0)
    assert resumed.tokens == seen + draw_batch(4)["tokens"].numel()


def test_counts_are_divided_in_float32():
    """With bf16-true, Lightning makes bfloat16 the default dtype, to which torch converts integers in a division."""
    model = Transduction(compose(["formal/lstm"], ["data.task=dyck_2_3", "model.hidden_size=8"]))
    strings = TASKS["dyck_2_3"].sample(np.random.default_rng(0), 7, 41)
    batch = build_string_batch(strings, TASKS["dyck_2_3"]) | {"index": torch.arange(7)}
    batch |= {"answers": (batch["targets"] != NO_TARGET).sum(), "counted": batch["mask"].sum()}
    batch |= {"length": 41, "max_length": 41}
    scores = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            metric = SequenceScores(7)
            model.update_set_metric(metric, batch)
            model.training_step(batch, 0)
            scores.append(metric.compute() | {"train": float(model.step_metrics.drain()["train/accuracy"])})
        finally:
            torch.set_default_dtype(torch.float32)
    assert scores[0] == scores[1]


def test_non_finite_gradient_error_has_step_and_length():
    model, strings = build(), draw_batch(3)
    model.training_step(strings, 0).backward()
    next(model.parameters()).grad[0, 0] = math.nan
    length = strings["length"]
    with pytest.raises(RunError, match=rf"^step 1: loss .* gradient norm nan on lengths \[{length}\] of rank 0"):
        model.configure_gradient_clipping(model.configure_optimizers()["optimizer"])


@pytest.mark.parametrize("task", ["mqar_4_small", "dyck_2_3"])
def test_the_loss_of_a_set_is_the_mean_over_answers_of_the_mean_over_strings(task):
    model = Transduction(compose(["formal/lstm"], [f"data.task={task}", "model.hidden_size=8"]))
    strings = TASKS[task].sample(np.random.default_rng(0), 4, 12)
    batch = build_string_batch(strings, TASKS[task]) | {"index": torch.arange(4)}
    metric = SequenceScores(4)
    model.update_set_metric(metric, batch)
    with torch.no_grad():
        log = model.model(batch["tokens"]).logits.log_softmax(-1)
    rows = [
        [-log[i, j, answer].item() for j, answer in enumerate(row) if answer != NO_TARGET]
        for i, row in enumerate(strings.targets)
    ]
    assert metric.compute()["loss"] == pytest.approx(np.mean([np.mean(row) for row in rows]), rel=1e-5)


def test_validation_scores_have_means_and_every_length():
    model = build()
    assert model.tag_validation_scores() == {}
    model.set_metrics = {"length_041": {"accuracy": 0.5, "loss": 0.7}, "length_042": {"accuracy": 1.0, "loss": 0.1}}
    assert model.tag_validation_scores() == {
        "val/accuracy/average": 0.75,
        "val/loss/average": pytest.approx(0.4),
        "val/accuracy/length_041": 0.5,
        "val/accuracy/length_042": 1.0,
    }
