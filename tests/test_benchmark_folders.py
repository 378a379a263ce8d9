"""`evaluate` on Hugging Face folders: the same scores as the run that was exported, and mistakes."""

import json
import shutil

import pytest
from benchmark_files import DATASETS, evaluate, read_error, write_datasets
from conftest import write_tiny
from corpora import prepare_set

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")
from stackexp import cli
from stackexp.evaluation.benchmarks.results import read_evaluations


@pytest.fixture
def datasets(tmp_path):
    return write_datasets(tmp_path / "datasets")


@pytest.mark.parametrize("memory", ["null", "stacktrans"])
def test_a_run_and_its_exported_folder_have_the_same_scores(corpus, datasets, tmp_path, capsys, memory):
    long = tmp_path / "long"  # room for the 256 tokens that GSM8K generates
    prepare_set(
        corpus["train"].parent / "text" / "train",
        long,
        context_length=512,
        tokenizer=corpus["train"] / "tokenizer.json",
    )
    options = (
        f"model.memory={memory}",
        "trainer.max_steps=4",
        f"data.path={long}",
        "data.context_length=512",
        "data.global_batch_tokens=1024",
        "data.micro_batch_size=2",
    )
    assert cli.main(["fit", "--config", str(write_tiny(corpus, tmp_path)), *options]) == 0
    (folder,) = (tmp_path / "runs" / "tiny").iterdir()
    copy = tmp_path / f"{memory}-hf"
    assert cli.main(["checkpoint", "export", "--run", str(folder), "--to", str(copy)]) == 0
    names = ",".join(DATASETS)
    assert evaluate("--run", folder, "--tasks", names, "--datasets", datasets) == 0
    output = tmp_path / "hf.json"
    command = ("--model", f"hf:{copy}", "--tasks", names, "--datasets", datasets, "--out", output)
    if memory != "null":
        assert evaluate(*command) == 1
        assert f"{copy}: contains the code of its model; read it, then add --trust-remote-code" in read_error(capsys)
    assert evaluate(*command, "--trust-remote-code") == 0
    (ours,), (theirs,) = read_evaluations(folder / "benchmarks.json"), read_evaluations(output)
    assert (ours.step, ours.tokens) == (4, 4096)
    assert ours.tasks.keys() == theirs.tasks.keys()
    for name, scores in ours.tasks.items():
        other = theirs.tasks[name]
        assert scores.accuracy == other.accuracy
        assert scores.random_guess == other.random_guess
        assert scores.bits_per_byte == pytest.approx(other.bits_per_byte, abs=1e-5)
        assert 0 < scores.bits_per_byte < 20


def test_what_does_not_fit_into_the_context_is_cut_and_counted(trained, datasets, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    file = datasets / "smollm2_piqa" / "validation.jsonl"
    long = {"goal": "open a door", "sol1": "turn the handle " * 40, "sol2": "eat the handle", "label": 0}
    file.write_text(file.read_text() + json.dumps(long) + "\n")
    copy, output = tmp_path / "hf", tmp_path / "hf.json"
    assert cli.main(["checkpoint", "export", "--run", str(run), "--to", str(copy)]) == 0
    names = ("--tasks", "smollm2_piqa,smollm2_gsm8k", "--datasets", datasets)
    assert evaluate("--run", run, *names) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "note: smollm2_piqa: 2 of 3 documents do not fit into the model's context" in printed, printed
    assert evaluate("--model", f"hf:{copy}", *names, "--out", output, "--trust-remote-code") == 0
    (ours,), (theirs,) = read_evaluations(run / "benchmarks.json"), read_evaluations(output)
    for name, cut in {"smollm2_piqa": 2, "smollm2_gsm8k": 1}.items():
        assert ours.tasks[name].num_cut == theirs.tasks[name].num_cut == cut
        assert ours.tasks[name].accuracy == theirs.tasks[name].accuracy
        assert ours.tasks[name].bits_per_byte == pytest.approx(theirs.tasks[name].bits_per_byte, abs=1e-5)


def test_a_folder_without_a_model_is_refused(tmp_path, capsys):
    assert evaluate("--model", f"hf:{tmp_path}", "--tasks", "smollm2") == 2
    assert "no config.json; give a folder with a Hugging Face model" in read_error(capsys)
    (tmp_path / "config.json").write_text("{}")
    score = ("--model", f"hf:{tmp_path}", "--tasks", "smollm2_piqa", "--datasets", tmp_path)
    assert evaluate(*score) == 1
    assert "no tokenizer.json; put that of the model there" in read_error(capsys)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("null")
    assert evaluate(*score) == 1
    assert "config.json: not an object; download the file again" in read_error(capsys)
