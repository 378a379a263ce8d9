"""Wrong paths and names of sets are reported in one line, before torch is imported."""

import json
import subprocess
import sys

import pytest

SHARDS = {"defaults": ["quickstart"], "data": {"kind": "shards", "path": "shards", "context_length": 256}}
FIT, VALIDATE = ("fit", "--config", "x.yaml"), ("validate", "--run", "run")
NO_TORCH = """
import sys
from stackexp.cli import main
for line in sys.argv[1:]:
    assert main(line.split()) == 1
assert "torch" not in sys.modules, "imported torch"
"""


@pytest.fixture
def read_error(empty_folder, tmp_path, invoke):
    """Return a function that writes a config with these data options, runs a verb, and returns the error line."""

    def run(data: dict, *arguments: str, code: int = 1) -> str:
        config = SHARDS | {"data": SHARDS["data"] | data}
        (tmp_path / "run").mkdir(exist_ok=True)
        for path in ("x.yaml", "run/config.yaml"):
            (tmp_path / path).write_text(json.dumps(config))
        line = invoke(*arguments, expect=code)
        return line

    return run


def test_training_data_that_are_missing_or_unfinished(read_error, tmp_path):
    assert "shards: no such folder; make one with: stackexp data prepare SOURCE --to shards" in read_error({}, *FIT)
    lines = (" ".join(FIT), " ".join([*VALIDATE, "--sets", "v3"]))
    done = subprocess.run([sys.executable, "-c", NO_TORCH, *lines], capture_output=True)
    assert done.returncode == 0, done.stderr
    streams = {"path": None, "streams": {"a": {"path": "one"}, "b": {"remote": "s3://x/y"}}}
    assert "one: no such folder" in read_error(streams, *FIT)
    (tmp_path / "shards").mkdir()
    assert "shards: holds no finished set; make one" in read_error({}, *FIT)


def test_text_in_place_of_a_dataset(read_error, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("text")
    for path, target in {"texts": "texts-prepared", "texts/a.txt": "texts/a-prepared"}.items():
        line = read_error({"path": path}, *FIT)
        assert f"{path}: not a prepared set; prepare it with: stackexp data prepare {path} --to {target} " in line
        assert line.endswith(f"data.path={target}")


def test_missing_validation_sets(read_error, tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/corpus.json").write_text("{}")
    sets = {"validation": {"mine": "nowhere", "v2": "data/olmo/v2"}}
    assert "nowhere: no such file or folder for set mine" in read_error(sets, *FIT)
    del sets["validation"]["mine"]
    assert read_error(sets, *VALIDATE).endswith("fetch them with: python -m stackexp data fetch v2")


@pytest.mark.parametrize(
    ("sets", "code", "message"),
    [
        ("min", 2, "no set 'min' in data.validation; did you mean 'mine'?"),
        ("mine=nowhere", 1, "nowhere: no such file or folder for set mine"),
        ("x=x.yaml,,b", 2, "--sets: expected names and NAME=PATH, separated by single commas"),
        ("v3", 1, "fetch them with: python -m stackexp data fetch v3"),
        ("average=x", 2, "--sets: 'average' is reserved"),
    ],
)
def test_wrong_words_of_sets(read_error, sets, code, message):
    data = {"validation": {"mine": "x", "a": "x", "b": "x"}}
    assert message in read_error(data, *VALIDATE, "--sets", sets, code=code)
