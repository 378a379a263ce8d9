"""Training from object storage: a real S3 server that fails, dawdles or lacks what is asked for; the cache's bounds."""

import gc
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import streaming
from forks import Forks
from loaders import config_of, loader_of, run_ranks, samples, steps, write
from records import losses, only_run
from s3 import S3, without_credentials
from streaming import Stream, StreamingDataset

from stackexp.config.data import ShardsConfig
from stackexp.data import hash_log
from stackexp.data.shards import TokenSet
from stackexp.datamodules import remote as remote_module
from stackexp.datamodules.remote import Cache, Remote, SourceError
from stackexp.datamodules.streaming import Source, TokenStream
from stackexp.errors import RunError

SHARD = "unit.00000/shard.00003.mds"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """About 150 sequences in shards of eight."""
    return write(tmp_path_factory.mktemp("prepared") / "train", 0, 60)


@pytest.fixture(scope="module")
def server():
    with S3() as s3:
        yield s3


@pytest.fixture
def s3(server, monkeypatch, tmp_path):
    """The server, well-behaved, and led to by the environment; caches are this test's own."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STACKEXP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_module, "_held", {})
    monkeypatch.setattr(remote_module, "SECONDS", 0.01)
    server.fail_every, server.seconds_per_chunk, server.refuses, server.failures = 0, 0.0, None, 0
    server.stalls = None
    server.requests.clear()
    yield server
    server.fail_every, server.refuses, server.stalls = 0, None, None
    for cache in remote_module._held.values():
        cache.close()


@pytest.fixture
def url(s3, folder, request) -> str:
    """The set, in a bucket of this test's own."""
    bucket = f"bucket-{abs(hash(request.node.name))}"
    return s3.upload(folder, bucket, "sets/train")


@pytest.fixture(scope="module")
def local(folder) -> list:
    """Two epochs as they come from the folder itself."""
    return samples(loader_of(config_of(path=str(folder))), epochs=2)


def limit_of(folder: Path, shards: int) -> str:
    """Room for so many shards beside what describes the set."""
    described = sum((folder / name).stat().st_size for name in ("index.json", "corpus.json", "tokenizer.json"))
    return f"{described + 200 + shards * (folder / SHARD).stat().st_size}b"


