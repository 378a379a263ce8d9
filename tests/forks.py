"""Start the program quickly, in processes forked from one with all imports loaded."""

import atexit
import contextlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

PRELOAD = [
    "stackexp.cli",
    "stackexp.evaluation.evaluate",
    "stackexp.training.loop",
    "stackexp.training.objectives.language_modeling",
    "stackexp.training.objectives.formal_language",
]
PRELOAD += [
    "stackexp.datamodules.pretraining",
    "stackexp.datamodules.node_storage",
    "stackexp.datamodules.token_stream",
    "stackexp.models.memories.stack",
    "preloaded_kernels",
]
SECONDS = 120


class Ranks(list[BaseProcess]):
    """The processes of one run, in the order of their ranks, with their output in the file `output`."""

    def __init__(self, output: Path):
        super().__init__()
        self.output = output

    def join(self) -> list[int]:
        """Return their exit codes (negative: killed by that signal); kill those that take too long."""
        for process in self:
            process.join(SECONDS)
        self.kill()
        return [process.exitcode for process in self]

    def kill_when(self, condition: Callable[[], bool]) -> None:
        """Send SIGKILL to all of them once `condition()` is true; fails if one ends first."""
        self.wait_until(condition)
        self.kill()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert all(process.is_alive() for process in self), self.output.read_text()
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.01)

    def kill(self) -> None:
        for process in self:
            process.kill()
        for process in self:
            process.join()


class Forks:
    """A starter of `python -m stackexp`, or of a function, in new processes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._started = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
            self._context.set_forkserver_preload(PRELOAD)
            check = self._context.Process(target=_check_preloaded)
            check.start()  # starts the server, if there is none yet
        check.join()
        assert check.exitcode == 0, "the server ignores imports that fail"

    def start(self, *arguments: object, ranks: int = 1, nodes: int = 1, function: Callable[..., Any] | None = None):
        """Start `ranks` processes on `nodes` nodes in `folder`, as a launcher would."""
        self._started += 1
        output, port = self.folder / f"output-{self._started}.txt", _free_port()
        started = Ranks(output)
        for rank in range(ranks):
            node, local = divmod(rank, ranks // nodes)
            here = {"LOCAL_RANK": local, "NODE_RANK": node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            here |= {"RANK": rank, "WORLD_SIZE": ranks} if function else {}  # for init_process_group
            arguments_of_child = (function or _program, arguments, here if ranks > 1 else {}, self.folder, output)
            started.append(self._context.Process(target=_child, args=arguments_of_child))
        for process in started:
            process.start()
        return started

    def run(self, *arguments: object, expect: int = 0, **options: Any) -> str:
        """Return their output; fails unless all of them exit with code `expect`."""
        started = self.start(*arguments, **options)
        codes = started.join()
        assert set(codes) == {expect}, started.output.read_text()
        return started.output.read_text()


def processes_in(folder: Path) -> list[int]:
    """Return the ids of the processes with this working directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "cwd") == str(folder):
                found.append(int(process.name))
    return found


def _check_preloaded() -> None:
    missing = set(PRELOAD) - sys.modules.keys()
    assert not missing, missing


def _child(function: Callable[..., Any], arguments: tuple, environment: dict, folder: Path, output: Path) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        code = function(*arguments)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
    sys.exit(code)


def _program(*arguments: object) -> int:
    from stackexp.cli import main

    sys.orig_argv = ["python", "-m", "stackexp", *map(str, arguments)]  # for environment.json
    return main(sys.orig_argv[3:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
