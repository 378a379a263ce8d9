"""`validate` and `test`: the figures of chunks, whatever the batch and the processes; what is recorded; kills."""

import contextlib
import io
import json
import math
import os
import re
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
from stackexp.evaluation.progress import PartialFigures
from stackexp.models import checkpoints
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.runs import RunFolder

T, V = 32, 300
LENGTHS = {"a": 7 * T + 5, "b": 3 * T, "c": 2 * T - 1}


@pytest.fixture(scope="module")
def group(tmp_path_factory) -> Path:
    """Raw token files as OLMo's."""
    folder = tmp_path_factory.mktemp("group")
    for name, length in LENGTHS.items():
        (folder / f"{name}.npy").write_bytes(ids_of(name).tobytes())
        assert len(ids_of(name)) == length
    return folder


def ids_of(name: str) -> np.ndarray:
    return np.random.default_rng(ord(name)).integers(1, V, LENGTHS[name]).astype("<u2")


@pytest.fixture(scope="module")
def fitted(corpus, group, tmp_path_factory) -> RunFolder:
    """A run that validates on a group and on a set of its own, three chunks of each."""
    folder = tmp_path_factory.mktemp("fitted")
    path = write_tiny(corpus, folder)
    config = yaml.safe_load(path.read_text())
    config["data"] |= {"validation": {"v2": str(group), "left": str(corpus["left"])}, "eval_sequences": 3}
    path.write_text(yaml.safe_dump(config))
    Forks(folder).run("fit", "--config", path)
    return only_run(folder / "runs")


