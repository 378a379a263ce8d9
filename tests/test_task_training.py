"""Every task outside Deletang et al. trains with the shared configs: finite losses that fall on a repeated batch."""

import functools

import pytest
import torch

from stackexp.config.compose import compose
from stackexp.datamodules.formal_language import FormalLanguageData
from stackexp.modules.transduction import Transduction
from stackexp.tasks import CHOMSKY_TASKS, TASKS

TINY = ("model.hidden_size=16", "model.num_layers=1", "data.batch_size=4", "data.curriculum_steps=0")
MODELS = {
    "lstm": (),
    "transformer": ("model.intermediate_size=16", "model.num_heads=2", "model.num_kv_heads=2"),
    "stacktrans": (
        "model.intermediate_size=16",
        "model.num_heads=2",
        "model.num_kv_heads=2",
        "model.memory.num_slots=4",
    ),
}


@pytest.mark.parametrize("task", [name for name in TASKS if name not in CHOMSKY_TASKS])
def test_three_steps_lower_the_loss_of_a_batch(task):
    shortest = TASKS[task].min_length
    length = min(TASKS[task].max_length, max(shortest, 12))
    for model in MODELS:
        config = compose_tiny(model)
        config.data.task, config.data.max_length = task, length
        config.data.vocab_size = config.model.vocab_size = TASKS[task].vocab_size
        config.data.output_vocab_size = config.model.output_vocab_size = TASKS[task].num_answer_symbols
        torch.manual_seed(0)
        module = Transduction(config)
        data = FormalLanguageData(config.data)
        data.trainer = type("Trainer", (), {"global_rank": 0, "world_size": 1})
        batch = data.sample_training_batch(1)
        optimizer = torch.optim.Adam(module.parameters(), 3e-3)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = module.training_step(batch, 0)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[3] < losses[0], model
        metrics = module.step_metrics.drain()
        assert 0 <= metrics["train/accuracy"] <= 1


@functools.cache
def compose_tiny(model: str):
    return compose([f"formal/{model}"], [*TINY, *MODELS[model]])
