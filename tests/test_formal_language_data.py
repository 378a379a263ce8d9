"""Training and evaluation strings depend only on seed, step and length, not on ranks and batch sizes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stackexp.certification.automata import REGULAR
from stackexp.config.compose import compose
from stackexp.datamodules.formal_language import STAGE_SEEDS, FormalLanguageData, compute_max_length
from stackexp.errors import ConfigError
from stackexp.tasks import NO_TARGET, TASKS


def build_data(*overrides: str, seed: int = 0, rank: int = 0, world_size: int = 1, step: int = 0):
    """Return the data module of a recipe with overrides of its data section."""
    common = ["eval_length_stride=1", "batch_size=128", "curriculum_steps=0"]
    config = compose(["formal/transformer"], [f"data.{override}" for override in [*common, *overrides]]).data
    data = FormalLanguageData(config, seed)
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size, global_step=step, accumulate_grad_batches=1)
    return data


def assert_equal(batch: dict, other: dict) -> None:
    assert batch.keys() == other.keys()
    for key, value in batch.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key


def test_a_training_batch_depends_on_seed_and_step_also_after_resume():
    batch = build_data().sample_training_batch(7)
    assert_equal(batch, build_data().sample_training_batch(7))
    for other in (build_data().sample_training_batch(8), build_data(seed=1).sample_training_batch(7)):
        assert batch["tokens"].shape != other["tokens"].shape or not torch.equal(batch["tokens"], other["tokens"])
    resumed = iter(build_data(step=5).train_dataloader())
    for step in (6, 7):
        assert_equal(next(resumed), build_data().sample_training_batch(step))


@pytest.mark.parametrize("task", TASKS)
def test_tokens_are_the_string_and_one_empty_token_per_answer_symbol(task):
    """Tasks that answer at every token have no empty tokens."""
    data = build_data(f"task={task}", "max_length=12", "validation_max_length=14", "batch_size=8")
    batch = data.sample_training_batch(3)
    tokens, targets, mask = (batch[key].numpy() for key in ("tokens", "targets", "mask"))
    rng = np.random.default_rng([0, 3])
    assert batch["length"] == rng.integers(TASKS[task].min_length, 13)
    expected = TASKS[task].sample(rng, 8, batch["length"])
    num_empty = 0 if TASKS[task].answers_every_token else expected.targets.shape[1]
    num_symbols = tokens.shape[1] - num_empty
    assert (tokens[:, :num_symbols] == expected.inputs).all()
    assert (tokens[:, num_symbols:] == TASKS[task].num_symbols).all()
    assert (targets == expected.targets).all()
    assert (mask == expected.mask).all()
    assert (mask <= (targets != NO_TARGET)).all()
    assert expected.inputs.max() < TASKS[task].num_symbols == data.config.vocab_size - bool(num_empty)
    assert targets.max() < data.config.output_vocab_size


@pytest.mark.parametrize("task", TASKS)
def test_the_first_tested_strings_are_longer_than_those_of_the_training(task):
    """Also in languages without strings of some lengths, where a length is rounded down."""
    data = build_data(f"task={task}", "max_length=40", "validation_max_length=60", "eval_max_length=90").config
    lengths = [TASKS[task].sample(np.random.default_rng(0), 1, n).inputs.shape[1] for n in range(38, 46)]
    seen, first = lengths[2], data.first_unseen_length
    assert min(n for n, length in zip(range(38, 46), lengths, strict=True) if length > seen) == first <= 42
    assert next(n for n in data.tested_lengths if n > 40) == first
    assert {
        strings.length
        for strings in build_data(f"task={task}", "max_length=40", "validation_max_length=44").sets("validate")
    } == set(range(first, 45))


def test_loop_fraction_makes_strings_end_in_repeated_words():
    task, rng = TASKS["cycle_navigation"], np.random.default_rng(0)
    batch = task.sample(rng, 4000, 30, loop_fraction=0.5)
    assert (batch.targets[:, 0] == (batch.inputs - 1).sum(1) % 5).all()
    ends = batch.inputs[:, -15:]  # half of the loops are longer than this
    has_period = np.any([(ends[:, p:] == ends[:, :-p]).all(1) for p in (1, 2, 3)], axis=0)
    assert 0.2 < has_period.mean() < 0.32
    with pytest.raises(ConfigError, match="requires a task in which words can be repeated: even_pairs, parity_check"):
        build_data("task=reverse_string", "loop_fraction=0.5")


@pytest.mark.parametrize("name", ["modular_arithmetic", "word_problem_s3"])
def test_strings_with_loops_have_the_answers_of_their_automaton(name):
    known, batch = REGULAR[name](), TASKS[name].sample(np.random.default_rng(0), 500, 31, loop_fraction=0.9)
    assert known.grammar.are_strings(batch.inputs).all()
    assert (known.automaton.outputs[known.automaton.run(batch.inputs)[:, -1]] == batch.targets[:, -1]).all()
    ends = batch.inputs[:, -12:]
    assert any((row[6:] == row[:6]).all() for row in ends), "words of two, four or six symbols"


def test_longest_fraction_adds_batches_of_maximum_length():
    data = build_data(
        "longest_fraction=0.5", "curriculum_steps=10", "curriculum_start=4", "max_length=8", "batch_size=1"
    )
    batches = [data.sample_training_batch(step) for step in range(1, 4011)]
    assert sum(batch["length"] == batch["max_length"] for batch in batches[:10]) >= 4  # the maximum of the step
    fractions = np.bincount([batch["length"] for batch in batches[10:]], minlength=9) / 4000
    assert fractions[8] == pytest.approx(0.5 + 0.5 / 8, abs=0.03)
    assert fractions[1:8] == pytest.approx(0.5 / 8, abs=0.02)
    always = build_data("longest_fraction=1", "batch_size=2")
    assert {always.sample_training_batch(step)["length"] for step in range(1, 30)} == {40}


def test_global_batch_tokens_is_the_mean_over_lengths():
    assert build_data("longest_fraction=1", "batch_size=2").config.global_batch_tokens == 2 * 80
    tokens = [build_data(f"longest_fraction={share}").config.global_batch_tokens for share in (0, 0.5, 1)]
    assert tokens == [128 * 41, 128 * (41 + 80) / 2, 128 * 80]


def test_the_curriculum_grows_linearly():
    config = build_data("curriculum_steps=36", "curriculum_start=4").config
    steps = (1, 2, 3, 36, 37, 38, 1000)
    assert [compute_max_length(config, step) for step in steps] == [4, 5, 6, 39, 40, 40, 40]
    slow = build_data("curriculum_steps=72", "curriculum_start=4").config
    assert [compute_max_length(slow, step) for step in (1, 2, 3, 4, 5)] == [4, 4, 5, 5, 6]
    assert compute_max_length(build_data().config, 1) == 40


def test_ranks_share_the_rows_of_a_training_batch():
    overrides = ("task=stack_manipulation", "batch_size=12")
    whole = build_data(*overrides).sample_training_batch(4)
    parts = [build_data(*overrides, rank=rank, world_size=3).sample_training_batch(4) for rank in range(3)]
    for key in ("tokens", "targets", "mask"):
        combined = torch.empty_like(whole[key])
        for rank, part in enumerate(parts):
            assert len(part[key]) == 4
            combined[rank::3] = part[key]
        assert torch.equal(combined, whole[key])
    assert sum(part["counted"] for part in parts) == whole["counted"] == whole["mask"].sum()


def read_tokens(stage: str, *overrides: str, length: int, world_size: int = 1) -> dict[int, list[int]]:
    """Return the tokens of each string of a set by its number, from all ranks."""
    rows: dict[int, list[int]] = {}
    for rank in range(world_size):
        data = build_data(*overrides, rank=rank, world_size=world_size)
        [strings] = [strings for strings in data.sets(stage) if strings.length == length]
        loader = data.build_eval_loader(strings, rank, world_size)
        batches = list(loader)
        assert len(batches) == len(loader)
        for batch in batches:
            scored = batch["index"] >= 0
            numbers, tokens = batch["index"][scored].tolist(), batch["tokens"][scored].tolist()
            assert not rows.keys() & set(numbers)
            rows |= zip(numbers, tokens, strict=True)
    return rows


def test_evaluation_strings_do_not_depend_on_batch_size_and_ranks():
    expected = read_tokens("test", "eval_sequences=10", length=45)
    assert sorted(expected) == list(range(10))
    assert read_tokens("test", "eval_sequences=10", "eval_batch_size=3", length=45) == expected
    assert read_tokens("test", "eval_sequences=10", "eval_batch_size=2", length=45, world_size=3) == expected
    assert read_tokens("test", "eval_sequences=10", "eval_length_stride=4", length=45) == expected
    assert read_tokens("validate", "validation_sequences=10", length=45) != expected


def test_each_stage_has_its_own_lengths():
    data = build_data("validation_max_length=43", "eval_length_stride=200", "eval_max_length=300")
    assert data.list_set_names("validate") == ["length_041", "length_042", "length_043"]
    assert data.list_set_names("test") == ["length_041", "length_241", "length_300"], "and the longest"
    data.skipped_sets = frozenset(["length_041"])
    assert data.list_set_names("test") == ["length_241", "length_300"]


def test_training_and_evaluation_seeds_never_coincide(monkeypatch):
    """Not even if a run's seed is a length: numpy treats the seed [41, 5] as [41, 5, 0]."""
    seeds = []
    default_rng = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: seeds.append(seed) or default_rng(seed))
    for seed in (0, 41, 43):
        data = build_data("eval_max_length=43", "validation_max_length=43", seed=seed)
        for step in (1, 2, 3):
            data.sample_training_batch(step)
    training = {tuple(seed) for seed in seeds}
    evaluation = [strings.seed for stage in ("validate", "test") for strings in data.sets(stage)]
    states = [tuple(default_rng(seed).integers(0, 2**60, 4)) for seed in [*training, *evaluation]]
    assert len(set(states)) == len(states) == 9 + 3 + 43
    assert 0 not in STAGE_SEEDS.values()
