"""The cache folder of a remote set, and errors of remotes and disks in one line."""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from forks import Forks
from loaders import build_config, build_loader, read_samples
from s3 import remove_credentials

from stackexp.datamodules import cache_folder
from stackexp.datamodules.cache_folder import METADATA_FILES, CacheFolder
from stackexp.datamodules.download import RemoteFolder, SourceError
from stackexp.errors import RunError

SHARD = "unit.00000/shard.00003.mds"


def test_a_cache_folder_belongs_to_one_run(s3, url, tmp_path, caplog):
    remote, path = RemoteFolder(url, 5, 0), str(tmp_path / "named")
    first, second = CacheFolder(remote, None), CacheFolder(remote, None)
    assert first.path != second.path
    folders = [CacheFolder(remote, path) for _ in range(3)]
    assert [folder.path.name for folder in folders] == ["named", "named-2", "named-3"]
    lines = [line for name, _, line in caplog.record_tuples if name == cache_folder.__name__]
    assert lines == [f"{path}: another run uses this cache; this run uses {folder.path}" for folder in folders[1:]]
    folders[1].close()
    folders.append(CacheFolder(remote, path))
    assert folders[-1].path == folders[1].path
    (tmp_path / "named-4").mkdir()
    (tmp_path / "named-4" / "thesis.tex").touch()
    with pytest.raises(SourceError, match="named-4: holds other files"):
        CacheFolder(remote, path)
    folders[0].close()
    with pytest.raises(SourceError, match=r"is the cache of s3://.*, not of"):
        CacheFolder(RemoteFolder("s3://another/set", 5, 0), path)


def test_a_cache_folder_keeps_only_complete_shards_of_the_set(s3, url, remote_set, tmp_path):
    remote, path = RemoteFolder(url, 5, 0), tmp_path / "named"
    CacheFolder(remote, str(path)).close()
    (path / "unit.00000").mkdir()
    complete, short = path / SHARD, path / "unit.00000" / "shard.00001.mds"
    shutil.copy(remote_set / SHARD, complete)
    short.write_bytes((remote_set / "unit.00000" / "shard.00001.mds").read_bytes()[:-1])
    part = path / "unit.00000" / ".shard.00002.mds.1-2"
    part.touch()
    CacheFolder(remote, str(path)).close()
    assert (complete.exists(), short.exists(), part.exists()) == (True, False, False)


def test_errors_are_one_line(s3, url, remote_set, tmp_path):
    def get_error(**changes) -> str:
        with pytest.raises((RunError, OSError)) as raised:
            next(iter(build_loader(build_config(**{"remote": url} | changes))))
        line = str(raised.value)
        assert "\n" not in line
        return line

    assert "not found; check data.remote" in get_error(remote="s3://no-such-bucket-here/x")
    assert "not found; check data.remote" in get_error(remote=url + "-not")
    assert "Unsupported remote path" in (unsupported := get_error(remote="ftp://host/folder"))
    assert unsupported.endswith("; check the URL, or install the package for it")
    minimum = get_error(cache_limit="10kb").split("data.cache_limit=")[1].split("b or more")[0]
    assert read_samples(build_loader(build_config(remote=url, cache_limit=f"{minimum}b")))  # the suggestion works
    assert "holds other files" in get_error(path=str(remote_set))
    s3.status = 403
    assert "access denied; check the credentials" in get_error()
    s3.status = None
    (tmp_path / "file").touch()
    assert "file" in get_error(path=str(tmp_path / "file" / "below"))


def test_missing_credentials_are_reported_in_one_line(s3, url, tmp_path):
    """In a process of its own, because boto3 caches credentials."""
    output = Forks(tmp_path).run(url, str(tmp_path), s3.environment["S3_ENDPOINT_URL"], function=_read_anonymously)
    assert "no credentials; for s3:// set AWS_ACCESS_KEY_ID" in output


def _read_anonymously(url: str, folder: str, endpoint: str) -> int:
    environment = remove_credentials(Path(folder)) | {"S3_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"}
    os.environ.clear()
    os.environ.update(environment)
    try:
        RemoteFolder(url, 5, 0).download("index.json", Path(folder, "index.json"))
    except SourceError as error:
        print(error)
    return 0


def list_shards(disk: Path) -> list[str]:
    return sorted(path.name for path in disk.rglob("*.mds*"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_full_disk_is_reported_in_one_line(remote_set, s3, url, tmp_path, workers):
    disk = tmp_path / "disk"
    disk.mkdir()
    metadata = sum(-((remote_set / name).stat().st_size // -4096) for name in METADATA_FILES)
    size = f"size={4 * (metadata + 4)}k"  # space for the lock file and three shards
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], stderr=-1).returncode:
        pytest.skip("needs permission to mount")
    try:
        with pytest.raises(SourceError) as raised:
            read_samples(build_loader(build_config(remote=url, path=str(disk / "cache"), num_workers=workers)))
        where, _, problem = str(raised.value).partition(": ")
        assert where.startswith(f"{disk}/cache/unit.00000/")
        assert problem == "No space left on device; free space, or name another cache with data.path or STACKEXP_CACHE"
        end = time.monotonic() + 30  # the look-ahead may be downloading another shard
        while (names := list_shards(disk)) and any(name.startswith(".") for name in names) and time.monotonic() < end:
            time.sleep(0.05)
        assert len(names) == 3
        assert not any(name.startswith(".") for name in names), "an incomplete shard stayed"
    finally:
        for folder in cache_folder._open_folders.values():
            folder.close()
        subprocess.run(["umount", "--lazy", disk], check=True)  # the look-ahead may still use it


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user, who may not write")
def test_a_read_only_cache_is_reported_in_one_line(remote_set, tmp_path):
    """Read-only from the start, and, as if the file system had become read-only, later."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        Path(folder, "theirs").mkdir(mode=0o755)
        shutil.copytree(remote_set, Path(folder, "set"))
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        output = Forks(tmp_path).run(folder, function=_read_as_other_user)
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
            loader = build_loader(build_config(remote=f"{folder}/set", path=f"{folder}/{name}"))
            Path(folder, name, "unit.00000").mkdir()
            os.chmod(Path(folder, name, "unit.00000"), 0o555)
            next(iter(loader))
        except (RunError, OSError) as error:
            print(error)
    os.seteuid(0)
