import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import loaders
import pytest
import torch
from loaders import T, V, loader_of, run_ranks
from streaming import LocalDataset
from torch import multiprocessing

from stackexp.config.data import ShardsConfig, StdlibConfig
from stackexp.data import stdlib
from stackexp.data.packing import write_documents
from stackexp.data.shards import TokenSet
from stackexp.data.tokenizer import train_tokenizer
from stackexp.datamodules.pretraining import PretrainingData, StdlibData
from stackexp.datamodules.streaming import Source, TokenStream, _remove_locks
from stackexp.errors import RunError

TEXTS = [f"line {n} of {n * n} lines\n" * 3 for n in range(200)]


@pytest.fixture(scope="module", autouse=True)
def own_temporary_folder(tmp_path_factory):
    """Where streaming puts its lock files: those of a killed process stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("locks")))
        patch.setenv("TMPDIR", tempfile.tempdir)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A set of 93 sequences: epochs of 11 steps of 8, five sequences sitting out."""
    folder = tmp_path_factory.mktemp("prepared") / "train"
    tokenizer = train_tokenizer(TEXTS, V)
    count = 1
    while True:
        write_documents(folder, TEXTS[:count], tokenizer, T)
        if len(TokenSet(folder)) >= 93:
            return folder
        count += 1
        folder = folder.with_name(f"train{count}")


def config_of(folder: Path, **changes) -> ShardsConfig:
    return loaders.config_of(path=str(folder), **changes)


def flat(lists: Iterable[list[int]]) -> list[int]:
    return [item for items in lists for item in items]


class Recorder(pl.LightningModule):
    """Writes down the numbers of the sequences it is given; saves a checkpoint after the steps of `save_at`."""

    def __init__(self, save_at: dict[int, Path] | None = None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.save_at, self.seen = save_at or {}, []

    def training_step(self, batch, index):
        assert batch["tokens"].shape == (4, T)
        self.seen.append(batch["index"].tolist())
        return self.weight * batch["tokens"].float().mean()

    def on_train_batch_end(self, outputs, batch, index):
        if index % 2 and self.trainer.global_step in self.save_at:
            self.trainer.save_checkpoint(self.save_at[self.trainer.global_step])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)


def fit(config: ShardsConfig, steps: int, save_at: dict[int, Path] | None = None, resume: Path | None = None) -> list:
    """Sequence numbers of every micro-batch of 4; two make a step."""
    module = Recorder(save_at)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = pl.Trainer(max_steps=steps, max_epochs=-1, accumulate_grad_batches=2, accelerator="cpu", **quiet)
    trainer.fit(module, PretrainingData(config, seed=5), ckpt_path=resume, weights_only=True)
    return module.seen


def checkpoints(folder: Path, workers: int) -> dict[int, Path]:
    """Where the checkpoints go: in the first epoch (11 steps), at its end, in the second, at the end of that."""
    return {step: folder / f"{workers}-{step}.ckpt" for step in (4, 11, 15, 22)}


