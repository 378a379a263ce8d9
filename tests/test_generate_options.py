"""Wrong options of `generate` are reported in one line, before anything is loaded."""

import pytest

from stackexp.cli import main

MISTAKES = {
    "--temperature -1": "--temperature -1.0: must be 0 (greedy) or a number >= 0.001",
    "--temperature 1e-300": "--temperature 1e-300: must be 0 (greedy) or a number >= 0.001",
    "--top_p 0": "--top_p 0.0: must be a number in (0, 1]",
    "--max_new_tokens 0": "argument --max_new_tokens: expected an integer >= 1, found 0",
    f"--seed {2**63}": f"--seed {2**63}: must be an integer from 0 to 2^63 - 1",
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.items())
def test_wrong_numbers(arguments, message, capsys):
    assert main(["generate", "--run", "x", *arguments.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: generate: {message}")


def test_a_prompt_that_is_not_text(capsys):
    assert main(["generate", "--run", "x", "--prompt", "\udcff"]) == 2  # how Python reads the byte 0xff
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: generate: --prompt: not valid UTF-8")
