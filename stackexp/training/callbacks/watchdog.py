"""Notices that a process of the run has gone or hangs, says which one, and ends the others."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from stackexp.errors import first_line

INTERVAL = 1.0  # seconds between two signs of life
SILENCE = 30.0  # seconds without one until a process on another machine counts as gone
GRACE = 3.0  # seconds a process has to say itself what it knows
VERDICT = "verdict"
FIRST_GONE = "rank 0 has gone: it answers no more"


class Watchdog(pl.Callback):
    """A thread of every process that tells the others, through a store of its own, that it lives and how far it is.

    Where a process has gone, or none has got on for `timeout` seconds, each prints one line that names it and exits
    with code 1: a collective that waits for it would never return.
    """

    def __init__(self, rank: int, size: int, timeout: float):
        self._rank, self._size, self._timeout = rank, size, timeout
        self._store = _connect(rank, size)
        self._batches, self._progress = 0, time.monotonic()
        self._stopping = threading.Event()
        self._found: str | None = None  # the verdict
        self._asked: float | None = None  # since when the store has been asked
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> its last sign of life, and when we first saw it
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._run, daemon=True, name="watchdog")

    def start(self) -> None:
        self._report()
        self._thread.start()
        threading.Thread(target=self._guard, daemon=True, name="watchdog-guard").start()

    def stop(self) -> None:
        """This process ends as it should; the others must not take it for gone."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._thread.join(GRACE)
            with self._asking():  # the first process, which keeps the store, may have ended before us
                self._store.set(str(self._rank), json.dumps({"done": True}))

    def tell(self, cause: str) -> None:
        """Let the others know why this process is about to end."""
        if not self._stopping.is_set():
            with self._asking():
                self._store.compare_set(VERDICT, "", f"rank {self._rank}: {cause}")
                time.sleep(2 * INTERVAL)  # the first process keeps the store: the others must have read it

    def cause(self, error: Exception) -> str:
        """Why a collective failed: the verdict, once there is one."""
        deadline = time.monotonic() + SILENCE + 10
        while time.monotonic() < deadline and self._found is None:
            time.sleep(INTERVAL / 2)
        return self._found or f"lost contact with another process ({first_line(error)})"

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Talk to the store; `_guard` sees how long it takes. A store that has gone is no error here."""
        self._asked = time.monotonic()
        with contextlib.suppress(RuntimeError):
            yield
        self._asked = None

    def _guard(self) -> None:
        """The store waits for ever for a first process that is frozen, or whose machine has lost its power."""
        while True:
            time.sleep(INTERVAL)
            asked = self._asked
            if asked is not None and time.monotonic() - asked > SILENCE:
                _end(self._rank, FIRST_GONE)

    # Progress, as Lightning's loops make it

    def on_train_batch_start(self, *_: Any) -> None:
        self._batches, self._progress = self._batches + 1, time.monotonic()

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = on_save_checkpoint = on_train_batch_start
    on_train_start = on_validation_start = on_validation_end = on_test_start = on_train_batch_start

    # The thread

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL):
            self._found = FIRST_GONE
            with self._asking():
                self._found = self._verdict()
            if self._found and not self._stopping.wait(GRACE):  # else the main thread has it, and ends the process
                _end(self._rank, self._found)

    def _verdict(self) -> str | None:
        """What is wrong, as the first to notice it has put it; None if all is well."""
        self._report()
        if found := self._judge():
            self._store.compare_set(VERDICT, "", found)
        return self._store.get(VERDICT).decode() if self._store.check([VERDICT]) else None

    def _report(self) -> None:
        frame = sys._current_frames().get(self._main)
        where = f"{_module(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else "?"
        idle = time.monotonic() - self._progress
        life = {"beat": time.monotonic(), "batches": self._batches, "idle": idle, "where": where}
        self._store.set(str(self._rank), json.dumps(life | {"host": socket.gethostname(), "pid": os.getpid()}))

    def _judge(self) -> str | None:
        """The first process looks after all, the others after the first."""
        known = [r for r in (range(self._size) if self._rank == 0 else [0]) if self._store.check([str(r)])]
        lives = {rank: json.loads(self._store.get(str(rank))) for rank in known}
        lives = {rank: life for rank, life in lives.items() if "done" not in life}
        for rank, life in lives.items():
            if rank != self._rank and self._is_gone(rank, life):
                return f"rank {rank} (process {life['pid']} on {life['host']}) has gone"
        if lives and len(lives) == self._size and min(life["idle"] for life in lives.values()) > self._timeout:
            return _hang(lives, self._timeout)
        return None

    def _is_gone(self, rank: int, life: dict[str, Any]) -> bool:
        if life["host"] == socket.gethostname() and not _lives(life["pid"]):
            return True
        now, (beat, since) = time.monotonic(), self._seen.get(rank, (None, 0.0))
        if beat != life["beat"]:
            self._seen[rank] = (life["beat"], now)
            return False
        return now - since > SILENCE


def _connect(rank: int, size: int) -> dist.Store:
    """A store that the first process keeps, apart from the collectives' own."""
    address: list[Any] = [None, None]
    if rank == 0:
        host = os.environ["MASTER_ADDR"]
        store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
        address = [host, store.port]
    dist.broadcast_object_list(address)
    return store if rank == 0 else dist.TCPStore(address[0], address[1], size, is_master=False)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def _hang(lives: dict[int, dict[str, Any]], timeout: float) -> str:
    """Who is behind: the fewest batches, or else at another place in the code than most."""
    batches = Counter(life["batches"] for life in lives.values())
    places = Counter(life["where"] for life in lives.values())
    least, usual = min(batches), places.most_common(1)[0][0]
    behind = [r for r, life in lives.items() if life["batches"] == least] if len(batches) > 1 else []
    if places[usual] > len(lives) / 2:
        behind = behind or [r for r, life in lives.items() if life["where"] != usual]
    behind = behind or [r for r, life in lives.items() if not _in_collective(life["where"])] or list(lives)
    named = ", ".join(f"rank {rank} at {lives[rank]['where']}" for rank in behind[:8])
    rest = next((life["where"] for rank, life in lives.items() if rank not in behind), None)
    waiting = f"; the others wait at {rest}" if rest else ""
    return f"no progress for {timeout:g} s: {named}{waiting}; see trainer.collective_timeout"


def _in_collective(where: str) -> bool:
    return where.startswith("torch/")


def _module(file: str) -> str:
    """site-packages/torch/autograd/graph.py -> torch/autograd/graph.py."""
    return file.rsplit("site-packages/", 1)[-1] if "site-packages/" in file else "/".join(file.split("/")[-2:])


def _end(rank: int, verdict: str) -> None:
    prefix = "\nerror: " if rank == 0 else f"\nerror: rank {rank}: "  # below the progress bar
    print(f"{prefix}{verdict}; go on with --ckpt_path last", file=sys.stderr, flush=True)
    os._exit(1)
