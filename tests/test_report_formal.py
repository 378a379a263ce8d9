"""The paper's table of formal languages, from made-up run folders."""

import csv
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from formal_runs import MODELS, finish, write_run

from stackexp.cli import main
from stackexp.config.formal_language import TASKS, model_label
from stackexp.errors import RunError
from stackexp.reports.formal import recipes as formal_recipes
from stackexp.reports.formal.collect import COLUMNS, Report, collect, column_of, find
from stackexp.reports.formal.export import escape, latex
from stackexp.reports.formal.figures import draw_bars, draw_curves
from stackexp.reports.formal.recipes import name_of
from stackexp.reports.formal.tables import header, markdown
from stackexp.reports.tables import ABSENT
from stackexp.sweeps.grid import expand
from stackexp.sweeps.sweep import load_sweep

FULL, NEAR = (41, 500), (41, 100)


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """runs/formal_table, empty, below the working directory; the shipped recipes are not looked at."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(formal_recipes, "_shipped", lambda name: None)
    return Path("runs/formal_table")


def row(text: str, task: str) -> dict[str, str]:
    """The cells of a task in the Markdown table: column -> cell, the paper's beside as `paper of COLUMN`."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {task} "))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    names = header()
    names = [f"paper of {names[i - 1]}" if name == "paper" else name for i, name in enumerate(names)]
    return dict(zip(names, cells, strict=True))


def table(runs: Path, among: tuple[int, int] = FULL) -> str:
    return markdown(collect([runs], among), [runs])


def test_a_run_is_of_the_model_that_its_config_says(runs):
    for model in MODELS:
        finish(write_run(runs / model, model, "even_pairs"), beyond=0.5)
    report = collect([runs], FULL)
    assert {run.path.name: run.column for run in report.runs} == {model: model for model in COLUMNS}
    config = dict(report.cells["even_pairs", "StackTrans"].runs[0].config)
    assert column_of(config | {"model.memory.axis": "token_major"}) == "StackTrans"
    assert column_of(config | {"model.memory.discipline": "queue"}) is None
    assert model_label(config) == "stacktrans"
    queue = {"model.memory.discipline": "queue", "model.memory.axis": "depth"}
    assert model_label(config | queue) == "stacktrans-depth-queue"
    assert model_label({"model.kind": "transformer", "model.memory": None}) == "transformer"
    assert model_label({"model.kind": "transformer", "model.memory.kind": "mine"}) == "mine"


def test_best_and_median_of_the_seeds_stand_beside_the_papers_figure(runs):
    for seed, score in enumerate((0.90, 0.996, 0.97)):
        finish(write_run(runs / f"a{seed}", "StackTrans", "parity_check", seed=seed), beyond=score)
        finish(write_run(runs / f"b{seed}", "LSTM", "odds_first", seed=seed), beyond=score - 0.4)
    finish(write_run(runs / "c", "StackTrans depth", "parity_check"), beyond=0.5)
    finish(write_run(runs / "d", "Transformer", "duplicate_string"), beyond=0.625)
    text = table(runs)
    cells = row(text, "parity_check")
    assert cells["StackTrans"] == "**1.00** / 0.97 (3)", "at the paper's two decimals"
    assert cells["StackTrans depth"] == "0.50↓ / 0.50 (1)"
    assert cells["paper of StackTrans depth"] == "1.00"
    assert re.fullmatch(r"missing \[\d\]", cells["LSTM"])
    assert (cells["paper of LSTM"], cells["paper of StackAttn"]) == ("1.00", ABSENT)
    assert row(text, "odds_first")["LSTM"] == "**0.60** / 0.57 (3)"
    assert row(text, "duplicate_string")["Transformer"] == "0.62 / 0.62 (1)", "the paper prints none"
    order = [line.split()[1] for line in text.splitlines() if line.startswith(("| even_", "| stack_m", "| missing_d"))]
    assert order == ["even_pairs", "stack_manipulation", "missing_duplicate"]
    assert text.index("*regular*") < text.index("*deterministic context-free*") < text.index("*context-sensitive*")
    (recipe,) = [line for line in text.splitlines() if line.startswith("| parity_check ") and "| time" in line]
    assert [cell.strip() for cell in recipe.split("|")][2:6] == ["time", "top", "identity", "0.001"]
    assert "| 24 | none (1..40) | 10,000 | 0, 1, 2 | 1.000 " in re.sub(r" +", " ", recipe)


