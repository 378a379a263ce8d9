"""Warnings at the start about options with which reads are mostly empty or decided by rounding."""

import logging

import pytest

from stackexp.config.compose import compose
from stackexp.training.objectives import build_objective

SLOTS = "model.memory.num_slots: 24 slots, but a token has 6 updates: empty slots take a share"
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
