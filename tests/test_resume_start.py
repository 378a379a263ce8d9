"""The start of a run: the folders it may use, and the checkpoints and configs it may resume."""

import json
import re
import shlex
import shutil
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from records import record
from saved_models import make_state

from stackexp.cli import main
from stackexp.config.compose import compose, load_config
from stackexp.errors import FolderBusyError, RunError
from stackexp.files import make_temporary_path
from stackexp.models import checkpoints
from stackexp.models.checkpoints import load_state
from stackexp.runs import MARKER, RunFolder, read_manifest, write_manifest
from stackexp.training.callbacks.metrics_log import MetricsLog
from stackexp.training.checkpointing import check_resumed_config, find_start


@pytest.fixture
def unfinished(trained, tmp_path) -> RunFolder:
    """A copy of the run before its result, among the runs of its name."""
    run = RunFolder(tmp_path / "runs" / "tiny" / trained.name)
    shutil.copytree(trained, run.path)
    run.result.unlink()
    return run


@pytest.fixture
def config(trained, tmp_path):
    return compose([str(trained / "config.yaml")], [f"logging.root={tmp_path}/runs"])


def get_error(*args, **options) -> str:
    with pytest.raises(RunError) as caught:
        find_start(*args, **options)
    return str(caught.value)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "files", [["config.yaml"], ["metrics.jsonl"], ["tokenizer.json"], ["checkpoints/.keep/mine"], ["data.jsonl", "a"]]
)
def test_folder_of_something_else_is_not_touched(config, tmp_path, files):
    folder = tmp_path / "mine"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    message = get_error(config, None, str(folder))
    assert message.startswith(f"{folder}: not a run folder (no valid .stackexp), and not empty (")
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == set(files)


def test_new_and_empty_folders_become_run_folders(config, tmp_path):
    for name in ("empty", "killed"):
        (tmp_path / name).mkdir()
    make_temporary_path(tmp_path / "killed" / MARKER).touch()
    for name in ("new", "empty", "killed"):
        assert find_start(config, None, str(tmp_path / name)).step == 0
        (tmp_path / name / "config.yaml").write_text("written by a sweep's driver\n")
        assert find_start(config, None, str(tmp_path / name)).step == 0, "the mark is there"


@pytest.mark.parametrize("marker", [None, "", "another program"])
def test_run_without_our_marker_is_refused(config, unfinished, marker):
    if marker is None:
        (unfinished.path / ".stackexp").unlink()
    else:
        (unfinished.path / ".stackexp").write_text(marker)
    assert "not a run folder (no valid .stackexp)" in get_error(config, None, str(unfinished.path))
    assert main(["runs", "remove", str(unfinished.path), "--yes"]) == 1
    assert unfinished.config.exists()


def test_folder_of_the_user_with_the_names_of_a_run_is_not_touched(config, tmp_path):
    folder = tmp_path / "mine"
    (folder / "checkpoints" / ".0keep").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: mine\n")
    (folder / "environment.json").write_text('[{"conda": "env"}]')
    before = {path: path.is_dir() or path.read_text() for path in folder.rglob("*")}
    assert "not a run folder" in get_error(config, None, str(folder))
    for command in (["fit", "--run"], ["runs", "remove", "--yes"]):
        assert main([*command, str(folder)]) != 0
    assert {path: path.is_dir() or path.read_text() for path in folder.rglob("*")} == before


def test_hidden_folders_of_the_user_are_kept(config, unfinished):
    (unfinished.checkpoints / ".mine").mkdir()
    (unfinished.checkpoints / ".00000016").mkdir()
    with unfinished.start_session(config, 12, unfinished.newest_checkpoint()):
        assert {path.name for path in unfinished.checkpoints.glob(".*")} == {".mine"}


