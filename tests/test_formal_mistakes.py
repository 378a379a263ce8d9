"""Invalid formal-language experiments: one error line each, before anything starts."""

import re
from types import SimpleNamespace

import pytest
from config_files import compose_error

from stackexp.config.compose import compose
from stackexp.datamodules.formal_language import FormalLanguageData
from stackexp.errors import ConfigError
from stackexp.inspection.inspect import open_task

MISTAKES = {
    "data.task=reverse_strings": r"data.task: .*did you mean 'reverse_string'\?",
    "model.memory.eval_num_slots=8": "model.memory.eval_num_slots: must not be smaller than num_slots 24",
    "data.eval_max_length=40": "data.eval_max_length: must be larger than max_length 40",
    "data.output_vocab_size=5": "data.output_vocab_size: data.task reverse_string has 2, found 5; remove this option",
    "data.vocab_size=2": "data.vocab_size: data.task reverse_string has 3, found 2; remove this option",
    "data.curriculum_steps=5 data.curriculum_start=50": "data.curriculum_start: .*max_length 40",
    "model.output_vocab_size=3": "reverse_string has 2 output symbols, the model 3; set model.output_vocab_size=",
    "model.memory.axis=token_major model.causal=false": "model.memory.axis: token_major requires model.causal: true",
    "data.task=solve_equation data.curriculum_start=1 data.curriculum_steps=10": (
        "data.curriculum_start: 1 is too short: the shortest string of solve_equation has 3 symbols"
    ),
}


@pytest.mark.parametrize(("overrides", "message"), MISTAKES.items())
def test_config_error_names_the_key_and_the_fix(overrides, message):
    assert re.search(message, compose_error(["formal/stacktrans"], *overrides.split()))


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
