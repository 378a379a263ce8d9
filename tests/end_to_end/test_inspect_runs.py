"""The verb `inspect` on trained runs."""

import hashlib
import json

import numpy as np
import pytest
from records import only_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stackexp.config.compose import load_config


@pytest.mark.process
def test_inspect_a_trained_run(tiny, forks, tmp_path):
    forks.run(
        "fit", "--config", tiny, "trainer.max_steps=2", "schedule.warmup_steps=0", "logging.loggers=[tensorboard]"
    )
    run = only_run(tmp_path / "runs")
    printed = forks.run("inspect", "--run", run.path, "--set", "left", "--chunks", "4", "--heads")
    record = json.loads((run.path / "inspect" / "set-left" / "inspect.json").read_text())
    assert [stack["layer"] for stack in record["stacks"]] == [0, 1]
    names = [change["intervention"] for change in record["interventions"]]
    assert {"none", "push = 0", "reads dropped", "stack cleared before layer 1"} <= set(names)
    assert all(name in printed for name in names[1:])
    assert all(change["low"] is None for change in record["interventions"][1:]), "four chunks are too few"
    assert "too few chunks" in printed
    assert (run.path / "inspect" / "set-left" / "stacks.png").read_bytes().startswith(b"\x89PNG")
    [image] = EventAccumulator(str(run.path / "inspect")).Reload().Images("inspect/left")
    assert image.step == 2
    forks.run("inspect", "--run", run.path, "--text", "import os", "--out", tmp_path / "text")
    assert "const data" in (tmp_path / "text" / "tokens.html").read_text()
    forks.run("inspect", "--run", run.path, "--text", "import os")
    folders = sorted(path.name for path in (run.path / "inspect").iterdir() if path.is_dir())
    assert folders == ["set-left", f"text-{hashlib.sha256(b'import os').hexdigest()[:8]}"], "neither replaces the other"
    assert {"inspect/left", "inspect/text"} == set(
        EventAccumulator(str(run.path / "inspect")).Reload().Tags()["images"]
    )
    for options, message in (
        (("--task", "parity_check"), "--task requires a model of a formal language; use --text or --set"),
        (("--text", "a"), "--text has fewer than two tokens"),
    ):
        error = forks.run("inspect", "--run", run.path, *options, expect=2)
        assert f"error: inspect: {message}" in error
    forks.run(
        "fit", "--config", tiny, "trainer.max_steps=2", "schedule.warmup_steps=0", "model.memory=null", "name=plain"
    )
    error = forks.run("inspect", "--run", only_run(tmp_path / "runs", "plain").path, "--text", "a b c", expect=1)
    assert "error: inspect: the model has no stack" in error


@pytest.mark.process
def test_inspect_a_residual_stack(tiny, forks, tmp_path):
    short = ("trainer.max_steps=2", "schedule.warmup_steps=0")
    forks.run("fit", "--config", tiny, "model.memory=residual_stack", *short)
    run = only_run(tmp_path / "runs")
    printed = forks.run("inspect", "--run", run.path, "--set", "left", "--chunks", "4")
    assert "actions frozen at their mean" in printed
    error = forks.run("inspect", "--run", run.path, "--set", "left", "--heads", expect=2)
    assert error == "error: inspect: --heads: ResidualStack has no heads; omit --heads\n"
    record = json.loads((run.path / "inspect" / "set-left" / "inspect.json").read_text())
    assert [stack["site"] for stack in record["stacks"]] == ["after_attention", "after_block"] * 2
    assert record["stacks"][0]["push"] == [pytest.approx(0.87, abs=0.02)]
    forks.run("report", "actions", run.path, "--chunks", "4", "--csv", tmp_path / "actions.csv")
    assert len((tmp_path / "actions.csv").read_text().splitlines()) == 1 + 3, "without the first memory"
    assert "const data" in (run.path / "inspect" / "set-left" / "tokens.html").read_text()


