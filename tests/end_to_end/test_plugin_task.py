"""An out-of-tree task: the files of docs/formal.md are trained, tested, swept and reported as a user would."""

import json
import re
from pathlib import Path

import pytest
from forks import Forks

from stackexp.runs import RunFolder

PAGE = Path(__file__).parents[2] / "docs" / "formal.md"
TINY = ("model.hidden_size=16", "model.num_layers=1", "data.batch_size=4")
TINY += ("data.eval_sequences=4", "data.validation_sequences=2", "trainer.max_steps=3", "schedule.warmup_steps=0")
TINY += ("trainer.val_check_interval=3", "trainer.checkpoint_interval=3", "trainer.accelerator=cpu")


def read_block(language: str) -> str:
    (block,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return block


@pytest.mark.process
def test_task_of_the_docs_is_trained_tested_swept_and_reported(forks, tmp_path, monkeypatch):
    outside = Forks(tmp_path / "elsewhere")
    outside.folder.mkdir()
    (tmp_path / "pyproject.toml").touch()  # the project
    (tmp_path / "dyck_depth.py").write_text(read_block("python"))
    (tmp_path / "dyck-depth.yaml").write_text(read_block("yaml").replace("stacktrans", "lstm"))
    forks.run("fit", "--config", "dyck-depth.yaml", *TINY)
    (path,) = (tmp_path / "runs" / "dyck-depth").iterdir()
    result = json.loads((path / "result.json").read_text())
    assert RunFolder(path).is_finished
    assert (result["task"], {"score_21_100"} & result.keys()) == ("dyck_depth", {"score_21_100"})
    assert list(map(int, result["accuracy"])) == [21, 48, 75, 100]
    assert "length   30" in forks.run("validate", "--run", path), "the task's own validation lengths"
    forks.run("test", "--run", path, "data.eval_length_stride=20")

    sweep = {"config": "../dyck-depth.yaml", "grid": {"data.max_length": [8]}, "seeds": [1]}
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "depth.yaml").write_text(json.dumps(sweep))
    forks.run("sweep", "run", "sweeps/depth.yaml", *TINY)

    report = forks.run("report", "formal", tmp_path / "runs")
    assert "not loaded" not in report
    assert report.index("outside the paper's table") < report.index("counting") < report.index("dyck_depth (21 to 100)")

    (tmp_path / "pyproject.toml").unlink()
    monkeypatch.setenv("STACKEXP_TRUST_PLUGINS", "0")
    report = outside.run("report", "formal", tmp_path / "runs")
    assert "tasks of plugins that are not loaded" in report
    assert "is outside the project" in report
    assert "dyck_depth" in report
