"""Wrong paths and names of sets are reported in one line, before torch is imported."""

import json
import subprocess
import sys

import pytest

SHARDS = {"defaults": ["quickstart"], "data": {"kind": "shards", "path": "shards", "context_length": 256}}
NO_TORCH = """
import sys
from stackexp.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "imported torch"
sys.exit(code)
"""


@pytest.fixture
def run_without_torch(tmp_path):
    """Return a function that writes a config with these data options, runs a verb, and returns the error line."""

    def run(data: dict, *arguments: str, code: int = 1) -> str:
        config = SHARDS | {"data": SHARDS["data"] | data}
        (tmp_path / "x.yaml").write_text(json.dumps(config))
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run/config.yaml").write_text(json.dumps(config))
        command = [sys.executable, "-c", NO_TORCH, *arguments]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        [line] = result.stderr.splitlines()
        assert result.returncode == code, line
        return line

    return run


def test_missing_training_data(run_without_torch):
    message = "shards: no such folder; make one with: stackexp data prepare SOURCE --to shards --vocab-size 49152 "
    assert message in run_without_torch({}, "fit", "--config", "x.yaml")
    streams = {"path": None, "streams": {"a": {"path": "one"}, "b": {"remote": "s3://x/y"}}}
    assert "one: no such folder" in run_without_torch(streams, "fit", "--config", "x.yaml")


def test_an_unfinished_dataset(run_without_torch, tmp_path):
    (tmp_path / "shards").mkdir()
    assert "shards: holds no finished set; make one" in run_without_torch({}, "fit", "--config", "x.yaml")


def test_text_in_place_of_a_dataset(run_without_torch, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("text")
    for path, target in {"texts": "texts-prepared", "texts/a.txt": "texts/a-prepared"}.items():
        line = run_without_torch({"path": path}, "fit", "--config", "x.yaml")
        assert f"{path}: not a prepared set; prepare it with: stackexp data prepare {path} --to {target} " in line
        assert line.endswith(f"then set data.path={target}")


def test_missing_validation_sets(run_without_torch, tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/corpus.json").write_text("{}")
    sets = {"validation": {"mine": "nowhere", "v2": "data/olmo/v2"}}
    assert "nowhere: no such file or folder for set mine; correct" in run_without_torch(
        sets, "fit", "--config", "x.yaml"
    )
    only_olmo = {"validation": {"v2": "data/olmo/v2"}}
    line = run_without_torch(only_olmo, "validate", "--run", "run")
    assert line.endswith("data/olmo/v2: no such folder; fetch them with: python -m stackexp data fetch v2")


@pytest.mark.parametrize(
    ("sets", "code", "message"),
    [
        ("min", 2, "--sets: no set 'min' in data.validation; did you mean 'mine'?"),
        ("mine=nowhere", 1, "nowhere: no such file or folder for set mine"),
        ("x=x.yaml,,b", 2, "--sets: expected names and NAME=PATH, separated by single commas, found ''"),
        ("v3", 1, "data/olmo/v3: no such folder; fetch them with: python -m stackexp data fetch v3"),
        ("average=x", 2, "--sets: 'average' is reserved"),
    ],
)
def test_wrong_words_of_sets(run_without_torch, sets, code, message):
    data = {"validation": {"mine": "x", "a": "x", "b": "x"}}
    assert message in run_without_torch(data, "validate", "--run", "run", "--sets", sets, code=code)
