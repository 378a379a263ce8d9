"""The command line: verbs, help, exit codes, one-line errors, and no heavy import before the config is checked."""

import contextlib
import errno
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

import stackexp
from stackexp import cli
from stackexp.config.compose import compose, load_config, to_yaml
from stackexp.errors import ConfigError, FolderBusyError, RunError, StoppedError
from stackexp.evaluation.request import EvaluationRequest
from stackexp.verbs.parser import Verb

HEAVY = {"torch", "lightning", "numpy", "streaming", "tensorboard", "tokenizers"}


def run_program(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "stackexp", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


LIGHT_COMMANDS = [
    "--help",
    "fit --config quickstart --print-config",
    "fit --config quickstart model.memory.num_slot=3",
    "validate --config quickstart --ckpt_path x model.memory.num_slot=3",
    "configs show quickstat",
    "generate --run nowhere",
    "plan --config quickstart --mfu 2",
    "fit --config quickstart --ckpt_path nowhere",
    "configs list",
    "configs explain",
    "sweep run formal_table --dry-run",
    "validate --run run --ckpt_path nowhere",
    "evaluate --run run --ckpt_path nowhere --tasks piqa",
    "generate --run run --ckpt_path nowhere",
    "checkpoint export --run nowhere --to out",
    "checkpoint consolidate --run run --ckpt_path nowhere --to out.safetensors",
    "test --run run",
    "fit --config quickstart warm_start.weights=nowhere",
    "inspect --run run --task reverse_strings",
]


def test_heavy_modules_are_imported_after_config_validation(tmp_path):
    """Run all commands in one process: the first command that imports a heavy module is the first that differs."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("defaults: [ablation/queue]\n")
    code = f"""
import sys, stackexp.cli
for command in {LIGHT_COMMANDS}:
    try: stackexp.cli.main(command.split())
    except SystemExit: pass
    print("heavy:", command, *{HEAVY} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("heavy: ")]
    assert found == [f"heavy: {command}" for command in LIGHT_COMMANDS], done.stderr
    assert done.stderr.count("\n") <= len(LIGHT_COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_verb(arguments, invoke):
    output = invoke(*arguments)
    assert all(f"\n  {verb} " in output for verb in cli.VERBS)
    assert "python -m stackexp fit --config quickstart" in output
    assert max(map(len, output.splitlines())) <= 80
    listed = [line.split()[1] for line in invoke("data").splitlines() if line.startswith("  data ")]
    assert listed == ["prepare", "fetch", "english", "retokenize", "inspect"], "a group lists its verbs"


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help_with_examples(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit_:
        cli.main([*verb.split(), "--help"])
    assert exit_.value.code == 0
    text, _, examples = capsys.readouterr().out.partition("examples:\n")
    assert max(map(len, text.splitlines())) <= 80
    assert examples.startswith(f"  python -m stackexp {verb}")


def test_print_config_round_trips(tmp_path, invoke):
    arguments = ["fit", "--config", "quickstart", "--seed", "3", "--print-config", "model.memory=queue"]
    printed = invoke(*arguments)
    (tmp_path / "config.yaml").write_text(printed)
    expected = compose(["quickstart"], ["seed=3", "model.memory=queue"])
    assert load_config(tmp_path / "config.yaml") == expected
    assert printed == to_yaml(expected)


def test_error_in_a_real_process_writes_no_files(tmp_path):
    (tmp_path / "x.yaml").write_text("defaults: [quickstart]\nmodel:\n  memory: {num_slots: 0}\n")
    before = set(tmp_path.iterdir())
    process = run_program(tmp_path, "fit", "--config", "x.yaml")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "error: x.yaml:3: model.memory.num_slots: expected an integer from 1 to 1048576, found 0\n"
    assert set(tmp_path.iterdir()) == before


def replace_verb(monkeypatch, name: str, run) -> None:
    verb = type("Replaced", (Verb,), {"__doc__": "A verb.", "run": lambda self, args: run(args)})
    monkeypatch.setitem(sys.modules, f"stackexp.verbs.{name}", SimpleNamespace(**{name.capitalize(): verb}))


def raise_error(error: BaseException):
    def run(args: Namespace) -> int:
        raise error

    return run


RERUN, RESUME = "rerun the command", "resume with `python -m stackexp fit --run runs/x`"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x")
QUOTA = OSError(errno.EDQUOT, "")
QUOTA.add_note(RESUME)
DENIED = PermissionError(errno.EACCES, "Permission denied", "runs/x")
CROSS_DEVICE = OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b")
CHECK_PATH = "check the path and its permissions"
ERRORS = [
    (ConfigError("wrong"), 2, "error: wrong\n"),
    (RunError("failed\nthere"), 1, "error: failed there\n"),
    (FolderBusyError("runs/x: in use"), 74, "error: runs/x: in use\n"),
    (StoppedError("runs/x: SIGTERM; newest checkpoint 00000004"), 75, "runs/x: SIGTERM; newest checkpoint 00000004\n"),
    (KeyboardInterrupt(), 130, "interrupted\n"),
    (KeyboardInterrupt("at step 3"), 130, "interrupted: at step 3\n"),
    (FULL, 1, f"error: no space left on the disk at runs/x; free some space, then {RERUN}\n"),
    (QUOTA, 1, f"error: disk quota exceeded; free some space, then {RESUME}\n"),
    (DENIED, 1, f"error: runs/x: Permission denied; {CHECK_PATH}\n"),
    (CROSS_DEVICE, 1, f"error: b: Invalid cross-device link; {CHECK_PATH}\n"),
]


@pytest.mark.parametrize(("error", "code", "line"), ERRORS)
def test_errors_are_one_line_with_an_exit_code(error, code, line, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    replace_verb(monkeypatch, "fit", raise_error(error))
    assert cli.main(["fit"]) == code
    assert capsys.readouterr().err == line
    monkeypatch.setenv("STACKEXP_TRACEBACK", "1")
    with pytest.raises(type(error)):
        cli.main(["fit"])


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("wrong"), 2, ""),
        (StoppedError("at step 3"), 75, ""),
        (KeyboardInterrupt("at step 3"), 130, ""),
        (RunError("failed"), 1, "error: rank 1: failed\n"),
    ],
)
def test_other_ranks_print_only_their_own_errors(error, code, line, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    replace_verb(monkeypatch, "fit", raise_error(error))
    assert cli.main(["fit"]) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "denied"), ZeroDivisionError()])