def test_the_score_is_over_the_range_asked_for(runs):
    finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=0.5, up_to_100=0.9)
    near = row(table(runs, NEAR), "even_pairs")["LSTM"]
    assert near == "0.90↓ / 0.90 (1)"
    assert "over strings of length 41..100 (every length, 512 strings of each). Bold" in table(runs, NEAR)
    whole = (60 * 0.9 + 400 * 0.5) / 460
    assert row(table(runs), "even_pairs")["LSTM"] == f"{whole:.2f}↓ / {whole:.2f} (1)"


def test_missing_cells_name_the_command_that_fills_them(runs):
    finish(write_run(runs / "a", "LSTM", "parity_check"), beyond=0.5)
    for task in TASKS:
        if task != "cycle_navigation":
            finish(write_run(runs / f"s-{task}", "StackTrans", task), beyond=0.5)
    text = table(runs)
    number = re.search(r"\[(\d)\]", row(text, "cycle_navigation")["StackTrans"])[1]
    fit = "for seed in 0 1 2; do python -m stackexp fit --config formal"
    assert f"\n{number}. `{fit}/stacktrans/cycle_navigation seed=$seed; done`\n" in text
    loop = next(
        line for line in text.splitlines() if f"; do {fit}/lstm data.task=$task seed=$seed; done; done`" in line
    )
    assert "even_pairs" in loop
    assert "parity_check" not in loop
    for config in ("stack_rnn", "stack_attention", "transformer", "stacktrans-depth"):
        assert f"{fit}/{config} data.task=$task seed=$seed; done; done`" in text


def test_the_commands_are_the_trials_of_the_shipped_table(runs):
    """bucket_sort's attention is trained without positions: all that the sweep changes is in the command."""
    finish(write_run(runs / "a", "LSTM", "parity_check"), beyond=0.5)
    text, fit = table(runs), "python -m stackexp fit --config formal"
    for config in ("stack_attention", "transformer", "stacktrans-depth"):
        assert f"{fit}/{config} data.task=bucket_sort model.positional=none seed=$seed; done`" in text
    told = set()
    for line in re.findall(r"^\d+\. `(.*)`$", text, re.MULTILINE):
        loops = {name: values.split() for name, values in re.findall(r"for (\w+) in ([^;]*); do ", line)}
        command = re.search(r"fit --config (.*?)(; done)+$", line)[1]
        for task, seed in itertools.product(loops.get("task", [""]), loops["seed"]):
            config, *overrides = command.replace("$task", task).replace("$seed", seed).split()
            told.add((config, *sorted(x for x in overrides if not config.endswith(x.removeprefix("data.task=")))))
    trials = set()
    for _, values in expand(load_sweep("formal_table").config):
        config = values.pop("config")
        spelled = (f"{key}={value}" for key, value in values.items() if key != "data.task" or config.count("/") == 1)
        trials.add((config, *sorted(spelled)))
    assert trials - told == {("formal/lstm", "data.task=parity_check", f"seed={seed}") for seed in range(3)}
    assert told < trials


def test_recipes_are_not_mixed_and_are_chosen_on_the_validation(runs):
    """Not by the score; what was not taken is told with what it differs in."""
    for seed in range(2):
        finish(write_run(runs / f"a{seed}", "StackTrans", "odds_first", seed=seed), beyond=0.6, validation=0.9)
        other = write_run(runs / f"b{seed}", "StackTrans", "odds_first", "data.curriculum_steps=1500", seed=seed)
        finish(other, beyond=0.8, validation=0.8 + 0.15 * seed)
    text = table(runs)
    assert row(text, "odds_first")["StackTrans"] == "**0.60** / 0.60 (2)"
    assert (
        "- StackTrans, odds_first: recipe not taken: `data.curriculum_steps=1500` "
        "(2 seeds, validation accuracy 0.875, against 0.9; runs/formal_table/b0)"
    ) in text
    finish(runs / "b0", beyond=0.8, validation=0.86)
    text = table(runs)
    assert row(text, "odds_first")["StackTrans"] == "**0.80** / 0.80 (2)"
    assert "4 to 40 in 1,500 steps" in text
    assert "recipe not taken: `data.curriculum_steps=0`" in text


