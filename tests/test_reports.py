"""Tables, and run comparison from run folders."""

import json
import shutil
from pathlib import Path

import language_runs
import pytest
from formal_runs import write_run

from stackexp.errors import RunError
from stackexp.evaluation.scores import format_scores
from stackexp.files import append_json_line
from stackexp.frame import name_runs, read_rows, read_run
from stackexp.reports.compare import build_comparison, draw_losses
from stackexp.reports.report import format_report, save_figure
from stackexp.reports.training_data import check_same_data
from stackexp.runs import RunFolder
from stackexp.tables import RULE, format_table


def build_scores(loss: float) -> dict[str, float]:
    means = {"loss": loss, "perplexity": 2.0 * loss, "bits_per_byte": loss / 2}
    return means | {"instances": 10, "tokens": 1000, "bytes": 3000, "loss_low": loss - 0.1, "loss_high": loss + 0.1}


def test_score_table_ends_with_the_average():
    lines = format_scores({"left": build_scores(1), "right": build_scores(3)}).splitlines()
    columns = ["set", "chunks", "tokens", "loss", "95", "%", "interval", "perplexity", "bits/byte"]
    assert lines[0].split() == columns
    assert lines[2].split() == ["left", "10", "1,000", "1.0000", "0.9000-1.1000", "2.00", "0.5000"]
    assert lines[-1].split() == ["average", "of", "sets", "20", "2,000", "2.0000", "\u2013", "4.00", "1.0000"]
    assert len({len(line) for line in lines}) == 1, "columns are aligned"


def test_groups_have_averages_and_missing_bytes_are_a_dash():
    sets = {"v2/a": build_scores(1), "v2/b": build_scores(3)}
    del sets["v2/a"]["bits_per_byte"]
    lines = format_scores(sets).splitlines()
    assert lines[2].split()[-1] == "\u2013"
    assert lines[-2].split() == ["v2:", "means", "of", "2", "sets", "20", "2,000", "2.0000", "\u2013", "4.00", "\u2013"]
    assert lines[-1].split() == ["v2:", "exp", "of", "the", "mean", "loss", "7.39"]
    assert not any(line.startswith("average of sets") for line in lines), "it would repeat the group"
    both = format_scores(sets | {"v3/a": build_scores(2)}).splitlines()
    assert both[-1].startswith("average of sets")
    row = format_scores(sets, style="markdown").splitlines()[2]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == lines[2].split()


