"""The rolling hash of the training data: its inputs, its file, and the runs that have the same."""

import json
import shutil

import numpy as np
import pytest
from forks import Forks
from records import only_run

from stackexp.data.hash_log import hash_sequence, read_hash_log, read_hashes, truncate_hash_log, update_hash
from stackexp.errors import RunError
from stackexp.files import write_json_lines
from stackexp.models.checkpoints import load_state
from stackexp.training.callbacks.data_record import check_sources

FEW = ("trainer.max_steps=6", "trainer.val_check_interval=null", "trainer.checkpoint_interval=3")
FEW += ("data.hash_interval=2", "logging.progress_bar=false")


def test_a_sequence_hash_depends_on_the_ids_but_not_on_their_type():
    tokens = np.arange(100, dtype=np.uint16)
    assert hash_sequence(tokens) == hash_sequence(tokens.astype(np.uint32)) == hash_sequence(tokens.astype(np.int64))
    changed = tokens.copy()
    changed[50] += 1
    assert hash_sequence(changed) != hash_sequence(tokens)
    assert hash_sequence(tokens[::-1]) != hash_sequence(tokens)


def test_a_step_hash_depends_on_its_sequences_in_any_order_and_on_earlier_steps():
    samples = np.array([3, 2**64 - 1, 7, 7], np.uint64)
    one = update_hash("", samples)
    assert one == update_hash("", samples[::-1])
    assert one != update_hash("", samples[:3]), "a repeated sequence counts twice"
    assert len({one, update_hash(one, samples), update_hash(one, samples[:1]), update_hash("", samples[:1])}) == 4


def test_the_file_continues_after_the_step_of_the_checkpoint(tmp_path):
    write_json_lines(tmp_path / "data.jsonl", [{"step": step, "hash": f"{step:02x}"} for step in (2, 4, 6)])
    with open(tmp_path / "data.jsonl", "a") as cut:
        cut.write('{"step": 8, "ha')
    assert list(read_hashes(tmp_path)) == [2, 4, 6]
    truncate_hash_log(tmp_path, 4)
    assert list(read_hashes(tmp_path)) == [2, 4]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["web"], "the run began with the training data web, code, now it is web; restore data.path or data.streams"),
        (["web", "code"], r"^training data 'code': the sequences have changed since the run began"),
    ],
)
def test_other_sources_are_refused_on_resume(names, message):
    with pytest.raises(RunError, match=message):
        check_sources({"web": "1", "code": "2"}, dict.fromkeys(names, "1"))


@pytest.fixture(scope="module")
def forks(tmp_path_factory) -> Forks:
    return Forks(tmp_path_factory.mktemp("forks"))


@pytest.mark.process
def test_the_hash_does_not_depend_on_micro_batches_processes_or_stops(forks, tiny, corpus, tmp_path):
    """Compare micro-batches of 4 in one process with 2 in two processes with data workers, and a resume at step 3."""
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

    after = list(read_hash_log(one.path))[1:]
    branch = (*fit, "--ckpt_path", one.checkpoints / "00000003")
    forks.run(*branch, f"logging.root={tmp_path}/branch")
    assert list(read_hash_log(only_run(tmp_path / "branch").path)) == after

    shutil.copytree(corpus["train"], tmp_path / "moved")
    forks.run(*branch, f"logging.root={tmp_path}/moved-run", f"data.path={tmp_path / 'moved'}")
    assert list(read_hash_log(only_run(tmp_path / "moved-run").path)) == after
    output = forks.run(*branch, f"logging.root={tmp_path}/other-run", f"data.path={corpus['left']}", expect=1)
    assert "the sequences have changed since the run began" in output