class Watch(threading.Thread):
    """Counts the shards in a cache while a run goes on, downloads under way included: .shard.00003.mds.123-456."""

    def __init__(self, cache: Path):
        super().__init__(daemon=True)
        self.cache, self.most, self.looks, self.done = cache, 0, 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.0005):
            for folder in self.cache.glob("remotes/*/unit.00000"):
                self.most = max(self.most, sum(".mds" in name for name in os.listdir(folder)))  # in one look: exact
                self.looks += 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_server_that_fails_and_dawdles_gives_the_samples_of_the_local_folder(
    s3, url, folder, local, tmp_path, workers
):
    """With a cache of a third of the set, so that shards go and come again."""
    s3.fail_every, s3.seconds_per_chunk = 3, 0.002
    number = 2 + 2 * max(1, workers)
    config = config_of(remote=url, cache_limit=limit_of(folder, number), num_workers=workers)
    watch = Watch(tmp_path / "cache")
    watch.start()
    assert samples(loader_of(config)) == local[: len(local) // 2]
    watch.done.set()
    assert s3.failures > 10
    assert s3.downloads(SHARD) > 1, "nothing was evicted: this proves nothing"
    assert watch.looks > 20
    assert 0 < watch.most <= number


def test_four_processes_share_a_cache(s3, url, folder, local, tmp_path):
    config = config_of(remote=url, cache_limit=limit_of(folder, 10), micro_batch_size=2)
    watch = Watch(tmp_path / "cache")
    watch.start()
    taken, _ = run_ranks(4, config, tmp_path / "meeting", len(local) // 8)
    watch.done.set()
    assert taken == steps(local)
    assert len(list((tmp_path / "cache" / "remotes").iterdir())) == 1
    assert 0 < watch.most <= 10


def test_a_warm_cache_downloads_no_shard_again(s3, url, local):
    samples(loader_of(config_of(remote=url)))
    s3.requests.clear()
    assert samples(loader_of(config_of(remote=url)), epochs=2) == local
    assert s3.downloads(".mds") == 0


def test_a_path_is_a_remote_too(s3, folder, local, tmp_path):
    config = config_of(remote=str(folder), path=str(tmp_path / "here"))
    assert samples(loader_of(config), epochs=2) == local
    assert len(list((tmp_path / "here").rglob("*.mds"))) == len(TokenSet(folder).files)


def test_a_mixture_of_a_remote_and_a_local_set_never_evicts_the_latter(s3, url, folder, tmp_path):
    from stackexp.config.data import StreamConfig

    other = write(tmp_path / "other", 2000, 30)
    before = sorted(other.rglob("*.mds"))
    streams = {"far": StreamConfig(remote=url), "near": StreamConfig(path=str(other))}
    far = config_of(streams=streams, cache_limit=limit_of(folder, 4))
    streams = {"far": StreamConfig(path=str(folder)), "near": StreamConfig(path=str(other))}
    assert samples(loader_of(far)) == samples(loader_of(config_of(streams=streams)))
    assert sorted(other.rglob("*.mds")) == before


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_shard_on_the_server_is_named(s3, url, folder, workers, tmp_path):
    bucket = url.split("/")[2]
    data = bytearray((folder / SHARD).read_bytes())
    data[-1] ^= 1
    s3.client.put_object(Bucket=bucket, Key=f"sets/train/{SHARD}", Body=bytes(data))
    with pytest.raises(SourceError) as raised:
        samples(loader_of(config_of(remote=url, num_workers=workers)))
    assert str(raised.value).startswith(f"{url}/{SHARD}: cannot be downloaded in 3 attempts: its sha256 is not the one")
    assert not list((tmp_path / "cache").rglob("*00003.mds*")), "nothing half-good ever counts"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_that_has_gone_is_named(s3, url, workers):
    loader = loader_of(config_of(remote=url, num_workers=workers))
    s3.client.delete_object(Bucket=url.split("/")[2], Key=f"sets/train/{SHARD}")
    taken = []
    with pytest.raises(SourceError, match=rf"^{url}/{SHARD}: not found"):
        taken += samples(loader)
    assert not taken


def test_the_processes_of_a_loader_end_with_it(folder):
    """Also where it is part of a cycle, as after an error: Python closes what it is told by before it can be told."""
    loader = loader_of(config_of(path=str(folder), num_workers=2))
    next(iter(loader))
    processes = list(loader._iterator._workers)
    loader.itself = loader
    began = time.monotonic()
    del loader
    gc.collect()
    assert not any(process.is_alive() for process in processes), "Python waits for these at exit, without end"
    assert time.monotonic() - began < 4, "they were not told, but waited for"


@pytest.mark.parametrize("workers", [0, 1])
def test_at_exit_nobody_waits_for_a_download_that_looks_ahead(s3, url, workers, tmp_path):
    s3.stalls, stalled = SHARD, s3.stalled
    config = config_of(remote=url, shuffle=False, num_workers=workers)
    Forks(tmp_path).run(s3.environment, config, tmp_path / "leaves", function=_take_one)
    assert s3.stalled == stalled + 1, "nothing was being downloaded: this proves nothing"
    assert time.time() - (tmp_path / "leaves").stat().st_mtime < 3


def _take_one(environment: dict[str, str], config: ShardsConfig, leaves: Path) -> None:
    os.environ.update(environment)
    batches = iter(loader_of(config))
    next(batches)
    time.sleep(0.5)  # of looking ahead
    sys.modules["kept until the end"] = batches  # as an error's traceback is
    leaves.touch()


def test_an_outage_is_waited_for(s3, url, local):
    """All requests fail, the library's own retries too, until the server is back."""
    loader = loader_of(config_of(remote=url, download_retries=9))
    s3.refuses = 503
    threading.Timer(1.5, lambda: setattr(s3, "refuses", None)).start()
    began = time.monotonic()
    assert samples(loader, epochs=2) == local
    assert time.monotonic() - began > 1


def test_mistakes_are_one_line(s3, url, folder, tmp_path, monkeypatch):
    def error(**changes) -> str:
        with pytest.raises((RunError, OSError)) as raised:
            next(iter(loader_of(config_of(**{"remote": url} | changes))))
        line = str(raised.value)
        assert "\n" not in line
        return line

    assert "not found; check data.remote" in error(remote="s3://no-such-bucket-here/x")
    assert "not found; check data.remote" in error(remote=url + "-not")
    assert "Unsupported remote path" in error(remote="ftp://host/folder")
    least = error(cache_limit="10kb").split("data.cache_limit=")[1].split("b or more")[0]
    assert samples(loader_of(config_of(remote=url, cache_limit=f"{least}b"))), (
        "the limit that the message names is enough"
    )
    assert "holds other files" in error(path=str(folder))
    s3.refuses = 403
    assert "not permitted; check the credentials" in error()
    s3.refuses = None
    (tmp_path / "file").touch()
    assert "file" in error(path=str(tmp_path / "file" / "below"))


def test_no_credentials_is_one_line(s3, url, tmp_path):
    """In a process of its own: boto3 remembers."""
    output = Forks(tmp_path).run(url, str(tmp_path), s3.environment["S3_ENDPOINT_URL"], function=_fetch_without)
    assert "no credentials; set AWS_ACCESS_KEY_ID" in output


def _fetch_without(url: str, folder: str, endpoint: str) -> int:
    environment = without_credentials(Path(folder)) | {"S3_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"}
    os.environ.clear()
    os.environ.update(environment)
    try:
        Remote(url, 5, 0).fetch("index.json", Path(folder, "index.json"))
    except SourceError as error:
        print(error)
    return 0


def test_a_cache_belongs_to_one_run(s3, url, tmp_path, caplog):
    remote = Remote(url, 5, 0)
    first, second = Cache(remote, None), Cache(remote, None)
    assert first.folder != second.folder
    named = [Cache(remote, str(tmp_path / "named")) for _ in range(3)]
    assert [cache.folder.name for cache in named] == ["named", "named-2", "named-3"]
    lines = [line for name, _, line in caplog.record_tuples if name == remote_module.__name__]
    for cache, line in zip(named[1:], lines, strict=True):
        assert line == f"{named[0].folder}: another run uses this cache; this run's is {cache.folder}"
    named[1].close()
    named.append(Cache(remote, str(tmp_path / "named")))
    assert named[-1].folder == named[1].folder
    (tmp_path / "named-4").mkdir()
    (tmp_path / "named-4" / "thesis.tex").touch()
    with pytest.raises(SourceError, match="named-4: holds other files"):
        Cache(remote, str(tmp_path / "named"))
    named[0].close()
    with pytest.raises(SourceError, match=r"the cache of s3://.*, not of"):
        Cache(Remote("s3://another/set", 5, 0), str(tmp_path / "named"))


def test_a_cache_keeps_what_is_whole_and_of_the_same_set(s3, url, folder, tmp_path):
    remote, place = Remote(url, 5, 0), tmp_path / "named"
    Cache(remote, str(place)).close()
    (place / "unit.00000").mkdir()
    whole, cut = place / SHARD, place / "unit.00000" / "shard.00001.mds"
    shutil.copy(folder / SHARD, whole)
    cut.write_bytes((folder / "unit.00000" / "shard.00001.mds").read_bytes()[:-1])
    part = place / "unit.00000" / ".shard.00002.mds.1-2"
    part.touch()
    Cache(remote, str(place)).close()
    assert (whole.exists(), cut.exists(), part.exists()) == (True, False, False)


def shards_in(disk):
    return sorted(path.name for path in disk.rglob("*.mds*"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_full_disk_is_one_line(folder, url, tmp_path, workers):
    disk = tmp_path / "disk"
    disk.mkdir()
    described = sum(-((folder / name).stat().st_size // -4096) for name in remote_module.DESCRIPTION)
    size = f"size={4 * (described + 4)}k"  # what names the remote, and three shards
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], stderr=-1).returncode:
        pytest.skip("needs the right to mount")
    try:
        with pytest.raises(SourceError) as raised:
            samples(loader_of(config_of(remote=url, path=str(disk / "cache"), num_workers=workers)))
        place, _, what = str(raised.value).partition(": ")
        assert place.startswith(f"{disk}/cache/unit.00000/")
        assert what == "No space left on device; free space, or name another cache with data.path or STACKEXP_CACHE"
        end = time.monotonic() + 30  # what looks ahead may be at another shard still
        while (names := shards_in(disk)) and any(name.startswith(".") for name in names) and time.monotonic() < end:
            time.sleep(0.05)
        assert len(names) == 3
        assert not any(name.startswith(".") for name in names), "nothing half-good stays"
    finally:
        for cache in remote_module._held.values():
            cache.close()
        subprocess.run(["umount", "--lazy", disk], check=True)  # what looks ahead may still be at it


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user, who may not write")
def test_a_cache_that_cannot_be_written_is_one_line(folder, tmp_path):
    """Not ours from the beginning, or, as when a file system goes read-only, not any more."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        Path(place, "theirs").mkdir(mode=0o755)
        shutil.copytree(folder, Path(place, "set"))
        subprocess.run(["chmod", "-R", "a+rX", place], check=True)
        output = Forks(tmp_path).run(place, function=_fetch_as_another)
    first, second = output.strip().splitlines()[-2:]
    assert first.endswith(f"Permission denied: '{place}/theirs/cache'")
    assert second.startswith(f"{place}/ours/unit.00000/")
    assert second.endswith(": Permission denied; free space, or name another cache with data.path or STACKEXP_CACHE")


def _fetch_as_another(place: str) -> None:
    next(iter(loader_of(config_of(remote=f"{place}/set", path=f"{place}/root"))))  # imports what another may not read
    os.seteuid(65534)
    for name in ("theirs/cache", "ours"):
        try:
            loader = loader_of(config_of(remote=f"{place}/set", path=f"{place}/{name}"))
            Path(place, name, "unit.00000").mkdir()
            os.chmod(Path(place, name, "unit.00000"), 0o555)
            next(iter(loader))
        except (RunError, OSError) as error:
            print(error)
    os.seteuid(0)


def test_a_run_killed_and_resumed_sees_what_a_run_on_the_local_folder_sees(s3, tiny, corpus, tmp_path):
    url = s3.upload(corpus["train"], "of-the-program", "sets/train")
    s3.fail_every = 3
    forks = Forks(tmp_path)
    size = max(path.stat().st_size for path in corpus["train"].rglob("*.mds"))
    changes = ("trainer.max_steps=10", "trainer.val_check_interval=null", "logging.progress_bar=false")
    command = ("fit", "--config", tiny, *changes, "data.hash_interval=1")
    forks.run(*command, f"logging.root={tmp_path}/local")
    far = ("data.path=null", f"data.remote={url}", f"data.cache_limit={4 * size + 200_000}b", "data.num_workers=1")
    killed = forks.start(s3.environment, *command, *far, function=_program_with)
    killed.kill_when(lambda: any((tmp_path / "runs").glob("tiny/*/checkpoints/00000004")))
    forks.run(s3.environment, *command, *far, "--ckpt_path", "last", function=_program_with)
    ours, theirs = only_run(tmp_path / "runs"), only_run(tmp_path / "local")
    assert hash_log.read_hashes(ours.path) == hash_log.read_hashes(theirs.path)
    assert losses(ours) == losses(theirs)


def _program_with(environment: dict[str, str], *arguments: object) -> int:
    from stackexp.cli import main

    os.environ.update(environment)
    return main([str(argument) for argument in arguments])


def test_the_library_is_as_we_rely_on_it(folder):
    """What TokenStream overrides or reads of mosaicml-streaming beyond its documentation. It decides which shards are
    here itself, because the library's cache can exceed its limit, evict local sets and wait without end."""
    version = streaming.__version__
    stream = TokenStream([Source(folder, 8)], batch_size=4, num_canonical_nodes=1)
    for name in ("_shard_access_times", "_shm_prefix_int", "_cache_filelock_path", "_unique_rank_world"):
        assert hasattr(stream, name), f"streaming {version} has no {name}"
    assert list(inspect.signature(StreamingDataset.prepare_shard).parameters) == ["self", "shard_id", "blocking"]
    assert list(inspect.signature(Stream.set_up_local).parameters) == ["self", "shards", "cache_usage_per_shard"]
    assert set(stream._shard_states.numpy()) == {3}, f"streaming {version} does not take every shard for present"
    asked = []
    path = Path(stream.shards[0].dirname, stream.shards[0].raw_data.basename)
    hidden = path.rename(path.with_suffix(".hidden"))
    try:
        stream.prepare_shard = lambda shard, blocking=True: asked.append(shard) or hidden.rename(path)
        assert len(stream[0]["tokens"])
    finally:
        if hidden.exists():
            hidden.rename(path)
    assert asked == [0], f"streaming {version} does not call prepare_shard for a file that is missing"
    assert stream._shard_access_times[0] > 0
