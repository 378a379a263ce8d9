"""Shell completion, in a real bash and zsh."""

import os
import shutil
import subprocess
import sys

import pytest

from stackexp.cli import VERBS
from stackexp.verbs.completion import complete


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", sorted({verb.split()[0] for verb in VERBS})),
        ("sweep ", ["results", "run", "status", "stop"]),
        ("sweep st", ["status", "stop"]),
        ("fit --conf", ["--config"]),
        ("fit --config quick", ["quickstart"]),
        ("sweep run quick", ["quick_grid"]),
        ("fit --config quickstart model.memory=q", ["model.memory=queue"]),
        ("configs explain model.memory.num_sl", ["model.memory.num_slots"]),
        ("configs show quick", ["quickstart"]),
        ("fit --run ", []),  # the shell completes names of files
        ("nothing ", []),
    ],
)
def test_words(line, expected):
    assert complete(line, VERBS) == expected


@pytest.fixture
def path(tmp_path):
    """Return PATH with a `stackexp` that runs this package."""
    command = tmp_path / "bin" / "stackexp"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m stackexp "$@"\n')
    command.chmod(0o755)
    return f"{command.parent}:{os.environ['PATH']}"


def test_bash_completes_words_with_an_equals_sign(path):
    script = """
    eval "$(stackexp completion bash)"
    ask() {
        COMP_LINE="$1" COMP_POINT=${#1}
        COMPREPLY=()
        _stackexp 2>/dev/null
        echo "${COMPREPLY[*]}"
    }
    ask "stackexp fit --config quick"
    ask "stackexp fit --config quickstart model.memory=pu"
    ask "stackexp sweep st"
    """
    shell = ["bash", "--norc", "-c", script]
    result = subprocess.run(shell, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["quickstart", "push_only", "status stop"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes(path, tmp_path):
    script = """
    autoload -U compinit && compinit -u
    eval "$(stackexp completion zsh)"
    compadd() { shift 3; print -l -- $@ }
    words=(stackexp fit --config quick) CURRENT=4
    _stackexp
    words=(stackexp sweep st) CURRENT=3
    _stackexp
    """
    environment = {**os.environ, "PATH": path, "HOME": str(tmp_path)}
    result = subprocess.run(["zsh", "-f", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["quickstart", "status", "stop"]
