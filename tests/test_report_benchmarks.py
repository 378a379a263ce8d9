"""`report benchmarks`: the table of tasks, missing cells, and the curves over the tokens."""

import csv
from pathlib import Path

import pytest
from language_runs import write_run

from stackexp.errors import RunError
from stackexp.evaluation.benchmarks.results import BenchmarkEvaluation, TaskScores, add_evaluation
from stackexp.files import read_json_lines, write_json_lines
from stackexp.reports import benchmarks
from stackexp.reports.benchmarks import build_benchmarks, draw_benchmarks
from stackexp.tables import ABSENT

GUESSES = {"a": 0.25, "b": 0.5}


def write_scores(path, accuracies, step=10, limit=None, checkpoint="runs/x/checkpoints/00000010", shots=None, **more):
    tasks = {
        name: TaskScores(accuracy, 0.03, 2 + accuracy, 0.04, GUESSES.get(name, 0.0), "acc", 100, 0)
        for name, accuracy in accuracies.items()
    }
    tokens = step and step * 1024
    add_evaluation(path, BenchmarkEvaluation(checkpoint, step, tokens, "now", limit, shots, "0.4.13", tasks, **more))


@pytest.fixture
def runs(tmp_path):
    for name, accuracies in {"one": {"a": 0.3, "b": 0.6}, "two": {"a": 0.4, "b": 0.5, "c": 0.1}}.items():
        write_run(tmp_path / "runs" / name, losses=[3.0, 2.0])
        write_scores(tmp_path / "runs" / name / "benchmarks.json", accuracies)
    return tmp_path / "runs"


def find_row(report, table, label):
    return next(row for row in report.tables[table].rows if row[0] == label)


def test_the_table_has_all_tasks_and_the_average_of_common_ones(runs, tmp_path, invoke):
    report = build_benchmarks([runs])
    assert report.tables[0].header == ["task", "random", "one", "two"]
    assert find_row(report, 0, "a") == ["a", "0.250", "0.300 ± 0.030", "0.400 ± 0.030"]
    assert find_row(report, 0, "c") == ["c", "0.000", ABSENT, "0.100 ± 0.030"]
    assert find_row(report, 0, "average of 2 common tasks")[1:] == ["0.375", "0.450 ± 0.021", "0.450 ± 0.021"]
    assert find_row(report, 1, "b") == ["b", "2.600 ± 0.040", "2.500 ± 0.040"]
    command = "`python -m stackexp evaluate --run RUN --tasks smollm2`"
    assert report.notes[0] == f"tasks are missing for one, filled by {command}"
    output = tmp_path / "scores.csv"
    assert "0.300 ± 0.030" in invoke("report benchmarks", runs, "--csv", output)
    assert [row["task"] for row in csv.DictReader(output.read_text().splitlines())] == ["a", "b", "a", "b", "c"]


def test_whole_tasks_are_shown_before_limited_ones_and_later_steps_before_earlier(runs):
    path = runs / "one" / "benchmarks.json"
    write_scores(path, {"a": 0.9, "b": 0.9}, limit=5)
    write_scores(path, {"a": 0.9, "b": 0.9}, step=30, exclude_long=True)
    write_scores(path, {"a": 0.8, "b": 0.8}, step=5)
    assert find_row(build_benchmarks([runs]), 0, "a")[2] == "0.300 ± 0.030"
    write_scores(path, {"a": 0.7}, step=20)
    assert find_row(build_benchmarks([runs]), 0, "a")[2] == "0.700 ± 0.030"


def test_evaluations_that_name_the_checkpoint_differently_are_merged(runs):
    write_scores(runs / "one" / "benchmarks.json", {"b": 0.7, "c": 0.2}, checkpoint="/home/x/checkpoints/00000010")
    tasks = build_benchmarks([runs / "one"]).records
    assert find_row(build_benchmarks([runs / "one"]), 0, "a")[2] == "0.300 ± 0.030"
    assert find_row(build_benchmarks([runs / "one"]), 0, "b")[2] == "0.700 ± 0.030"
    assert len(tasks) == 4


def test_the_figure_has_a_line_of_training_and_points_of_evaluations(runs):
    path = runs / "one" / "metrics.jsonl"
    lines = list(read_json_lines(path))
    for line, accuracy in zip(lines, (0.2, 0.4), strict=True):
        line |= {"downstream/a/accuracy": accuracy, "downstream/b/accuracy": 0.6}
        line |= {"downstream/a/bits_per_byte": 3.0, "downstream/b/bits_per_byte": 5.0}
    lines.append({"step": 11, "downstream/a/accuracy": 0.9})  # without tokens
    write_json_lines(path, lines)
    write_scores(runs / "one" / "benchmarks.json", {"a": 0.8, "b": 0.6}, step=5)
    report = build_benchmarks([runs / "one"])
    left, right = report.draw().axes
    assert [line.get_label() for line in left.lines] == ["one, 2 tasks in training", "one, 2 tasks", "random guess"]
    assert list(left.lines[0].get_ydata()) == pytest.approx([0.4, 0.5])
    assert list(left.lines[1].get_xdata()) == [5 * 1024, 10 * 1024]
    assert list(left.lines[1].get_ydata()) == pytest.approx([0.7, 0.45])
    assert list(right.lines[0].get_ydata()) == [4.0, 4.0]
    assert draw_benchmarks([]).axes, "an empty figure is drawn"