def evaluate(run: RunFolder, *options: object, stage: str = "validate") -> dict:
    """What the program leaves in the file of the run's folder that its last line names."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([stage, "--run", str(run.path), *map(str, options)]) == 0
    return json.loads(Path(printed.getvalue().splitlines()[-1].removeprefix("figures: ")).read_text())


def reference(run: RunFolder, ids: np.ndarray, starts: range, length: int = T) -> tuple[list[float], list[int]]:
    """Loss and number of predictions of the chunks that begin at `starts`, one after the other, in plain torch."""
    config = compose.load(str(run.config))
    model = LanguageModeling(config, weights=checkpoints.choose(run, None)).model.eval()
    losses, counts = [], []
    with torch.no_grad():
        for start in starts:
            chunk = torch.from_numpy(ids[start : start + length].astype(np.int64))
            logits = model(chunk[None]).logits[0]
            losses.append(F.cross_entropy(logits[:-1].double(), chunk[1:], reduction="sum").item())
            counts.append(len(chunk) - 1)
    return losses, counts


def test_figures_are_those_of_a_plain_loop_over_the_file(fitted):
    record = evaluate(fitted)
    for name, length in LENGTHS.items():
        losses, counts = reference(fitted, ids_of(name), range(0, length - T + 1, T))
        mean = np.mean([loss / count for loss, count in zip(losses, counts, strict=True)])  # OLMo: of means of chunks
        figures = record["sets"][f"v2/{name}"]
        assert figures["instances"] == length // T
        assert figures["tokens"] == length // T * (T - 1)
        assert figures["loss"] == pytest.approx(mean, rel=1e-6)
        assert figures["perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)
    assert (record["context_length"], record["keep_remainder"]) == (T, False)


def test_with_the_remainder_every_token_but_the_first_is_scored_once(fitted):
    record = evaluate(fitted, "--keep-remainder", "--sets", "v2/a,v2/c")
    assert list(record["sets"]) == ["v2/a", "v2/c"]
    for name in ("a", "c"):
        length = LENGTHS[name]
        losses, counts = reference(fitted, ids_of(name), range(0, length - 1, T - 1))
        figures = record["sets"][f"v2/{name}"]
        assert figures["tokens"] == sum(counts) == length - 1
        assert figures["instances"] == len(counts)
        assert figures["loss"] == pytest.approx(sum(losses) / sum(counts), rel=1e-6)
    assert record["keep_remainder"]


def test_neither_batch_size_nor_processes_change_a_figure(fitted, tmp_path):
    expected = evaluate(fitted, "data.eval_batch_size=1")["sets"]
    again = evaluate(fitted, "data.eval_batch_size=7")["sets"]
    two = ("trainer.devices=2", "data.micro_batch_size=2", "data.eval_batch_size=3")
    said = Forks(tmp_path).run("validate", "--run", fitted.path, *two, ranks=2)
    assert said.count("sets are missing") == 1, "not once per rank"
    divided = json.loads((fitted.path / "validate.json").read_text())["sets"]
    for sets in (again, divided):
        assert sets.keys() == expected.keys()
        for name, figures in expected.items():
            assert sets[name] == pytest.approx(figures, rel=1e-6), name  # float32 in another order within the model
            assert all(sets[name][key] == figures[key] for key in ("instances", "tokens", "bytes"))


def test_averages_of_the_group_and_of_all(fitted):
    record = evaluate(fitted)
    sets = [record["sets"][f"v2/{name}"] for name in LENGTHS]
    group = record["groups"]["v2"]
    assert group["sets"] == 3
    assert group["loss"] == pytest.approx(sum(s["loss"] for s in sets) / 3)
    assert group["perplexity"] == pytest.approx(sum(s["perplexity"] for s in sets) / 3)
    assert group["exp_mean_loss"] == pytest.approx(math.exp(group["loss"]))
    assert record["average"]["loss"] == pytest.approx(sum(s["loss"] for s in record["sets"].values()) / 4)
    table = (fitted.path / "validate.md").read_text()
    assert "| v2: means of 3 sets | " in table
    assert f"| {group['exp_mean_loss']:.2f} |" in table
    assert f"| left | 70 | 2,170 | {record['sets']['left']['loss']:.4f} |" in table


def test_while_fitting_groups_have_tags_of_their_own_and_sets_are_a_sample_of_their_chunks(fitted):
    lines = [line for line in fitted.read_metrics() if "validation/loss/average" in line]
    assert [line["step"] for line in lines] == [6, 12]
    averages = {f"sample/v2/average/{figure}" for figure in ("loss", "perplexity", "exp_mean_loss")}
    tags = {f"sample/v2/{name}" for name in LENGTHS} | averages
    ours = {f"validation/{figure}/{name}" for figure in ("loss", "perplexity") for name in ("left", "average")}
    assert tags | ours <= lines[-1].keys()
    assert not [tag for tag in lines[-1] if tag.startswith("validation/") and "v2" in tag]
    losses, counts = reference(fitted, ids_of("a"), range(0, 6 * T, 2 * T))  # of seven
    assert lines[-1]["sample/v2/a"] == pytest.approx(sum(losses) / sum(counts), rel=1e-6)
    assert lines[-1]["sample/v2/average/loss"] == pytest.approx(
        np.mean([lines[-1][f"sample/v2/{name}"] for name in LENGTHS])
    )


def test_the_result_is_over_whole_sets_and_has_the_groups(fitted):
    result, record = json.loads(fitted.result.read_text()), evaluate(fitted)
    assert result["sets"] == record["sets"]
    assert result["groups"] == record["groups"]
    assert result["average"] == record["average"]


def test_tensorboard_has_the_sets_of_groups_at_the_checkpoints_step(fitted, group):
    def steps_of(tag: str) -> list[int]:
        events = EventAccumulator(str(fitted.path), size_guidance={"scalars": 0}).Reload()
        return sorted(e.step for e in events.Scalars(tag)) if tag in events.Tags()["scalars"] else []

    for old in fitted.path.glob("*.evaluation"):
        old.unlink()
    older = ("--ckpt_path", fitted.checkpoints / "00000008")
    record = evaluate(fitted, *older)
    assert record["step"] == 8
    evaluate(fitted)
    evaluate(fitted, *older, "--sets", "v2")
    for others in (
        ["data.context_length=48", "--sets", "left"],
        ["--sets", "v2/a"],
        ["--sets", f"left={group / 'b.npy'}"],
    ):
        evaluate(fitted, *older, *others)
    evaluate(fitted, *older, "--sets", "right", stage="test")
    assert steps_of("v2/a") == steps_of("v2/average/loss") == steps_of("whole/loss/left") == [8, 12]
    assert steps_of("whole/loss/average") == [8, 12]
    assert steps_of("sample/v2/a") == steps_of("validation/loss/left") == [6, 12], "the fit's"
    assert steps_of("test/loss/right") == [8]
    value = {e.step: e.value for e in EventAccumulator(str(fitted.path)).Reload().Scalars("v2/a")}
    assert value[8] == pytest.approx(record["sets"]["v2/a"]["loss"])


def test_other_sets_than_the_configs(fitted, corpus, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STACKEXP_CACHE", str(tmp_path / "cache"))
    Path("words.txt").write_text("def one():\n    return 1\n" * 30)
    Path("mine").mkdir()
    Path("mine/ice.jsonl").write_text(json.dumps({"text": "def one():\n    return 1\n" * 30}) + "\n")
    Path("mine/left").symlink_to(corpus["left"])
    sets = ("--sets", "words=words.txt, right", "--sets", "v3=mine")
    assert main(["test", "--run", str(fitted.path), *sets, "--out", "to/out.json", "data.eval_batch_size=64"]) == 0
    record = json.loads(Path("to/out.json").read_text())
    assert list(record["sets"]) == ["words", "right", "v3/ice", "v3/left"]
    assert record["sets"]["v3/ice"] == record["sets"]["words"]
    assert {path.name for path in Path("to").iterdir()} == {"out.json", "out.md"}
    assert not (fitted.path / "test.json").exists()
    assert "v3: 10 sets are missing: c4_en, dolma_books" in caplog.text


def test_figures_of_other_options_overwrite_none(fitted, monkeypatch):
    from stackexp.evaluation.evaluate import Evaluation

    own = compose.load(fitted.config)
    monkeypatch.setattr(compose, "load", lambda path: own)

    def name(*sets: str, overrides: tuple[str, ...] = (), ckpt_path: str | None = None) -> str:
        config = compose.compose([str(fitted.config)], overrides) if overrides else own
        return Evaluation("validate", config, fitted, ckpt_path, sets).record.name

    assert name() == name(overrides=("data.eval_batch_size=1", "trainer.devices=2", "data.micro_batch_size=2"))
    assert name() == "validate.json"
    assert name("v2/a", "left") == "validate-v2-a+left.json"
    assert name(ckpt_path="runs/x/checkpoints/00000008") == "validate-00000008.json"
    options = ("data.keep_remainder=true", "data.validation.left=x")
    hashed = [name(overrides=(option,)) for option in options] + [name("a=x"), name("a=y"), name("v2/a," * 30)]
    assert len(set(hashed)) == len(hashed)
    assert all(re.fullmatch(r"validate-(a-)?[0-9a-f]{8}\.json", each) for each in hashed)


# Kills


@pytest.fixture
def many(tmp_path) -> Path:
    """Twelve sets, enough for a kill in the middle."""
    rng = np.random.default_rng(0)
    (tmp_path / "many").mkdir()
    for number in range(12):
        (tmp_path / "many" / f"set{number:02}.npy").write_bytes(rng.integers(1, V, 2 * T).astype("<u2").tobytes())
    return tmp_path / "many"


def killed_after_four(*arguments: object) -> int:
    add = PartialFigures.add

    def add_and_die(partial: PartialFigures, *of: object) -> None:
        add(partial, *of)
        if len(lines_of(partial.path)) == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    PartialFigures.add = add_and_die
    return main([str(argument) for argument in arguments])


def lines_of(partial: Path) -> list[dict]:
    return [json.loads(line) for line in partial.read_text().splitlines() if line] if partial.exists() else []


def test_a_kill_after_some_sets_loses_none_of_them(fitted, many, tmp_path):
    forks, out = Forks(tmp_path), tmp_path / "figures.json"
    command = ("validate", "--run", fitted.path, "--sets", f"g={many}", "--out", out, "data.eval_batch_size=1")
    partial = out.with_suffix(".partial.jsonl")
    assert forks.start(*command, function=killed_after_four).join() == [-signal.SIGKILL]
    done = lines_of(partial)
    assert len(done) == 4
    assert not out.exists()
    marked = [line | {"figures": line["figures"] | {"loss": 100.0 + number}} for number, line in enumerate(done)]
    partial.write_text("".join(json.dumps(line) + "\n" for line in marked) + '{"key": "cut o')

    other = fitted.checkpoints / "00000008"
    assert main([*map(str, command), "--ckpt_path", str(other)]) == 0
    assert all(figures["loss"] < 100 for figures in json.loads(out.read_text())["sets"].values())
    assert [line["set"] for line in lines_of(partial)] == [line["set"] for line in done], "another's lines stay"

    said = forks.run(*command)
    assert f"{len(done)} of 12 sets were done before" in said
    sets = json.loads(out.read_text())["sets"]
    assert list(sets) == [f"g/set{number:02}" for number in range(12)]
    assert {name: sets[name]["loss"] for name in sets if sets[name]["loss"] >= 100} == {
        line["set"]: line["figures"]["loss"] for line in marked
    }, "what was done is taken as it was"
    assert not partial.exists()

    assert main([*map(str, command)]) == 0
    whole = json.loads(out.read_text())["sets"]
    killed = {line["set"]: line["figures"] for line in done}
    assert whole == sets | killed, "to the last bit what an evaluation without a kill gives"


def test_a_kill_after_the_last_step_loses_no_set_either(corpus, many, tmp_path):
    path, run = write_tiny(corpus, tmp_path), RunFolder(tmp_path / "run")
    config = yaml.safe_load(path.read_text())
    config["data"] |= {"validation": {"g": str(many)}, "eval_sequences": 1, "eval_batch_size": 1}
    path.write_text(yaml.safe_dump(config))
    forks, command = Forks(tmp_path), ("fit", "--config", path, "--run", run.path)
    partial = run.path / "validate.partial.jsonl"
    forks.start(*command, function=killed_after_four).join()
    done = [line | {"figures": line["figures"] | {"loss": 100.0}} for line in lines_of(partial)]
    assert not run.finished
    partial.write_text("".join(json.dumps(line) + "\n" for line in done))
    assert f"{len(done)} of 12 sets were done before" in forks.run(*command)
    sets = json.loads(run.result.read_text())["sets"]
    assert len(sets) == 12
    assert [name for name in sets if sets[name]["loss"] == 100] == [line["set"] for line in done]
    assert not partial.exists()


def test_what_changes_a_figure_is_in_the_key(fitted, many, tmp_path):
    """The chunks, the model, the precision, a set's content: nothing done otherwise is taken for done."""
    from stackexp.evaluation import evaluate as verb
    from stackexp.evaluation.requests import keys_of

    class Here:
        def agree(self, decide):
            return decide()

    def keys(*overrides: str, checkpoint: str = "00000012") -> dict[str, str]:
        config = compose.compose([str(fitted.config)], list(overrides))
        data = verb._data(verb.Evaluation("validate", config, run=fitted, sets=(f"g={many}",)))
        data.setup("validate")
        return keys_of("validate", config, data, Here(), fitted.checkpoints / checkpoint)

    first = keys()
    assert keys("data.eval_batch_size=3", "trainer.devices=1", "logging.progress_bar=false") == first
    others = [keys("data.keep_remainder=true"), keys("data.context_length=16"), keys(checkpoint="00000008")]
    others += [keys("model.memory.eval_num_slots=8"), keys("trainer.precision=bf16-true")]
    for other in others:
        assert not set(other.values()) & set(first.values())
    (many / "set01.npy").write_bytes((many / "set01.npy").read_bytes()[: -2 * T])
    changed = keys()
    assert [name for name in first if changed[name] != first[name]] == ["g/set01"]


