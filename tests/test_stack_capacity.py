"""Warnings at the start about stacks with too few or too many slots, and about masks that rounding decides."""

import logging
from types import SimpleNamespace

import pytest

from stackexp.config.compose import compose
from stackexp.training.objectives import build_objective

SAME_SLOTS_IN_TEST = "model.memory.eval_num_slots=null"
BRACKETS = "data.task=modular_arithmetic_brackets"


@pytest.fixture
def warnings(caplog):
    """A function that returns the warnings for a recipe with overrides."""

    def get_warnings(*overrides: str, config: str = "formal/stacktrans", stage: str = "test") -> list[str]:
        caplog.clear()
        slots = ["model.memory.num_slots=24"] if config == "formal/stacktrans" else []
        build_objective(compose([config], [*slots, *overrides])).warn_about_limits(stage)
        return [entry.getMessage() for entry in caplog.records]

    return get_warnings


def test_evaluation_checks_its_longest_strings(warnings):
    assert "at length 500" in warnings(SAME_SLOTS_IN_TEST)[0]
    assert warnings(SAME_SLOTS_IN_TEST)[0].endswith("set model.memory.eval_num_slots=500")
    assert "at length 60" in warnings(SAME_SLOTS_IN_TEST, stage="validate")[0]


def test_fit_also_checks_the_training_strings(warnings):
    assert warnings(stage="fit")[0].endswith("at length 40, which requires 40; set model.memory.num_slots=40")
    assert warnings("data.max_length=24", stage="fit") == []
    assert len(warnings(SAME_SLOTS_IN_TEST, stage="fit")) == 2


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (SAME_SLOTS_IN_TEST, BRACKETS),
        (SAME_SLOTS_IN_TEST, "data.task=parity_check"),
        ("model.memory.eval_num_slots=41", "data.eval_max_length=41"),
    ],
)
def test_a_large_enough_stack_gives_no_warning(warnings, overrides):
    assert warnings(*overrides) == []


def test_other_models_are_checked_if_they_have_slots(warnings):
    few = ("model.memory.num_slots=2", "model.memory.eval_num_slots=2")
    assert "requires 21" in warnings(BRACKETS, *few)[0]
    assert warnings("model.eval_num_slots=null", config="formal/stack_rnn")[0].startswith("model.eval_num_slots: ")
    assert warnings(config="formal/stacktrans-depth") == warnings(config="formal/transformer") == []


SLOTS = "model.memory.num_slots: 24 slots, but a token has 6 updates: empty slots take a share"


def test_a_memory_of_a_plugin_may_have_only_num_slots(caplog):
    objective = build_objective(compose(["formal/transformer"], ["data.task=reverse_string"]))
    objective.config.model.memory = SimpleNamespace(kind="mine", num_slots=2)
    objective.warn_about_limits("fit")
    assert not caplog.messages


CASES = {
    "": [SLOTS],
    "model.memory.num_slots=6": [],
    "model.memory.read_mask=log": [],
    "model.memory.read=top": [],
    "model.memory.axis=time": [],
    "model.memory.site=each_sublayer": ["model.memory.num_slots: 24 slots, but a token has 12 updates"],
    "model.memory.read_mask=additive": ["model.memory.read_mask: additive lets rounding of the mask choose the slot"],
    "model.memory=null": [],
    "model.memory=hyper_connections": [],
}


@pytest.mark.parametrize(("override", "expected"), CASES.items())
def test_warnings(override, expected, caplog):
    objective = build_objective(compose(["quickstart"], [override] if override else []))
    with caplog.at_level(logging.WARNING, logger="stackexp"):
        objective.warn_about_limits("fit")
        objective.warn_about_limits("validate")
    assert len(caplog.messages) == len(expected)
    assert all(message.startswith(start) for message, start in zip(caplog.messages, expected, strict=True))
