"""Run folders: names, locks, checkpoints, metrics and results."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import threading
from datetime import datetime
from types import SimpleNamespace

import pytest

from stackexp import __version__, runs
from stackexp.config.compose import compose, load_config
from stackexp.errors import FolderBusyError, RunError
from stackexp.files import read_json, try_lock, write_hashed_json
from stackexp.run_result import RunResult
from stackexp.runs import RunFolder
from stackexp.training.objectives import sum_earlier_sessions


@pytest.fixture
def config(tmp_path):
    return compose(["quickstart"], [f"logging.root={tmp_path}/runs"])


def create_run(config) -> RunFolder:
    folder = runs.allocate_run(config)
    with folder.start_session(config):
        return folder


def add_checkpoint(folder: RunFolder, name: str) -> None:
    """Create a folder that looks like a checkpoint."""
    (folder.checkpoints / name).mkdir()
    (folder.checkpoints / name / "state.pt").touch()


def write_metrics(folder: RunFolder, text: str) -> RunFolder:
    folder.metrics.write_text(text)
    return folder


def test_new_folder_is_under_its_name_and_can_be_rerun(config, tmp_path):
    folder = runs.allocate_run(config)
    assert folder.path.parent == tmp_path / "runs" / "quickstart"
    assert not folder.path.exists(), "no files are written before the run starts"
    with folder.start_session(config):
        assert folder.config.exists()
    (folder.checkpoints / ".00000004").mkdir()
    (folder.checkpoints / ".00000004" / "state.pt").touch()
    with folder.start_session(config):
        pass
    assert not list(folder.checkpoints.iterdir()), "incomplete checkpoints are deleted"
    assert load_config(folder.config) == config
    sessions = json.loads((folder.path / "environment.json").read_text())
    assert len(sessions) == 2, "one per process"
    assert sessions[0]["cpu"]["cores"] == os.cpu_count()
    assert runs.open_run(str(folder.path)).path == folder.path


def test_resume_deletes_later_metrics_and_checkpoints(config):
    folder = write_metrics(create_run(config), '{"step": 1}\n{"step": 2}\n{"step": 2, "v": 0.1}\n{"step": 3}\n{"st')
    assert folder.newest_checkpoint() is None
    for name in [*map(runs.format_checkpoint_name, (1, 2, 3, 100)), "best", "00000300.bak", ".00000200"]:
        add_checkpoint(folder, name)
    assert folder.newest_checkpoint().name == "00000100"
    folder.truncate_after(2)
    assert [path.name for path in folder.list_checkpoints()] == ["00000001", "00000002"]
    assert {"best", "00000300.bak"} < {path.name for path in folder.checkpoints.iterdir()}, "copies of the user"
    assert folder.metrics.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 2, "v": 0.1}\n'


def test_last_is_the_newest_unfinished_run_with_a_checkpoint(config, tmp_path):
    with pytest.raises(RunError, match="no unfinished run"):
        runs.find_unfinished_run(config)
    folders = [RunFolder(tmp_path / "runs" / "quickstart" / f"2026010{i}-000000-aaaa") for i in range(4)]
    for folder in folders:
        folder.checkpoints.mkdir(parents=True)
        folder.config.touch()
    for folder in (folders[0], folders[1], folders[3]):
        add_checkpoint(folder, "00000001")
    folders[3].result.touch()
    RunFolder(folders[0].path.parent / "z-of-another-name" / "x").checkpoints.mkdir(parents=True)
    assert runs.find_unfinished_run(config).path == folders[1].path
    folders[1].result.touch()
    folders[0].result.touch()
    with pytest.raises(RunError, match=f"{folders[3].path}: this run is finished .* --ckpt_path .*/00000001$"):
        runs.find_unfinished_run(config)
    shutil.rmtree(folders[3].checkpoints)
    with pytest.raises(RunError, match=r"start a new one without --ckpt_path$"):
        runs.find_unfinished_run(config)


def test_the_best_checkpoint_has_the_lowest_validation_loss(config):
    folder = write_metrics(create_run(config), '{"step": 30, "val/loss/average": 0.1}\n')
    assert folder.best_checkpoint() is None
    for step in (5, 10, 20, 30, 40):
        add_checkpoint(folder, runs.format_checkpoint_name(step))
        runs.write_manifest(folder.checkpoints / runs.format_checkpoint_name(step), step, None)
    assert folder.best_checkpoint() is None, "none was validated"
    for step, loss, accuracy in ((10, 3.0, 0.5), (20, 2.0, None), (30, 2.5, 0.9), (40, math.nan, None)):
        runs.write_validation(folder.checkpoints / runs.format_checkpoint_name(step), loss, accuracy, "a")
    assert folder.best_checkpoint().name == "00000020", "metrics.jsonl can be edited"
    scores = folder.checkpoints / "00000030" / "validation.json"
    shutil.copy(folder.checkpoints / "00000020" / "validation.json", scores)
    with pytest.raises(RunError, match=r"validation.json: the scores of another checkpoint"):
        folder.best_checkpoint()
    scores.write_text(scores.read_text().replace("2.0", "1.0"))
    with pytest.raises(RunError, match=r"validation.json: not as it was written"):
        folder.best_checkpoint()
    (folder.checkpoints / "00000030" / "manifest.json").unlink()
    assert folder.best_checkpoint().name == "00000020", "a damaged checkpoint is never the best"


def test_latest_checkpoint_without_mistakes_is_best(config):
    folder = create_run(config)
    for step, loss, accuracy in ((10, 1e-6, 1.0), (20, 1e-3, 1.0), (30, 1e-7, 0.999), (40, 2.0, 0.5)):
        path = folder.checkpoints / runs.format_checkpoint_name(step)
        add_checkpoint(folder, path.name)
        runs.write_manifest(path, step, None)
        runs.write_validation(path, loss, accuracy, "a")
    assert folder.best_checkpoint().name == "00000020"


def test_losses_on_other_data_than_the_latest_are_not_compared(config):
    folder = create_run(config)
    for step, loss, data in ((10, 1.0, "a"), (20, 2.0, "b"), (30, 3.0, "b"), (40, math.nan, "a")):
        path = folder.checkpoints / runs.format_checkpoint_name(step)
        add_checkpoint(folder, path.name)
        runs.write_manifest(path, step, None)
        runs.write_validation(path, loss, None, data)
    assert folder.best_checkpoint().name == "00000020"
    oldest = folder.checkpoints / "00000010" / "validation.json"
    scores = read_json(oldest)
    write_hashed_json(oldest, {key: scores[key] for key in ("loss", "accuracy", "manifest_sha256")})
    assert folder.best_checkpoint().name == "00000010", "earlier versions did not record the data"


def test_the_tokenizer_is_bound_to_the_run_and_its_checkpoints(config, tmp_path):
    folder = runs.allocate_run(config)
    with folder.start_session(config, tokenizer="{}"):
        pass
    checkpoint = folder.checkpoints / "00000010"
    add_checkpoint(folder, checkpoint.name)
    runs.write_manifest(checkpoint, 10, folder.read_tokenizer_hash())
    assert folder.find_tokenizer(checkpoint) == folder.find_tokenizer(checkpoint / "ema") == folder.tokenizer
    folder.tokenizer.write_text("[]")
    with pytest.raises(RunError, match=r"not the tokenizer that environment.json records"):
        folder.find_tokenizer()
    with (
        pytest.raises(RunError, match="not the tokenizer"),
        folder.start_session(config, 10, checkpoint, tokenizer="{}"),
    ):
        pass
    folder.environment.write_text("[]")
    with pytest.raises(RunError, match=r"not the tokenizer that .*00000010 was trained with"):
        folder.find_tokenizer(checkpoint)
    folder.tokenizer.unlink()
    with pytest.raises(RunError, match=r"tokenizer.json: missing"):
        folder.find_tokenizer(checkpoint)
    assert folder.find_tokenizer() is None, "a run on formal languages"


@pytest.mark.parametrize("value", [5, True, 0.5, {"a": 1}, [1], "x"])
def test_a_damaged_record_of_the_tokenizer_is_one_line(config, tmp_path, value):
    folder = runs.allocate_run(config)
    with folder.start_session(config, tokenizer="{}"):
        pass
    sessions = json.loads(folder.environment.read_text())
    folder.environment.write_text(json.dumps([sessions[0] | {"tokenizer_sha256": value}]))
    with pytest.raises(RunError, match=r"not the tokenizer that environment.json records"):
        folder.find_tokenizer()


def test_the_instant_lock_of_a_status_does_not_make_a_folder_busy(config):
    folder = create_run(config)
    status = try_lock(folder.path / ".lock", shared=True)
    timer = threading.Timer(runs.RETRY_SECONDS / 2, status.close)
    timer.start()
    with folder.lock():
        timer.join()
        assert folder.is_running
        with pytest.raises(FolderBusyError, match="another process uses this folder"), folder.lock():
            pass


def test_ids_sort_by_start_even_if_the_clock_goes_backwards(config, monkeypatch):
    times = [datetime(2026, 3, 1, 12), datetime(2026, 2, 1), datetime(2026, 3, 1, 12, 0, 1), datetime(2026, 3, 2)]
    clock = SimpleNamespace(now=lambda: times.pop(0), strptime=datetime.strptime)
    monkeypatch.setattr(runs, "datetime", clock)
    (runs.allocate_run(config).path.parent / "notes").mkdir(parents=True)  # not a run: no timestamp in its name
    times.insert(0, datetime(2026, 3, 1, 12))
    names = [create_run(config).path.name for _ in range(4)]
    stamps = ["20260301-120000", "20260301-120001", "20260301-120002", "20260302-000000"]
    assert [name[:15] for name in names] == stamps, "the third starts in the same second as the second"


def test_folder_finished_by_another_process_is_refused(config):
    folder = create_run(config)
    folder.result.touch()
    with pytest.raises(RunError, match="another process finished this run"), folder.start_session(config):
        pass


LOSSES = {"first": 2.0, "last_20_steps": 1.5}
RESULT = RunResult(3, 300, 10, 2, LOSSES, seconds=3.0, figures={"average": {"loss": 1.0}})


def test_earlier_sessions_count_up_to_their_last_line():
    """Sessions start at 100, 200 and 300 seconds; the second was killed before its first line."""
    sessions = [{"started": f"1970-01-01T00:{clock}+0000"} for clock in ("01:40", "03:20", "05:00")]
    lines = [{"time": t} for t in (110.0, 150.5, 310.0)]
    assert sum_earlier_sessions(sessions, lines) == 50.5
    assert sum_earlier_sessions(sessions[:1], lines) == 0


def test_results_are_read_back(config):
    folder = create_run(config)
    folder.write_result(RESULT)
    assert folder.is_finished
    assert folder.read_result() == RESULT
    contents = json.loads(folder.result.read_text())
    assert len(contents.pop("sha256")) == 64
    assert contents == RESULT.to_dict()
    folder.write_result(dataclasses.replace(RESULT, figures={"accuracy": {9: 1.0, 41: float("nan"), 10: 0.5}}))
    assert folder.read_result().figures == {"accuracy": {"9": 1.0, "41": None, "10": 0.5}}


def test_damaged_changed_or_newer_results_are_refused(config):
    folder = create_run(config)
    folder.write_result(RESULT)
    changed = folder.result.read_text().replace('"loss": 1.0', '"loss": 1.5')
    for text, message in {changed: "sha256", '{"version": 1}': "sha256", "{": "not valid JSON"}.items():
        folder.result.write_text(text)
        with pytest.raises(RunError, match=f"result.json: .*{message}"):
            folder.read_result()
    write_hashed_json(folder.result, {"version": 99})
    with pytest.raises(RunError, match=r"result.json: version 99 is newer than this stackexp; update it"):
        folder.read_result()


def test_a_changed_plugin_is_warned_about(config, tmp_path, caplog):
    plugin = tmp_path / "mine.py"
    plugin.write_text("RATE = 1\n")
    config = dataclasses.replace(config, plugins=[str(plugin)])
    folder = create_run(config)
    for text, warnings in (
        ("RATE = 1\n", []),
        ("RATE = 2\n", [f"{plugin}: changed since the last session of this run"]),
    ):
        plugin.write_text(text)
        with folder.start_session(config):
            assert caplog.messages == warnings


def test_the_environment_needs_no_installed_stackexp(monkeypatch):
    def find_version(name):
        assert name != "stackexp", "a source tree on PYTHONPATH has no metadata"
        return "1.2"

    monkeypatch.setattr("importlib.metadata.version", find_version)
    assert runs.describe_environment()["versions"]["stackexp"] == __version__


def test_the_commit_is_that_of_this_code(tmp_path, monkeypatch):
    """Not that of a project whose checkout contains an installed package."""
    package = tmp_path / "project/.venv/stackexp"
    package.mkdir(parents=True)
    (package / "runs.py").touch()
    git = ["git", "-C", str(package), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    monkeypatch.setattr(runs, "__file__", str(package / "runs.py"))
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]):
        assert runs.read_commit() is None
        subprocess.run([*git[:2], str(tmp_path / "project"), *git[3:], *command], check=True)
    assert runs.read_commit() is None
    for command in (["add", "runs.py"], ["commit", "-q", "-m", "b"]):
        subprocess.run([*git, *command], check=True)
    assert len(runs.read_commit()) == 40
