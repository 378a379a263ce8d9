"""`evaluate`: the shipped tasks, runs and exported folders, kills, and mistakes."""

import json
import math
import os
import shutil
import signal

import pytest
from benchmark_files import DATASETS, write_datasets
from conftest import write_tiny
from corpora import prepare_set

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance

from stackexp import cli
from stackexp.errors import ConfigError, RunError
from stackexp.evaluation.benchmarks import prompts, tasks
from stackexp.evaluation.benchmarks.evaluate import _open_cache, score_task
from stackexp.evaluation.benchmarks.models import WholeAnswers
from stackexp.evaluation.benchmarks.results import (
    TaskScores,
    average_tasks,
    compute_mean,
    compute_ratio,
    format_tasks,
    read_evaluations,
)
from stackexp.evaluation.benchmarks.tasks import TaskLoader

SMALL = ("smollm2_arc_easy", "smollm2_piqa", "smollm2_trivia_qa")


@pytest.fixture
def datasets(tmp_path):
    return write_datasets(tmp_path / "datasets")


@pytest.fixture
def trained_copy(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


# Tasks


def test_smollm2_is_the_group_of_all_shipped_tasks():
    assert TaskLoader().expand(["smollm2"]) == sorted(DATASETS)
    assert TaskLoader().expand(["smollm2_piqa", "smollm2"])[0] == "smollm2_piqa"


ANIMALS = [" a dog", " a fish", " a stone"]
PROMPTS = {
    "smollm2_arc_easy": ("Question: Which animal barks?\nAnswer:", ANIMALS),
    "smollm2_arc_challenge": ("Question: Which animal barks?\nAnswer:", ANIMALS),
    "smollm2_commonsense_qa": ("Which animal barks?", ANIMALS),
    "smollm2_openbookqa": ("Which animal barks?", ANIMALS),
    "smollm2_piqa": ("Question: open a door\nAnswer:", [" turn the handle", " eat the handle"]),
    "smollm2_mmlu": (
        "The following are questions about abstract algebra.\nQuestion: 2 + 2?\nAnswer:",
        [" 1", " 2", " 3", " 4"],
    ),
    "smollm2_hellaswag": (
        "Washing a car: A man holds a hose. He ",
        [" rinses the car.. Done", " flies away.", " eats the hose.", " sleeps."],
    ),
    "smollm2_winogrande": ("The cup fell because the ", ["hand was slippery.", "moon was slippery."]),
    "smollm2_trivia_qa": ("Question: Capital of France?\nAnswer:", None),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_and_choices(name, datasets):
    task = TaskLoader(datasets).load(name)
    task.build_all_requests()
    context, choices = PROMPTS[name]
    first = [request.args for request in task.instances if request.doc_id == 0]
    assert first[0][0] == context
    if choices:
        assert [args[1] for args in first] == choices
    else:
        assert first[0][1]["until"] == ["Question"]
        assert first[0][1]["max_gen_toks"] == 20


def test_gsm8k_has_five_worked_examples(datasets):
    task = TaskLoader(datasets).load("smollm2_gsm8k")
    task.set_fewshot_seed(1234)
    task.build_all_requests()
    (request,) = task.instances
    *examples, question = request.args[0].split("\n\n")
    assert question == "Question: 600 plus 600?\nAnswer:"
    assert len(examples) == 5
    assert all(text.startswith("Question: ") and "\nAnswer: It is " in text and "####" in text for text in examples)


def test_answers_are_compared_as_text_or_by_the_number_after_the_mark():
    document = {"answer": {"aliases": ["Paris", "Paris, France", "City"]}}
    for answer, score in {" Paris\n\n": 1, "the city": 0, "PARIS!": 1, "Paris, France": 0, "": 0}.items():
        assert prompts.score_trivia_qa(document, [answer]) == {"exact_match": score}
    for answer, score in {"so #### 1200": 1, "#### 1,200 #### 7": 1, "1200": 0, "#### 12": 0}.items():
        assert prompts.score_gsm8k({"answer": "It is 1,200.\n#### 1,200"}, [answer]) == {"exact_match": score}


# Scores


class ByteModel(WholeAnswers):
    """A model that gives each of 256 bytes and an end the same probability."""

    max_length = 4096
    eot_token_id = prefix_token_id = 256

    def tok_encode(self, text, add_special_tokens=None):
        return list(text.encode())

    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        return [(-len(after) * math.log(257), False) for _, _, after in requests]

    def generate_until(self, requests, disable_tqdm=False):
        return ["" for _ in requests]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError


@pytest.mark.parametrize("name", ["smollm2_arc_easy", "smollm2_hellaswag", "smollm2_winogrande", "smollm2_trivia_qa"])
def test_bits_per_byte_count_all_bytes_that_are_scored(name, datasets):
    """Prompts of hellaswag and winogrande end with a space, which is scored with the answer."""
    scores = score_task(ByteModel(), TaskLoader(datasets).load(name))
    assert scores.bits_per_byte == pytest.approx(math.log2(257), rel=1e-6)


def test_all_tokens_of_an_answer_longer_than_the_context_are_scored(monkeypatch):
    model, seen = ByteModel(), []
    monkeypatch.setattr(model, "max_length", 4)
    score = model._loglikelihood_tokens
    monkeypatch.setattr(
        model, "_loglikelihood_tokens", lambda requests, **kwargs: [*map(seen.append, requests)] and score(requests)
    )
    pairs = [("ab", "c" * 10), ("ab", "cdef")]
    requests = [Instance("loglikelihood", {}, pair, 0, ("task", 0, 1)) for pair in pairs]
    assert model.loglikelihood(requests) == [(pytest.approx(-n * math.log(257)), False) for n in (10, 4)]
    texts = [(key, bytes(before).decode(), bytes(after).decode()) for key, before, after in seen]
    assert texts[:3] == [(None, "ab" + "c" * n, "c" * size) for n, size in ((0, 4), (4, 4), (8, 2))]
    assert texts[3] == (pairs[1], "ab", "cdef"), "whole answers are cached"


def test_two_commands_share_the_cache_of_responses(tmp_path):
    output = tmp_path / "benchmarks.json"
    with _open_cache(ByteModel(), output, ["model"]) as first:
        first.dbdict["a"] = 1
        first.dbdict.commit()
        with _open_cache(ByteModel(), output, ["model"]) as second:
            assert second.dbdict["a"] == 1
        first.dbdict["b"] = 2
        first.dbdict.commit()
    assert not list(tmp_path.glob("*.db")) + list(tmp_path.glob(".*.db")), "the last one deletes it"


def test_means_and_ratios_have_standard_errors():
    assert compute_mean([0.0, 1.0, 1.0, 0.0]) == (0.5, pytest.approx(math.sqrt(1 / 3 / 4)))
    assert compute_mean([1.0]) == (1.0, None)
    assert compute_ratio([2.0, 4.0], [1.0, 2.0]) == (2.0, 0.0), "no spread"
    assert compute_ratio([1.0, 2.0], [1.0, 1.0]) == (1.5, 0.5)


def make_scores(**changes) -> TaskScores:
    values = {"accuracy": 0.5, "accuracy_stderr": 0.03, "bits_per_byte": 2.0, "bits_per_byte_stderr": 0.04}
    rest = {"random_guess": 0.25, "metric": "acc", "num_documents": 10, "num_fewshot": 0}
    return TaskScores(**values | rest | changes)


def test_averages_skip_tasks_without_the_score():
    two = {"a": make_scores(), "b": make_scores(accuracy=0.7, accuracy_stderr=0.04), "c": make_scores(accuracy=None)}
    assert average_tasks(two, "accuracy") == (pytest.approx(0.6), pytest.approx(0.025))
    assert average_tasks({"a": make_scores(accuracy_stderr=None)}, "accuracy") == (0.5, None)
    assert average_tasks({"c": make_scores(accuracy=None)}, "accuracy") is None
    assert max(map(len, format_tasks({"smollm2_arc_challenge": make_scores(num_documents=12345)}).splitlines())) <= 80


# The verb


def test_tasks_are_added_and_kept_apart_by_checkpoint_and_limit(trained_copy, datasets, invoke, monkeypatch):
    checkpoint = trained_copy / "checkpoints" / "00000004"
    tasks = [[SMALL[0]], [SMALL[1]], [SMALL[0], "--limit", 1], [SMALL[1], "--ckpt_path", checkpoint]]
    command = ("evaluate --run", trained_copy, "--datasets", datasets, "--tasks")
    lines = [line for options in tasks for line in invoke(*command, *options).splitlines()]
    monkeypatch.chdir(trained_copy)  # another path of the same checkpoint
    invoke("evaluate --run", ".", "--datasets", datasets, "--tasks", SMALL[2])
    found = read_evaluations(trained_copy / "benchmarks.json")
    assert [(e.step, e.limit, sorted(e.tasks)) for e in found] == [
        (12, 1, [SMALL[0]]),
        (4, None, [SMALL[1]]),
        (12, None, sorted(SMALL)),
    ]
    table = [line for line in lines if str(trained_copy) not in line and not line.startswith("note: ")]
    assert max(map(len, table)) <= 80
    assert found[0].tasks[SMALL[0]].num_documents == 1
    path = trained_copy / "benchmarks.json"
    record = json.loads(path.read_text())
    record["evaluations"][0]["tasks"][SMALL[0]]["accuracy"] = 1.5
    path.write_text(json.dumps(record))
    with pytest.raises(RunError, match="not as it was written"):
        read_evaluations(path)


def score_and_kill(kill_at: int, *arguments: object) -> int:
    """Evaluate with batches of one request; the process kills itself before request number `kill_at`."""
    from stackexp.evaluation.benchmarks.models import RunModel

    original, requests = RunModel._score, []

    def score(self, batch):
        requests.extend(batch)
        if len(requests) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, batch)

    RunModel._score = score
    try:
        assert cli.main(["evaluate", *map(str, arguments), "--batch_size", "1"]) == 0
    finally:
        RunModel._score = original
    return len(requests)


def test_a_killed_evaluation_computes_only_the_remaining_answers(trained_copy, datasets, forks, tmp_path):
    command = ("--run", trained_copy, "--tasks", ",".join(SMALL), "--datasets", datasets)
    output = trained_copy / "benchmarks.json"
    forks.run(8, *command, function=score_and_kill, expect=-signal.SIGKILL)
    assert not output.exists()
    other = ("--ckpt_path", trained_copy / "checkpoints" / "00000004", "--out", tmp_path / "other.json")
    assert score_and_kill(0, *command, *other) == 14, "9 + 4 choices and a reference answer: nothing of another model"
    assert score_and_kill(0, *command) <= 14 - 6, "the last response may be lost"
    assert not list(trained_copy.glob(".*responses.db"))
    (resumed,) = read_evaluations(output)
    output.unlink()
    assert score_and_kill(0, *command) == 14, "a finished evaluation is repeated"
    assert read_evaluations(output)[0].tasks == resumed.tasks, "bit for bit"


# Hugging Face folders


@pytest.mark.parametrize("memory", ["null", "stacktrans"])
def test_a_run_and_its_exported_folder_have_the_same_scores(corpus, datasets, tmp_path, invoke, memory):
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
    invoke("fit --config", write_tiny(corpus, tmp_path), *options)
    (folder,) = (tmp_path / "runs" / "tiny").iterdir()
    copy = tmp_path / f"{memory}-hf"
    invoke("checkpoint export --run", folder, "--to", copy)
    names = ",".join(DATASETS)
    invoke("evaluate --run", folder, "--tasks", names, "--datasets", datasets)
    output = tmp_path / "hf.json"
    command = ("evaluate --model", f"hf:{copy}", "--tasks", names, "--datasets", datasets, "--out", output)
    if memory != "null":
        error = invoke(*command, expect=1)
        assert f"{copy}: contains the code of its model; read it, then add --trust-remote-code" in error
    invoke(*command, "--trust-remote-code")
    (ours,), (theirs,) = read_evaluations(folder / "benchmarks.json"), read_evaluations(output)
    assert (ours.step, ours.tokens) == (4, 4096)
    assert ours.tasks.keys() == theirs.tasks.keys()
    for name, scores in ours.tasks.items():
        other = theirs.tasks[name]
        assert scores.accuracy == other.accuracy
        assert scores.random_guess == other.random_guess
        assert scores.bits_per_byte == pytest.approx(other.bits_per_byte, abs=1e-5)
        assert 0 < scores.bits_per_byte < 20


def test_what_does_not_fit_into_the_context_is_cut_and_counted(trained, datasets, tmp_path, invoke):
    run = shutil.copytree(trained, tmp_path / "run")
    file = datasets / "smollm2_piqa" / "validation.jsonl"
    long = {"goal": "open a door", "sol1": "turn the handle " * 40, "sol2": "eat the handle", "label": 0}
    file.write_text(file.read_text() + json.dumps(long) + "\n")
    copy, output = tmp_path / "hf", tmp_path / "hf.json"
    invoke("checkpoint export --run", run, "--to", copy)
    names = ("--tasks", "smollm2_piqa,smollm2_gsm8k", "--datasets", datasets)
    printed = " ".join(invoke("evaluate --run", run, *names).split())
    assert "note: smollm2_piqa: 2 of 3 documents do not fit into the model's context" in printed, printed
    printed = invoke("evaluate --run", run, "--tasks", "smollm2_piqa", *names[2:], "--exclude_long")
    assert "smollm2_piqa: 2 documents do not fit" in " ".join(printed.split())
    command = ("evaluate --model", f"hf:{copy}", *names, "--trust-remote-code")
    invoke(*command, "--out", output)
    (ours, fitting), (theirs,) = read_evaluations(run / "benchmarks.json"), read_evaluations(output)
    (scores,) = fitting.tasks.values()
    assert (scores.num_documents, scores.num_excluded, scores.num_cut) == (1, 2, 0)
    for name, cut in {"smollm2_piqa": 2, "smollm2_gsm8k": 1}.items():
        assert ours.tasks[name].num_cut == theirs.tasks[name].num_cut == cut
        assert ours.tasks[name].accuracy == theirs.tasks[name].accuracy
        assert ours.tasks[name].bits_per_byte == pytest.approx(theirs.tasks[name].bits_per_byte, abs=1e-5)
    content = (copy / "tokenizer_config.json").read_text()
    (copy / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    assert "is outside the vocabulary of" in invoke(*command, expect=1), "LlamaTokenizer adds its own special tokens"
    (copy / "tokenizer_config.json").write_text(json.dumps(json.loads(content) | {"model_max_length": "x"}))
    assert "hf: model_max_length is 'x', not a number" in invoke(*command, expect=1)
    (copy / "tokenizer_config.json").write_text(content)
    for path in copy.glob("*.json"):  # a tokenizer without an end
        contents = json.loads(path.read_text()) if path.name != "tokenizer.json" else {}
        if any("_token" in key for key in contents):
            path.write_text(json.dumps({key: value for key, value in contents.items() if "_token" not in key}))
    assert "hf: the tokenizer has no eos_token; name one" in invoke(*command, expect=1)


# Mistakes


def test_a_folder_without_a_model_is_refused(tmp_path, invoke):
    score = ("evaluate --model", f"hf:{tmp_path}", "--tasks", "smollm2_piqa", "--datasets", tmp_path)
    assert "no config.json; give a folder with a Hugging Face model" in invoke(*score, expect=2)
    (tmp_path / "config.json").write_text("{}")
    assert "no tokenizer.json" in invoke(*score, expect=1)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("null")
    assert "config.json: not an object; download the file again" in invoke(*score, expect=1)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("smollm2_hellaswag", {"label": "x"}, "the right answer is 'x', not one of 4 choices"),
        ("smollm2_arc_easy", {"answerKey": "x"}, "'x' is not in list"),
    ],
)
def test_a_document_without_a_right_answer_is_named(trained, datasets, task, changes, message, invoke):
    (file,) = (datasets / task).iterdir()
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | changes)]) + "\n")
    error = invoke("evaluate --run", trained, "--tasks", task, "--datasets", datasets, expect=1)
    assert f"{task}: cannot read document {len(lines) - 1} ({message}); correct its fields" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "smollm2_pica"], "tasks: unknown task 'smollm2_pica'; did you mean 'smollm2_piqa'?"),
        (["--tasks", ","], "evaluate: --tasks: name tasks, such as smollm2 or arc_easy,piqa"),
        (["--tasks", "smollm2", "--out", "x.txt"], "evaluate: --out x.txt: must end in .json"),
        (["--tasks", "smollm2", "--datasets", "missing"], "evaluate: --datasets missing: no such folder"),
        (["--tasks", "smollm2", "--model", "hf:x"], "evaluate: argument --model: not allowed with argument --run"),
    ],
)
def test_mistakes_on_the_command_line(trained, arguments, message, monkeypatch, invoke):
    monkeypatch.setattr(TaskLoader, "_all", TaskLoader._shipped)  # the whole list takes seconds to read
    assert message in invoke("evaluate --run", trained, *arguments, expect=2)


