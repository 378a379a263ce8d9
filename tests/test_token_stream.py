"""Training from object storage: a real S3 server that fails, is slow, or lacks files; cache limits; loader workers."""

import gc
import inspect
import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.connection import Client
from multiprocessing.resource_sharer import DupFd, _resource_sharer
from pathlib import Path

import pytest
import streaming
import torch
from loaders import build_config, build_loader, open_data, read_samples, run_ranks, split_into_steps, write_set
from records import losses, only_run
from streaming import Stream, StreamingDataset

from stackexp.cli import main
from stackexp.config.data import ShardsConfig, StreamConfig
from stackexp.data import hash_log
from stackexp.datamodules.node_storage import SourceError
from stackexp.datamodules.token_stream import TokenSource, TokenStream, _set_up_worker
from stackexp.runs import RunFolder

SHARD = "unit.00000/shard.00003.mds"


@pytest.fixture(scope="module")
def local_samples(remote_set) -> list:
    """Two epochs, read from the folder itself."""
    return read_samples(build_loader(build_config(path=str(remote_set))), epochs=2)


def compute_limit(folder: Path, shards: int) -> str:
    """Return a cache limit with space for the index and a number of shards."""
    return f"{(folder / 'index.json').stat().st_size + shards * (folder / SHARD).stat().st_size}b"


