"""Training data from local shards: order, epochs, exact resume, and runs that share a machine."""

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from forks import Forks
from loaders import TEXTS, TOKENIZER, T, build_config, build_loader, run_ranks
from torch import multiprocessing

from stackexp.config.data import ShardsConfig, StdlibConfig
from stackexp.data import stdlib
from stackexp.data.shards import TokenSet
from stackexp.data.units import write_documents
from stackexp.datamodules.pretraining import PretrainingData, StdlibData
from stackexp.datamodules.token_stream import TokenSource, TokenStream
from stackexp.errors import RunError

CHECKPOINT_STEPS = (4, 11, 15, 22)  # in the first epoch of 11 steps, at its end, in the second, at the end of that


@pytest.fixture(scope="module", autouse=True)
def own_temporary_folder(tmp_path_factory):
    """A folder for the library's lock files; a killed process leaves its own there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("locks")))
        patch.setenv("TMPDIR", tempfile.tempdir)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A set of 93 sequences: epochs of 11 steps of 8, with five sequences left out."""
    folder = tmp_path_factory.mktemp("prepared") / "train"
    write_documents(folder, TEXTS[:60], TOKENIZER, T)
    assert len(TokenSet(folder)) == 93
    return folder


def flatten(lists: Iterable[list[int]]) -> list[int]:
    return [item for items in lists for item in items]


class Recorder(pl.LightningModule):
    """Records the indices of its batches, and saves a checkpoint after the steps in `checkpoints`."""

    def __init__(self, checkpoints: dict[int, Path]):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.checkpoints, self.indices = checkpoints, []

    def training_step(self, batch, batch_idx):
        assert batch["tokens"].shape == (4, T)
        self.indices.append(batch["index"].tolist())
        return self.weight * batch["tokens"].float().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx % 2 and self.trainer.global_step in self.checkpoints:
            self.trainer.save_checkpoint(self.checkpoints[self.trainer.global_step])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)


def fit(
    config: ShardsConfig, steps: int, checkpoints: dict[int, Path] | None = None, resume: Path | None = None
) -> list[list[int]]:
    """Return the indices of every micro-batch of 4; two make a step."""
    module = Recorder(checkpoints or {})
    disabled = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    options = {"max_steps": steps, "max_epochs": -1, "accumulate_grad_batches": 2, "accelerator": "cpu"}
    trainer = pl.Trainer(**options, **dict.fromkeys(disabled, False))
    trainer.fit(module, PretrainingData(config, seed=5), ckpt_path=resume, weights_only=True)
    return module.indices


def checkpoint_paths(folder: Path, workers: int) -> dict[int, Path]:
    return {step: folder / f"{workers}-{step}.ckpt" for step in CHECKPOINT_STEPS}


def train_and_die(path: str, checkpoints: Path, locks: str) -> None:
    """Train, save checkpoints, and kill this process with its workers. Runs in a process of its own."""
    os.setsid()
    tempfile.tempdir = os.environ["TMPDIR"] = locks
    for workers in (0, 1):
        fit(build_config(path=path, num_workers=workers), 23, checkpoint_paths(checkpoints, workers))
    next(iter(build_loader(build_config(path=path, num_workers=1))))
    os.killpg(0, signal.SIGKILL)


