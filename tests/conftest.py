"""Shared fixtures: a small corpus of real text and a small experiment."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import interpreter
import pytest
import yaml
from forks import Forks
from processes import Program
from slurm import Slurm, explain_missing

from stackexp.startup import hide_optional_packages

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two cores are shared with the processes that tests start
hide_optional_packages()  # as the command line

TINY = {
    "name": "tiny",
    "model": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "intermediate_size": 64,
        "memory": {"kind": "stack", "num_heads": 2, "head_dim": 4, "num_slots": 4},
    },
    "data": {
        "kind": "shards",
        "vocab_size": 300,
        "context_length": 32,
        "global_batch_tokens": 256,
        "micro_batch_size": 4,
        "eval_batch_size": 32,
        "num_workers": 0,
    },
    "optimizer": {"lr": 3e-3},
    "schedule": {"warmup_steps": 2},
    "trainer": {
        "accelerator": "cpu",
        "precision": "32-true",
        "max_steps": 12,
        "val_check_interval": 6,
        "checkpoint_interval": 4,
    },
    "logging": {"probe_interval": 5, "loggers": []},  # the heat maps of TensorBoard take as long as the training
}


LONG_GROUPS = (
    *("trained", "cluster", "test_faults.py", "test_triton_compiler.py"),
    *("test_triton_depth.py", "test_triton_scan.py", "test_sweep_worker.py"),
)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests for `pytest -n`: by file, and those that share a cluster or the trained run in one group each.

    Jobs of two clusters at once would have the same numbers, from which Lightning derives the ports of runs. The
    longest groups start first, so that all processes end at about the same time.
    """
    groups = {}
    for item in items:
        shared = (name for name in ("cluster", "trained") if name in item.fixturenames)
        groups[item] = next(shared, item.path.name)
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    items.sort(key=lambda item: groups[item] not in LONG_GROUPS)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests marked `gpu` on a machine without one."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> dict[str, Path]:
    """Prepare the sets `train`, `left` and `right` from files of the standard library."""
    from corpora import prepare_set

    folder = tmp_path_factory.mktemp("corpus")
    stdlib = Path(os.__file__).parent
    sets = {}
    for name, files in {"train": ("argparse.py", "ast.py"), "left": ("bisect.py",), "right": ("io.py",)}.items():
        source = folder / "text" / name
        source.mkdir(parents=True)
        for file in files:
            (source / file).with_suffix(".txt").write_text((stdlib / file).read_text())
        tokenizer = {"tokenizer": sets["train"] / "tokenizer.json"} if sets else {"vocab_size": 300}
        sets[name] = folder / name
        prepare_set(source, sets[name], context_length=32, **tokenizer)
    return sets


@pytest.fixture
def empty_folder(tmp_path, monkeypatch) -> None:
    """Make an empty folder the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tiny(corpus, tmp_path) -> Path:
    """The YAML of an experiment of a few seconds, its runs under tmp_path/runs."""
    return write_tiny(corpus, tmp_path)


def write_tiny(corpus: dict[str, Path], folder: Path, loggers: tuple[str, ...] = ()) -> Path:
    config = TINY | {
        "data": TINY["data"]
        | {
            "path": str(corpus["train"]),
            "validation": {"left": str(corpus["left"]), "right": str(corpus["right"])},
            "test": {"right": str(corpus["right"])},
        },
        "logging": TINY["logging"] | {"root": str(folder / "runs"), "loggers": list(loggers)},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory) -> Path:
    """The run folder of twelve steps with checkpoints 4, 8 and 12; to be copied, not changed."""
    from stackexp.cli import main

    folder = tmp_path_factory.mktemp("trained")
    options = ("trainer.keep_checkpoints=9", "logging.progress_bar=false")
    assert main(["fit", "--config", str(write_tiny(corpus, folder)), *options]) == 0
    (run,) = (folder / "runs" / "tiny").iterdir()
    return run


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("STACKEXP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def known(tmp_path):
    """The tokenizer of `evaluation_files`, read from a file."""
    from evaluation_files import TOKENIZER

    from stackexp.data.tokenizer import KnownTokenizer

    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    return KnownTokenizer.read(tmp_path / "tokenizer.json")


@pytest.fixture
def server(monkeypatch):
    """An HTTP server of OLMo's sets; failed downloads are repeated without a pause."""
    from file_server import FileServer
    from olmo_files import CONTENT

    from stackexp.data import fetch

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetch, "PAUSE_SECONDS", 0.0)
    with FileServer() as server:
        server.files = {olmo_set.path: content for olmo_set, content in CONTENT.items()}
        yield server


