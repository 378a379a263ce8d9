"""`validate` and `test`: scores independent of batch size and process count, output records, and kills."""

import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import write_tiny
from forks import Forks
from records import only_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional as F

from stackexp.cli import main
from stackexp.config import compose
from stackexp.errors import RunError
from stackexp.evaluation.evaluate import open_data
from stackexp.evaluation.request import EvaluationRequest, PartialResults, compute_keys
from stackexp.files import read_json, read_json_lines
from stackexp.models import checkpoints
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.runs import RunFolder, write_manifest
from stackexp.training.processes import Processes

CHUNK, VOCAB = 32, 300
LENGTHS = {"a": 7 * CHUNK + 5, "b": 3 * CHUNK, "c": 2 * CHUNK - 1}  # tokens


def make_tokens(name: str) -> np.ndarray:
    return np.random.default_rng(ord(name)).integers(1, VOCAB, LENGTHS[name]).astype("<u2")


@pytest.fixture(scope="module")
def group(tmp_path_factory) -> Path:
    """A folder of raw token files, like OLMo's."""
    folder = tmp_path_factory.mktemp("group")
    for name in LENGTHS:
        (folder / f"{name}.npy").write_bytes(make_tokens(name).tobytes())
    return folder


@pytest.fixture(scope="module")
def fitted(corpus, group, tmp_path_factory) -> RunFolder:
    """A run that validates on three chunks of each set: those of the group `v2`, and `left`."""
    folder = tmp_path_factory.mktemp("fitted")
    path = write_tiny(corpus, folder, ("tensorboard",))
    config = yaml.safe_load(path.read_text())
    config["data"] |= {"validation": {"v2": str(group), "left": str(corpus["left"])}, "eval_sequences": 3}
    path.write_text(yaml.safe_dump(config))
    Forks(folder).run("fit", "--config", path)
    return only_run(folder / "runs")


