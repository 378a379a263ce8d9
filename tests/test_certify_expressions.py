"""`certify` of arithmetic and equations with brackets: short strings, rules, and what a network gets wrong."""

import itertools
import re

import numpy as np
import pytest
import torch
from known_networks import SMALL, certify, write_run

from stackexp.certification import expressions
from stackexp.evaluation.loading import load_run
from stackexp.tasks import TASKS

BOTH = (expressions.BRACKETS, expressions.EQUATIONS)


def has_answer(text: str, answer: int) -> bool:
    """Evaluate an expression, or both sides of an equation with its solution."""
    left, _, right = text.replace("x", str(answer)).partition("=")
    return (eval(left) - (int(right) if right else answer)) % 5 == 0


@pytest.mark.parametrize("task", BOTH)
def test_missing_rules_are_wrong_answers(tmp_path, capsys, monkeypatch, task):
    assert len(list(expressions.list_rules(task))) == (5 * 3**3 if task == BOTH[0] else 5 * 2**3 * 4)
    monkeypatch.setattr(expressions, "RULES", dict(itertools.islice(expressions.RULES.items(), 1, 2)))
    run = write_run(tmp_path, f"formal/stacktrans/{task}", *SMALL)
    code, printed, record = certify(capsys, run, "--exhaustive", "8")
    model, symbols = load_run(run[1], run[3]).model, TASKS[task].symbols
    listed = {text for rule in record["missing_rules"] for text in rule["wrong_expressions"]}
    assert code == 1
    for rule, valued in itertools.islice(expressions.list_rules(task), 0, None, 3):
        for text, answer in valued[::50]:
            tokens = torch.tensor([[*map(symbols.index, text), len(symbols)]])
            with torch.no_grad():
                found = int(model(tokens).logits[0, -1].argmax())
            assert has_answer(text, answer)
            assert (text in listed) == (found != answer)
            assert re.fullmatch(re.escape(rule).translate({ord(name): r"\d" for name in "abcde"}), text)
    assert "wrong, such as (" in printed
    assert "random strings of up to 60 symbols, lengths in geometric steps: network and task differ on " in printed


@pytest.mark.parametrize("task", BOTH)
def test_all_short_strings_are_listed(task):
    listed, rng = dict(expressions.list_strings(task, 10)), np.random.default_rng(0)
    assert len(listed) == len(expressions.list_strings(task, 10))
    assert all(has_answer(text, answer) for text, answer in listed.items())
    for length in range(TASKS[task].min_length, 11):
        batch = TASKS[task].sample(rng, 300, length)
        drawn = ["".join(TASKS[task].symbols[i] for i in row) for row in batch.inputs]
        assert [listed[text] for text in drawn] == batch.targets[:, 0].tolist()
    lengths = np.bincount([len(text) for text in listed])[:8].tolist()
    assert lengths == ([0, 5, 5, 5, 5, 75, 150, 225] if task == BOTH[0] else [0, 0, 0, 5, 5, 5, 5, 100])