def test_older_checkpoint_is_branched_into_a_new_folder(trained, unfinished, tmp_path, invoke):
    before = record(unfinished), unfinished.list_checkpoints()
    older = unfinished.checkpoints / "00000004"
    fit = ["fit", "--config", str(trained / "config.yaml"), f"logging.root={tmp_path}/runs"]
    assert f"branched from {older}" in invoke(*fit, "--ckpt_path", older)
    assert (record(unfinished), unfinished.list_checkpoints()) == before
    (branch,) = (path for path in unfinished.path.parent.iterdir() if path != unfinished.path)
    assert record(RunFolder(branch)) == [line for line in before[0] if line["step"] > 4]


def test_a_branch_that_has_saved_nothing_starts_again_from_its_parent(config, trained, unfinished, monkeypatch, invoke):
    def fail(*_) -> None:
        raise OSError("disk full")

    older = unfinished.checkpoints / "00000004"
    fit = ["fit", "--config", str(trained / "config.yaml"), f"logging.root={config.logging.root}"]
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "write", fail)
        with pytest.raises(OSError, match="disk full") as caught:
            main([*fit, "trainer.spike_threshold=9", "--ckpt_path", str(older)])
    (branch,) = (path for path in unfinished.path.parent.iterdir() if path != unfinished.path)
    assert caught.value.__notes__ == [f"resume with `python -m stackexp fit --run {branch}`"]
    assert f"branched from {older.resolve()}" in invoke("fit --run", branch)
    assert record(RunFolder(branch)) == [line for line in record(unfinished) if line["step"] > 4]


@pytest.mark.parametrize("origin", [5, "x", [1], {"is_branch": True}, {"path": 5, "is_branch": True}])
def test_a_damaged_origin_is_one_line(config, unfinished, origin, capture):
    sessions = [session | {"origin": origin} for session in unfinished.read_sessions()]
    unfinished.environment.write_text(json.dumps(sessions))
    shutil.rmtree(unfinished.checkpoints)
    assert "environment.json: the origin of a session is " in get_error(config, None, str(unfinished.path))
    for command in ("show", "list"):
        assert "Traceback" not in capture("runs", command, unfinished.path).err


def test_checkpoints_that_another_process_saved_meanwhile_are_kept(config, unfinished):
    start = find_start(config, None, str(unfinished.path))
    newer = unfinished.checkpoints / "00000013"
    newer.mkdir()
    with (
        pytest.raises(FolderBusyError, match="another process changed the checkpoints; rerun the command"),
        start.folder.start_session(config, start.step, start.newest),
    ):
        pass
    assert newer.exists()


@pytest.mark.parametrize(("file", "by"), [("state.pt", "--run"), (".metadata", "last"), ("manifest.json", "last")])
def test_damaged_checkpoint_falls_back_to_the_older_one(config, unfinished, caplog, file, by):
    flip_bit(unfinished.checkpoints / "00000012" / file)
    start = find_start(config, None, str(unfinished.path)) if by == "--run" else find_start(config, "last", None)
    assert (start.folder.path, start.step) == (unfinished.path, 8)
    assert "00000012: damaged" in caplog.text
    assert "resuming from 00000008 instead" in caplog.text
    for name in ("00000008", "00000004"):
        flip_bit(unfinished.checkpoints / name / file)
    assert "00000004: damaged" in get_error(config, None, str(unfinished.path))


def test_named_checkpoint_is_resumed_in_its_own_folder_or_refused(config, unfinished):
    path = unfinished.checkpoints / "00000012"
    assert find_start(config, str(path), None).folder.path.resolve() == unfinished.path.resolve()
    flip_bit(path / "__0_0.distcp")
    assert get_error(config, str(path), None).startswith(f"{path}: damaged (__0_0.distcp has changed")


def test_finished_run_with_another_config_is_refused(trained, config):
    path = str(trained)
    changed = compose([str(trained / "config.yaml")], ["optimizer.lr=0.5"])
    assert find_start(compose([str(trained / "config.yaml")]), None, path).is_finished
    assert "finished, with optimizer.lr 0.003; the config has 0.5" in get_error(changed, None, path)
    longer = compose([str(trained / "config.yaml")], ["trainer.max_steps=20"])
    assert "finished, with trainer.max_steps 12; the config has 20" in get_error(longer, None, path)


