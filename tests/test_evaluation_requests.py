"""Requests to `validate` and `test`: output files, partial results and errors. No model is trained."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import write_tiny
from forks import Forks

from stackexp.cli import main
from stackexp.config import compose
from stackexp.evaluation.evaluate import open_data
from stackexp.evaluation.request import EvaluationRequest
from stackexp.evaluation.resumable import PartialResults, compute_keys
from stackexp.runs import RunFolder
from stackexp.training.processes import Processes

CHUNK, VOCAB = 32, 300


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> RunFolder:
    """A run folder with the sets `v2/a` and `left`, and two empty checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    run, path = RunFolder(folder / "run"), write_tiny(corpus, folder)
    (folder / "group").mkdir()
    np.arange(CHUNK, dtype="<u2").tofile(folder / "group" / "a.npy")
    config = yaml.safe_load(path.read_text())
    config["data"]["validation"] = {"v2": str(folder / "group"), "left": str(corpus["left"])}
    path.write_text(yaml.safe_dump(config))
    for step in ("00000008", "00000012"):
        (run.checkpoints / step).mkdir(parents=True)
        (run.checkpoints / step / "state.pt").write_text(step)
    run.config.write_text(compose.to_yaml(compose.compose([str(path)], [])))
    return run


def make_request(run: RunFolder, *sets: str, overrides: tuple[str, ...] = (), ckpt_path=None) -> EvaluationRequest:
    config = compose.compose([str(run.config)], overrides)
    return EvaluationRequest("validate", config, run, ckpt_path, sets)


def test_set_key_changes_with_every_input_of_its_scores(run, tmp_path):
    rng = np.random.default_rng(0)
    for name in ("set00", "set01"):
        (tmp_path / f"{name}.npy").write_bytes(rng.integers(1, VOCAB, 2 * CHUNK).astype("<u2").tobytes())

    def keys(*overrides: str, checkpoint: str = "00000012") -> dict[str, str]:
        request = make_request(run, f"g={tmp_path}", overrides=overrides)
        alone = Processes(0, 1, None)
        return compute_keys("validate", request.config, open_data(request), alone, run.checkpoints / checkpoint)

    first = keys()
    assert list(first) == ["g/set00", "g/set01"]
    assert keys("data.eval_batch_size=3", "trainer.devices=1", "logging.progress_bar=false") == first
    others = [keys("data.score_remainder=true"), keys("data.context_length=16"), keys(checkpoint="00000008")]
    others += [keys("model.memory.eval_num_slots=8"), keys("trainer.precision=bf16-true")]
    for other in others:
        assert not set(other.values()) & set(first.values())
    (tmp_path / "set01.npy").write_bytes((tmp_path / "set01.npy").read_bytes()[: -2 * CHUNK])
    changed = keys()
    assert [name for name in first if changed[name] != first[name]] == ["g/set01"]


def test_evaluations_share_a_file_of_partial_results(tmp_path):
    path = tmp_path / "x.jsonl"
    first, second = PartialResults(path, {"a": "1", "b": "3"}), PartialResults(path, {"a": "2"})
    assert first.load() == {}
    assert not path.exists(), "an evaluation that fails at once leaves nothing"
    path.write_text('{"key": "truncated by a ki')
    first.add("a", {"loss": 1.0})
    second.add("a", {"loss": 2.0})
    assert first.load() == {"a": {"loss": 1.0}}
    first.delete()
    assert first.load() == {}
    assert second.load() == {"a": {"loss": 2.0}}
    second.delete()
    assert not path.exists()


def test_different_options_use_separate_output_files(run, tmp_path):
    def name(*sets: str, **options) -> str:
        return make_request(run, *sets, **options).output.name

    same_figures = ("data.eval_batch_size=1", "trainer.devices=2", "data.micro_batch_size=2")
    assert name() == name(overrides=same_figures) == "validate.json"
    assert name("v2/a", "left") == "validate-v2-a+left.json"
    assert name(ckpt_path="runs/x/checkpoints/00000008") == "validate-00000008.json"
    assert name(ckpt_path=str(run.checkpoints / "00000008")) == "validate-00000008.json"
    (tmp_path / "00000008").mkdir()
    assert re.fullmatch(r"validate-00000008-[0-9a-f]{8}\.json", name(ckpt_path=str(tmp_path / "00000008")))
    options = ("data.score_remainder=true", "data.validation.left=x")
    hashed = [name(overrides=(option,)) for option in options] + [name("a=x"), name("a=y"), name("v2/a," * 30)]
    assert len(set(hashed)) == len(hashed)
    assert all(re.fullmatch(r"validate-(a-)?[0-9a-f]{8}\.json", each) for each in hashed)
    request = EvaluationRequest("validate", compose.load_config(run.config), run, out=Path("x.json"))
    assert request.output == Path("x.json")
    assert not request.should_write_events


# Mistakes


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--sets left,left", 2, "--sets: left "),
        ("--sets v2/aa", 2, "--sets: no set 'v2/aa' in data.validation; did you mean 'v2/a'?"),
        ("--sets x=large.npy", 1, "large.npy: token id 50,279"),
        ("--sets x=odd.npy", 1, "odd.npy: 3 bytes"),
        ("--out figures.txt", 2, "validate: --out figures.txt: must end in .json"),
        ("--out odd.npy/x.json", 1, "odd.npy: File exists; check the path"),
        ("--ckpt_path nowhere", 1, "nowhere: no such checkpoint; give a folder in a run's checkpoints/"),
    ],
)
def test_errors_are_one_line(run, tmp_path, monkeypatch, capsys, options, code, message):
    monkeypatch.chdir(tmp_path)
    np.array([1, 50_279] * 99, "<u2").tofile("large.npy")
    Path("odd.npy").write_bytes(b"abc")
    assert main(["validate", "--run", str(run.path), *options.split()]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {message}")
    assert printed.err.count("\n") == 1


def test_error_shared_by_all_processes_is_reported_once(run, tmp_path):
    (tmp_path / "odd.npy").write_bytes(b"abc")
    command = ("validate", "--run", run.path, "--sets", "x=odd.npy", "trainer.devices=2")
    output = Forks(tmp_path).run(*command, ranks=2, expect=1)
    assert [line[:14] for line in output.splitlines()] == ["error: odd.npy"]