def test_the_figure_compares_models_on_the_tasks_they_share(runs, tmp_path):
    write_scores(tmp_path / "smollm2.json", {"b": 0.5}, step=None, checkpoint="hf/smollm2")
    left, _ = build_benchmarks([runs / "one", tmp_path / "smollm2.json"]).draw().axes
    one, baseline, _ = left.lines
    assert (one.get_label(), baseline.get_label()) == ("one, 1 task", "smollm2, 1 task")
    assert list(one.get_ydata()) == [0.6]
    assert list(baseline.get_ydata()) == [0.5, 0.5], "its training tokens are unknown"


def test_columns_have_unique_names(runs, tmp_path):
    write_scores(tmp_path / "one.json", {"a": 0.5})
    write_scores(runs / "one" / "benchmarks.json", {"a": 0.6})
    write_scores(runs / "one.json", {"a": 0.7})
    twice = build_benchmarks([tmp_path / "one.json", tmp_path / "runs/../one.json"])
    assert twice.tables[0].header == ["task", "random", "one"]
    assert len(twice.records) == 1
    report = build_benchmarks([runs / "one", runs / "one.json"])
    assert report.tables[0].header[2:] == [str(runs / "one"), str(runs / "one.json")]


def test_runs_without_scores_name_the_command(tmp_path):
    write_run(tmp_path / "runs" / "one")
    (tmp_path / "empty").mkdir()
    for names, message in {
        ("runs",): "no benchmarks yet; run `python -m stackexp evaluate",
        ("missing.json",): "no such file; write it with `evaluate --run RUN --out .*missing.json`",
        ("runs", "misspelled"): "no such folder",
        ("empty",): "no run folders",
    }.items():
        with pytest.raises(RunError, match=message):
            build_benchmarks([tmp_path / name for name in names])


PAPER = dict.fromkeys(benchmarks.TASK_NAMES, 0.5) | {"smollm2_arc_easy": 0.7, "smollm2_gsm8k": 0.05}


def test_the_paper_is_next_to_our_models(runs, tmp_path):
    write_scores(runs / "one" / "benchmarks.json", PAPER)
    write_scores(runs / "two" / "benchmarks.json", {"smollm2_piqa": 0.6, "smollm2_arc_easy": 0.3})
    report = build_benchmarks([runs])
    assert report.tables[0].header[:5] == ["benchmark", "one", "two", "StackTrans†", "SmolLM†"]
    assert find_row(report, 0, "ARC")[1:4] == ["60.0 ± 2.1", ABSENT, "59.0"]
    assert find_row(report, 0, "PIQA")[1:4] == ["50.0 ± 3.0", "60.0 ± 3.0", "71.7"]
    assert find_row(report, 0, "average")[1:4] == [f"{(0.5 * 7 + 0.6 + 0.05) / 9 * 100:.1f} ± 1.0", ABSENT, "44.3"]
    assert report.notes[0].startswith("tasks are missing for one, two, ")
    assert benchmarks.NOTE in report.notes


def test_printed_averages_are_those_of_the_printed_figures():
    for name, (_, average, accuracies) in benchmarks.PAPER_MODELS.items():
        assert len(accuracies) == len(benchmarks.BENCHMARK_TASKS) == 9
        assert sum(accuracies) / 9 == pytest.approx(average, abs=0.051), name


def test_the_papers_tasks_are_shipped_and_drawn_with_its_models(runs):
    folder = Path(benchmarks.__file__).parents[1] / "evaluation" / "benchmarks" / "tasks"
    shipped = {path.stem for path in folder.glob("smollm2_*.yaml")}
    assert set(benchmarks.TASK_NAMES) == shipped
    (runs / "one" / "benchmarks.json").unlink()
    write_scores(runs / "one" / "benchmarks.json", PAPER)
    left, right = build_benchmarks([runs / "one"]).draw().axes
    points = {line.get_label(): line for line in left.lines}
    assert points["one, 10 tasks"].get_ydata()[0] == pytest.approx((0.5 * 7 + 0.6 + 0.05) / 9)
    assert list(points["paper: SmolLM2"].get_xdata()) == [4e12]
    assert left.get_xscale() == "log"
    assert not any("paper" in line.get_label() for line in right.lines)
