"""`fit --config formal/quick` runs a sweep of two models and prints their scores in one table."""

import json

import pytest

from stackexp.cli import main
from stackexp.sweeps.quick import is_sweep
from stackexp.sweeps.sweep import load_sweep


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["formal/quick"], True), (["quickstart"], False), (["ablation"], False), (["formal/quick", "mine.yaml"], False)],
)
def test_only_a_config_with_a_sweep_of_its_name_runs_as_a_sweep(names, expected):
    assert is_sweep(names) == expected


def test_finished_sweep_prints_the_scores_of_both_models_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    stacktrans, transformer = load_sweep("formal/quick", ["seed=3"]).trials
    assert stacktrans.folder.path.parent.as_posix() == "runs/formal/quick"
    for trial, score in ((stacktrans, 1.0), (transformer, 0.5)):
        trial.folder.path.mkdir(parents=True)
        model = trial.name.partition("-")[0]
        result = {
            "model": model,
            "score_41_500": score,
            "accuracy": {"40": 1.0, "41": score, "100": score, "500": score},
        }
        trial.folder.result.write_text(json.dumps(result))
    assert main(["fit", "--config", "formal/quick", "seed=3"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith(("stacktrans ", "transformer "))]
    assert [row[:3] for row in rows] == [["stacktrans", "1.000", "1.000"], ["transformer", "0.500", "0.500"]]
    assert printed.count("o stacktrans   x transformer") == 1
    assert load_sweep("runs/formal/quick").trials == [stacktrans, transformer]
