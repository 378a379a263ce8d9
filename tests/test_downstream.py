"""Benchmarks during training: the log, stops and kills between tasks, several processes, and mistakes."""

import os
import signal
import time

import pytest
import torch
from benchmark_files import write_datasets
from records import losses, only_run, record
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytest.importorskip("lm_eval")
from stackexp.cli import main
from stackexp.config.compose import compose
from stackexp.errors import ConfigError, RunError
from stackexp.evaluation.benchmarks import evaluate as engine
from stackexp.evaluation.benchmarks.results import read_evaluations
from stackexp.metric_tags import TOKENS_PER_SECOND
from stackexp.models.checkpoints import load_state
from stackexp.runs import RunFolder
from stackexp.training.callbacks.downstream import load_tasks

TASKS = ("smollm2_arc_easy", "smollm2_piqa")
TAGS = {f"downstream/{task}/{score}" for task in TASKS for score in ("accuracy", "bits_per_byte")}


@pytest.fixture
def options(tiny, tmp_path) -> tuple[str, ...]:
    """The command of a run that scores two tasks every four steps."""
    datasets = write_datasets(tmp_path / "datasets")
    section = (f"evaluation.tasks=[{','.join(TASKS)}]", "evaluation.interval=4", f"evaluation.datasets={datasets}")
    return ("fit", "--config", str(tiny), "logging.progress_bar=false", *section)


def read_scores(run: RunFolder) -> dict[int, dict[str, float]]:
    lines = [{tag: v for tag, v in line.items() if tag == "step" or tag in TAGS} for line in record(run)]
    return {line.pop("step"): line for line in lines if line.keys() > {"step"}}


def test_tasks_are_scored_without_changing_the_training(options, trained, tmp_path):
    assert main([*options, "logging.loggers=[tensorboard]"]) == 0
    run = only_run(tmp_path / "runs")
    scores = read_scores(run)
    assert list(scores) == [4, 8, 12]
    assert all(values.keys() == TAGS for values in scores.values())
    assert losses(run) == losses(RunFolder(trained)), "bit for bit"
    ours, reference = (load_state(f.newest_checkpoint())["stackexp"] for f in (run, RunFolder(trained)))
    assert ours["python_rng"] == reference["python_rng"]
    assert torch.equal(ours["torch_rng"], reference["torch_rng"])

    arguments = ("--tasks", ",".join(TASKS), "--datasets", str(tmp_path / "datasets"))
    assert main(["evaluate", "--run", str(run.path), *arguments]) == 0
    (evaluation,) = read_evaluations(run.path / "benchmarks.json")
    for task, found in evaluation.tasks.items():
        for name, value in found.flatten().items():
            assert scores[12][f"downstream/{task}/{name}"] == pytest.approx(value, abs=1e-6)

    events = EventAccumulator(str(run.path)).Reload()
    for tag in TAGS:
        assert [event.step for event in events.Scalars(tag)] == [4, 8, 12]


def test_a_stop_between_two_tasks_scores_all_of_them_on_resume(options, tmp_path, monkeypatch, capsys):
    """Stop one run twice: in the first of two tasks at step 8, and at step 12, the last one."""
    reference, run = RunFolder(tmp_path / "reference"), RunFolder(tmp_path / "stopped")
    assert main([*options, "--run", str(reference.path)]) == 0
    original, tasks = engine.score_task, []

    def score_and_stop(task, *arguments):
        tasks.append(task)
        if len(tasks) in (3, 6):  # step 4: 1 and 2; step 8: 3, after the stop 4 and 5; step 12: 6
            os.kill(os.getpid(), signal.SIGTERM)
        return original(task, *arguments)

    monkeypatch.setattr(engine, "score_task", score_and_stop)
    for step in (8, 12):
        assert main([*options, "--run", str(run.path)]) == 75
        assert f"newest checkpoint {step:08d}; resume with `python" in capsys.readouterr().err
        assert list(read_scores(run)) == list(range(4, step, 4))
    assert main([*options, "--run", str(run.path)]) == 0
    assert read_scores(run) == read_scores(reference), "bit for bit"
    assert losses(run) == losses(reference)


