"""Debian packages: download pinned versions with apt-get, verify their hashes, and read their files."""

import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from stackexp.data.plain_text import READERS
from stackexp.errors import RunError, first_line
from stackexp.files import compute_sha256
from stackexp.terminal import open_bar, print_line

TOOLS = ("apt-get", "dpkg-deb")


class UnavailableError(RunError):
    """Raised if the mirror does not have a package."""


@dataclass(frozen=True)
class Package:
    """A package and the part of its files to read."""

    name: str
    version: str
    sha256: str
    genre: str
    format: str  # a key of plain_text.READERS
    files: str  # regular expression of paths without the leading ./
    license: str
    max_bytes: int | None = None  # of plain text


@dataclass(frozen=True)
class PackageList:
    """The packages of a corpus, and the genres of its held-out sets."""

    validation: list[str]
    test: list[str]
    packages: list[Package]
    sha256: str = ""  # of the text made from exactly these versions


def load_packages(path: Path) -> PackageList:
    """Read a list of packages. Raises RunError if it is not one."""
    try:
        contents: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        listed = PackageList(**contents | {"packages": [Package(**entry) for entry in contents["packages"]]})
        for package in listed.packages:
            re.compile(package.files)
            if package.format not in READERS:
                raise ValueError(f"{package.name} has the format {package.format}; known are {', '.join(READERS)}")
        if both := {*listed.validation} & {*listed.test}:
            raise ValueError(f"{min(both)} is in validation and in test")
        return listed
    except (OSError, yaml.YAMLError, TypeError, KeyError, ValueError, re.error) as error:
        message = getattr(error, "strerror", None) or first_line(error)
        raise RunError(f"{path}: not a list of packages ({message}); correct the file") from error


def check_tools() -> None:
    """Raise RunError if the tools of Debian and Ubuntu are missing."""
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        raise RunError(
            f"{' and '.join(missing)}: not installed; run the command on Debian or Ubuntu, and copy its folder here"
        )


def download_packages(packages: list[Package], folder: Path, latest: bool) -> dict[Package, Path]:
    """Return the .deb file of each package in `folder`; download those that are missing.

    With `latest`, the version is the one that the machine's mirror has; packages that it lacks are reported and left
    out, and the returned packages have the real version and hash.

    Raises RunError if a package cannot be downloaded or has another hash than the list.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[Package, Path] = {}
    failures: dict[str, str] = {}
    for package in open_bar(packages, desc="downloading packages", unit="package"):
        path = _find_file(package, folder, latest)
        if path is None:
            request = package.name if latest else f"{package.name}={package.version}"
            try:
                path = _download(request, folder, None if latest else package.sha256)
            except UnavailableError as error:
                failures[request] = str(error)
                continue
        if latest:
            package = replace(package, version=_read_version(path), sha256=compute_sha256(path))
        found[package] = path
    if failures and not latest:
        raise RunError(
            f"{len(failures)} of {len(packages)} packages cannot be downloaded: {', '.join(failures)} "
            f"({next(iter(failures.values()))}); run apt-get update and repeat, or put the .deb files into {folder}, "
            "or use --latest for the versions of your mirror"
        )
    for request, reason in failures.items():
        print_line(f"left out: {request} ({reason})")
    return found


def _find_file(package: Package, folder: Path, latest: bool) -> Path | None:
    """Return the package's file in `folder`, if it has the right hash."""
    files = sorted(folder.glob(f"{package.name}_*.deb"))
    return next((path for path in files if latest or compute_sha256(path) == package.sha256), None)


def _download(request: str, folder: Path, sha256: str | None) -> Path:
    """Download NAME or NAME=VERSION and return the path of the file. Raises UnavailableError, or RunError."""
    for left in folder.glob(".part*"):  # by a killed process, whose apt-get may still run
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".part", dir=folder, ignore_cleanup_errors=True) as part:
        command = ["apt-get", "download", "--quiet=2", request]
        run = subprocess.run(command, cwd=part, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        files = list(Path(part).glob("*.deb"))
        if run.returncode or not files:
            errors = re.findall(r"^E: (.*)", run.stderr, flags=re.MULTILINE)
            raise UnavailableError(errors[0] if errors else f"apt-get exit code {run.returncode}")
        found = compute_sha256(files[0])
        if sha256 not in (None, found):
            raise RunError(
                f"{request}: SHA-256 is {found}, not {sha256} as in the list; use another mirror, or --latest to "
                "accept the files of this one"
            )
        return files[0].rename(folder / files[0].name)


def _read_version(path: Path) -> str:
    command = ["dpkg-deb", "--field", str(path), "Version"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RunError(f"{path}: not a Debian package; delete the file and rerun the command")
    return run.stdout.strip()


def read_files(path: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and contents of a package's regular files whose path matches `pattern`, in the archive's order.

    Raises RunError if the package is damaged.
    """
    matches = re.compile(pattern).fullmatch
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    name = member.name.removeprefix("./")
                    if member.isreg() and matches(name) and (file := archive.extractfile(member)):
                        yield name, file.read()
            process.stdout.read()
        except tarfile.TarError as error:
            raise RunError(f"{path}: damaged ({error}); delete the file and rerun the command") from error
    if process.returncode:
        raise RunError(f"{path}: dpkg-deb failed with exit code {process.returncode}; delete the file and rerun")
