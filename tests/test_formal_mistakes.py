"""Invalid formal-language experiments: one error line each, before anything starts."""

import pytest

from stackexp.cli import main

FIT = ["fit", "--config", "formal/stacktrans"]


def read_fit_error(capsys, *arguments: str) -> str:
    """Run a fit that fails, and return its error line."""
    assert main([*FIT, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.task=reverse_strings"], ["data.task", "did you mean 'reverse_string'?"]),
        (["model.memory.eval_num_slots=8"], ["model.memory.eval_num_slots", "must not be smaller than num_slots 24"]),
        (["data.eval_max_length=40"], ["data.eval_max_length", "must be larger than max_length 40"]),
        (["data.curriculum_steps=5", "data.curriculum_start=50"], ["data.curriculum_start", "max_length 40"]),
        (
            ["model.output_vocab_size=3"],
            ["reverse_string has 2 output symbols, the model 3", "set model.output_vocab_size=${data.output_vocab"],
        ),
        (
            ["model.memory.axis=token_major", "model.causal=false"],
            ["model.memory.axis", "token_major requires model.causal: true"],
        ),
        (
            ["data.task=solve_equation", "data.curriculum_start=1", "data.curriculum_steps=10"],
            ["data.curriculum_start: 1 is too short: the shortest string of solve_equation has 3 symbols"],
        ),
    ],
)
def test_config_error_names_the_key_and_the_fix(capsys, overrides, words):
    line = read_fit_error(capsys, *overrides)
    for word in words:
        assert word in line


def test_test_rejects_set_names(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text("defaults: [formal/transformer]\n")
    assert main(["test", "--run", str(tmp_path), "--sets", "length_041"]) == 2
    assert "data.eval_length_stride" in capsys.readouterr().err


def test_generate_rejects_formal_language_models(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text("defaults: [formal/transformer]\n")
    assert main(["generate", "--run", str(tmp_path)]) == 1
    assert "trained on reverse_string, not on text" in capsys.readouterr().err
