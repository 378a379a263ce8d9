"""The rolling hash of what a run trains on: what it depends on, where it is kept, and runs that differ in it."""

import json
import shutil

import numpy as np
import pytest
from forks import Forks
from records import only_run

from stackexp.cli import main
from stackexp.data.hash_log import HashLog, hash_sequence, read_hash_log, read_hashes, update_hash
from stackexp.models.checkpoints import load_state

FEW = ("trainer.max_steps=6", "trainer.val_check_interval=null", "trainer.checkpoint_interval=3")
FEW += ("data.hash_interval=2", "logging.progress_bar=false", "logging.tensorboard=false")


def test_a_sample_s_hash_is_of_its_ids_not_of_their_type():
    tokens = np.arange(100, dtype=np.uint16)
    assert hash_sequence(tokens) == hash_sequence(tokens.astype(np.uint32)) == hash_sequence(tokens.astype(np.int64))
    changed = tokens.copy()
    changed[50] += 1
    assert hash_sequence(changed) != hash_sequence(tokens)
    assert hash_sequence(tokens[::-1]) != hash_sequence(tokens)


def test_a_step_s_hash_is_of_its_samples_in_any_order_and_of_all_before():
    samples = np.array([3, 2**64 - 1, 7, 7], np.uint64)
    one = update_hash("", samples)
    assert one == update_hash("", samples[::-1])
    assert one != update_hash("", samples[:3]), "a sample seen twice counts twice"
    assert len({one, update_hash(one, samples), update_hash(one, samples[:1]), update_hash("", samples[:1])}) == 4


def test_the_file_goes_on_where_the_checkpoint_was_made(tmp_path):
    file = HashLog(tmp_path, 0)
    for step in (2, 4, 6):
        file.append({"step": step, "hash": f"{step:02x}"})
    with open(tmp_path / "data.jsonl", "a") as cut:
        cut.write('{"step": 8, "ha')
    assert list(read_hashes(tmp_path)) == [2, 4, 6]
    HashLog(tmp_path, 4).append({"step": 5, "hash": "05"})
    assert list(read_hashes(tmp_path)) == [2, 4, 5]


@pytest.fixture(scope="module")
def forks(tmp_path_factory) -> Forks:
    return Forks(tmp_path_factory.mktemp("forks"))


def test_the_hash_does_not_depend_on_how_batches_are_divided_nor_on_stops(forks, tiny, corpus, tmp_path):
    """Micro-batches of 4 in one process; of 2 in two processes with a loader's process each, and resumed at step 3."""
    fit = ("fit", "--config", tiny, *FEW)
    forks.run(*fit, f"logging.root={tmp_path}/one")
    one = only_run(tmp_path / "one")
    assert list(read_hashes(one.path)) == [2, 4, 6]
    assert [line["sequences"] for line in read_hash_log(one.path)] == [{"train": 16}, {"train": 32}, {"train": 48}]
    assert json.loads(one.result.read_text())["data_hash"] == {"6": read_hashes(one.path)[6]}
    saved = load_state(one.checkpoints / "00000003")["data_record"]
    assert saved["sequences"] == [24]

    other = ("data.micro_batch_size=2", "trainer.devices=2", "data.num_workers=1", f"logging.root={tmp_path}/two")
    forks.run(*fit, *other, "trainer.strategy=ddp", ranks=2)
    two = only_run(tmp_path / "two")
    assert read_hashes(two.path) == read_hashes(one.path)
    assert load_state(two.checkpoints / "00000003")["data_record"] == saved

    one.result.unlink()
    before = list(read_hash_log(one.path))
    forks.run(*fit, f"logging.root={tmp_path}/one", "--ckpt_path", one.checkpoints / "00000003")
    assert list(read_hash_log(one.path)) == before

    shutil.copytree(corpus["train"], tmp_path / "moved")
    resume = (*fit, f"logging.root={tmp_path}/one", "--ckpt_path", one.checkpoints / "00000003")
    one.result.unlink()
    forks.run(*resume, f"data.path={tmp_path / 'moved'}")
    assert list(read_hash_log(one.path)) == before
    one.result.unlink()
    said = forks.run(*resume, f"data.path={corpus['left']}", expect=1)
    assert f"error: {corpus['left']}: the sequences have changed since the run began" in said


def test_report_compare_refuses_runs_on_other_data(tiny, tmp_path, capsys):
    paths = []
    for name, change in {"a": "seed=0", "b": "seed=0", "c": "seed=1"}.items():
        assert main(["fit", "--config", str(tiny), *FEW, f"logging.root={tmp_path}/{name}", change]) == 0
        paths.append(str(only_run(tmp_path / name).path))
    capsys.readouterr()
    assert main(["report", "compare", *paths[:2]]) == 0
    assert capsys.readouterr().err == ""
    assert main(["report", "compare", *paths]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert (
        f"{paths[2]}: trained on other data than {paths[0]}, first seen at step 2; give --different-data" in shown.err
    )
    assert main(["report", "compare", *paths, "--different-data"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
