"""Cache folders of remote sets, errors of remotes and disks in one line, and shared memory of killed runs."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from loaders import build_config, build_loader, read_samples, write_set
from s3 import remove_credentials

from stackexp.datamodules import node_storage
from stackexp.datamodules.node_storage import METADATA_FILES, CacheFolder, SourceError
from stackexp.datamodules.token_stream import TokenStream
from stackexp.errors import RunError
from stackexp.files import read_start_time


def test_a_cache_folder_belongs_to_one_run(s3, url, tmp_path, caplog):
    path = str(tmp_path / "named")
    first, second = CacheFolder(url, None), CacheFolder(url, None)
    assert first.path != second.path
    folders = [CacheFolder(url, path) for _ in range(3)]
    assert [folder.path.name for folder in folders] == ["named", "named-2", "named-3"]
    lines = [line for name, _, line in caplog.record_tuples if name == node_storage.__name__]
    assert lines == [f"{path}: another run uses this cache; this run uses {folder.path}" for folder in folders[1:]]
    folders[1].lock.close()
    folders.append(CacheFolder(url, path))
    assert folders[-1].path == folders[1].path
    (tmp_path / "named-4").mkdir()
    (tmp_path / "named-4" / "thesis.tex").touch()
    with pytest.raises(SourceError, match="named-4: holds other files"):
        CacheFolder(url, path)
    folders[0].lock.close()
    with pytest.raises(SourceError, match=r"is the cache of s3://.*, not of"):
        CacheFolder("s3://another/set", path)


def test_a_cache_keeps_only_intact_shards_of_the_set(s3, url, remote_set, tmp_path):
    path = tmp_path / "named"
    CacheFolder(url, str(path)).lock.close()
    (path / "unit.00000").mkdir()
    names = [f"unit.00000/shard.0000{n}.mds" for n in range(4)]
    for name in names[:3]:
        shutil.copy(remote_set / name, path / name)
    (path / names[1]).write_bytes((remote_set / names[1]).read_bytes()[:-1])
    (path / names[2]).write_bytes((remote_set / names[1]).read_bytes())
    (path / f"{names[3]}.tmp").touch()
    build_loader(build_config(remote=url, path=str(path)))
    assert [file.name for file in path.rglob("*") if "shard" in file.name] == ["shard.00000.mds"]


def test_errors_are_one_line(s3, url, remote_set, tmp_path):
    def get_error(**changes) -> str:
        with pytest.raises((RunError, OSError)) as raised:
            next(iter(build_loader(build_config(**{"remote": url, "download_retries": 0} | changes))))
        line = str(raised.value)
        assert "\n" not in line
        return line

    for missing in ("s3://no-such-bucket-here/x", url + "-not"):
        assert (error := get_error(remote=missing)).startswith(f"{missing}/corpus.json: ")
        assert "not found" in error
        assert "check data.remote" in error
    assert "Unsupported remote path" in get_error(remote="ftp://host/folder")
    minimum = get_error(cache_limit="1kb").split("data.cache_limit=")[1].split("b or more")[0]
    assert read_samples(build_loader(build_config(remote=url, cache_limit=f"{minimum}b")))  # the suggestion works
    assert "holds other files" in get_error(path=str(remote_set))
    s3.status = 403
    assert "permission" in get_error()
    s3.status = None
    (tmp_path / "file").touch()
    assert "file" in get_error(path=str(tmp_path / "file" / "below"))


def test_a_failed_look_ahead_ends_an_epoch_at_once(s3, url, monkeypatch):
    """The loop over the samples may end before it reads the one that cannot be downloaded."""

    def wait_for_failure(stream: TokenStream, _: object) -> Iterator[int]:
        deadline = time.monotonic() + 30
        while not stream._event.is_set() and time.monotonic() < deadline:
            time.sleep(0.01)
        return iter(())

    monkeypatch.setattr(TokenStream, "_each_sample_id", wait_for_failure)
    loader = build_loader(build_config(remote=url, download_retries=0))
    s3.status = 403
    with pytest.raises(SourceError, match="permission"):
        next(iter(loader))


def test_missing_credentials_are_reported_in_one_line(s3, url, forks, tmp_path):
    """The test uses a separate process, because boto3 caches credentials."""
    output = forks.run(url, str(tmp_path), s3.environment["S3_ENDPOINT_URL"], function=_read_anonymously)
    assert f"{url}/corpus.json: Unable to locate credentials; check data.remote and the credentials" in output


def _read_anonymously(url: str, folder: str, endpoint: str) -> int:
    environment = remove_credentials(Path(folder)) | {"S3_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"}
    os.environ.clear()
    os.environ.update(environment)
    try:
        CacheFolder(url, f"{folder}/cache")
    except SourceError as error:
        print(error)
    return 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_full_disk_is_reported_in_one_line(remote_set, s3, url, tmp_path, workers):
    disk = tmp_path / "disk"
    disk.mkdir()
    metadata = sum(-((remote_set / name).stat().st_size // -4096) for name in METADATA_FILES)
    size = f"size={4 * (metadata + 4)}k"  # space for the lock file and three shards
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], stderr=-1).returncode:
        pytest.skip("needs permission to mount")
    try:
        config = build_config(remote=url, path=str(disk / "cache"), num_workers=workers, download_retries=1)
        with pytest.raises(SourceError) as raised:
            read_samples(build_loader(config))
        assert "No space left on device; free space, or name another cache with data.path" in str(raised.value)
    finally:
        for folder in node_storage._open_folders.values():
            folder.lock.close()
        subprocess.run(["umount", "--lazy", disk], check=True)  # the look-ahead may still use it


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user, who may not write")
def test_a_read_only_cache_is_reported_in_one_line(remote_set, forks):
    """Read-only from the start, and, as if the file system had become read-only, later."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        Path(folder, "theirs").mkdir(mode=0o755)
        shutil.copytree(remote_set, Path(folder, "set"))
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        output = forks.run(folder, function=_read_as_other_user)
    first, second = output.strip().splitlines()[-2:]
    assert first.endswith(f"Permission denied: '{folder}/theirs/cache'")
    assert second.startswith(f"{folder}/ours/unit.00000/")
    assert second.endswith(": Permission denied; free space, or name another cache with data.path or STACKEXP_CACHE")