def evaluate(run: RunFolder, *options: object, stage: str = "validate") -> dict:
    """Return the record in the file that the last line of the output names."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([stage, "--run", str(run.path), *map(str, options)]) == 0
    return read_json(Path(printed.getvalue().splitlines()[-1].removeprefix("scores: ")))


@pytest.fixture(scope="module")
def record(fitted) -> dict:
    return evaluate(fitted)


def compute_losses(run: RunFolder, tokens: np.ndarray, starts: range) -> tuple[list[float], list[int]]:
    """Return the loss and the predictions of each chunk, one at a time in plain torch."""
    config = compose.load_config(str(run.config))
    model = LanguageModeling(config, weights=checkpoints.find_checkpoint(run, None)).model.eval()
    losses, counts = [], []
    with torch.no_grad():
        for start in starts:
            chunk = torch.from_numpy(tokens[start : start + CHUNK].astype(np.int64))
            logits = model(chunk[None]).logits[0]
            losses.append(F.cross_entropy(logits[:-1].double(), chunk[1:], reduction="sum").item())
            counts.append(len(chunk) - 1)
    return losses, counts


def test_scores_match_a_plain_loop_over_the_file(fitted, record):
    for name, length in LENGTHS.items():
        losses, counts = compute_losses(fitted, make_tokens(name), range(0, length - CHUNK + 1, CHUNK))
        mean = np.mean([loss / count for loss, count in zip(losses, counts, strict=True)])  # OLMo averages chunk means
        figures = record["sets"][f"v2/{name}"]
        assert figures["instances"] == length // CHUNK
        assert figures["tokens"] == length // CHUNK * (CHUNK - 1)
        assert figures["loss"] == pytest.approx(mean, rel=1e-6)
        assert figures["perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)
    assert (record["context_length"], record["keep_remainder"]) == (CHUNK, False)


def test_score_remainder_scores_every_token_but_the_first_once(fitted):
    record = evaluate(fitted, "--score-remainder", "--sets", "v2/a,v2/c")
    assert list(record["sets"]) == ["v2/a", "v2/c"]
    for name in ("a", "c"):
        losses, counts = compute_losses(fitted, make_tokens(name), range(0, LENGTHS[name] - 1, CHUNK - 1))
        figures = record["sets"][f"v2/{name}"]
        assert figures["tokens"] == sum(counts) == LENGTHS[name] - 1
        assert figures["instances"] == len(counts)
        assert figures["loss"] == pytest.approx(sum(losses) / sum(counts), rel=1e-6)
    assert record["keep_remainder"]


def test_max_chunks_scores_evenly_spaced_chunks(fitted):
    record = evaluate(fitted, "data.max_chunks=2", "--sets", "v2/a,v2/b")
    for name in ("a", "b"):
        total = LENGTHS[name] // CHUNK
        assert total > 2, "otherwise nothing is left out"
        losses, counts = compute_losses(fitted, make_tokens(name), [0, total // 2 * CHUNK])
        figures = record["sets"][f"v2/{name}"]
        assert figures["instances"] == 2
        assert figures["loss"] == pytest.approx(np.mean(np.divide(losses, counts)), rel=1e-6)


def test_batch_size_and_process_count_do_not_change_scores(fitted, record, forks):
    again = evaluate(fitted, "data.eval_batch_size=1")["sets"]
    two = ("trainer.devices=2", "data.micro_batch_size=2", "data.eval_batch_size=3")
    output = forks.run("validate", "--run", fitted.path, *two, ranks=2)
    assert output.count("sets are missing") == 1, "reported by rank 0 alone"
    for sets in (again, read_json(fitted.path / "validate.json")["sets"]):
        assert sets.keys() == record["sets"].keys()
        for name, figures in record["sets"].items():
            assert sets[name] == pytest.approx(figures, rel=1e-6), name  # float32 sums in another order in the model
            assert all(sets[name][key] == figures[key] for key in ("instances", "tokens", "bytes"))


def test_validation_samples_the_sets_evenly_and_the_result_has_full_sets(fitted, record):
    result = read_json(fitted.result)
    assert all(result[key] == record[key] for key in ("sets", "groups", "average"))
    table = (fitted.path / "validate.md").read_text()
    assert "v2: means of 3 sets" in table
    assert f"{record['sets']['left']['loss']:.4f}" in table

    lines = [line for line in fitted.read_metrics() if "val/loss/average" in line]
    assert [line["step"] for line in lines] == [6, 12]
    averages = {f"val/v2/average/{figure}" for figure in ("loss", "perplexity", "exp_mean_loss")}
    tags = {f"val/v2/{name}" for name in LENGTHS} | averages
    plain = {f"val/{figure}/{name}" for figure in ("loss", "perplexity") for name in ("left", "average")}
    assert tags | plain <= lines[-1].keys()
    assert not [tag for tag in lines[-1] if tag.startswith("val/loss") and "v2" in tag]
    losses, counts = compute_losses(fitted, make_tokens("a"), range(0, 6 * CHUNK, 2 * CHUNK))  # three chunks of seven
    assert lines[-1]["val/v2/a"] == pytest.approx(sum(losses) / sum(counts), rel=1e-6)
    mean = np.mean([lines[-1][f"val/v2/{name}"] for name in LENGTHS])
    assert lines[-1]["val/v2/average/loss"] == pytest.approx(mean)


def test_tensorboard_has_the_scores_at_the_checkpoint_step(fitted, group, capsys):
    def list_steps(tag: str) -> list[int]:
        events = EventAccumulator(str(fitted.path), size_guidance={"scalars": 0}).Reload()
        return sorted(e.step for e in events.Scalars(tag)) if tag in events.Tags()["scalars"] else []

    for old in fitted.path.glob("*.evaluation"):
        old.unlink()
    older = ("--ckpt_path", fitted.checkpoints / "00000008")
    record = evaluate(fitted, *older)
    assert record["step"] == 8
    evaluate(fitted)
    evaluate(fitted, *older, "--sets", "v2")
    for without_tags in (("data.context_length=48", "--sets", "left"), ("--sets", f"left={group / 'b.npy'}")):
        evaluate(fitted, *older, *without_tags)
    evaluate(fitted, *older, "--sets", f"mine={group / 'b.npy'}")
    assert list_steps("val/whole/loss/mine") == [8]
    evaluate(fitted, *older, "--sets", "right", stage="test")
    for tag in ("val/whole/v2/a", "val/whole/v2/average/loss", "val/whole/loss/left", "val/whole/loss/average"):
        assert list_steps(tag) == [8, 12], tag
    assert list_steps("val/v2/a") == list_steps("val/loss/left") == [6, 12], "logged by the fit"
    assert list_steps("test/loss/right") == [8]
    values = {e.step: e.value for e in EventAccumulator(str(fitted.path)).Reload().Scalars("val/whole/v2/a")}
    assert values[8] == pytest.approx(record["sets"]["v2/a"]["loss"])

    for old in fitted.path.glob("*.evaluation"):
        old.unlink()
    with fitted.lock():  # as a running fit, whose event file is kept
        evaluate(fitted, "--sets", "v2")
    assert not list(fitted.path.glob("*.evaluation"))
    assert f"note: {fitted.path} is in use, so TensorBoard does not get the scores" in capsys.readouterr().err


def test_json_is_all_that_is_printed(fitted, capture):
    printed = capture("validate --sets left --json --run", fitted.path)
    assert json.loads(printed.out) == read_json(fitted.path / "validate-left.json")
    assert "average of sets" in printed.err
    capture("validate --json --config x --ckpt_path y", expect=2)
    capture("validate --json --by_position --run", fitted.path, expect=2)


def test_sets_can_be_given_on_the_command_line(fitted, corpus, empty_folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("STACKEXP_CACHE", str(tmp_path / "cache"))
    Path("words.txt").write_text("def one():\n    return 1\n" * 30)
    Path("mine").mkdir()
    Path("mine/ice.jsonl").write_text(json.dumps({"text": "def one():\n    return 1\n" * 30}) + "\n")
    Path("mine/left").symlink_to(corpus["left"])
    sets = ("--sets", "words=words.txt, right", "--sets", "v3=mine")
    Path("to").mkdir()
    assert main(["test", "--run", str(fitted.path), *sets, "--out", "to/out.json", "data.eval_batch_size=64"]) == 0
    record = read_json(Path("to/out.json"))
    assert list(record["sets"]) == ["words", "right", "v3/ice", "v3/left"]
    assert record["sets"]["v3/ice"] == record["sets"]["words"]
    assert {path.name for path in Path("to").iterdir()} == {"out.chunks", "out.json", "out.md"}
    assert not (fitted.path / "test.json").exists()
    assert "v3: 10 sets are missing: c4_en, dolma_books" in caplog.text


def test_long_evaluations_show_progress_on_standard_error(fitted, monkeypatch, capsys):
    evaluate(fitted, "--sets", "v2")
    assert capsys.readouterr().err == "", "it took less than QUIET_SECONDS"
    monkeypatch.setattr("stackexp.evaluation.request.QUIET_SECONDS", 0)
    evaluate(fitted, "--sets", "v2")
    assert re.fullmatch(r"v2/c: loss \d.*100%.* 3/3 .*", capsys.readouterr().err.splitlines()[-1])
    evaluate(fitted, "--sets", "v2", "logging.progress_bar=false")
    assert capsys.readouterr().err == ""


# Kills


@pytest.fixture
def many_sets(tmp_path) -> Path:
    """A group of twelve sets, enough to kill the evaluation in the middle."""
    rng = np.random.default_rng(0)
    (tmp_path / "many").mkdir()
    for number in range(12):
        tokens = rng.integers(1, VOCAB, 2 * CHUNK).astype("<u2")
        (tmp_path / "many" / f"set{number:02}.npy").write_bytes(tokens.tobytes())
    return tmp_path / "many"


def run_until_four_sets_are_scored(*arguments: object) -> int:
    add = PartialResults.add

    def add_and_kill(partial: PartialResults, *scored: object) -> None:
        add(partial, *scored)
        if len(read_lines(partial.path)) == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    PartialResults.add = add_and_kill
    return main([str(argument) for argument in arguments])


def read_lines(path: Path) -> list[dict]:
    return list(read_json_lines(path, skip_damaged=True))


def change_losses(path: Path) -> dict[str, float]:
    """Set the losses in a file of partial results to 100, 101, ... and return them, to recognize them later."""
    lines = [line | {"figures": line["figures"] | {"loss": 100.0 + n}} for n, line in enumerate(read_lines(path))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"key": "truncated by a ki')
    return {line["set"]: line["figures"]["loss"] for line in lines}


@pytest.mark.usefixtures("restored_signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_an_evaluation_between_two_batches(
    fitted, many_sets, tmp_path, monkeypatch, capture, number, code
):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where pytest runs in the background
    add, out = PartialResults.add, tmp_path / "figures.json"
    monkeypatch.setattr(PartialResults, "add", lambda *scored: (add(*scored), signal.raise_signal(number)))
    printed = capture("validate --run", fitted.path, "--sets", f"g={many_sets}", "--out", out, expect=code)
    assert printed.err.endswith("; rerun the command to score the remaining sets\n")
    assert len(read_lines(out.with_suffix(".partial.jsonl"))) == 1


def test_a_checkpoint_without_its_run_requires_the_tokenizer_of_its_training(fitted, tmp_path):
    config = compose.load_config(fitted.config)
    checkpoint = fitted.newest_checkpoint()
    request = EvaluationRequest("validate", config, None, str(checkpoint), ())
    data = open_data(request, checkpoint)
    other = tmp_path / "00000012"
    shutil.copytree(checkpoint, other)
    write_manifest(other, 12, "0" * 64)
    with pytest.raises(RunError, match=r"trained with another tokenizer than that of data\.path; give --run"):
        open_data(request, other)
    assert data.tokenizer is not None


def test_a_killed_evaluation_resumes_after_the_scored_sets(fitted, many_sets, forks, tmp_path):
    out = tmp_path / "figures.json"
    command = ("validate", "--run", fitted.path, "--sets", f"g={many_sets}", "--out", out, "data.eval_batch_size=1")
    partial = out.with_suffix(".partial.jsonl")
    assert forks.start(*command, function=run_until_four_sets_are_scored).join() == [-signal.SIGKILL]
    killed = {line["set"]: line["figures"] for line in read_lines(partial)}
    assert len(killed) == 4
    assert not out.exists()
    changed = change_losses(partial)

    saved = partial.read_bytes()
    assert main([*map(str, command), "--ckpt_path", str(fitted.checkpoints / "00000008")]) == 0
    assert all(figures["loss"] < 100 for figures in read_json(out)["sets"].values()), "lines of another checkpoint"
    partial.write_bytes(saved)

    assert "resuming, 4 of 12 sets are scored already" in forks.run(*command)
    sets = read_json(out)["sets"]
    assert list(sets) == [f"g/set{number:02}" for number in range(12)]
    assert {name: figures["loss"] for name, figures in sets.items() if figures["loss"] >= 100} == changed
    assert not partial.exists()
    assert main([*map(str, command)]) == 0
    assert read_json(out)["sets"] == sets | killed, "bit for bit the figures without a kill"


def test_a_fit_killed_in_its_final_evaluation_keeps_the_scored_sets(corpus, many_sets, forks, tmp_path):
    path, run = write_tiny(corpus, tmp_path), RunFolder(tmp_path / "run")
    config = yaml.safe_load(path.read_text())
    config["data"] |= {"validation": {"g": str(many_sets)}, "eval_sequences": 1, "eval_batch_size": 1}
    path.write_text(yaml.safe_dump(config))
    command = ("fit", "--config", path, "--run", run.path)
    partial = run.path / "result.partial.jsonl"
    forks.start(*command, function=run_until_four_sets_are_scored).join()
    assert not run.is_finished
    changed = change_losses(partial)
    assert len(changed) == 4
    assert "resuming, 4 of 12 sets are scored already" in forks.run(*command)
    sets = read_json(run.result)["sets"]
    assert len(sets) == 12
    assert {name: figures["loss"] for name, figures in sets.items() if figures["loss"] >= 100} == changed
    assert not partial.exists()


# Requests


def make_request(run: RunFolder, *sets: str, overrides: tuple[str, ...] = (), ckpt_path=None) -> EvaluationRequest:
    config = compose.compose([str(run.config)], overrides)
    return EvaluationRequest("validate", config, run, ckpt_path, sets)


def test_set_key_changes_with_every_input_of_its_scores(fitted, many_sets):
    def keys(*overrides: str, checkpoint: str = "00000012") -> dict[str, str]:
        request = make_request(fitted, f"g={many_sets}", overrides=overrides)
        alone = Processes(0, 1, None)
        return compute_keys("validate", request.config, open_data(request), alone, fitted.checkpoints / checkpoint)

    first = keys()
    assert keys("data.eval_batch_size=3", "trainer.devices=1", "logging.progress_bar=false") == first
    others = [
        keys("data.score_remainder=true"),
        keys("data.max_chunks=2"),
        keys("data.context_length=16"),
        keys(checkpoint="00000008"),
    ]
    others += [keys("model.memory.eval_num_slots=8"), keys("trainer.precision=bf16-true")]
    for other in others:
        assert not set(other.values()) & set(first.values())
    for file in (fitted.checkpoints / "00000012").iterdir():
        os.utime(file, (0, 0))
    assert keys() == first, "the time of a checkpoint's files is not part of it"
    (many_sets / "set01.npy").write_bytes((many_sets / "set01.npy").read_bytes()[: -2 * CHUNK])
    changed = keys()
    assert [name for name in first if changed[name] != first[name]] == ["g/set01"]


def test_different_options_use_separate_output_files(fitted, tmp_path, monkeypatch):
    def name(*sets: str, **options) -> str:
        return make_request(fitted, *sets, **options).output.name

    same_figures = ("data.eval_batch_size=1", "trainer.devices=2", "data.micro_batch_size=2")
    assert name() == name(overrides=same_figures) == "validate.json"
    assert name("v2/a", "left") == "validate-v2-a+left.json"
    assert name(ckpt_path="runs/x/checkpoints/00000008") == "validate-00000008.json"
    assert name(ckpt_path=str(fitted.checkpoints / "00000008")) == "validate-00000008.json"
    (tmp_path / "00000008").mkdir()
    for key in ("", "-ema"):
        path = tmp_path / "00000008" / key[1:]
        assert re.fullmatch(rf"validate-00000008{key}-[0-9a-f]{{8}}\.json", name(ckpt_path=str(path)))
    (tmp_path / "best").touch()
    monkeypatch.chdir(tmp_path)
    assert name(ckpt_path="best") == "validate-best.json"
    options = ("data.score_remainder=true", "data.validation.left=x")
    hashed = [name(overrides=(option,)) for option in options] + [name("a=x"), name("a=y"), name("v2/a," * 30)]
    assert len(set(hashed)) == len(hashed)
    assert all(re.fullmatch(r"validate-(a-)?[0-9a-f]{8}\.json", each) for each in hashed)
    request = EvaluationRequest("validate", compose.load_config(fitted.config), fitted, out=Path("x.json"))
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
        (
            "--out odd.npy/x.json",
            2,
            "validate: --out odd.npy/x.json: the folder odd.npy does not exist",
        ),
        ("--ckpt_path nowhere", 1, "nowhere: no such checkpoint; give a folder in a run's checkpoints/"),
    ],
)
def test_errors_are_one_line(fitted, empty_folder, capture, options, code, message):
    np.array([1, 50_279] * 99, "<u2").tofile("large.npy")
    Path("odd.npy").write_bytes(b"abc")
    printed = capture(f"validate {options} --run", fitted.path, expect=code)
    assert printed.out == ""
    assert printed.err.startswith(f"error: {message}")
    assert printed.err.count("\n") == 1


def test_error_shared_by_all_processes_is_reported_once(fitted, forks, tmp_path):
    (tmp_path / "odd.npy").write_bytes(b"abc")
    command = ("validate", "--run", fitted.path, "--sets", "x=odd.npy", "trainer.devices=2")
    output = forks.run(*command, ranks=2, expect=1)
    assert [line[:14] for line in output.splitlines()] == ["error: odd.npy"]
