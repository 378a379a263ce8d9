"""The formal-language table: the runs, recipes and tests counted in a cell, from synthetic run folders."""

import json
import re
from pathlib import Path

import pytest
from formal_runs import ALL_LENGTHS, MODELS, NEAR_LENGTHS, finish, format_report, read_row, write_run

from stackexp.config.formal_language import model_label
from stackexp.errors import RunError
from stackexp.reports.formal import paper, recipes
from stackexp.reports.formal.collect import collect_report
from stackexp.reports.formal.paper import COLUMNS, find_column
from stackexp.tables import ABSENT
from stackexp.tasks import TASKS


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The path runs/formal_table in an empty working directory; shipped recipes are not composed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "_compose_recipe", lambda name: None)
    return Path("runs/formal_table")


def test_printed_scores_are_those_of_table_1():
    assert list(paper.TABLE_1) == [task for task in TASKS if task in paper.TABLE_1], "in the order of the table"
    printed = [paper.get_printed_score("stack_manipulation", column) for column in COLUMNS]
    assert printed == [0.66, 0.85, 0.93, 0.53, 0.92, 0.92]
    assert paper.get_printed_score("even_pairs", "StackAttn") is None
    assert paper.get_printed_score("duplicate_string", "LSTM") is None
    assert [len(tasks) for tasks in paper.CLASSES.values()] == [4, 4, 7]


def test_column_follows_from_the_config(runs):
    for model in MODELS:
        finish(write_run(runs / model, model, "even_pairs"), beyond=0.5)
    report = collect_report([runs], ALL_LENGTHS)
    assert {run.path.name: run.column for run in report.runs} == {model: model for model in COLUMNS}
    config = dict(report.cells["even_pairs", "StackTrans"].runs[0].config)
    assert find_column(config | {"model.memory.axis": "token_major"}) == "StackTrans"
    assert find_column(config | {"model.memory.discipline": "queue"}) is None
    assert model_label(config) == "stacktrans"
    queue = {"model.memory.discipline": "queue", "model.memory.axis": "depth"}
    assert model_label(config | queue) == "stacktrans-depth-queue"
    assert model_label({"model.kind": "transformer", "model.memory": None}) == "transformer"
    assert model_label({"model.kind": "transformer", "model.memory.kind": "mine"}) == "mine"


def test_cell_has_best_and_median_next_to_the_papers_score(runs):
    for seed, score in enumerate((0.90, 0.996, 0.97)):
        finish(write_run(runs / f"a{seed}", "StackTrans", "parity_check", seed=seed), beyond=score)
        finish(write_run(runs / f"b{seed}", "LSTM", "odds_first", seed=seed), beyond=score - 0.4)
    finish(write_run(runs / "c", "StackTrans depth", "parity_check"), beyond=0.5)
    finish(write_run(runs / "d", "Transformer", "duplicate_string"), beyond=0.625)
    text = format_report(runs)
    cells = read_row(text, "parity_check")
    assert cells["StackTrans"] == "**1.00** / 0.97 (3)", "compared at two decimals"
    assert cells["StackTrans depth"] == "0.50↓ / 0.50 (1)"
    assert cells["paper of StackTrans depth"] == "1.00"
    assert (cells["LSTM"], cells["paper of LSTM"], cells["paper of StackAttn"]) == ("missing", "1.00", ABSENT)
    assert read_row(text, "odds_first")["LSTM"] == "**0.60** / 0.57 (3)"
    assert read_row(text, "duplicate_string")["Transformer"] == "0.62 / 0.62 (1)", "the paper prints none"
    order = [line.split()[1] for line in text.splitlines() if line.startswith(("| even_", "| stack_m", "| missing_d"))]
    assert order == ["even_pairs", "stack_manipulation", "missing_duplicate"]
    assert text.index("*regular*") < text.index("*deterministic context-free*") < text.index("*context-sensitive*")
    (recipe,) = [line for line in text.splitlines() if line.startswith("| parity_check ") and "| time" in line]
    assert [cell.strip() for cell in recipe.split("|")][2:6] == ["time", "top", "identity", "0.001"]
    assert "| 24 | none (1..40) | 10,000 | 0, 1, 2 | 1.000 " in re.sub(r" +", " ", recipe)


