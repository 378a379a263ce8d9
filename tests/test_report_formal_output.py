"""The output of the formal-language report: commands, notes, LaTeX, CSV, figures and errors."""

import csv
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from formal_runs import ALL_LENGTHS, MODELS, finish, format_report, read_row, write_run

from stackexp.cli import main
from stackexp.errors import RunError
from stackexp.reports.formal import recipes
from stackexp.reports.formal.collect import Report, collect_report
from stackexp.reports.formal.export import escape_latex, format_latex
from stackexp.reports.formal.figures import _build_curve, _build_legend, draw_bars, draw_curves
from stackexp.reports.formal.paper import COLUMNS
from stackexp.reports.formal.recipes import name_recipe
from stackexp.reports.formal.tables import build_header
from stackexp.reports.summaries import find_runs
from stackexp.tasks import TASKS


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """The path runs/formal_table in an empty working directory; shipped recipes are not composed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "_compose_recipe", lambda name: None)
    return Path("runs/formal_table")


def test_missing_cells_are_filled_by_the_shipped_sweep(runs):
    finish(write_run(runs / "a", "LSTM", "parity_check"), beyond=0.5)
    text = format_report(runs)
    assert read_row(text, "parity_check")["StackTrans"] == "missing"
    (line,) = [line for line in text.splitlines() if line.startswith("- `python -m stackexp sweep run formal_table`")]
    assert "StackRNN: all tasks; " in line
    assert "parity_check" not in line


def test_unfinished_runs_are_marked_and_resumed(runs):
    finish(write_run(runs / "a", "LSTM", "even_pairs"), beyond=1.0)
    line = {"step": 300, "tokens": 1, "train/loss": 2.0}
    for model, seed in (("LSTM", 1), ("StackRNN", 0)):
        started = write_run(runs / f"{model}{seed}", model, "even_pairs", seed=seed)
        (started / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    near = finish(write_run(runs / "near", "Transformer", "even_pairs"), beyond=0.5, longest=100)
    text = format_report(runs)
    assert read_row(text, "even_pairs")["LSTM"] == "**1.00** / 1.00 (1)‡"
    assert read_row(text, "even_pairs")["StackRNN"] == "missing‡"
    assert "LSTM even_pairs: runs/formal_table/LSTM1 (at step 300 of 10,000)" in text
    command = "python -m stackexp fit --run runs/formal_table/LSTM1"
    assert f"- `{command}` (LSTM: even_pairs)\n" in text
    assert f"`python -m stackexp test --run {near} data.eval_max_length=500`" in text
    finish(runs / "StackRNN0", beyond=0.5, file="test.json")
    assert read_row(format_report(runs), "even_pairs")["StackRNN"] == "0.50↓ / 0.50 (1)‡", "tested before its end"


def test_missing_cells_of_a_sweep_are_filled_by_it(runs, tmp_path):
    base = tmp_path / "lstm.yaml"
    base.write_text(
        "data: {kind: formal_language}\nmodel: {kind: lstm, output_vocab_size: 2}\nschedule: {warmup_steps: 0}\n"
    )
    mine = runs.parent / "mine"
    mine.mkdir(parents=True)
    sweep = {"config": str(base), "grid": {"data.task": ["even_pairs", "parity_check"]}, "seeds": [0, 1, 2]}
    (mine / "sweep.yaml").write_text(json.dumps(sweep))
    finish(write_run(mine / "a-1", "LSTM", "even_pairs"), beyond=0.5)
    for folder, command in ((mine, "sweep run runs/mine"), (runs, "sweep run formal_table")):
        text = format_report(folder if folder.exists() else mine.rename(runs))
        line = next(line for line in text.splitlines() if line.startswith(f"- `python -m stackexp {command}` ("))
        assert "LSTM: parity_check" in line
        assert f"- {folder}: 5 of 6 trials are not finished: `python -m stackexp {command}`" in text


def test_recipe_is_named_by_the_shipped_config_and_its_overrides(tmp_path, monkeypatch):
    lines = ["name: x", "data: {kind: formal_language}", "model: {kind: lstm, output_vocab_size: 2, hidden_size: 32}"]
    (tmp_path / "lstm.yaml").write_text("\n".join([*lines, "schedule: {warmup_steps: 0}"]))
    monkeypatch.setitem(recipes.SHIPPED, "LSTM", str(tmp_path / "lstm.yaml"))
    few = ["model.hidden_size=32", "optimizer.lr=0.01", "trainer.gradient_clip_val=null"]
    many = [*few, "model.num_layers=1", "optimizer.beta1=0.8", "optimizer.eps=1e-8", "data.max_length=20"]
    for number, overrides in enumerate([few[:1], few, many]):
        finish(write_run(tmp_path / f"r{number}", "LSTM", "bucket_sort", *overrides), beyond=0.5)
    names = {run.path.name: name_recipe(run) for run in collect_report([tmp_path], ALL_LENGTHS).runs}
    assert names["r0"] == str(tmp_path / "lstm.yaml"), "the sizes of the task are no differences"
    assert names["r1"] == f"{tmp_path}/lstm.yaml optimizer.lr=0.01 trainer.gradient_clip_val=null"
    assert names["r2"] == f"{tmp_path}/r2/config.yaml"


def test_recipes_shared_by_tasks_are_listed_once(runs):
    for task in TASKS:
        changes = ["optimizer.lr=0.01"] if task == "parity_check" else []
        finish(write_run(runs / f"t-{task}", "Transformer", task, *changes), beyond=0.5)
        finish(write_run(runs / f"d-{task}", "StackTrans depth", task), beyond=0.5)
    text = format_report(runs)
    assert "Training steps: Transformer 10,000; StackTrans depth 10,000.\n" in text
    lines = text.split("**Other models**\n\n")[1].split("\n\n")[0].splitlines()
    assert [line.split("`")[0] for line in lines] == ["- Transformer: "] * 2 + ["- StackTrans depth: "]
    expected = ", 10,000 steps, lr 0.01, curriculum: none (1..40), positional none, causal (parity_check)"
    assert lines[1].endswith(expected)
    assert lines[2].endswith("curriculum: none (1..40), read global, lambda 0.001, S 24 (all tasks)")


def test_other_folders_are_skipped_with_a_note(runs, tmp_path, capsys):
    run = write_run(runs / "one", "LSTM", "even_pairs")
    with pytest.raises(RunError, match=r"no finished run on a formal language \(1 runs are unfinished or not tested"):
        collect_report([runs], ALL_LENGTHS)
    finish(run, beyond=0.5)
    other = runs.parent / "quickstart" / "id"
    other.mkdir(parents=True)
    (other / ".stackexp").touch()
    (other / "config.yaml").write_text("model: {kind: transformer}\ndata: {kind: stdlib}\n")
    queue = finish(write_run(runs / "q", "StackTrans", "even_pairs", "model.memory.discipline=queue"), beyond=1.0)
    text = format_report(runs.parent)
    assert f"- skipped, not a formal language: {other}\n" in text
    assert f"- skipped, the table has no column for this model: {queue}\n" in text
    found = find_runs([runs, runs / "one", runs.resolve()])
    assert [run.path for run in found] == [runs / "one", runs / "q"], "each once"
    assert main(["report", "formal", str(tmp_path / "nothing")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/nothing: no run folder in it or below; give runs/")
    assert error.count("\n") == 1


@pytest.fixture
def report(runs) -> Report:
    """Every model on three tasks with two seeds, and a name that LaTeX must escape."""
    for task in ("even_pairs", "reverse_string", "bucket_sort"):
        for number, model in enumerate(MODELS):
            for seed in range(2):
                run = write_run(runs / f"{model}_{task}&50%#{seed}", model, task, seed=seed)
                stride = 9 if (model, task, seed) == ("StackRNN", "even_pairs", 1) else 1
                finish(run, beyond=0.4 + 0.1 * number + 0.05 * seed, up_to_100=0.95, stride=stride)
    write_run(runs / "begun~^{x}", "LSTM", "even_pairs", seed=5)
    return collect_report([runs], ALL_LENGTHS)


def test_latex_is_escaped_and_compiles(report, tmp_path):
    text = format_latex(report)
    collapsed = " ".join(text.split())
    assert r"even\_pairs & 0.52$\downarrow$ / 0.49 (2)$\ddagger$ & 1.00 &" in collapsed
    assert r"& \textbf{0.78} / 0.75 (2) & 0.49 &" in collapsed
    assert "% missing cells: `python -m stackexp fit --run 'runs/formal_table/begun~^{x}'`" in text
    assert escape_latex(r"50% a_b `x/y_z` \ ~^ ↓") == (
        r"50\% a\_b \texttt{x/\allowbreak{}y\_\allowbreak{}z} \textbackslash{} "
        r"\textasciitilde{}\textasciicircum{} $\downarrow$"
    )
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.replace(r"\&", "").count("&") for line in lines} == {len(build_header()) - 1, 10}
    if not shutil.which("pdflatex"):
        pytest.skip("pdflatex is not installed; the text was checked, but not compiled")
    (tmp_path / "table.tex").write_text(text, encoding="utf-8")
    document = r"\documentclass{article}\usepackage{booktabs,graphicx}\begin{document}\input{table}\end{document}"
    (tmp_path / "main.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "main.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]


def test_figures_show_every_model(report, tmp_path):
    assert _build_legend()[1] == [*COLUMNS, "median over seeds", "paper", "uniform guess"]
    lengths, low, median, high = _build_curve(report.cells["even_pairs", "StackRNN"])  # the second seed: one in 9
    assert (lengths[0], lengths[1], lengths[-1]) == (5, 14, 500), "where all seeds were tested"
    assert (low[-1], median[-1], high[-1]) == (pytest.approx(0.5), pytest.approx(0.525), pytest.approx(0.55))
    for name, draw in {"bars.png": draw_bars, "curves.png": draw_curves}.items():
        draw(report, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_verb_writes_the_requested_files(report, runs, tmp_path, capsys):
    files = ["table.md", "table.tex", "runs.csv"]
    assert main(["report", "formal", str(runs), "--score", "41_200", *(f"--out={name}" for name in files)]) == 0
    assert capsys.readouterr().out.split() == files
    assert (tmp_path / "table.md").read_text().startswith("| task ")
    assert "on lengths 41..200" in (tmp_path / "table.md").read_text()
    lines = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert len(lines) == 3 * 6 * 2 + 1
    assert {line["in_table"] for line in lines} == {"True", "False"}
    line = next(line for line in lines if line["model"] == "StackTrans" and line["task"] == "bucket_sort")
    assert (line["seed"], line["axis"], line["read"], line["paper"]) == ("0", "time", "top", "0.89")
    assert (line["positional"], line["attention_window"], line["action_noise"]) == ("none", "", "0.0")
    assert (line["num_layers"], line["attention_log_base"]) == ("5", "")
    assert float(line["score_41_100"]) == pytest.approx(0.95)
    assert float(line["score_41_500"]) == pytest.approx((60 * 0.95 + 400 * 0.8) / 460)
    assert float(line["score_41_200"]) == pytest.approx((60 * 0.95 + 100 * 0.8) / 160)
    assert line["run"] == str(runs / "StackTrans_bucket_sort&50%#0")
    started = next(line for line in lines if line["finished"] == "False")
    assert (started["score_41_500"], started["steps"], started["max_steps"]) == ("", "0", "10000")
    assert main(["report", "formal", str(runs)]) == 0
    assert "41..500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["formal", "x", "--out", "table.txt"], "table.txt: expected a file name ending in .md, .tex, .csv"),
        (["formal", "x", "--score", "500"], "--score: expected a range of lengths such as 41_500, found 500"),
        (["formal", "x", "--score", "100_41"], "--score: expected a range of lengths"),
        (["formal", "x", "--figure", "a.gif"], "a.gif: expected a file name ending in .png, .pdf, .svg"),
        (["fromal", "x"], "unknown verb 'fromal'; did you mean 'formal'?"),
        (["formal"], "the following arguments are required: RUNS"),
    ],
)
def test_errors_are_one_line(argv, message, capsys):
    assert main(["report", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
