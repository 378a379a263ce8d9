"""Shell completion by argcomplete, in a real bash and zsh."""

import os
import shutil
import subprocess
import sys

import pytest

CASES = {
    "stackexp sweep st": "status stop",
    "stackexp fit --conf": "--config",
    "stackexp sweep run quick": "quick_grid",
    "stackexp fit --config quickstart model.memory=pu": "push_only",
    "stackexp fit --config quickstart model.memory.axis=ti": "time",
    "stackexp fit --config quickstart trainer.compile=": "auto true false",
    "stackexp configs explain model.memory.num_sl": "model.memory.num_slots",
    "stackexp plan --device h1": "h100-pcie h100",
    "python -m stackexp fit --config quick": "quickstart",
}


@pytest.fixture
def environment(tmp_path):
    """Return an environment with a `stackexp`, as setup.py installs it, and a `python` that has this package."""
    folder = tmp_path / "bin"
    folder.mkdir()
    code = "# PYTHON_ARGCOMPLETE_OK\nfrom stackexp.__main__ import run\nrun()\n"
    (folder / "stackexp").write_text(f"#!{sys.executable}\n{code}")
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for command in folder.iterdir():
        command.chmod(0o755)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": root, "HOME": str(tmp_path)}
    return {**os.environ, **paths}


def test_bash_completes_verbs_names_keys_and_values(environment):
    lines = ['eval "$(stackexp completion bash)"', "ask() {", 'COMP_LINE="$1" COMP_POINT=${#1} COMP_WORDS=($1)']
    lines += ["COMPREPLY=()", "_python_argcomplete_global ${COMP_WORDS[0]} 2>/dev/null", "echo ${COMPREPLY[*]}", "}"]
    script = "\n".join([*lines, *(f"ask '{line}'" for line in CASES)])
    command = ["bash", "--norc", "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert dict(zip(CASES, result.stdout.split("\n"), strict=False)) == CASES, result.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes(environment):
    script = """
    autoload -U compinit && compinit -u
    eval "$(stackexp completion zsh)"
    _describe() { shift; print -l -- ${(P)1} }
    BUFFER="stackexp fit --config quick" CURSOR=${#BUFFER}
    _python_argcomplete_global
    """
    command = ["zsh", "-f", "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("quickstart")
