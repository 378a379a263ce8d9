"""Strings to train and test on: functions of seed, step and length alone, whatever the devices and batch sizes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stackexp.config.compose import compose
from stackexp.config.formal_language import TASKS as SIZES
from stackexp.datamodules.formal_language import (
    SEEDS,
    FormalLanguageData,
    LengthBatches,
    ceiling,
    longest_of,
    warn_of_slots,
)
from stackexp.errors import ConfigError
from stackexp.tasks import TASKS


def data(*overrides: str, seed: int = 0, rank: int = 0, world_size: int = 1, step: int = 0) -> FormalLanguageData:
    every = ["data.eval_length_stride=1", "data.batch_size=128", "data.curriculum_steps=0"]
    config = compose(["formal/transformer"], [*every, *(f"data.{override}" for override in overrides)]).data
    built = FormalLanguageData(config, seed)
    built.trainer = SimpleNamespace(global_rank=rank, world_size=world_size, global_step=step)
    return built


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) if isinstance(one[key], torch.Tensor) else one[key] == other[key]
        for key in one
    )


def test_a_batch_is_a_function_of_seed_and_step():
    assert same(data().sample_training_batch(7), data().sample_training_batch(7))
    assert not same(data().sample_training_batch(7), data().sample_training_batch(8))
    assert not same(data().sample_training_batch(7), data(seed=1).sample_training_batch(7))


def test_training_goes_on_after_the_last_step():
    resumed = iter(data(step=5).train_dataloader())
    for step in (6, 7):
        assert same(next(resumed), data().sample_training_batch(step))


@pytest.mark.parametrize("task", SIZES)
def test_a_sequence_is_the_string_then_an_empty_token_for_each_symbol_of_the_answer(task):
    built = data(f"task={task}", "max_length=12", "validation_max_length=13", "batch_size=8")
    batch = built.sample_training_batch(3)
    tokens, targets, mask = (batch[key].numpy() for key in ("tokens", "targets", "mask"))
    rng = np.random.default_rng([0, 3])
    assert batch["length"] == rng.integers(TASKS[task].min_length, 13)
    expected = TASKS[task].sample(rng, 8, batch["length"])
    symbols = expected.inputs.shape[1]
    assert (tokens[:, :symbols] == expected.inputs).all()
    assert (tokens[:, symbols:] == SIZES[task].num_symbols).all()
    assert tokens.shape[1] - symbols == targets.shape[1]
    assert (targets == expected.targets).all()
    assert (mask == expected.mask).all()
    assert tokens.max() == built.config.vocab_size - 1


def test_lengths_are_uniform_from_the_tasks_least_to_the_longest():
    built = data("max_length=6", "validation_max_length=7", "task=solve_equation", "batch_size=1")
    lengths = [built.sample_training_batch(step)["length"] for step in range(1, 801)]
    least = TASKS["solve_equation"].min_length
    counts = np.bincount(lengths, minlength=7)
    assert counts[:least].sum() == 0
    assert (np.abs(counts[least:] - 800 / (7 - least)) < 60).all()


def test_a_share_of_the_batches_has_the_longest_strings():
    built = data("longest_fraction=0.5", "curriculum_steps=10", "curriculum_start=4", "max_length=8", "batch_size=1")
    batches = [built.sample_training_batch(step) for step in range(1, 4011)]
    early = sum(batch["length"] == batch["max_length"] for batch in batches[:10])
    counts = np.bincount([batch["length"] for batch in batches[10:]], minlength=9)
    assert early >= 4, "those of its step, not max_length"
    assert abs(counts[8] / 4000 - (0.5 + 0.5 / 8)) < 0.03
    assert (np.abs(counts[1:8] / 4000 - 0.5 / 8) < 0.02).all(), "the others are uniform"
    always = data("longest_fraction=1", "batch_size=2")
    assert {always.sample_training_batch(step)["length"] for step in range(1, 30)} == {40}
    assert always.config.global_batch_tokens == 2 * 80
    tokens = [data(f"longest_fraction={share}").config.global_batch_tokens for share in (0, 0.5, 1)]
    assert tokens == [128 * 41, 128 * (41 + 80) / 2, 128 * 80]


def test_the_longest_grows_linearly_then_stays():
    config = data("curriculum_steps=36", "curriculum_start=4").config
    assert [longest_of(config, step) for step in (1, 2, 3, 36, 37, 38, 1000)] == [4, 5, 6, 39, 40, 40, 40]
    slow = data("curriculum_steps=72", "curriculum_start=4").config
    assert [longest_of(slow, step) for step in (1, 2, 3, 4, 5)] == [4, 4, 5, 5, 6]
    assert longest_of(data().config, 1) == 40
    built = data("curriculum_steps=36", "curriculum_start=4")
    for step in (1, 20, 37):
        batch = built.sample_training_batch(step)
        assert batch["length"] <= batch["max_length"] == longest_of(config, step)


def test_devices_share_the_rows_of_a_batch():
    whole = data("task=stack_manipulation", "batch_size=12").sample_training_batch(4)
    parts = [data("task=stack_manipulation", "batch_size=12", rank=r, world_size=3).sample_training_batch(4) for r in range(3)]
    for key in ("tokens", "targets", "mask"):
        together = torch.empty_like(whole[key])
        for rank, part in enumerate(parts):
            assert len(part[key]) == 4
            together[rank::3] = part[key]
        assert torch.equal(together, whole[key])
    assert sum(part["counted"] for part in parts) == whole["counted"] == whole["mask"].sum()


def rows_of(stage: str, *overrides: str, length: int, world_size: int = 1) -> dict[int, list[int]]:
    """number -> tokens of each string of a length, from all ranks."""
    rows = {}
    for rank in range(world_size):
        built = data(*overrides, rank=rank, world_size=world_size)
        [of] = [of for of in built.sets(stage) if of.length == length]
        loader = LengthBatches(of, built.config.eval_batch_size, rank, world_size)
        batches = list(loader)
        assert len(batches) == len(loader)
        for batch in batches:
            for number, tokens in zip(batch["index"].tolist(), batch["tokens"].tolist(), strict=True):
                assert number not in rows
                if number >= 0:
                    rows[number] = tokens
    return rows


def test_tested_strings_are_the_same_whatever_batch_size_and_devices():
    expected = rows_of("test", "eval_sequences=10", length=45)
    assert sorted(expected) == list(range(10))
    assert rows_of("test", "eval_sequences=10", "eval_batch_size=3", length=45) == expected
    assert rows_of("test", "eval_sequences=10", "eval_batch_size=2", length=45, world_size=3) == expected
    assert rows_of("test", "eval_sequences=10", "eval_length_stride=4", length=45) == expected
    other = rows_of("validate", "validation_sequences=10", length=45)
    assert other != expected, "recipes are chosen on other strings"


def test_the_lengths_of_each_stage():
    built = data("validation_max_length=43", "eval_length_stride=200", "eval_max_length=300")
    assert built.set_names("validate") == ["length_041", "length_042", "length_043"]
    assert built.set_names("test") == ["length_041", "length_241"]
    built.leave_out = frozenset(["length_041"])
    assert built.set_names("test") == ["length_241"]
    least = TASKS["solve_equation"].min_length
    assert data("task=solve_equation", "eval_max_length=50").sets("test")[0].length == least > 1


def test_strings_are_not_refused_for_a_curriculum_that_is_not_there():
    assert data("task=solve_equation", "curriculum_start=1").config.max_length == 40


def test_no_strings_to_evaluate_on_come_of_a_seed_of_training(monkeypatch):
    """Not even of a run whose seed is a length; to numpy the seed [41, 5] is [41, 5, 0]."""
    seeds = []
    draw = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: seeds.append(seed) or draw(seed))
    for seed in (0, 41, 43):
        built = data("eval_max_length=43", "validation_max_length=43", seed=seed)
        for step in (1, 2, 3):
            built.sample_training_batch(step)
    training = {tuple(seed) for seed in seeds}
    evaluation = [seed for stage in ("validate", "test") for of in built.sets(stage) if (seed := of.seed)]
    states = [tuple(draw(seed).integers(0, 2**60, 4)) for seed in [*training, *evaluation]]
    assert len(set(states)) == len(states) == 9 + 3 + 43
    assert 0 not in SEEDS.values()


def test_sets_cannot_be_named():
    with pytest.raises(ConfigError, match=r"data\.eval_length_stride"):
        data().choose("test", ["length_041"])


def slots(caplog, *overrides: str, config: str = "formal/stacktrans", stage: str = "test") -> list[str]:
    caplog.clear()
    own = ["model.memory.num_slots=24"] if config == "formal/stacktrans" else []
    warn_of_slots(compose([config], [*own, *overrides]), stage)
    return [entry.getMessage() for entry in caplog.records]


SMALL = "model.memory.eval_num_slots=null"


def test_a_stack_too_small_for_the_test_is_told_what_it_can_reach(caplog):
    assert slots(caplog, SMALL) == [
        "model.memory.eval_num_slots: reverse_string at length 500: a stack of 24 slots keeps 24 of up to 500 symbols "
        "and scores 0.5 + 0.5 min(1, 24/L), 0.57 over 41..500; set model.memory.eval_num_slots=500"
    ]
    [line] = slots(caplog, SMALL, stage="validate")
    assert "at length 60: a stack of 24 slots keeps 24 of up to 60 symbols and scores" in line
    assert "0.74 over 41..60; set model.memory.eval_num_slots=60" in line
    for task in ("stack_manipulation", "odds_first", "duplicate_string"):  # in which more is lost, or less
        assert slots(caplog, SMALL, f"data.task={task}") == [
            f"model.memory.eval_num_slots: {task} at length 500: a stack of 24 slots keeps 24 of up to 500 symbols; "
            "set model.memory.eval_num_slots=500"
        ]
    brackets = "data.task=modular_arithmetic_brackets"
    few = ("model.memory.num_slots=2", "model.memory.eval_num_slots=2")
    assert "keeps 2 of up to 21 symbols" in slots(caplog, brackets, *few)[0]
    assert slots(caplog, SMALL, brackets) == []
    [line] = slots(caplog, "model.eval_num_slots=null", config="formal/stack_rnn")
    assert line.startswith("model.eval_num_slots: ")
    assert slots(caplog) == []
    assert slots(caplog, SMALL, "data.eval_max_length=41") != []
    assert slots(caplog, "model.memory.eval_num_slots=41", "data.eval_max_length=41") == []
    assert slots(caplog, SMALL, "data.task=parity_check") == []
    assert slots(caplog, config="formal/stacktrans-depth") == slots(caplog, config="formal/transformer") == []


def test_a_stack_too_small_for_the_strings_of_training_is_told_too(caplog):
    assert slots(caplog, stage="fit") == [
        "model.memory.num_slots: reverse_string at length 40: a stack of 24 slots keeps 24 of up to 40 symbols; "
        "set model.memory.num_slots=40"
    ]
    assert slots(caplog, "data.max_length=24", stage="fit") == []
    assert len(slots(caplog, SMALL, stage="fit")) == 2


def test_the_ceiling_of_a_stack():
    assert ceiling(24, range(41, 501)) == pytest.approx(np.mean([0.5 + 0.5 * 24 / n for n in range(41, 501)]))
    assert ceiling(500, range(41, 501)) == 1