class ShardCounter(threading.Thread):
    """Counts the shards in a cache while a run reads it, including unfinished downloads."""

    def __init__(self, cache: Path):
        super().__init__(daemon=True)
        self._cache, self._is_done = cache, threading.Event()
        self.maximum = self.num_counts = 0

    def __enter__(self) -> "ShardCounter":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()

    def run(self) -> None:
        while not self._is_done.wait(0.0005):
            for folder in self._cache.glob("remotes/*/unit.00000"):
                self.maximum = max(self.maximum, sum(".mds" in name for name in os.listdir(folder)))
                self.num_counts += 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_server_and_a_small_cache_give_the_local_samples(
    s3, url, remote_set, local_samples, tmp_path, workers
):
    """The cache holds less than the set, so shards are evicted and downloaded again."""
    s3.fail_every, s3.seconds_per_chunk = 3, 0.002
    number = 6 * max(1, workers)
    limit = compute_limit(remote_set, number)
    config = build_config(remote=url, cache_limit=limit, num_workers=workers, micro_batch_size=2)
    with ShardCounter(tmp_path / "cache") as counter:
        assert read_samples(build_loader(config)) == local_samples[: len(local_samples) // 2]
    assert s3.num_failures > 10
    assert s3.count_downloads(SHARD) > 1, "nothing was evicted, so this proves nothing"
    assert counter.num_counts > 20
    assert 0 < counter.maximum <= number


def test_four_ranks_share_a_cache(s3, url, remote_set, local_samples, tmp_path):
    config = build_config(remote=url, cache_limit=compute_limit(remote_set, 20), micro_batch_size=1)
    with ShardCounter(tmp_path / "cache") as counter:
        steps, _ = run_ranks(4, config, tmp_path / "rendezvous", len(local_samples) // 8)
    assert steps == split_into_steps(local_samples)
    assert len(list((tmp_path / "cache" / "remotes").iterdir())) == 1
    assert 0 < counter.maximum <= 20


def test_a_filled_cache_downloads_no_shards(s3, url, local_samples):
    read_samples(build_loader(build_config(remote=url)))
    s3.requests.clear()
    assert read_samples(build_loader(build_config(remote=url)), epochs=2) == local_samples
    assert s3.count_downloads(".mds") == 0


def test_a_mixture_never_evicts_shards_of_a_local_set(s3, url, remote_set, tmp_path):
    other = write_set(tmp_path / "other", 2000, 30)
    shards = sorted(other.rglob("*.mds"))
    near = StreamConfig(path=str(other))
    streams = {"far": StreamConfig(remote=url), "near": near}
    limit = int(compute_limit(remote_set, 8)[:-1]) + (other / "index.json").stat().st_size
    samples = read_samples(build_loader(build_config(streams=streams, cache_limit=f"{limit}b")))
    local = {"far": StreamConfig(path=str(remote_set)), "near": near}
    assert samples == read_samples(build_loader(build_config(streams=local)))
    assert sorted(other.rglob("*.mds")) == shards


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_remote_shard_is_named(s3, url, remote_set, workers, tmp_path):
    data = bytearray((remote_set / SHARD).read_bytes())
    data[-1] ^= 1
    s3.client.put_object(Bucket=url.split("/")[2], Key=f"sets/train/{SHARD}", Body=bytes(data))
    with pytest.raises(SourceError) as raised:
        read_samples(build_loader(build_config(remote=url, num_workers=workers)))
    assert str(raised.value).startswith(f"{url}/{SHARD}: the SHA-256 of the downloaded file differs")
    assert not list((tmp_path / "cache").rglob("*00003.mds*"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_missing_remote_shard_is_named(s3, url, workers):
    loader = build_loader(build_config(remote=url, num_workers=workers))
    s3.client.delete_object(Bucket=url.split("/")[2], Key=f"sets/train/{SHARD}")
    with pytest.raises(SourceError, match=rf"^{url}/{SHARD}: Object .*not found"):
        read_samples(loader)


def test_training_waits_for_a_server_that_is_down(s3, url, local_samples):
    loader = build_loader(build_config(remote=url, download_retries=9))
    s3.status = 503
    threading.Timer(1.5, lambda: setattr(s3, "status", None)).start()
    began = time.monotonic()
    assert read_samples(loader, epochs=2) == local_samples
    assert time.monotonic() - began > 1


# Random numbers


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_draw_no_global_random_numbers(remote_set, workers):
    """A resumed run restores the random state before it creates the iterators."""
    data = open_data(build_config(path=str(remote_set), num_workers=workers, validation={"left": str(remote_set)}))
    state = torch.get_rng_state()
    for loader in (data.train_dataloader(), *data.val_dataloader()):
        next(iter(loader))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("memory", ["model.memory.action_noise=0.3", "plugins=[noise.py]"])
def test_resume_with_random_numbers_is_exact(tiny, empty_folder, tmp_path, memory):
    """A branch from step 4 repeats the later steps of its run bit for bit, across a validation."""
    Path("noise.py").write_text(NOISE)
    command = ["fit", "--config", str(tiny), memory, "trainer.max_steps=8", "logging.progress_bar=false"]
    command += ["model.memory.kind=noise"] if "plugins" in memory else []
    assert main([*command, "name=whole", "trainer.keep_checkpoints=3"]) == 0
    [whole] = map(RunFolder, (tmp_path / "runs" / "whole").iterdir())
    assert main([*command, "name=branch", "--ckpt_path", f"{whole.path}/checkpoints/00000004"]) == 0
    [branch] = map(RunFolder, (tmp_path / "runs" / "branch").iterdir())
    assert losses(branch) == {step: loss for step, loss in losses(whole).items() if step > 4}


NOISE = """
import torch
from linear_memory import LinearMemory, LinearMemoryConfig
from dataclasses import dataclass
from stackexp.config.registry import register

@dataclass
class NoiseConfig(LinearMemoryConfig):
    kind: str = "noise"

@register("memory", "noise", config=NoiseConfig)
class Noise(LinearMemory):
    uses_random_numbers = True

    def forward(self, h, state, previous, probe=False):
        return h + 0.1 * torch.randn_like(h) + self.map(h), state, {}
"""


# Processes


def test_workers_end_with_their_loader(remote_set):
    """The loader may be in a reference cycle, as after an error. Then its queues may be collected first."""
    loader = build_loader(build_config(path=str(remote_set), num_workers=2))
    next(iter(loader))
    workers = list(loader._iterator._workers)
    loader.cycle = loader
    began = time.monotonic()
    del loader
    gc.collect()
    assert not any(worker.is_alive() for worker in workers), "Python would wait for these at exit, forever"
    assert time.monotonic() - began < 4, "they ended after torch's timeout"


def _lose_the_run() -> None:
    """Connect to the thread that sends batches, as the run does, and close the connection without a request."""
    receiver, _sender = multiprocessing.Pipe(duplex=False)
    _set_up_worker(receiver, worker_id=0)
    DupFd(0)  # starts the thread
    Client(_resource_sharer._address, authkey=multiprocessing.current_process().authkey).close()
    time.sleep(0.3)


def test_worker_prints_no_traceback_if_its_run_is_killed_while_it_fetches_a_batch(capfd):
    worker = multiprocessing.get_context("fork").Process(target=_lose_the_run)
    worker.start()
    worker.join(30)
    assert worker.exitcode == 0
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("workers", [0, 1])
def test_exit_does_not_wait_for_the_look_ahead(s3, url, workers, forks, tmp_path):
    s3.stall_on = SHARD
    config = build_config(remote=url, shuffle=False, num_workers=workers)
    forks.run(s3.environment, config, tmp_path / "exit", function=_read_one_batch)
    assert s3.num_stalls == 1, "nothing was being downloaded, so this proves nothing"
    assert time.time() - (tmp_path / "exit").stat().st_mtime < 3


def _read_one_batch(environment: dict[str, str], config: ShardsConfig, marker: Path) -> None:
    os.environ.update(environment)
    batches = iter(build_loader(config))
    next(batches)
    time.sleep(0.5)  # for the look-ahead
    sys.modules["kept until the end"] = batches  # as an error's traceback would keep it
    marker.touch()


@pytest.mark.process
def test_a_killed_and_resumed_run_equals_a_run_on_the_local_folder(s3, tiny, corpus, forks, tmp_path):
    url = s3.upload(corpus["train"], "of-the-program", "sets/train")
    s3.fail_every = 3
    size = max(path.stat().st_size for path in corpus["train"].rglob("*.mds"))
    changes = ("trainer.max_steps=10", "trainer.val_check_interval=null", "logging.progress_bar=false")
    command = ("fit", "--config", tiny, *changes, "data.hash_interval=1")
    forks.run(*command, f"logging.root={tmp_path}/local")
    remote = ("data.path=null", f"data.remote={url}", f"data.cache_limit={4 * size + 200_000}b", "data.num_workers=1")
    killed = forks.start(s3.environment, *command, *remote, function=_run_program)
    killed.kill_when(lambda: any((tmp_path / "runs").glob("tiny/*/checkpoints/00000004")))
    forks.run(s3.environment, *command, *remote, "--ckpt_path", "last", function=_run_program)
    run, reference = only_run(tmp_path / "runs"), only_run(tmp_path / "local")
    assert hash_log.read_hashes(run.path) == hash_log.read_hashes(reference.path)
    assert losses(run) == losses(reference)


def _run_program(environment: dict[str, str], *arguments: object) -> int:
    from stackexp.cli import main

    os.environ.update(environment)
    return main([str(argument) for argument in arguments])


def test_the_library_has_the_hooks_that_token_stream_uses(remote_set):
    version = streaming.__version__
    stream = TokenStream([TokenSource(remote_set, 8)], batch_size=4, num_canonical_nodes=1)
    assert callable(streaming.base.dataset.get_shm_prefix)
    assert list(inspect.signature(StreamingDataset.prepare_shard).parameters) == ["self", "shard_id", "blocking"]
    assert list(inspect.signature(StreamingDataset.get_item).parameters) == ["self", "sample_id", "retry"]
    assert list(inspect.signature(Stream.set_up_local).parameters) == ["self", "shards", "cache_usage_per_shard"]
    assert set(stream._shard_states.numpy()) == {1}, f"streaming {version} treats unverified shards as present"
    assert len(next(iter(stream))["tokens"])
    assert 3 in stream._shard_states.numpy(), f"streaming {version} prepares shards elsewhere"
    assert callable(stream._iterator.non_blocking_exit)
    assert callable(stream.on_exception)