@pytest.mark.process
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_have_the_scores_of_one(options, strategy, forks, tmp_path):
    one, two = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")
    forks.run(*options, "--run", one.path, "evaluation.batch_size=2")
    parallel = (f"trainer.strategy={strategy}", "trainer.devices=2", "data.micro_batch_size=4")
    forks.run(*options, "--run", two.path, "evaluation.batch_size=2", *parallel, ranks=2)
    expected, found = read_scores(one), read_scores(two)
    assert found.keys() == expected.keys()
    for step, scores in expected.items():
        assert found[step] == pytest.approx(scores, abs=1e-5)


def _fit_with_slow_batches(seconds: float, stops: bool, *arguments: str) -> int:
    """Train while every batch of a benchmark takes `seconds` more; optionally request a stop in the first."""
    from stackexp.evaluation.benchmarks.models import RunModel

    original = RunModel._score

    def score(self, batch):
        if stops:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)
        return original(self, batch)

    RunModel._score = score
    return main(list(arguments))


@pytest.mark.process
def test_scoring_may_take_longer_than_the_timeout_of_collectives(options, forks, tmp_path):
    arguments = (*options, "evaluation.tasks=[smollm2_arc_easy]", "evaluation.batch_size=1")
    parallel = ("trainer.strategy=ddp", "trainer.devices=2", "trainer.collective_timeout_seconds=12")
    forks.run(4, False, *arguments, *parallel, "trainer.max_steps=4", ranks=2, function=_fit_with_slow_batches)
    assert list(read_scores(only_run(tmp_path / "runs"))) == [4]


@pytest.mark.process
def test_a_batch_longer_than_the_grace_period_ends_with_a_message(options, forks):
    arguments = (*options, "trainer.stop_grace_seconds=1")
    output = forks.run(60, True, *arguments, function=_fit_with_slow_batches, expect=1)
    assert "error: SIGTERM: no batch has ended for 1 s; exiting without a checkpoint" in output


def test_throughput_excludes_the_scoring(options, tmp_path, monkeypatch):
    original = engine.score_task
    monkeypatch.setattr(engine, "score_task", lambda *arguments: (time.sleep(1), original(*arguments))[1])
    assert main([*options, "trainer.max_steps=5"]) == 0
    speeds = {line["step"]: line.get(TOKENS_PER_SECOND) for line in only_run(tmp_path / "runs").read_metrics()}
    assert speeds[5] > 256 / 2, "256 tokens, and two tasks that take a second each"


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (["evaluation.tasks=[smollm2_pica]"], 2, "tasks: unknown task 'smollm2_pica'; did you mean 'smollm2_piqa'?"),
        (["evaluation.tasks=[]"], 2, "evaluation.datasets: requires tasks; name some in evaluation.tasks"),
        (["evaluation.interval=0"], 2, "evaluation.interval: expected an integer >= 1, found 0"),
        (["evaluation.datasets=missing"], 1, "smollm2_arc_easy: no missing/smollm2_arc_easy/test.jsonl; write one"),
    ],
)
def test_mistakes_end_before_the_first_step(options, changes, code, message, monkeypatch, invoke, tmp_path):
    from stackexp.evaluation.benchmarks.tasks import TaskLoader

    monkeypatch.setattr(TaskLoader, "_all", TaskLoader._shipped)
    assert message in invoke(*options, *changes, expect=code)
    assert not (tmp_path / "runs").exists()


def test_sharded_weights_do_not_generate(options, tmp_path):
    config = compose([options[2]], [*options[4:], "evaluation.tasks=[smollm2_trivia_qa]", "trainer.strategy=fsdp"])
    with pytest.raises(
        ConfigError, match="smollm2_trivia_qa generates text, which fsdp does not support; remove it, or set"
    ):
        load_tasks(config, object())
    with pytest.raises(RunError, match="the tokenizer of the training data is unknown"):
        load_tasks(config, None)
    with pytest.raises(ConfigError, match=r"evaluation\.tasks: requires training on text, found data.kind: formal"):
        compose(["formal/quick"], ["evaluation.tasks=[smollm2_piqa]"])