def test_number_of_steps_changes_only_by_an_override(trained, unfinished, caplog):
    longer = compose([str(trained / "config.yaml")], ["trainer.max_steps=20"])
    message = get_error(longer, None, str(unfinished.path))
    assert "trainer.max_steps is 12 in the checkpoint, 20 in the config" in message
    assert message.endswith("add the override trainer.max_steps=20")
    assert find_start(longer, None, str(unfinished.path), overridden=["trainer.max_steps"]).step == 12
    assert "trainer.max_steps changes from 12 to 20 after step 12" in caplog.text


@pytest.mark.parametrize(
    "option", ["trainer.spike_threshold=null", "trainer.callbacks=[{class: 'my_package:Stop', options: {at: 9}}]"]
)
def test_the_suggested_override_can_be_entered(trained, unfinished, option):
    changed = compose([str(trained / "config.yaml")], [option])
    (override,) = shlex.split(get_error(changed, None, str(unfinished.path)).partition("add the override ")[2])
    assert compose([str(trained / "config.yaml")], [override]) == changed


def test_a_run_may_end_at_its_newest_checkpoint(unfinished, invoke):
    shutil.rmtree(unfinished.checkpoints / "00000012")
    invoke("fit --run", unfinished.path, "trainer.max_steps=8")
    result, saved = unfinished.read_result(), load_state(unfinished.checkpoints / "00000008")["data_record"]
    assert (result.steps, result.figures["sequences"]) == (8, {"train": 64})
    assert result.figures["data_hash"] == {"8": saved["hash"]}


def test_replaced_configs_are_kept(trained, unfinished):
    before = unfinished.config.read_text()
    with unfinished.start_session(load_config(unfinished.config), 12, unfinished.newest_checkpoint()):
        assert unfinished.config.read_text() == before
        assert not list(unfinished.path.glob("config.step-*"))
    longer = compose([str(trained / "config.yaml")], ["trainer.max_steps=20"])
    with unfinished.start_session(longer, 12, unfinished.newest_checkpoint()):
        assert (unfinished.path / "config.step-12.yaml").read_text() == before
        assert "max_steps: 20" in unfinished.config.read_text()
    longest = compose([str(trained / "config.yaml")], ["trainer.max_steps=30"])
    with unfinished.start_session(longest, 12, unfinished.newest_checkpoint()):
        assert (unfinished.path / "config.step-12.yaml").read_text() == before, "it trained the steps up to 12"
        assert "max_steps: 30" in unfinished.config.read_text()


def test_a_refused_dataset_changes_no_file_of_the_run(unfinished, corpus, invoke):
    before = {path: path.read_bytes() for path in unfinished.path.rglob("*") if path.is_file()}
    line = invoke("fit --run", unfinished.path, f"data.path={corpus['left']}", expect=1)
    assert "the sequences have changed since the run began; restore data.path or data.streams" in line
    assert {path: path.read_bytes() for path in unfinished.path.rglob("*") if path.is_file()} == before
    invoke("fit --run", unfinished.path)