def test_a_recipe_of_three_seeds_goes_before_one_of_a_better_validation(runs):
    finish(write_run(runs / "a", "LSTM", "odds_first", "optimizer.lr=0.01"), beyond=0.9, validation=1.0)
    for seed in range(3):
        finish(write_run(runs / f"b{seed}", "LSTM", "odds_first", seed=seed), beyond=0.5, validation=0.8)
    assert row(table(runs), "odds_first")["LSTM"] == "0.50↓ / 0.50 (3)"
    for seed in (1, 2):  # three are enough: a fourth counts for less than the validation
        other = write_run(runs / f"a{seed}", "LSTM", "odds_first", "optimizer.lr=0.01", seed=seed)
        finish(other, beyond=0.9, validation=1.0)
    finish(write_run(runs / "b3", "LSTM", "odds_first", seed=3), beyond=0.5, validation=0.8)
    assert row(table(runs), "odds_first")["LSTM"] == "**0.90** / 0.90 (3)"


def test_of_recipes_of_the_same_validation_accuracy_the_one_of_the_lower_loss_is_taken(runs):
    for seed in range(2):
        finish(write_run(runs / f"a{seed}", "LSTM", "odds_first", seed=seed), beyond=0.9, loss=0.02)
        finish(
            write_run(runs / f"b{seed}", "LSTM", "odds_first", "optimizer.lr=0.01", seed=seed), beyond=0.5, loss=0.001
        )
    text = table(runs)
    assert row(text, "odds_first")["LSTM"] == "0.50↓ / 0.50 (2)"
    assert "(2 seeds, validation loss 0.02, against 0.001; runs/formal_table/a0)" in text


def test_of_recipes_of_the_same_validation_the_one_of_more_seeds_is_taken(runs):
    finish(write_run(runs / "a", "LSTM", "odds_first", "optimizer.lr=0.01"), beyond=0.9)
    for seed in range(2):
        finish(write_run(runs / f"b{seed}", "LSTM", "odds_first", seed=seed), beyond=0.5)
    assert row(table(runs), "odds_first")["LSTM"] == "0.50↓ / 0.50 (2)"


def test_runs_that_differ_in_where_and_how_long_they_are_tested_are_of_one_recipe(runs):
    finish(write_run(runs / "a", "LSTM", "odds_first"), beyond=0.5)
    other = (
        "data.eval_length_stride=9",
        "beside={x: [seed=1]}",
        "trainer.accelerator=cpu",
        "trainer.checkpoint_interval=7",
        "name=x",
    )
    finish(write_run(runs / "b", "LSTM", "odds_first", *other, seed=1), beyond=0.7, stride=9, sequences=64)
    (old,) = [write_run(runs / "c", "LSTM", "odds_first", seed=2)]
    finish(old, beyond=0.6)
    text = (old / "config.yaml").read_text()
    (old / "config.yaml").write_text(text.replace("  z_loss: 0.0\n", "").replace("  spike_threshold: 6.0\n", ""))
    assert text != (old / "config.yaml").read_text(), "made before these options were there"
    text = table(runs)
    assert row(text, "odds_first")["LSTM"] == "**0.70** / 0.60 (3)†"
    assert "- † tested less than others: one length in 9, 64 strings of each (LSTM: odds_first)" in text


def test_a_seed_counts_once(runs):
    for name, score in {"a": 0.9, "b": 0.5}.items():
        finish(write_run(runs / name, "LSTM", "odds_first"), beyond=score)
    text = table(runs)
    assert row(text, "odds_first")["LSTM"] == "0.50↓ / 0.50 (1)", "the later, not the better"
    assert "- LSTM, odds_first: seeds that are there already, not counted: runs/formal_table/a (seed 0)" in text


def test_the_more_thorough_of_result_and_test_is_taken(runs):
    run = finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=0.5, stride=9, sequences=64)
    finish(run, beyond=0.75, file="test.json", stride=9, sequences=32)
    assert row(table(runs), "even_pairs")["LSTM"].startswith("0.50")
    finish(run, beyond=0.75, file="test.json")
    assert row(table(runs), "even_pairs")["LSTM"].startswith("0.75")
    finish(run, beyond=0.6, file="test.json", longest=200)
    assert row(table(runs), "even_pairs")["LSTM"].startswith("0.50"), "it does not reach 500"