@pytest.fixture
def capture(capsys):
    """`capture(command, *arguments)` runs the program in this process and returns what it printed: `out` and `err`.

    The command is split at spaces, the arguments are not. Fails unless the exit code is `expect`.
    """
    from stackexp.cli import main

    def run(command: str = "", *arguments: object, expect: int = 0):
        capsys.readouterr()  # of earlier calls
        code = main([*command.split(), *map(str, arguments)])
        printed = capsys.readouterr()
        assert code == expect, printed.err
        return printed

    return run


@pytest.fixture
def invoke(capture):
    """`invoke(command, *arguments)` as `capture`, but returns only the output, or the error line if it fails."""

    def run(command: str = "", *arguments: object, expect: int = 0) -> str:
        printed, errors = capture(command, *arguments, expect=expect)
        if not expect:
            return printed
        line = errors.strip().splitlines()[-1]
        assert line.startswith("error: "), errors
        return line

    return run


@pytest.fixture
def question(tmp_path):
    """A verdict on four arms with fake trials."""
    from verdict_question import Question

    return Question(tmp_path)


@pytest.fixture
def restored_registry() -> Iterator[None]:
    """Remove the kinds that a test has registered."""
    from stackexp.config import registry

    before = dict(registry._entries)
    yield
    registry._entries.clear()
    registry._entries.update(before)


@pytest.fixture
def restored_signals() -> Iterator[None]:
    """Restore the handlers of the signals that stop a run."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def program(tmp_path) -> Program:
    return Program(tmp_path)


@pytest.fixture
def forks(tmp_path) -> Forks:
    return Forks(tmp_path)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Slurm]:
    """A real Slurm of two nodes."""
    if reason := explain_missing():
        pytest.skip(reason)
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm(cluster, monkeypatch) -> Iterator[Slurm]:
    """The cluster without jobs, selected by the environment."""
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)
    yield cluster
    cluster.reset()


# Object storage


@pytest.fixture(scope="module")
def remote_set(tmp_path_factory) -> Path:
    """A prepared set of about 150 sequences in shards of eight."""
    from loaders import write_set

    return write_set(tmp_path_factory.mktemp("prepared") / "train", 0, 60)


@pytest.fixture(scope="module")
def s3_server():
    from s3 import S3

    with S3() as server:
        yield server


@pytest.fixture
def s3(s3_server, monkeypatch, tmp_path):
    """A server that answers normally, with its address in the environment and cache folders of this test's own."""
    from stackexp.datamodules import node_storage

    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STACKEXP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(node_storage, "_open_folders", {})
    monkeypatch.setattr("streaming.base.util.sleep", lambda seconds: time.sleep(min(seconds, 0.05)))
    s3_server.reset()
    yield s3_server
    s3_server.reset()
    for folder in node_storage._open_folders.values():
        folder.lock.close()


@pytest.fixture
def url(s3, remote_set, request) -> str:
    """The URL of `remote_set` in a bucket of this test's own."""
    return s3.upload(remote_set, f"bucket-{abs(hash(request.node.name))}", "sets/train")


@pytest.fixture(scope="session")
def triton_interpreter() -> Iterator[ProcessPoolExecutor]:
    """Return a process with Triton in interpreter mode, which is fixed when Triton is imported."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), interpreter.prepare)
        executor.submit(os.getpid).result()  # start it now, while the environment is set
    with executor:
        yield executor