@pytest.fixture(scope="module")
def checkpoints(folder, tmp_path_factory) -> Path:
    """Checkpoints of a process that was killed."""
    path = tmp_path_factory.mktemp("checkpoints")
    before = set(os.listdir("/dev/shm"))
    Forks(path).run(str(folder), path, tempfile.tempdir, function=train_and_die, expect=-signal.SIGKILL)
    remains = set(os.listdir("/dev/shm")) - before
    assert remains, "the kill left no shared memory, so this proves nothing"
    yield path
    for name in remains:
        Path("/dev/shm", name).unlink(missing_ok=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_resume_continues_with_the_next_sequences(folder, checkpoints, workers):
    config = build_config(path=str(folder), num_workers=workers)
    indices = fit(config, 30)
    assert len(indices) == 60
    for step, path in checkpoint_paths(checkpoints, workers).items():
        assert fit(config, 30, resume=path) == indices[2 * step :], f"after step {step}"


def test_an_epoch_has_whole_steps_and_a_new_order(folder):
    config = build_config(path=str(folder))
    indices = fit(config, 33)
    epochs = [flatten(indices[22 * e : 22 * e + 22]) for e in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 88
    assert epochs[0] != epochs[1] != epochs[2]
    assert set().union(*epochs) == set(range(93)), "the same sequences are left out in every epoch"
    assert fit(config, 3) == indices[:6]


def test_shuffle_seed_replaces_the_seed_of_the_order(folder):
    config = build_config(path=str(folder))  # of seed 5
    assert fit(replace(config, shuffle_seed=5), 3) == fit(config, 3) != fit(replace(config, shuffle_seed=1), 3)


def test_without_shuffling_the_order_is_that_of_the_set(folder):
    indices = flatten(fit(build_config(path=str(folder), shuffle=False), 22))
    assert indices[:88] == sorted(indices[:88])
    assert indices[88:] == indices[:88]


@pytest.mark.parametrize("nodes", [1, 2])
def test_two_ranks_read_the_same_global_batches_as_one(folder, tmp_path, nodes):
    config = build_config(path=str(folder), num_canonical_nodes=nodes, micro_batch_size=2)
    one, _ = run_ranks(1, config, tmp_path / "one", 11)
    two, _ = run_ranks(2, config, tmp_path / "two", 11)
    assert two == one
    assert max(Counter(index for step in one for index, *_ in step).values()) == 1


def test_canonical_nodes_that_do_not_divide_are_reported(folder):
    with pytest.raises(RunError, match=r"data\.num_canonical_nodes: 3 does not divide the 8 sequences"):
        build_loader(build_config(path=str(folder), num_canonical_nodes=3))
    data = PretrainingData(build_config(path=str(folder), num_canonical_nodes=2), seed=0)
    data.setup("fit")
    data.trainer = SimpleNamespace(global_rank=0, world_size=3, num_devices=1)
    with pytest.raises(RunError, match=r"the 3 nodes of this run must divide one another"):
        data.train_dataloader()


def open_stream(folder: Path) -> TokenStream:
    return TokenStream([TokenSource(folder, 93)], batch_size=4, num_canonical_nodes=1)


def count_samples(folder: Path, start, queue) -> None:
    start.wait()
    queue.put(len(list(open_stream(folder))))


def test_runs_that_start_together_use_separate_shared_memory(folder):
    """The library's own names would give two runs the same shared memory, and they would crash."""
    context = multiprocessing.get_context("fork")
    start, queue = context.Barrier(6), context.Queue()
    runs = [context.Process(target=count_samples, args=(folder, start, queue)) for _ in range(6)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0] * 6
    assert [queue.get() for _ in runs] == [93] * 6


def test_the_standard_library_is_prepared_once(tmp_path, monkeypatch):
    monkeypatch.setenv("STACKEXP_CACHE", str(tmp_path))
    monkeypatch.setattr(stdlib, "TRAIN_BYTES", 100_000)
    config = StdlibConfig(vocab_size=300, context_length=64, global_batch_tokens=512, eval_sequences=3, num_workers=0)
    data = StdlibData(config, seed=0)
    reads = []
    read_stdlib = stdlib.read_stdlib
    monkeypatch.setattr(stdlib, "read_stdlib", lambda root: reads.append(root) or read_stdlib(root))
    for _ in range(2):  # called by stackexp and by Lightning
        data.prepare_data()
        data.setup("fit")
    assert data.list_set_names("validate") == ["stdlib-asyncio", "stdlib-json+email", "stdlib-docstrings"]
    assert data.list_set_names("test") == ["stdlib-logging+http", "stdlib-xml"]
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, num_devices=1)
    assert next(iter(data.train_dataloader()))["tokens"].shape == (8, 64)
    assert data.token_bytes.sum() > 300
    assert len(reads) == 1