def test_a_bug_keeps_its_traceback(error, monkeypatch):
    replace_verb(monkeypatch, "fit", raise_error(error))
    with pytest.raises(type(error)):
        cli.main(["fit"])


def test_a_closed_pipe_is_not_an_error(tmp_path):
    command = f"{sys.executable} -m stackexp fit --config quickstart --print-config | true"
    process = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert (process.stdout, process.stderr) == ("", "")


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """Record the engine calls of the verbs: (arguments, keywords)."""
    calls = []

    def record(*args, **kwargs) -> int:
        calls.append((args, kwargs))
        return 0

    for name in ("training.loop", "evaluation.evaluate"):
        package, _, module_name = name.partition(".")
        module = SimpleNamespace(train=record, evaluate=record)
        monkeypatch.setitem(sys.modules, f"stackexp.{name}", module)
        monkeypatch.setattr(f"stackexp.{package}.{module_name}", module, raising=False)
    return calls


def test_fit_passes_the_config_to_the_loop(calls):
    config = compose(["quickstart"], ["seed=1"])
    assert cli.main(["fit", "--config", "quickstart", "--ckpt_path", "last", "--seed", "1"]) == 0
    assert calls.pop() == ((config, "last", None), {"overridden": {"seed"}})
    assert cli.main(["fit", "--config", "quickstart", "--run", "here", "--seed", "1"]) == 0
    assert calls.pop() == ((config, None, "here"), {"overridden": {"seed"}})


def test_validate_and_test_pass_config_sets_and_overrides(calls, empty_folder, tmp_path):
    run, config = str(tmp_path), compose(["quickstart"], ["seed=1"])
    for name in ("b.npy", "data/olmo/v2", "data/olmo/v3"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "a.safetensors").touch()
    assert cli.main(["validate", "--run", run, "data.context_length=48", "trainer.devices=3"]) == 0
    [(request,), _] = calls.pop()
    assert (request.stage, request.run.path, request.sets, request.out) == ("validate", tmp_path, (), None)
    assert request.overrides == ("data.context_length=48", "trainer.devices=3")
    assert request.config.data.context_length == 48, "the global batch matters to training only"
    assert cli.main(["test", "--config", "quickstart", "--seed=1", "--ckpt_path", "a.safetensors"]) == 0
    [(request,), _] = calls.pop()
    assert request == EvaluationRequest("test", config, None, "a.safetensors", (), None, ("--seed=1",))
    sets = ["--sets", "v2, v3", "--sets", "a=b.npy", "--score-remainder", "--out", "x.json"]
    assert cli.main(["validate", "--run", run, *sets]) == 0
    [(request,), _] = calls.pop()
    assert (request.sets, request.out) == (("v2", "v3", "a=b.npy"), Path("x.json"))
    assert request.config.data.score_remainder


@pytest.mark.parametrize("verb", [[], ["fit"], ["data", "prepare"], ["configs"]])
def test_help_is_a_verb_too(capsys, verb):
    printed = []
    for words in (["help", *verb], [*verb, "--help"]):
        with contextlib.suppress(SystemExit):  # argparse
            assert cli.main(words) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "usage: python -m stackexp" in printed[0]


def test_version_and_errors_on_a_narrow_terminal(monkeypatch, invoke):
    assert invoke("--version") == f"stackexp {stackexp.__version__}\n"
    monkeypatch.setenv("COLUMNS", "8")
    assert invoke("configs list foo", expect=2).startswith("error: ")


def test_a_missing_dependency_is_one_line(invoke, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.delitem(sys.modules, "stackexp.config.yaml_files")
    monkeypatch.delitem(sys.modules, "stackexp.config.layers")
    monkeypatch.delitem(sys.modules, "stackexp.verbs.configs")
    assert invoke("configs list", expect=1).startswith("error: the Python module yaml is not installed; ")