def test_the_last_document_of_a_file_needs_no_line_feed(datasets):
    (file,) = (datasets / "smollm2_piqa").iterdir()
    count = len(TaskLoader(datasets).load("smollm2_piqa").eval_docs)
    file.write_text(file.read_text().removesuffix("\n"))
    assert len(TaskLoader(datasets).load("smollm2_piqa").eval_docs) == count > 1
    file.write_text(file.read_text()[:-1])
    with pytest.raises(RunError, match=r"validation.jsonl: line \d is damaged"):
        TaskLoader(datasets).load("smollm2_piqa")


@pytest.mark.parametrize("examples", [0, 4])
def test_too_few_examples_end_before_the_first_score(trained, datasets, examples, invoke):
    """Otherwise lm-eval would draw the shots of GSM8K from the test split, or fail with a traceback."""
    folder = datasets / "smollm2_gsm8k"
    (folder / "test.jsonl").write_text((folder / "test.jsonl").read_text() * 9)
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").unlink() if not examples else (folder / "train.jsonl").write_text("".join(lines[:4]))
    error = invoke("evaluate --run", trained, "--tasks", "smollm2_gsm8k", "--datasets", datasets, expect=1)
    message = "5 shots require 5 examples, found 4; add some or lower --num_fewshot"
    expected = message if examples else f"no {folder}/train.jsonl; write one line for each document"
    assert f"smollm2_gsm8k: {expected}" in error


