"""The formal-language report: which runs count in a cell, and the files it writes, from synthetic run folders."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from formal_runs import ALL_LENGTHS, MODELS, NEAR_LENGTHS, finish, format_formal, read_row, write_run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from stackexp.config.affects import flatten_config
from stackexp.config.compose import compose
from stackexp.config.data import get_model_label
from stackexp.errors import RunError
from stackexp.files import read_hashed_json, write_hashed_json
from stackexp.reports import formal
from stackexp.reports.formal import COLORS, build_curve, build_formal, draw_curves
from stackexp.reports.formal_runs import COLUMNS, TABLE_1, Results, collect_cells, get_printed_score, name_column
from stackexp.reports.report import escape_latex, format_report
from stackexp.tables import ABSENT
from stackexp.tasks import TASKS


@pytest.fixture
def runs(empty_folder, monkeypatch) -> Path:
    """The path runs/formal_table in an empty working directory; shipped recipes are not composed."""
    monkeypatch.setattr(formal, "_compose_recipe", lambda name: None)
    return Path("runs/formal_table")


def test_printed_scores_are_those_of_table_1():
    assert list(TABLE_1) == [task for task in TASKS if task in TABLE_1], "in the order of the table"
    printed = [get_printed_score("stack_manipulation", column) for column in COLUMNS]
    assert printed == [0.66, 0.85, 0.93, 0.53, 0.92, 0.92]


def test_column_follows_from_the_config(runs):
    for model in MODELS:
        finish(write_run(runs / model, model, "even_pairs"), beyond=0.5)
    report = collect_cells([runs], ALL_LENGTHS)
    assert {Path(run.row["path"]).name: run.column for run in report.runs} == dict(zip(COLUMNS, COLUMNS, strict=True))
    row = report.cells["even_pairs", "StackTrans"].runs[0].row
    queue, feedback = {"model.memory.discipline": "queue"}, {"model.memory.feedback": False}
    axes = {axis: {"model.memory.axis": axis} for axis in ("depth", "token_major")}
    table_1 = [row | changes for changes in (axes["token_major"], feedback, queue, axes["depth"] | queue)]
    assert list(map(name_column, table_1)) == ["StackTrans", "StackTrans", "StackTrans queue", "StackTrans depth queue"]
    row |= {"data.task": "word_problem_s3"}
    others = [row | changes for changes in ({}, feedback, axes["token_major"], axes["depth"] | feedback)]
    names = ["StackTrans time + feedback", "StackTrans time", "StackTrans token_major + feedback", "StackTrans depth"]
    assert list(map(name_column, others)) == names
    assert name_column(row | {"model.memory.kind": "my_memory"}) == "my memory"
    assert get_model_label({"model.kind": "transformer", "model.memory.kind": "mine"}) == "mine"


def test_baselines_have_columns_of_their_own():
    names = {
        "delta_net": "DeltaNet [-1, 1]",
        "delta_net model.allow_negative_eigenvalues=false": "DeltaNet [0, 1]",
        "delta_product": "DeltaProduct [-1, 1]",
        "nondeterministic_stack": "nondeterministic stack",
        "stratified_stack": "stratified stack",
        "stack_attention": "StackAttn",
    }
    for name, column in names.items():
        config, *overrides = name.split()
        assert (
            name_column(flatten_config(compose([f"formal/{config}"], [*overrides, "data.task=even_pairs"]))) == column
        )


def test_committed_runs_are_all_in_the_tables():
    folder = Path(__file__).parents[1] / "docs/results/formal"
    report = build_formal([folder])
    assert {record["path"] for record in report.records if record["in_table"]} == {
        str(path.parent) for path in folder.rglob("config.yaml")
    }
    table_1, others, _ = report.tables
    assert {"DeltaNet [-1, 1]", "DeltaNet [0, 1]", "stratified stack"} <= set(table_1.header)
    assert {"StackTrans time", "StackTrans time + feedback"} <= set(others.header)
    assert not any("skipped" in note for note in report.notes)
    text = format_report(report, "markdown")
    cells = read_row(text, "parity_check")
    assert (cells["StackTrans"], cells["DeltaNet [-1, 1]"]) == ("**1.00** / 1.00 (5/5)", "0.70 / 0.70 (0/1)")
    assert cells["stratified stack"] == ABSENT
    assert read_row(text, "word_problem_s3")["StackTrans time + feedback"] == "1.00 / 1.00 (5/5)"
    assert "`formal/delta_net model.allow_negative_eigenvalues=false`" in text
    assert "=null" not in text, "options that are newer than a run have their defaults"


def test_cell_has_best_and_median_next_to_the_papers_score(runs):
    for seed, score in enumerate((0.90, 0.996, 0.97)):
        finish(write_run(runs / f"a{seed}", "StackTrans", "parity_check", seed=seed), beyond=score)
    finish(write_run(runs / "c", "StackTrans depth", "parity_check"), beyond=0.5)
    finish(write_run(runs / "d", "Transformer", "duplicate_string"), beyond=0.625)
    text = format_formal(runs)
    cells = read_row(text, "parity_check")
    assert cells["StackTrans"] == "**1.00** / 0.97 (1/3)", "compared at two decimals"
    assert cells["StackTrans depth"] == "0.50↓ / 0.50 (0/1)"
    assert cells["paper of StackTrans depth"] == "1.00"
    assert (cells["LSTM"], cells["paper of LSTM"], cells["paper of StackAttn"]) == ("missing", "1.00", ABSENT)
    assert read_row(text, "duplicate_string")["Transformer"] == "0.62 / 0.62 (0/1)", "the paper prints none"
    classes = ("regular", "deterministic context-free", "context-sensitive")
    positions = [text.index(f"| {name} ") for name in classes]
    assert positions == sorted(positions)


def test_score_covers_the_requested_lengths(runs):
    """Accuracy is interpolated between the tested lengths: here it falls from 95 to 104."""
    finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=0.5, up_to_100=0.9, stride=9)
    assert read_row(format_formal(runs, NEAR_LENGTHS), "even_pairs")["LSTM"] == "0.89↓ / 0.89 (0/1)"
    with pytest.raises(RunError, match=r"not tested over 41\.\.505"):
        format_formal(runs, (41, 505))
    (run,) = collect_cells([runs], ALL_LENGTHS).runs
    falling = [0.5 + 0.4 * share / 9 for share in range(8, 0, -1)]  # at 96 to 103
    expected = (55 * 0.9 + sum(falling) + 397 * 0.5) / 460
    assert run.compute_score(ALL_LENGTHS) == pytest.approx(expected)


def test_other_families_follow_with_lengths_of_their_own(runs, tmp_path):
    finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=0.5)
    finish(write_run(runs / "b", "StackTrans", "word_problem_s3"), beyond=0.75)
    lengths = ("data.max_length=20", "data.validation_max_length=40", "data.eval_max_length=200")
    finish(write_run(runs / "c", "LSTM", "repl_s3", *lengths), beyond=0.25, longest=200)
    shorter = ("data.max_length=8", "data.validation_max_length=20", "data.eval_max_length=100")
    finish(write_run(runs / "c2", "StackRNN", "repl_s3", *shorter), beyond=0.5, longest=100)
    config = write_run(runs / "d", "LSTM", "parity_check") / "config.yaml"
    tree = yaml.safe_load(config.read_text())
    tree["data"] |= {"task": "gone", "output_vocab_size": 4}
    config.write_text(yaml.safe_dump(tree | {"plugins": ["/missing/gone.py"]}))
    finish(config.parent, beyond=0.625)

    report = build_formal([runs], ALL_LENGTHS, curves=tmp_path / "curves.png")
    text = format_report(report, "markdown")
    classes = ("context-sensitive ", "state tracking ", "state tracking in code ", "tasks of plugins that are not")
    positions = [text.index(f"| {name}") for name in classes]
    assert positions == sorted(positions)
    cells = {"LSTM": ABSENT, "StackRNN": ABSENT, "StackTrans time + feedback": "0.75 / 0.75 (0/1)"}
    assert read_row(text, "word_problem_s3") == {"task": "word_problem_s3"} | cells, "only columns with runs"
    assert read_row(text, "repl_s3")["LSTM"] == "0.33 / 0.33 (0/1)", "1 on 21 to 40, then 0.25"
    assert "| repl_s3 (21 to 200) " in text, "beyond the training of all runs"
    assert read_row(text, "repl_s3")["StackRNN"] == "missing‡"
    assert read_row(text, "gone")["LSTM"] == "0.62 / 0.62 (0/1)"
    assert "word_problem_a5" not in text
    assert "plugin not loaded (" in text
    results = collect_cells([runs], ALL_LENGTHS)
    assert [results.guess_accuracy(task) for task in ("word_problem_s3", "dyck_2_3", "gone")] == [1 / 6, 0, 1 / 4]
    records = {record["task"]: record for record in report.records if record["in_table"]}
    assert records["word_problem_s3"]["class"] == "state tracking"
    assert records["repl_s3"]["score_21_200"] == pytest.approx((20 + 160 * 0.25) / 180)
    assert len(report.draw().axes) == 4, "a panel for each family with runs"
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    only = format_formal(runs / "b")
    assert "Table 1" not in only
    assert "sweep run formal_table" not in only


def test_curves_at_one_accuracy_are_all_visible(runs):
    for model in ("LSTM", "StackRNN", "Transformer"):
        finish(write_run(runs / model, model, "even_pairs"), beyond=1.0)
    figure = draw_curves(collect_cells([runs], ALL_LENGTHS))
    figure.set_dpi(300)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box = figure.axes[0].get_window_extent()
    pixels = np.asarray(canvas.buffer_rgba())[::-1, :, :3][int(box.y0) : int(box.y1)].reshape(-1, 3).tolist()
    for model in ("LSTM", "StackRNN", "Transformer"):
        assert pixels.count([round(255 * part) for part in to_rgb(COLORS[model])]) > 20, model


def test_languages_with_an_entropy_are_scored_by_their_loss(runs):
    lengths = ("data.max_length=80", "data.validation_max_length=90", "data.eval_max_length=200")
    for name, recipe, excess, loss in (("a", "", 0.25, 1.5), ("b", "optimizer.lr=0.01", 0.125, 1.25)):
        run = write_run(runs / name, "LSTM", "generate_dyck_2", *lengths, *recipe.split())
        path = finish(run, beyond=0.5, validation=loss - 1, loss=loss, longest=200) / "result.json"
        above = {str(n): excess * (1 + (n <= 100)) for n in range(1, 201)}
        write_hashed_json(path, read_hashed_json(path, "") | {"loss_above_entropy": above})
    report = build_formal([runs])
    text = format_report(report, "markdown")
    assert read_row(text, "generate_dyck_2")["LSTM"] == "0.145 / 0.145 nats (1)", "(19 * 0.25 + 100 * 0.125) / 119"
    assert "| generate_dyck_2 (82 to 200) " in text
    assert "`optimizer.lr=0.0004` (1 seed; runs/formal_table/a)" in text, "the recipe with the lower loss is chosen"
    assert [record["loss_above_entropy"] for record in report.records] == pytest.approx([34.5 / 119, 17.25 / 119])
    write_hashed_json(path, read_hashed_json(path, "") | {"loss_above_entropy": above | {"90": None}})
    text = format_report(build_formal([runs / "b"]), "markdown")
    assert read_row(text, "generate_dyck_2")["LSTM"] == "inf / inf nats (1)", "one loss was not finite"


def test_recipe_is_chosen_by_the_validation_accuracy(runs):
    """Not by the score. Recipes are not mixed, and the others are described in a note."""
    for seed in range(2):
        finish(write_run(runs / f"a{seed}", "StackTrans", "odds_first", seed=seed), beyond=0.6, validation=0.9)
        other = write_run(runs / f"b{seed}", "StackTrans", "odds_first", "data.curriculum_steps=1500", seed=seed)
        finish(other, beyond=0.8, validation=0.8 + 0.15 * seed)
    text = format_formal(runs)
    assert read_row(text, "odds_first")["StackTrans"] == "**0.60** / 0.60 (0/2)"
    assert "StackTrans, odds_first: recipe not chosen by validation" in text
    assert "`data.curriculum_steps=1500` (2 seeds; runs/formal_table/b0)" in text
    finish(runs / "b0", beyond=0.8, validation=0.86)
    text = format_formal(runs)
    assert read_row(text, "odds_first")["StackTrans"] == "**0.80** / 0.80 (0/2)"
    assert "`data.curriculum_steps=0` (2 seeds; runs/formal_table/a0)" in text


def test_recipe_with_three_seeds_precedes_better_validation(runs):
    finish(write_run(runs / "a", "LSTM", "odds_first", "optimizer.lr=0.01"), beyond=0.9, validation=1.0)
    for seed in range(3):
        finish(write_run(runs / f"b{seed}", "LSTM", "odds_first", seed=seed), beyond=0.5, validation=0.8)
    assert read_row(format_formal(runs), "odds_first")["LSTM"] == "0.50↓ / 0.50 (0/3)"
    for seed in (1, 2):
        other = write_run(runs / f"a{seed}", "LSTM", "odds_first", "optimizer.lr=0.01", seed=seed)
        finish(other, beyond=0.9, validation=1.0)
    finish(write_run(runs / "b3", "LSTM", "odds_first", seed=3), beyond=0.5, validation=0.8)
    assert read_row(format_formal(runs), "odds_first")["LSTM"] == "**0.90** / 0.90 (0/3)", "three seeds are enough"


@pytest.mark.parametrize(("losses", "seeds"), [((0.02, 0.001), (2, 2)), ((0.25, 0.25), (1, 2))])
def test_tie_is_broken_by_validation_loss_and_then_by_seeds(runs, losses, seeds):
    recipes = ([], ["optimizer.lr=0.01"])
    for name, recipe, loss, count, score in zip("ab", recipes, losses, seeds, (0.9, 0.5), strict=True):
        for seed in range(count):
            finish(write_run(runs / f"{name}{seed}", "LSTM", "odds_first", *recipe, seed=seed), beyond=score, loss=loss)
    text = format_formal(runs)
    assert read_row(text, "odds_first")["LSTM"] == "0.50↓ / 0.50 (0/2)"


def test_recipe_ignores_execution_and_thoroughness(runs):
    """A coarse test is marked. Options that are newer than a run have their defaults."""
    finish(write_run(runs / "a", "LSTM", "odds_first"), beyond=0.5)
    execution = ("data.eval_length_stride=9", "trainer.accelerator=cpu", "trainer.checkpoint_interval=7", "name=x")
    other = write_run(runs / "b", "LSTM", "odds_first", *execution, seed=1)
    finish(other, beyond=0.7, stride=9, sequences=64)
    old = finish(write_run(runs / "c", "LSTM", "odds_first", seed=2), beyond=0.6) / "config.yaml"
    tree = yaml.safe_load(old.read_text())
    assert (tree["trainer"].pop("z_loss"), tree["trainer"].pop("spike_threshold")) == (0.0, 6.0)
    old.write_text(yaml.safe_dump(tree))
    report = format_formal(runs)
    assert read_row(report, "odds_first")["LSTM"] == "**0.70** / 0.60 (0/3)†"
    assert "- † tested less than others: one length in 9, 64 strings each (LSTM: odds_first)" in report


def test_more_thorough_test_counts_then_the_later_run(runs):
    run = finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=0.9, stride=9, sequences=64)
    finish(run, beyond=0.75, file="test.json", stride=9, sequences=32)
    assert read_row(format_formal(runs), "even_pairs")["LSTM"].startswith("0.90")
    finish(run, beyond=0.75, file="test.json")
    assert read_row(format_formal(runs), "even_pairs")["LSTM"].startswith("0.75")
    finish(run, beyond=0.6, file="test-to-200-every-1-of-512.json", longest=200)
    assert read_row(format_formal(runs, NEAR_LENGTHS), "even_pairs")["LSTM"].startswith("0.75"), "the first of equals"
    (run / "test.json").unlink()
    assert read_row(format_formal(runs), "even_pairs")["LSTM"].startswith("0.90"), "the other does not reach 500"
    assert read_row(format_formal(runs, NEAR_LENGTHS), "even_pairs")["LSTM"].startswith("0.60")
    finish(write_run(runs / "b", "LSTM", "even_pairs"), beyond=0.5, stride=9, sequences=64)
    text = format_formal(runs)
    assert read_row(text, "even_pairs")["LSTM"] == "0.50↓ / 0.50 (0/1)"
    assert "- LSTM, even_pairs: duplicate seeds, not counted: runs/formal_table/a (seed 0)" in text


def test_test_of_another_checkpoint_or_config_is_skipped(runs):
    changes = ({"step": 5000}, {"overrides": ["--data.task", "odds_first"]}, {"overrides": ["model.memory=null"]})
    for seed, change in enumerate([*changes, {"step": 10_000, "overrides": ["data.eval_sequences=1024"]}]):
        run = finish(write_run(runs / f"a{seed}", "StackTrans", "even_pairs", seed=seed), beyond=0.5)
        path = finish(run, beyond=0.9, file="test.json", sequences=1024) / "test.json"
        write_hashed_json(path, read_hashed_json(path, "") | change)
    text = format_formal(runs)
    assert read_row(text, "even_pairs")["StackTrans"] == "0.90↓ / 0.50 (0/4)†"
    names = ", ".join(f"{runs}/a{seed}/test.json" for seed in range(3))
    assert f"- skipped, test of another checkpoint or config: {names}\n" in text


@pytest.mark.parametrize("file", ["result.json", "test.json"])
def test_changed_results_are_one_line(runs, file):
    path = finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=0.5, file=file) / file
    path.write_text(path.read_text().replace("0.5", "0.9", 1))
    with pytest.raises(RunError, match=rf"a/{file}: not as it was written"):
        collect_cells([runs], ALL_LENGTHS)


def test_training_on_the_tested_lengths_is_noted(runs):
    overrides = ("data.max_length=60", "data.validation_max_length=80")
    finish(write_run(runs / "60", "LSTM", "even_pairs", *overrides), beyond=1.0)
    finish(write_run(runs / "40", "StackRNN", "even_pairs"), beyond=1.0)
    assert "trained on lengths that the score includes: LSTM: even_pairs\n" in format_formal(runs)


def test_unfinished_runs_are_marked(runs):
    finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=1.0)
    line = {"step": 300, "tokens": 1, "train/loss": 2.0}
    for model, seed in (("LSTM", 1), ("StackRNN", 0)):
        started = write_run(runs / f"{model}{seed}", model, "even_pairs", seed=seed)
        (started / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    near = finish(write_run(runs / "near", "Transformer", "even_pairs"), beyond=0.5, longest=100)
    write_run(runs / "other", "LSTM", "even_pairs", "optimizer.lr=0.01")
    text = format_formal(runs)
    reason = "LSTM, even_pairs: recipe without a run that is finished and tested over these lengths: "
    assert f"{reason}`optimizer.lr=0.01` (1 seed; runs/formal_table/other)" in text
    assert read_row(text, "even_pairs")["LSTM"] == "**1.00** / 1.00 (1/1)‡"
    assert read_row(text, "even_pairs")["StackRNN"] == "missing‡"
    assert "runs/formal_table/LSTM1 (at step 300 of 10,000)" in text
    assert f"{near} (not tested over these lengths)" in text
    assert text.endswith("- `python -m stackexp sweep run formal_table` fills missing cells and finishes its runs")
    finish(runs / "StackRNN0", beyond=0.5, file="test.json")
    assert read_row(format_formal(runs), "even_pairs")["StackRNN"] == "0.50↓ / 0.50 (0/1)‡", "tested before its end"


def test_other_folders_are_skipped_with_a_note(runs):
    run = write_run(runs / "one", "LSTM", "even_pairs")
    with pytest.raises(RunError, match=r"no finished run on a formal language \(1 runs are unfinished or not tested"):
        collect_cells([runs], ALL_LENGTHS)
    finish(run, beyond=0.5)
    options = "seed: 0\nplugins: []\ntrainer: {max_steps: 1}\n"
    other = runs.parent / "quickstart" / "id"
    other.mkdir(parents=True)
    (other / ".stackexp").touch()
    (other / "config.yaml").write_text(f"{options}data: {{kind: stdlib}}\n")
    without_task = write_run(runs / "no-task", "LSTM", "even_pairs")
    data = "data: {kind: formal_language, max_length: 40, eval_max_length: 500}\n"
    (without_task / "config.yaml").write_text(f"{options}model: {{kind: lstm}}\n{data}")
    text = format_formal(runs.parent)
    assert f"- skipped, not a formal language: {without_task}, {other}\n" in text
    with pytest.raises(RunError, match=r"^nothing: no such folder; give run folders"):
        collect_cells(["nothing"], ALL_LENGTHS)
    Path("empty").mkdir()
    with pytest.raises(RunError, match=r"^empty: no run folder in it or below; give runs/"):
        collect_cells(["empty"], ALL_LENGTHS)


@pytest.fixture
def report(runs) -> Results:
    """Every model on three tasks with two seeds, and a name that LaTeX must escape."""
    for task in ("even_pairs", "reverse_string", "bucket_sort"):
        for number, model in enumerate(MODELS):
            for seed in range(2):
                run = write_run(runs / f"{model}_{task}&50%#{seed}", model, task, seed=seed)
                stride = 9 if (model, task, seed) == ("StackRNN", "even_pairs", 1) else 1
                finish(run, beyond=0.4 + 0.1 * number + 0.05 * seed, up_to_100=0.95, stride=stride)
    write_run(runs / "begun~^{x}", "LSTM", "even_pairs", seed=5)
    return collect_cells([runs], ALL_LENGTHS)


def test_curve_has_the_range_of_the_seeds_where_all_were_tested(report):
    lengths, low, median, high = build_curve(report.cells["even_pairs", "StackRNN"])  # the second seed: one in 9
    assert (lengths[0], lengths[1], lengths[-1]) == (5, 14, 500)
    assert (low[-1], median[-1], high[-1]) == (pytest.approx(0.5), pytest.approx(0.525), pytest.approx(0.55))


def test_latex_is_escaped(report, runs):
    text = format_report(build_formal([runs], ALL_LENGTHS), "latex")
    collapsed = " ".join(text.split())
    assert r"even\_pairs & 0.52$\downarrow$ / 0.49 (0/2)$\ddagger$ & 1.00 &" in collapsed
    assert r"& \textbf{0.78} / 0.75 (0/2) & 0.49 &" in collapsed
    assert "% `python -m stackexp sweep run formal_table` fills" in text
    assert r"begun\textasciitilde{}\textasciicircum{}\{x\} (at step 0" in text
    assert escape_latex(r"50% a_b `x/y` ^") == r"50\% a\_b \texttt{x/\allowbreak{}y} \textasciicircum{}"
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.replace(r"\&", "").count("&") for line in lines} == {12, 3}


def test_verb_writes_the_requested_files(report, runs, tmp_path, invoke):
    files = ["--csv=runs.csv", "--figure=bars.png", "--curves=curves.png"]
    printed = invoke("report formal", runs, "--score", "41_200", *files)
    assert "on lengths 41 to 200." in printed
    assert "\nregular " in printed
    for name in ("bars.png", "curves.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    lines = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert len(lines) == 3 * 6 * 2 + 1
    line = next(line for line in lines if line["model"] == "StackTrans" and line["task"] == "bucket_sort")
    assert (line["seed"], line["model.memory.axis"], line["paper"]) == ("0", "time", "0.89")
    assert float(line["score_41_100"]) == pytest.approx(0.95)
    assert float(line["score_41_500"]) == pytest.approx((60 * 0.95 + 400 * 0.8) / 460)
    assert float(line["score_41_200"]) == pytest.approx((60 * 0.95 + 100 * 0.8) / 160)
    started = next(line for line in lines if line["state"] == "unfinished")
    assert (started["score_41_500"], started["step"], started["trainer.max_steps"]) == ("", "0", "10000")


def test_of_two_runs_of_a_seed_the_later_one_counts(tmp_path):
    for name, day, score in (("z-first", "01", 0.6), ("a-second", "20", 0.9)):
        run = finish(write_run(tmp_path / name, "LSTM", "parity_check"), beyond=score)
        (run / "environment.json").write_text(json.dumps([{"started": f"2026-11-{day}T00:00:00+0000"}]))
    assert read_row(format_formal(tmp_path), "parity_check")["LSTM"].startswith("0.90")
