"""Detect and stop the running drivers of a sweep."""

import os
import secrets
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from stackexp.errors import RunError
from stackexp.files import hold_lock, is_locked, write_atomically
from stackexp.sweeps.launchers import LAUNCHERS, load_launcher
from stackexp.sweeps.sweep import Sweep

STOP_SECONDS = 180
"""How long `stop_sweep` waits for the drivers."""


def hold_presence(folder: Path) -> AbstractContextManager[Any]:
    """Make `has_driver(folder)` true within the context."""
    folder.mkdir(parents=True, exist_ok=True)
    return hold_lock(folder / ".drivers", "sweep stop", shared=True)


def has_driver(folder: Path) -> bool:
    """Return True if a driver works on the sweep."""
    return is_locked(folder / ".drivers", count_shared=True)


def read_stop_request(folder: Path) -> str:
    """Return the last stop request. Drivers obey one that is newer than their start."""
    path = folder / "stop"
    return path.read_text() if path.exists() else ""


def request_stop(folder: Path) -> None:
    """Request that every driver of the sweep stops."""
    write_atomically(folder / "stop", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {os.getpid()} {secrets.token_hex(4)}\n")


def stop_sweep(sweep: Sweep) -> None:
    """Stop the drivers of a sweep, and jobs that run without one; wait until their trials have saved.

    Raises RunError if a driver is still running after STOP_SECONDS.
    """
    if not has_driver(sweep.folder):
        print(f"{sweep.folder}: no driver is running", flush=True)
        for name in LAUNCHERS:
            launcher = load_launcher(name)
            if launcher.find_jobs(sweep.folder):
                print(f"stopping its {name} jobs: running trials save a checkpoint", flush=True)
                launcher(sweep.folder, [], sweep.config.resources).stop()
        return
    request_stop(sweep.folder)
    print(f"{sweep.folder}: stopping; waiting until running trials have saved a checkpoint", flush=True)
    deadline = time.monotonic() + STOP_SECONDS
    while has_driver(sweep.folder):
        if time.monotonic() > deadline:
            raise RunError(f"{sweep.folder}: a driver is still running after {STOP_SECONDS} s; see `sweep status`")
        time.sleep(0.2)