def test_a_checkpoint_without_a_data_record_changes_no_file_of_the_run(unfinished, invoke, monkeypatch):
    before = {path: path.read_bytes() for path in unfinished.path.rglob("*") if path.is_file()}
    load = checkpoints.load_state
    monkeypatch.setattr(checkpoints, "load_state", lambda path: load(path) | {"data_record": {}})
    line = invoke("fit --run", unfinished.path, "trainer.keep_checkpoints=3", expect=1)
    assert "has no record of its training data; start a new run" in line
    assert {path: path.read_bytes() for path in unfinished.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_log_shorter_than_the_checkpoint_is_refused(config, unfinished, damage):
    lines = unfinished.metrics.read_text().splitlines(keepends=True)
    unfinished.metrics.write_text("".join(lines[:5]))
    if damage == "missing":
        unfinished.metrics.unlink()
    message = f"metrics.jsonl: ends at step {0 if damage == 'missing' else 5}, but the checkpoint is at step 12"
    assert message in get_error(config, None, str(unfinished.path))


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("model.memory=null", "model.memory"),
        ("model.num_layers=2", "different architecture: model.num_layers is 6 in the checkpoint, 2 in the config"),
        ("data.global_batch_tokens=2048", "different run: data.global_batch_tokens"),
        ("trainer.precision=64-true", "different run: trainer.precision"),
        ("seed=1", "different run: seed is 0 in the checkpoint, 1 in the config"),
    ],
)
def test_the_first_option_that_prevents_resuming_is_named(tmp_path, override, difference):
    with pytest.raises(RunError, match=re.escape(difference)):
        check_resumed_config(tmp_path, make_state(), compose(["quickstart"], [override]))


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.max_steps=999", "name=x", "logging.root=elsewhere"],
        ["trainer.devices=2", "trainer.strategy=fsdp", "data.micro_batch_size=1"],
        ["trainer.num_nodes=2", "trainer.devices=2", "trainer.strategy=hsdp", "data.micro_batch_size=1"],
        ["trainer.checkpoint_interval_minutes=5", "trainer.keep_checkpoints=7", "trainer.max_time=00:01:00:00"],
        ["trainer.activation_checkpointing=true", "trainer.reshard_after_forward=false", "trainer.skip_spikes=true"],
    ],
)
def test_devices_duration_and_logging_may_change_on_resume(tmp_path, overrides):
    keys = [text.partition("=")[0] for text in overrides]
    check_resumed_config(tmp_path, make_state(), compose(["quickstart"], overrides), overridden=keys)


def test_an_option_that_is_newer_than_the_checkpoint_must_have_its_default(tmp_path):
    state = make_state()
    del state["stackexp"]["config"]["model"]["qkv_bias"]
    check_resumed_config(tmp_path, state, compose(["quickstart"]))
    with pytest.raises(RunError, match=r"model.qkv_bias is None in the checkpoint, True in the config"):
        check_resumed_config(tmp_path, state, compose(["quickstart"], ["model.qkv_bias=true"]))
    del state["stackexp"]["config"]["model"]["memory"]
    with pytest.raises(RunError, match=r"model.memory"):
        check_resumed_config(tmp_path, state, compose(["quickstart"]))


def test_a_state_without_a_position_in_the_data_is_reported_in_one_line(unfinished, invoke):
    path = unfinished.checkpoints / "00000012"
    tokenizer, state = read_manifest(path)["tokenizer"], torch.load(path / "state.pt", weights_only=True)
    state["loops"]["fit_loop"]["state_dict"] = {}
    torch.save(state, path / "state.pt")
    (path / "validation.json").unlink()
    write_manifest(path, 12, tokenizer)
    for older in ("00000004", "00000008"):
        shutil.rmtree(unfinished.checkpoints / older)
    line = invoke("fit --run", unfinished.path, expect=1)
    assert line.startswith(f"error: {path}: damaged (")
    assert "lacks its position in the training data" in line


def test_another_version_of_lightning_is_named(unfinished, capture):
    path = unfinished.checkpoints / "00000012"
    tokenizer, state = read_manifest(path)["tokenizer"], torch.load(path / "state.pt", weights_only=True)
    torch.save(state | {"pytorch-lightning_version": "2.0.1"}, path / "state.pt")
    (path / "validation.json").unlink()
    write_manifest(path, 12, tokenizer)
    warning = f"saved with Lightning 2.0.1, not {pl.__version__}; if this fails, install 2.0.1"
    assert warning in capture("fit --run", unfinished.path).err