@pytest.mark.process
def test_inspect_a_formal_language(forks, tmp_path):
    sizes = ("model.hidden_size=16", "model.num_heads=2", "model.num_kv_heads=2", "model.intermediate_size=16")
    data = ("data.batch_size=4", "data.eval_max_length=41", "data.eval_sequences=2", "data.validation_max_length=41")
    steps = ("trainer.max_steps=2", "schedule.warmup_steps=0", "trainer.accelerator=cpu", "name=tiny")
    forks.run("fit", "--config", "formal/stacktrans", *sizes, *data, *steps)
    run = only_run(tmp_path / "runs")
    task = load_config(run.config).data.task
    printed = forks.run("inspect", "--run", run.path, "--task", f"{task}:12")
    assert f"{task}, 12 symbols" in printed
    assert "reads dropped" in printed
    assert "stack cleared" not in printed, "the stack passes from token to token"
    for options, message in (
        (("--task", "bucket_sort"), f"--task bucket_sort: the run was trained on {task}; use --task {task}"),
        (("--task", f"{task}:²"), f"--task {task}:²: the length must be from 1 to 65536"),
        (("--task", f"{task}:0"), f"--task {task}:0: the length must be from 1 to 65536"),
        (("--set", "x"), "--set requires a model of text; use --task for one of formal languages"),
    ):
        assert f"error: inspect: {message}" in forks.run("inspect", "--run", run.path, *options, expect=2)


def test_short_sets_are_inspected_without_padding(trained, tmp_path, invoke):
    """Chunks have 32 tokens; a set of at most one chunk is one sequence, like a text."""
    text = "def f(x): return x"
    for name, content in (("one", text), ("two", "import os; " * 8)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.md").write_text(content)

    def inspect(*options):
        printed = invoke("inspect --run", trained, "--out", tmp_path / "out", *options)
        page = (tmp_path / "out" / "tokens.html").read_text()
        record = json.loads((tmp_path / "out" / "inspect.json").read_text())
        return record | json.loads(page.partition("const data = ")[2].partition(";\n")[0]), printed

    record, printed = inspect("--set", f"mine={tmp_path}/one")
    assert "interventions" not in record
    assert "no interventions: an interval requires at least two sequences; use a larger set" in printed
    expected, _ = inspect("--text", text)
    assert record["tokens"] == [*expected["tokens"], "<|endoftext|>"]
    for stack, other in zip(record["stacks"], expected["stacks"], strict=True):
        assert np.array(stack["values"]["push"])[:-1] == pytest.approx(np.array(other["values"]["push"]), abs=2e-4)
    record, _ = inspect("--set", f"mine={tmp_path}/two")
    assert record["interventions"][0]["loss"] > 0
    (tmp_path / "group").mkdir()
    for name in "ab":
        (tmp_path / "group" / f"{name}.txt").write_text(text)
    error = invoke("inspect --run", trained, "--set", f"mine={tmp_path}/group", expect=2)
    assert error.endswith("/group: a group of 2 sets; give the path of one file")
    np.save(tmp_path / "tiny.npy", np.array([1]))
    error = invoke("inspect --run", trained, "--set", f"mine={tmp_path}/tiny.npy", expect=1)
    assert error.endswith("do not fill one chunk of data.context_length 32; use a longer text")


def test_the_errors_name_the_option_of_the_command(trained, invoke):
    unknown = "--set: no set 'nope' in data.validation; available: v2, v3, left, right (or give NAME=PATH)"
    assert invoke("inspect --run", trained, "--set", "nope", expect=2) == f"error: {unknown}"
    error = invoke("report actions", trained, "--set", "nope", expect=1)
    assert error == f"error: {trained}: skipped {trained}: {unknown}"
    found = "a study of layers requires 3 stacks, found 2; use more layers"
    assert invoke("report actions", trained, expect=1) == f"error: {trained}: skipped {trained}: {found}"