def test_score_covers_the_requested_lengths(runs):
    finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=0.5, up_to_100=0.9)
    near = format_report(runs, NEAR_LENGTHS)
    assert read_row(near, "even_pairs")["LSTM"] == "0.90↓ / 0.90 (1)"
    assert "on lengths 41..100 (every length, 512 strings each). Bold" in near
    mean = (60 * 0.9 + 400 * 0.5) / 460
    assert read_row(format_report(runs), "even_pairs")["LSTM"] == f"{mean:.2f}↓ / {mean:.2f} (1)"


def test_score_is_interpolated_between_tested_lengths(runs):
    finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=0.5, up_to_100=0.9, stride=9)
    (run,) = collect_report([runs], ALL_LENGTHS).runs
    falling = [0.5 + 0.4 * share / 9 for share in range(8, 0, -1)]  # at 96 to 103
    expected = (55 * 0.9 + sum(falling) + 397 * 0.5) / 460
    assert run.compute_score(ALL_LENGTHS) == pytest.approx(expected)


def test_recipe_is_chosen_by_the_validation_accuracy(runs):
    """Not by the score. Recipes are not mixed, and the others are described in a note."""
    for seed in range(2):
        finish(write_run(runs / f"a{seed}", "StackTrans", "odds_first", seed=seed), beyond=0.6, validation=0.9)
        other = write_run(runs / f"b{seed}", "StackTrans", "odds_first", "data.curriculum_steps=1500", seed=seed)
        finish(other, beyond=0.8, validation=0.8 + 0.15 * seed)
    text = format_report(runs)
    assert read_row(text, "odds_first")["StackTrans"] == "**0.60** / 0.60 (2)"
    assert (
        "- StackTrans, odds_first: recipe not chosen: `data.curriculum_steps=1500` "
        "(2 seeds, validation accuracy 0.875, chosen 0.9; runs/formal_table/b0)"
    ) in text
    finish(runs / "b0", beyond=0.8, validation=0.86)
    text = format_report(runs)
    assert read_row(text, "odds_first")["StackTrans"] == "**0.80** / 0.80 (2)"
    assert "4 to 40 in 1,500 steps" in text
    assert "recipe not chosen: `data.curriculum_steps=0`" in text


def test_recipe_with_three_seeds_precedes_better_validation(runs):
    finish(write_run(runs / "a", "LSTM", "odds_first", "optimizer.lr=0.01"), beyond=0.9, validation=1.0)
    for seed in range(3):
        finish(write_run(runs / f"b{seed}", "LSTM", "odds_first", seed=seed), beyond=0.5, validation=0.8)
    assert read_row(format_report(runs), "odds_first")["LSTM"] == "0.50↓ / 0.50 (3)"
    for seed in (1, 2):
        other = write_run(runs / f"a{seed}", "LSTM", "odds_first", "optimizer.lr=0.01", seed=seed)
        finish(other, beyond=0.9, validation=1.0)
    finish(write_run(runs / "b3", "LSTM", "odds_first", seed=3), beyond=0.5, validation=0.8)
    assert read_row(format_report(runs), "odds_first")["LSTM"] == "**0.90** / 0.90 (3)", "three seeds are enough"


@pytest.mark.parametrize(("losses", "seeds"), [((0.02, 0.001), (2, 2)), ((0.25, 0.25), (1, 2))])
def test_tie_is_broken_by_validation_loss_and_then_by_seeds(runs, losses, seeds):
    for name, recipe, loss, count, score in zip(
        "ab", ([], ["optimizer.lr=0.01"]), losses, seeds, (0.9, 0.5), strict=True
    ):
        for seed in range(count):
            finish(write_run(runs / f"{name}{seed}", "LSTM", "odds_first", *recipe, seed=seed), beyond=score, loss=loss)
    text = format_report(runs)
    assert read_row(text, "odds_first")["LSTM"] == "0.50↓ / 0.50 (2)"
    if losses[0] != losses[1]:
        assert "(2 seeds, validation loss 0.02, chosen 0.001; runs/formal_table/a0)" in text