def test_a_test_of_something_else_is_not_taken(runs):
    """Another checkpoint, or overrides that change the model or the task."""
    changes = ({"step": 5000}, {"overrides": ["--data.task", "odds_first"]}, {"overrides": ["model.memory=null"]})
    for seed, change in enumerate([*changes, {"step": 10_000, "overrides": ["data.eval_sequences=1024"]}]):
        run = finish(write_run(runs / f"a{seed}", "StackTrans", "even_pairs", seed=seed), beyond=0.5)
        finish(run, beyond=0.9, file="test.json", sequences=1024)
        path = run / "test.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    text = table(runs)
    assert row(text, "even_pairs")["StackTrans"] == "0.90↓ / 0.50 (4)†"
    names = ", ".join(f"{runs}/a{seed}/test.json" for seed in range(3))
    assert f"- left out, of another checkpoint, or with overrides that change more than the test: {names}\n" in text


def test_what_is_unfinished_is_marked_and_gone_on_with(runs):
    finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=1.0)
    line = {"step": 300, "tokens": 1, "loss/train": 2.0}
    for model, seed in (("LSTM", 1), ("StackRNN", 0)):
        begun = write_run(runs / f"{model}{seed}", model, "even_pairs", seed=seed)
        (begun / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    near = finish(write_run(runs / "near", "Transformer", "even_pairs"), beyond=0.5, longest=100)
    text = table(runs)
    cells = row(text, "even_pairs")
    assert re.fullmatch(r"\*\*1\.00\*\* / 1\.00 \(1\)‡ \[\d\]", cells["LSTM"])
    assert re.fullmatch(r"missing‡ \[\d\]", cells["StackRNN"])
    assert "LSTM even_pairs: runs/formal_table/LSTM1 (at step 300 of 10,000)" in text
    again = "`python -m stackexp fit --config runs/formal_table/LSTM1/config.yaml --run runs/formal_table/LSTM1`"
    assert again in text
    assert f"`python -m stackexp test --run {near} data.eval_max_length=500`" in text
    finish(runs / "StackRNN0", beyond=0.5, file="test.json")
    assert row(table(runs), "even_pairs")["StackRNN"] == "0.50↓ / 0.50 (1)‡", "tested before its end"


def test_a_sweep_fills_its_own_cells(runs, tmp_path):
    base = tmp_path / "lstm.yaml"
    base.write_text(
        "data: {kind: formal_language}\nmodel: {kind: lstm, output_vocab_size: 2}\nschedule: {warmup_steps: 0}\n"
    )
    mine = runs.parent / "mine"
    mine.mkdir(parents=True)
    sweep = {"config": str(base), "grid": {"data.task": ["even_pairs", "parity_check"]}, "seeds": [0, 1, 2]}
    (mine / "sweep.yaml").write_text(json.dumps(sweep))
    finish(write_run(mine / "a-1", "LSTM", "even_pairs"), beyond=0.5)
    for folder, name in ((mine, "runs/mine"), (runs, "formal_table")):  # of a shipped sweep, in its place
        text = table(folder if folder.exists() else mine.rename(runs))
        number = re.search(r"\[(\d+)\]", row(text, "parity_check")["LSTM"])[1]
        assert f"\n{number}. `python -m stackexp sweep run {name}`\n" in text
        assert f"- {folder}: 5 of 6 trials are not done: `python -m stackexp sweep run {name}`" in text
        assert "parity_check" not in next(line for line in text.splitlines() if "formal/lstm" in line)


def test_a_recipe_is_named_by_the_shipped_config_and_what_was_changed(tmp_path, monkeypatch):
    """formal/NAME, with overrides that make the run again; the folder where nearly all is other."""
    lines = ["name: x", "data: {kind: formal_language}", "model: {kind: lstm, output_vocab_size: 2, hidden_size: 32}"]
    (tmp_path / "lstm.yaml").write_text("\n".join([*lines, "schedule: {warmup_steps: 0}"]))
    monkeypatch.setitem(formal_recipes.SHIPPED, "LSTM", str(tmp_path / "lstm.yaml"))
    changes = ["model.hidden_size=32", "optimizer.lr=0.01", "trainer.gradient_clip_val=null"]
    others = ["model.num_layers=1", "optimizer.beta1=0.8", "optimizer.eps=1e-8", "data.max_length=20"]
    for number in range(3):
        chosen = [changes[:1], changes, [*changes, *others]][number]
        finish(write_run(tmp_path / f"r{number}", "LSTM", "bucket_sort", *chosen), beyond=0.5)
    names = {run.path.name: name_of(run) for run in collect([tmp_path], FULL).runs}
    assert names["r0"] == str(tmp_path / "lstm.yaml"), "the sizes of the task are no changes"
    assert names["r1"] == f"{tmp_path}/lstm.yaml optimizer.lr=0.01 trainer.gradient_clip_val=null"
    assert names["r2"] == f"{tmp_path}/r2/config.yaml"


def test_recipes_that_tasks_share_are_told_once(runs):
    for task in TASKS:
        changes = ["optimizer.lr=0.01"] if task == "parity_check" else []
        finish(write_run(runs / f"t-{task}", "Transformer", task, *changes), beyond=0.5)
        finish(write_run(runs / f"d-{task}", "StackTrans depth", task), beyond=0.5)
    text = table(runs)
    assert "Steps of training: Transformer 10,000; StackTrans depth 10,000.\n" in text
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    assert [line.split("`")[0] for line in lines] == ["- Transformer: "] * 2 + ["- StackTrans depth: "]
    assert lines[1].endswith(
        ", 10,000 steps, lr 0.01, curriculum: none (1..40), positional none, causal (parity_check)"
    )
    assert lines[2].endswith("curriculum: none (1..40), read global, lambda 0.001, S 24 (all tasks)")


def test_what_is_no_run_of_a_formal_language_is_told(runs, tmp_path, capsys):
    text = write_run(runs / "one", "LSTM", "even_pairs")
    with pytest.raises(RunError, match=r"no finished run of a formal language \(1 of formal languages unfinished or"):
        collect([runs], FULL)
    finish(text, beyond=0.5)
    other = runs.parent / "quickstart" / "id"
    other.mkdir(parents=True)
    (other / "config.yaml").write_text("model: {kind: transformer}\ndata: {kind: stdlib}\n")
    queue = finish(write_run(runs / "q", "StackTrans", "even_pairs", "model.memory.discipline=queue"), beyond=1.0)
    report = markdown(collect([runs.parent], FULL), [runs.parent])
    assert f"- left out, no formal language: {other}\n" in report
    assert f"- left out, a model that the table has no column for: {queue}\n" in report
    assert main(["report", "formal", str(tmp_path / "nothing")]) == 1
    error = f"error: {tmp_path}/nothing: no run folder there (no config.yaml in it or below); give runs/<name>/<id>, "
    assert capsys.readouterr().err == f"{error}or a folder of run folders such as runs/formal_table\n"
    assert find([runs, runs / "one", runs.resolve()]) == [runs / "one", runs / "q"], "each once"


def test_a_broken_result_is_told_in_one_line(runs):
    run = write_run(runs / "a", "LSTM", "even_pairs")
    (run / "result.json").write_text('{"steps": 3}')
    with pytest.raises(
        RunError, match=r"a/result.json: has no 'accuracy'; test the run again: python -m stackexp test --run"
    ):
        collect([runs], FULL)
    (run / "result.json").write_text("{")
    with pytest.raises(RunError, match=r"a/result.json: not valid JSON"):
        collect([runs], FULL)


@pytest.fixture
def report(runs) -> Report:
    """Every model on three tasks, two seeds; one name wants escaping."""
    for task in ("even_pairs", "reverse_string", "bucket_sort"):
        for number, model in enumerate(MODELS):
            for seed in range(2):
                run = write_run(runs / f"{model}_{task}&50%#{seed}", model, task, seed=seed)
                stride = 9 if (model, task, seed) == ("StackRNN", "even_pairs", 1) else 1
                finish(run, beyond=0.4 + 0.1 * number + 0.05 * seed, up_to_100=0.95, stride=stride)
    (runs / "begun~^").parent.mkdir(exist_ok=True)
    write_run(runs / "begun~^{x}", "LSTM", "even_pairs", seed=5)
    return collect([runs], FULL)


def test_latex_is_escaped_and_compiles(report, tmp_path):
    text = latex(report, [])
    assert r"even\_pairs & 0.52$\downarrow$ / 0.49 (2)$\ddagger$ [1] & 1.00 &" in text
    assert r"& \textbf{0.78} / 0.75 (2) & 0.49 &" in text
    assert "% [1] missing cells: python -m stackexp fit --config 'runs/formal_table/begun~^{x}'/config.yaml" in text
    assert escape(r"50% a_b `x/y_z` \ ~^ ↓") == (
        r"50\% a\_b \texttt{x/\allowbreak{}y\_\allowbreak{}z} \textbackslash{} "
        r"\textasciitilde{}\textasciicircum{} $\downarrow$"
    )
    lines = [line for line in text.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
    assert {line.replace(r"\&", "").count("&") for line in lines} == {len(header()) - 1, 10}, "all cells are there"
    if not shutil.which("pdflatex"):
        pytest.skip("pdflatex is not installed; the text was checked, but not compiled")
    (tmp_path / "table.tex").write_text(text, encoding="utf-8")
    document = r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}\input{table}\end{document}"
    (tmp_path / "main.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "main.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]


def test_figures_show_every_model_once(report, tmp_path):
    from stackexp.reports.formal.figures import _curve, _legend

    assert _legend()[1] == [*COLUMNS, "median of the seeds", "the paper's figure"]
    lengths, low, median, high = _curve(report.cells["even_pairs", "StackRNN"])  # the second seed: one in 9
    assert (lengths[0], lengths[-1]) == (5, 500)
    assert lengths[1] == 14, "where all seeds were tested"
    assert (low[-1], high[-1]) == (pytest.approx(0.5), pytest.approx(0.55))
    assert median[-1] == pytest.approx(0.525)
    for name, draw in {"bars.png": draw_bars, "curves.png": draw_curves}.items():
        draw(report, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_verb_writes_what_it_is_asked_for(report, runs, tmp_path, capsys):
    files = ["table.md", "table.tex", "runs.csv"]
    assert main(["report", "formal", str(runs), "--score", "41_200", *(f"--out={name}" for name in files)]) == 0
    assert capsys.readouterr().out.split() == files
    assert (tmp_path / "table.md").read_text().startswith("| task ")
    assert "strings of length 41..200" in (tmp_path / "table.md").read_text()
    lines = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert len(lines) == 3 * 6 * 2 + 1
    assert {line["in_table"] for line in lines} == {"True", "False"}
    chosen = next(line for line in lines if line["model"] == "StackTrans" and line["task"] == "bucket_sort")
    assert (chosen["seed"], chosen["axis"], chosen["read"], chosen["paper"]) == ("0", "time", "top", "0.89")
    assert (chosen["positional"], chosen["attention_window"], chosen["action_noise"]) == ("none", "", "0.0")
    assert (chosen["num_layers"], chosen["attention_log_base"]) == ("5", "")
    assert float(chosen["score_41_100"]) == pytest.approx(0.95)
    assert float(chosen["score_41_500"]) == pytest.approx((60 * 0.95 + 400 * 0.8) / 460)
    assert float(chosen["score_41_200"]) == pytest.approx((60 * 0.95 + 100 * 0.8) / 160)
    assert chosen["run"] == str(runs / "StackTrans_bucket_sort&50%#0")
    begun = next(line for line in lines if line["finished"] == "False")
    assert (begun["score_41_500"], begun["steps"], begun["max_steps"]) == ("", "0", "10000")
    assert main(["report", "formal", str(runs)]) == 0
    assert "41..500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["formal", "x", "--out", "table.txt"],
            "--out: expected a file name ending in .md, .tex, .csv, found table.txt",
        ),
        (["formal", "x", "--score", "500"], "--score: expected a range of lengths such as 41_500"),
        (["formal", "x", "--score", "100_41"], "--score: expected a range"),
        (
            ["formal", "x", "--figure", "a.gif"],
            "--figure: expected a file name ending in .png, .pdf",
        ),
        (["fromal", "x"], "unknown verb 'fromal'; did you mean 'formal'?"),
        (["formal"], "the following arguments are required: RUNS"),
    ],
)
def test_mistakes_are_answered_in_one_line(argv, message, capsys):
    assert main(["report", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