def test_partial_figures_of_two_evaluations_share_a_file(tmp_path):
    partial = PartialFigures(tmp_path / "x.jsonl")
    assert partial.begin({"a": "1"}) == {}
    assert not partial.path.exists(), "an evaluation that fails at once leaves nothing"
    partial.path.write_text('{"key": "cut o')
    partial.add("1", "a", {"loss": 1.0})
    partial.add("2", "a", {"loss": 2.0})
    assert partial.read({"a": "1", "b": "3"}) == {"a": {"loss": 1.0}}
    partial.forget({"a": "1"})
    assert partial.read({"a": "1"}) == {}
    assert partial.read({"a": "2"}) == {"a": {"loss": 2.0}}
    partial.forget({"a": "2"})
    assert not partial.path.exists()


# Mistakes


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--sets", "v9"], 2, "--sets: no set 'v9' in data.validation; there are v2, v3, left (or give NAME=PATH)"),
        (["--sets", "lefft"], 2, "--sets: no set 'lefft' in data.validation; did you mean 'left'? (or give NAME=PATH)"),
        (
            ["--sets", "odd.npy"],
            2,
            "--sets: no set 'odd.npy' in data.validation; there are v2, v3, left (or give NAME=odd.npy)",
        ),
        (["--sets", "v2,,left"], 2, "--sets: expected names and NAME=PATH, parted by single commas, found ''"),
        (["--sets", "=odd.npy"], 2, "--sets: expected names and NAME=PATH, parted by single commas, found '=odd.npy'"),
        (["--sets", "left,left"], 2, "--sets: left comes twice; give every set once"),
        (["--sets", "v2/aa"], 2, "--sets: no set 'v2/aa' in data.validation; did you mean 'v2/a'?"),
        (["--sets", "v3"], 1, "data/olmo/v3: no such folder; fetch them with: python -m stackexp data fetch v3"),
        (["--sets", "x=nowhere.npy"], 1, "nowhere.npy: no such file or folder, set x; correct the path"),
        (["--sets", "x=large.npy"], 1, "large.npy: token id 50,279, but data.vocab_size is 300; re-encode it with"),
        (["--sets", "x=odd.npy"], 1, "odd.npy: 3 bytes are no whole number of uint16 token ids"),
        (["--out", "figures.txt"], 2, "validate: --out: expected a name that ends in .json, found figures.txt"),
        (["--set", "v2"], 2, "validate: unknown option --set; did you mean '--sets'?"),
        (["--out", "odd.npy/x.json"], 1, "odd.npy: File exists; mend the path"),
        (["--ckpt_path", "nowhere"], 1, "nowhere: no such checkpoint; give a folder in a run's checkpoints/"),
    ],
)
def test_a_mistake_is_one_line(fitted, tmp_path, monkeypatch, capsys, options, code, message):
    monkeypatch.chdir(tmp_path)
    np.array([1, 50_279] * 99, "<u2").tofile("large.npy")
    Path("odd.npy").write_bytes(b"abc")
    assert main(["validate", "--run", str(fitted.path), *options]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {message}")
    assert printed.err.count("\n") == 1


def test_a_mistake_is_told_once_however_many_processes_meet_it(fitted, tmp_path):
    (tmp_path / "odd.npy").write_bytes(b"abc")
    command = ("validate", "--run", fitted.path, "--sets", "x=odd.npy", "trainer.devices=2")
    said = Forks(tmp_path).run(*command, ranks=2, expect=1)
    assert [line[:14] for line in said.splitlines()] == ["error: odd.npy"]


def test_progress_of_a_long_evaluation_goes_to_standard_error(fitted, monkeypatch, capsys):
    monkeypatch.setattr("stackexp.evaluation.progress.QUIET_SECONDS", 0)
    evaluate(fitted, "--sets", "v2")
    printed = capsys.readouterr()
    assert [line.split(":")[0] for line in printed.err.splitlines()] == ["1/3 v2/a", "2/3 v2/b", "3/3 v2/c"]
    evaluate(fitted, "--sets", "v2", "logging.progress_bar=false")
    assert capsys.readouterr().err == ""


def test_a_live_run_keeps_its_tensorboard_file_for_itself(fitted):
    for old in fitted.path.glob("*.evaluation"):
        old.unlink()
    with fitted.lock():
        evaluate(fitted, "--sets", "v2")
    assert not list(fitted.path.glob("*.evaluation"))
    events = EventAccumulator(str(fitted.path / "validate")).Reload()
    assert [e.step for e in events.Scalars("v2/a")] == [12]