def test_recipe_ignores_execution_and_thoroughness(runs):
    """A coarse test is marked. Options that are newer than a run have their defaults."""
    finish(write_run(runs / "a", "LSTM", "odds_first"), beyond=0.5)
    execution = ("data.eval_length_stride=9", "trainer.accelerator=cpu", "trainer.checkpoint_interval=7", "name=x")
    other = write_run(runs / "b", "LSTM", "odds_first", *execution, seed=1)
    finish(other, beyond=0.7, stride=9, sequences=64)
    old = finish(write_run(runs / "c", "LSTM", "odds_first", seed=2), beyond=0.6) / "config.yaml"
    text = old.read_text()
    old.write_text(text.replace("  z_loss: 0.0\n", "").replace("  spike_threshold: 6.0\n", ""))
    assert text != old.read_text()
    report = format_report(runs)
    assert read_row(report, "odds_first")["LSTM"] == "**0.70** / 0.60 (3)†"
    assert "- † tested less than others: one length in 9, 64 strings each (LSTM: odds_first)" in report


def test_later_run_of_a_seed_counts(runs):
    for name, score in {"a": 0.9, "b": 0.5}.items():
        finish(write_run(runs / name, "LSTM", "odds_first"), beyond=score)
    text = format_report(runs)
    assert read_row(text, "odds_first")["LSTM"] == "0.50↓ / 0.50 (1)"
    assert "- LSTM, odds_first: duplicate seeds, not counted: runs/formal_table/a (seed 0)" in text


def test_more_thorough_of_result_and_test_counts(runs):
    run = finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=0.5, stride=9, sequences=64)
    finish(run, beyond=0.75, file="test.json", stride=9, sequences=32)
    assert read_row(format_report(runs), "even_pairs")["LSTM"].startswith("0.50")
    finish(run, beyond=0.75, file="test.json")
    assert read_row(format_report(runs), "even_pairs")["LSTM"].startswith("0.75")
    finish(run, beyond=0.6, file="test.json", longest=200)
    assert read_row(format_report(runs), "even_pairs")["LSTM"].startswith("0.50"), "it does not reach 500"


def test_test_of_another_checkpoint_or_config_is_skipped(runs):
    changes = ({"step": 5000}, {"overrides": ["--data.task", "odds_first"]}, {"overrides": ["model.memory=null"]})
    for seed, change in enumerate([*changes, {"step": 10_000, "overrides": ["data.eval_sequences=1024"]}]):
        run = finish(write_run(runs / f"a{seed}", "StackTrans", "even_pairs", seed=seed), beyond=0.5)
        path = finish(run, beyond=0.9, file="test.json", sequences=1024) / "test.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    text = format_report(runs)
    assert read_row(text, "even_pairs")["StackTrans"] == "0.90↓ / 0.50 (4)†"
    names = ", ".join(f"{runs}/a{seed}/test.json" for seed in range(3))
    assert f"- skipped, test of another checkpoint, or with overrides that change more than the test: {names}\n" in text


def test_damaged_result_is_an_error(runs):
    run = write_run(runs / "a", "LSTM", "even_pairs")
    (run / "result.json").write_text('{"steps": 3}')
    with pytest.raises(RunError, match=r"a/result.json: 'accuracy' is missing; test the run again: python -m stackexp"):
        collect_report([runs], ALL_LENGTHS)
    (run / "result.json").write_text("{")
    with pytest.raises(RunError, match=r"a/result.json: not valid JSON"):
        collect_report([runs], ALL_LENGTHS)