def die_in_training(path: str, to: str) -> None:
    """A process that trains, saves, and is killed with everything it started."""
    for workers in (0, 1):
        fit(config_of(Path(path), num_workers=workers), 23, checkpoints(Path(to), workers))
    next(iter(loader_of(config_of(Path(path), num_workers=1))))
    os.killpg(0, signal.SIGKILL)


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory) -> Path:
    """Checkpoints of a process that was killed."""
    to = tmp_path_factory.mktemp("saved")
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import {Path(__file__).stem} as test; "
    script += f"test.die_in_training({str(folder)!r}, {str(to)!r})"
    before = set(os.listdir("/dev/shm"))
    ended = subprocess.run([sys.executable, "-c", script], start_new_session=True, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    left = set(os.listdir("/dev/shm")) - before
    assert left, "the kill left no shared memory: this proves nothing"
    yield to
    for name in left:
        Path("/dev/shm", name).unlink(missing_ok=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_resume_gives_the_sequences_that_would_have_followed(folder, saved, workers):
    config = config_of(folder, num_workers=workers)
    whole = fit(config, 30)
    assert len(whole) == 60
    for step, path in checkpoints(saved, workers).items():
        assert fit(config, 30, resume=path) == whole[2 * step :], f"after step {step}"


def test_an_epoch_is_whole_steps_and_each_has_its_own_order(folder):
    seen = fit(config_of(folder), 33)
    epochs = [flat(seen[22 * e : 22 * e + 22]) for e in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 88
    assert epochs[0] != epochs[1] != epochs[2]
    assert len(set(range(93)) - set().union(*epochs)) == 0, "the same sequences sit out in every epoch"
    assert fit(config_of(folder), 3) == seen[:6]


def test_without_shuffling_the_order_is_that_of_the_set(folder):
    seen = flat(fit(config_of(folder, shuffle=False), 22))
    assert seen[:88] == sorted(seen[:88])
    assert seen[88:] == seen[:88]


def test_the_batches_are_the_sequences_of_the_set(folder):
    tokens, theirs = TokenSet(folder), LocalDataset(str(folder))
    assert len(tokens) == len(theirs)
    for batch in loader_of(config_of(folder)):
        assert batch["tokens"].dtype == torch.int64
        for row, index in zip(batch["tokens"], batch["index"].tolist(), strict=True):
            assert row.tolist() == tokens[index].tolist() == theirs[index]["tokens"].tolist()


@pytest.mark.parametrize("nodes", [1, 2])
def test_two_ranks_take_the_same_global_batches_as_one(folder, tmp_path, nodes):
    config = config_of(folder, num_canonical_nodes=nodes, micro_batch_size=2)
    one, _ = run_ranks(1, config, tmp_path / "one", 11)
    two, _ = run_ranks(2, config, tmp_path / "two", 11)
    assert two == one
    assert max(Counter(index for step in one for index, *_ in step).values()) == 1


def test_nodes_that_do_not_divide_are_one_line(folder):
    with pytest.raises(RunError, match=r"data\.num_canonical_nodes 3 does not divide the 8 sequences"):
        loader_of(config_of(folder, num_canonical_nodes=3))
    data = PretrainingData(config_of(folder, num_canonical_nodes=2), seed=0)
    data.setup("fit")
    data.trainer = SimpleNamespace(global_rank=0, world_size=3, num_devices=1)
    with pytest.raises(RunError, match=r"the 3 nodes of this run must divide one another"):
        data.train_dataloader()


def count_samples(folder: Path, start, queue) -> None:
    start.wait()
    queue.put(len(list(TokenStream([Source(folder, 93)], batch_size=4, num_canonical_nodes=1))))


def test_runs_that_start_together_do_not_meet(folder):
    """With the library's own choice of names this crashes: the runs take the same shared memory."""
    context = multiprocessing.get_context("fork")
    start, queue = context.Barrier(6), context.Queue()
    runs = [context.Process(target=count_samples, args=(folder, start, queue)) for _ in range(6)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0] * 6
    assert [queue.get() for _ in runs] == [93] * 6


def test_lock_files_are_removed_at_exit(folder):
    stream = TokenStream([Source(folder, 93)], batch_size=4, num_canonical_nodes=1)
    list(stream)
    pattern = f"{stream._shm_prefix_int:06}_*_filelock"
    _remove_locks(stream._shm_prefix_int)
    assert not list(Path(tempfile.gettempdir()).glob(pattern))


def test_the_standard_library_prepares_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("STACKEXP_CACHE", str(tmp_path))
    monkeypatch.setattr(stdlib, "TRAIN_BYTES", 100_000)
    config = StdlibConfig(vocab_size=300, context_length=64, global_batch_tokens=512, eval_sequences=3, num_workers=0)
    data = StdlibData(config, seed=0)
    reads = []
    read_stdlib = stdlib.read_stdlib
    monkeypatch.setattr(stdlib, "read_stdlib", lambda root: reads.append(root) or read_stdlib(root))
    for _ in range(2):  # we call it, and then Lightning
        data.prepare_data()
        data.setup("fit")
    assert data.set_names("validate") == ["stdlib-asyncio", "stdlib-json+email", "stdlib-docstrings"]
    assert data.set_names("test") == ["stdlib-logging+http", "stdlib-xml"]
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, num_devices=1)
    assert next(iter(data.train_dataloader()))["tokens"].shape == (8, 64)
    assert data.token_bytes.sum() > 300
    assert len(reads) == 1