def test_a_task_needs_one_example_more_if_its_shots_are_scored(datasets):
    assert TaskLoader(datasets, 1).load("smollm2_piqa").get_config("num_fewshot") == 1
    with pytest.raises(RunError, match="smollm2_piqa: 2 shots require 3 examples, found 2"):
        TaskLoader(datasets, 2).load("smollm2_piqa")


def test_a_document_is_never_its_own_example(datasets):
    task = TaskLoader(datasets, 2).load("smollm2_arc_easy")  # has a test split only
    task.set_fewshot_seed(1234)
    documents = list(task.test_docs())
    assert [task.fewshot_context(d, 2).count(d["question"]) for d in documents] == [1, 1, 1]
    with pytest.raises(RunError, match="smollm2_arc_easy: 3 shots require 4 examples, found 3"):
        TaskLoader(datasets, 3).load("smollm2_arc_easy")


def test_shots_are_not_drawn_from_another_split_without_a_file(datasets, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "FOLDER", shutil.copytree(tasks.FOLDER, tmp_path / "tasks"))
    with open(tasks.FOLDER / "smollm2_arc_easy.yaml", "a") as file:
        file.write("training_split: train\n")
    with pytest.raises(RunError, match=r"smollm2_arc_easy: no .*/train.jsonl; write one line for each document"):
        TaskLoader(datasets, 1).load("smollm2_arc_easy")
    assert TaskLoader(datasets).load("smollm2_arc_easy").get_config("num_fewshot") == 0
    folder = datasets / "smollm2_arc_easy"
    (folder / "test.jsonl").rename(folder / "train.jsonl")
    (folder / "test.jsonl").write_text((folder / "train.jsonl").read_text().replace("barks", "meows"))
    task = TaskLoader(datasets, 3).load("smollm2_arc_easy")
    task.set_fewshot_seed(1234)
    assert "Which animal barks?" in task.fewshot_context(next(iter(task.test_docs())), 3)


def test_a_failed_download_and_a_missing_package_are_one_line(monkeypatch):
    import datasets

    def fail(**_):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(RunError, match=r"^smollm2_piqa: cannot load dataset 'baber/piqa' \(no network\); [^\n]+$"):
        TaskLoader().load("smollm2_piqa")
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lm-eval: not installed; .* pip install 'stackexp\[eval\]'"):
        TaskLoader()