def test_table_aligns_columns_in_each_style():
    rows, header = [["long | name", "1"], RULE, ["x", "1000"]], ["name", "number"]
    assert format_table(rows, header=header, align="<>").splitlines() == [
        "name         number",
        "-----------  ------",
        "long | name       1",
        "-----------  ------",
        "x              1000",
    ]
    markdown = format_table(rows, header=header, align="<>", style="markdown").splitlines()
    assert markdown[1:] == ["|:-------------|-------:|", "| long \\| name |      1 |", "| x            |   1000 |"]
    latex = format_table(rows, header=header, style="latex").splitlines()
    assert [latex[0], latex[2], latex[4], latex[-1]] == [r"\toprule", r"\midrule", r"\midrule", r"\bottomrule"]
    assert latex[3] == r"long | name & 1      \\"
    assert format_table([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"


def format_comparison(runs) -> list[str]:
    """Return the lines of the Markdown table of `report compare`."""
    return format_report(build_comparison(runs, different_data=True), "markdown").splitlines()[2:]


def test_runs_are_compared_in_a_table_and_a_figure(tmp_path, invoke):
    folders = []
    bigrams = {"loss": 4.0, "perplexity": 54.6}
    for name, loss in {"one": 2, "two": 1}.items():
        folder = RunFolder(
            language_runs.write_run(tmp_path / name / f"20261127-120000-000{loss}", losses=[3, loss], data=name)
        )
        append_json_line(folder.metrics, {"step": 2, "tokens": 2048, "val/loss/average": 2.5})
        scores = {"sets": {"left": build_scores(loss)}, "average": build_scores(loss)}
        language_runs.finish(folder.path, loss, **scores, bigrams={"sets": {"left": bigrams}, "average": bigrams})
        folders.append(folder)
    runs = [folder.path for folder in folders]
    rows = format_comparison(runs)
    cells = [cell.strip() for cell in rows[2].split("|")[1:-1]]
    assert cells[:7] == ["one", "finished", "10", "10,240", "1,000", "0", "1.500"]
    assert cells[7:] == ["2.000 / 4.00", "2.000 / 4.00", "1.000"]
    assert rows[3].split()[1] == "two"
    assert [row.split("|")[1].strip() for row in rows[4:]] == ["bigram counts"], "one row for the same tokens"
    assert "4.000 / 54.60" in rows[4]
    assert len(invoke("report compare --different-data", tmp_path).splitlines()) == 7, "a folder of runs"
    error = invoke("report compare", tmp_path, expect=1)
    assert "trained on other data than" in error
    assert "report ablation" not in error
    language_runs.write_run(tmp_path / "one" / "20261127-120000-0009", data="nine", seed=1)
    line = invoke("report compare", tmp_path / "one", expect=1)
    assert "; average seeds with `report ablation`, or compare them anyway with" in line
    shutil.rmtree(tmp_path / "one" / "20261127-120000-0009")
    folders[1].result.unlink()
    found = read_rows(runs)
    cells = [cell.strip() for cell in format_comparison(runs)[3].split("|")[1:-1]]
    assert cells == ["two", "unfinished", "2", "2,048", *"\u2013\u2013", "2.000", *"\u2013\u2013\u2013"]
    trials = [Path(f"sweep/queue-seed={seed}-0123abcd") for seed in (0, 1)]
    later = runs[0].with_name("20261127-130000-0123")
    assert name_runs([*runs, later, *trials]) == [runs[0].name, "two", later.name, *(trial.name for trial in trials)]
    save_figure(draw_losses(found), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_training_data_are_compared_by_their_hashes(tmp_path):
    """Some have other intervals, or no record."""
    records = {"a": {10: "aa", 20: "bb", 30: "cc"}, "b": {20: "bb", 40: "dd"}, "none": {}, "c": {30: "ff", 40: "ee"}}
    folders = {}
    for name, hashes in records.items():
        (tmp_path / name).mkdir()
        folders[name] = {"path": str(tmp_path / name)}
        lines = [json.dumps({"step": step, "hash": value}) + "\n" for step, value in hashes.items()]
        if lines:
            (tmp_path / name / "data.jsonl").write_text("".join(lines))
    assert check_same_data([folders["a"], folders["b"]]) == []
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "data.jsonl").touch()
    (line,) = check_same_data([folders["a"], {"path": str(tmp_path / "started")}])
    assert "started: its training data are not compared; none recorded yet" in line
    (line,) = check_same_data([folders["a"], folders["none"], folders["b"]])
    assert line.startswith(f"{tmp_path}/none: its training data are not compared")
    with pytest.raises(RunError, match=r"/c: trained on other data than .*/a \(they differ at step 30\)"):
        check_same_data([folders["a"], folders["b"], folders["c"]])


def test_formal_languages_are_compared_by_their_options(tmp_path):
    def read(name, task="even_pairs", *overrides, seed=0):
        return read_run(RunFolder(write_run(tmp_path / name, "LSTM", task, *overrides, seed=seed)))

    one = read("one")
    assert check_same_data([one, read("longer", "even_pairs", "data.eval_max_length=600")]) == [], "tests may differ"
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens/data.jsonl").write_text('{"step": 10, "hash": "aa"}\n')
    for other, message in (
        (read("other", "odds_first"), "data.task is odds_first, not even_pairs"),
        (read("again", seed=1), "seed is 1, not 0"),
        ({"path": str(tmp_path / "tokens")}, "text is not generated data"),
    ):
        with pytest.raises(RunError, match=rf"trained on other data than .*/one \({message}\)"):
            check_same_data([one, other])
