"""Invalid formal-language experiments: one error line each, before anything starts."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from stackexp.config.compose import compose
from stackexp.datamodules.formal_language import FormalLanguageData
from stackexp.errors import ConfigError
from stackexp.inspection.inspect import open_task
from stackexp.tasks import TASKS, Task
from stackexp.tasks import task as register_task


def test_verbs_for_text_reject_formal_languages():
    config = compose(["formal/transformer"])
    with pytest.raises(ConfigError, match=r"data\.eval_length_stride"):
        FormalLanguageData(config.data, seed=0).select_sets("test", ["length_041"])


def test_strings_to_inspect_exist():
    run = SimpleNamespace(config=compose(["formal/stacktrans"], ["data.task=binary_addition"]))
    for length in (2, 99999999999999999999, "x"):
        with pytest.raises(ConfigError, match=f"--task binary_addition:{length}: the length must be from 3 to 65536"):
            open_task(run, f"binary_addition:{length}")
    with pytest.raises(ConfigError, match="reverse_string: the run was trained on binary_addition; use"):
        open_task(run, "reverse_string")


def draw_letters(rng, batch_size, length):
    """Return strings of two letters with an answer at each, for the cases below."""
    return rng.integers(0, 2, (batch_size, length)), rng.integers(0, 2, (batch_size, length))


def make_task(generate, output_length=lambda length: length, **options) -> Task:
    """Return a task that generates strings with `generate(strings, answers)` of `draw_letters`."""
    return Task("mine", "own", lambda *sizes: generate(*draw_letters(*sizes)), "ab", "xy", output_length, **options)


WRONG = {
    "at length 5 its generator returned 6 symbols and 5 answers": lambda x, y: (np.column_stack([x, x[:, 0]]), y),
    "answers of 1 symbols; output_length gives 5": lambda x, y: (x, y[:, :1]),
    "strings [5] of int64; return int64 [3, length of the string]": lambda x, y: (x[0], y),
    "answers [3, 5] of int32; return int64 [3, length of the answer]": lambda x, y: (x, y.astype("int32")),
    "strings [2, 5] of int64; return int64 [3, ": lambda x, y: (x[:2], y),
    "the string id 2; return ids from 0 to 1": lambda x, y: (x + 1, y),
    "the answer id -1; return ids from 0 to 1": lambda x, y: (x, y - 1),
    "its mask counts no answer; raise its min_length": lambda x, y: (x, y, np.zeros(y.shape, bool)),
    "must return a tuple of two or three NumPy arrays": lambda x, y: [x, y],
    "as third array int64 [3, 5]; return a mask, bool [3, 5], or": lambda x, y: (x, y, y),
    "as third array bool [3]; return a mask, ": lambda x, y: (x, y, y[:, 0] == 0),
    "as third array int64 [3]; return a mask, bool [3, 5], or positions below 5": lambda x, y: (x, y, y[:, 0] + 5),
    "a string without an answer; each needs one that is not -100": lambda x, y: (x, np.where(x[:, :1] == 0, y, -100)),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_generator_that_breaks_its_contract_is_named(message):
    task = make_task(WRONG[message], answers_every_token=True)
    with pytest.raises(ConfigError, match="^task mine: " + ".*" + re.escape(message)):
        task.sample(np.random.default_rng(0), 3, 5)


@pytest.mark.parametrize("answers_every_token", [True, False])
def test_answers_have_the_length_of_the_strings_that_exist(answers_every_token):
    task = Task("mine", "own", draw_letters, "ab", "xy", lambda length: length, answers_every_token, 2, 2)
    sizes = [task.sample(np.random.default_rng(0), 3, length).targets.shape[1] for length in (4, 5, 6)]
    assert sizes == [4, 4, 6]
    assert task.count_tokens(5) == task.count_tokens(4) == (4 if answers_every_token else 8)


def test_strings_longer_than_the_length_are_named():
    task = make_task(lambda x, y: (np.tile(x, 7), y[:, :1]), lambda length: 1)
    with pytest.raises(ConfigError, match="at length 5 its generator returned strings of 35 symbols; return at most 5"):
        task.sample(np.random.default_rng(0), 3, 5)


def test_repeated_words_would_change_what_accuracy_counts():
    task = make_task(lambda x, y: (x, y, np.zeros(len(x), "int64")), solve=lambda strings: strings)
    assert task.sample(np.random.default_rng(0), 3, 5).mask.sum(1).tolist() == [1, 1, 1]
    with pytest.raises(ConfigError, match=r"task mine: has a mask of its own, which data\.loop_fraction would change"):
        task.sample(np.random.default_rng(0), 3, 5, loop_fraction=1.0)


@pytest.mark.parametrize("names", ["symbols", "answer_symbols"])
def test_symbols_have_names_of_their_own(names):
    options = {"symbols": "ab", "answer_symbols": "xy"} | {names: "aa"}
    with pytest.raises(ValueError, match=f"task 'mine': {names} repeat a symbol"):
        register_task("own", name="mine", **options)(draw_letters)
    assert "mine" not in TASKS


def test_two_tasks_of_one_file_have_different_names():
    def repeat(rng, batch_size, length):
        return draw_letters(rng, batch_size, length)

    register = register_task("own", name="mine", symbols="ab", answer_symbols="xy")
    try:
        register(register(draw_letters))  # as a file that is imported again
        with pytest.raises(ValueError, match="task 'mine' is already registered by test_formal_mistakes"):
            register(repeat)
    finally:
        del TASKS["mine"]


def test_the_entropy_assumes_uniform_lengths():
    options = ["data.task=generate_dyck_2", "data.longest_fraction=0.5"]
    with pytest.raises(ConfigError, match=r"data\.longest_fraction: the entropy of generate_dyck_2 assumes uniform"):
        compose(["formal/lstm"], options)
    assert (
        compose(
            ["formal/lstm"], ["data.task=generate_hardest", "data.curriculum_steps=0", options[1]]
        ).data.longest_fraction
        == 0.5
    )