def _read_as_other_user(folder: str) -> None:
    # The first loader imports modules that the other user may not read. Read to the end, it has no threads left.
    read_samples(build_loader(build_config(remote=f"{folder}/set", path=f"{folder}/root")))
    os.seteuid(65534)
    for name in ("theirs/cache", "ours"):
        try:
            config = build_config(remote=f"{folder}/set", path=f"{folder}/{name}", download_retries=0)
            loader = build_loader(config)
            Path(folder, name, "unit.00000").mkdir()
            os.chmod(Path(folder, name, "unit.00000"), 0o555)
            next(iter(loader))
        except (RunError, OSError) as error:
            print(error)
    os.seteuid(0)


# Shared memory

RUN = """
import sys, time
sys.path.insert(0, {tests!r})
from loaders import build_config, build_loader
loader = build_loader(build_config(path={folder!r}, num_workers={workers}))
batches = iter(loader)
next(batches)
print(loader.dataset._shm_prefix_int, *(worker.pid for worker in loader._workers), flush=True)
time.sleep(1000)
"""


class Run:
    """A process that reads training data with a temporary folder of its own."""

    def __init__(self, data: Path, workers: int = 0):
        folder = Path(tempfile.mkdtemp())  # shorter than tmp_path: the path of a socket has at most 107 bytes
        self.folder, code = folder, RUN.format(tests=str(Path(__file__).parent), folder=str(data), workers=workers)
        environment = os.environ | {"TMPDIR": str(folder)}
        command = [sys.executable, "-c", code]
        options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True, "env": environment}
        self.process = subprocess.Popen(command, **options)
        prefix, *self.workers = map(int, self.process.stdout.readline().split())
        self.prefix = f"{prefix:06}"

    def list_remains(self) -> set[str]:
        """Return the names of shared memory segments and lock files."""
        locks = {path.name for path in self.folder.glob(f"{self.prefix}_*_filelock")}
        return locks | {name for name in os.listdir("/dev/shm") if name.startswith(f"{self.prefix}_")}

    def kill_all(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        time.sleep(0.2)  # for its children, which hold no lock
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_next_run_removes_leftovers_of_a_killed_run(tmp_path, workers):
    """All three runs have different temporary folders."""
    data = write_set(tmp_path / "set", 0, 40)
    living = Run(data, workers)
    try:
        dead = Run(data, workers)
        # Checked before the kill: after it, a run of another test may remove them first.
        assert len(dead.list_remains()) > 5, "the run has no shared memory, so this proves nothing"
        dead.kill_all()
        next(iter(build_loader(build_config(path=str(data)))))
        assert not dead.list_remains()
        assert living.list_remains(), "a living run keeps its shared memory"
    finally:
        living.kill_all()
    read_samples(build_loader(build_config(path=str(data))))
    assert not living.list_remains()


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_workers_end_with_their_run(tmp_path, number):
    """A worker that was stopped with SIGSTOP cannot see that its run has ended."""
    run = Run(write_set(tmp_path / "set", 0, 40), workers=2)
    for worker in run.workers:
        os.kill(worker, signal.SIGSTOP)
    run.process.send_signal(number)
    run.process.wait(20)
    end = time.monotonic() + 20
    while any(map(read_start_time, run.workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(read_start_time, run.workers))


def test_a_temporary_folder_with_a_long_path_is_reported(tmp_path, monkeypatch):
    data = write_set(tmp_path / "set", 0, 40)
    monkeypatch.setattr(tempfile, "tempdir", f"/{75 * 'x'}")
    with pytest.raises(RunError, match=r"^/x+: the path is too long .*; set TMPDIR to a path of at most 75 bytes"):
        build_loader(build_config(path=str(data), num_workers=1))
    monkeypatch.setattr(tempfile, "tempdir", f"/{74 * 'x'}")
    node_storage.check_temporary_folder(loaders=1)
    monkeypatch.setattr(tempfile, "tempdir", f"/{75 * 'x'}")
    node_storage.check_temporary_folder(loaders=0)


def test_too_little_shared_memory_is_reported(tmp_path, monkeypatch):
    config = build_config(path=str(write_set(tmp_path / "set", 0, 40)))
    monkeypatch.setattr(node_storage.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 10))
    with pytest.raises(RunError, match=r"^/dev/shm: the training data need .* 65,536 are free; .*--shm-size="):
        build_loader(config)
    monkeypatch.setattr(node_storage.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    build_loader(config)
    with pytest.raises(RunError, match=r"or set data.num_workers=0$"):
        node_storage.check_shared_memory(10, 8, 10**9)
