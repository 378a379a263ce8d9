"""The processes of a run, one per device: started here, by srun or by torchrun.

On a single machine, the first process starts the others with its own command line. On several machines without Slurm
or torchrun, start one process on each with MASTER_ADDR, MASTER_PORT and NODE_RANK set.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from stackexp.config.trainer import TrainerConfig
from stackexp.errors import ConfigError, RunError, StoppedError, first_line
from stackexp.training.watchdog import GRACE, Watchdog

T = TypeVar("T")
EXIT_SECONDS = 30  # time for the processes started here to exit after this one
FROZEN_SECONDS = 2 * GRACE  # the same, once the watchdog has found a fault


@dataclass
class Processes:
    """The connected processes of a run. `watchdog` is None for a single process without sharding."""

    rank: int
    size: int
    environment: ClusterEnvironment
    watchdog: Watchdog | None = None

    @property
    def is_first(self) -> bool:
        """Return True on rank 0."""
        return self.rank == 0

    def run_on_first(self, decide: Callable[[], T]) -> T:
        """Call `decide` on rank 0 only, however long it takes; return its result on every rank.

        A ConfigError, RunError or OSError of rank 0 is raised on every rank. Any other error is raised only on rank 0,
        and the watchdog ends the other ranks.
        """
        if self.size == 1:
            with self._pause_watchdog():
                return decide()
        result: list[Any] = [None, None]
        if self.is_first:
            try:
                with self._pause_watchdog():
                    result[0] = decide()
            except (ConfigError, RunError, OSError) as error:
                result[1] = error
        dist.broadcast_object_list(result)
        if result[1] is not None:
            result[1].is_reported = not self.is_first  # rank 0 reports it
            raise result[1]
        return result[0]

    def run_on_all(self, load: Callable[[], T]) -> T:
        """Call `load` on every rank, however long it takes; return its result, or raise its error, on the same rank.

        Only rank 0 logs the warnings of `stackexp.data`. A RunError that rank 0 raises too is reported only there.
        """
        if self.size == 1:
            with self._pause_watchdog():
                return load()
        error, log, result = None, logging.getLogger("stackexp.data"), None
        if not self.is_first:
            log.setLevel(logging.ERROR)
        try:
            with self._pause_watchdog():
                result = load()
        except RunError as raised:
            error = raised
        finally:
            log.setLevel(logging.NOTSET)
        messages: list[str | None] = [None] * self.size
        dist.all_gather_object(messages, str(error) if error else None)
        if error is not None:
            error.is_reported = not self.is_first and messages[0] == str(error)  # type: ignore[attr-defined]
            raise error
        return result  # type: ignore[return-value]

    def _pause_watchdog(self) -> contextlib.AbstractContextManager[None]:
        return self.watchdog.pause() if self.watchdog else contextlib.nullcontext()


@contextlib.contextmanager
def start_processes(trainer: TrainerConfig, device_type: str) -> Iterator[Processes]:
    """Start and connect all processes of the run. Raises RunError if that fails or a process is lost."""
    size = trainer.world_size
    environment, children = _find_environment(trainer)
    if size == 1 and not trainer.is_sharded:
        yield Processes(0, 1, environment)
        return
    with _exit_with_children(children, trainer.devices):
        try:
            rank = _connect(environment, trainer, device_type)
        except BaseException:
            _wait_for(children, 0)  # they would wait for this process until the timeout
            raise
    timeouts = trainer.collective_timeout_seconds, trainer.startup_timeout_seconds
    watchdog = Watchdog(rank, size, *timeouts, lambda: _wait_for(children, FROZEN_SECONDS))
    watchdog.start()
    _set_group_timeout(timedelta(days=30))  # from now on, the watchdog ends hanging processes, unless one is paused
    try:
        try:
            yield Processes(rank, size, environment, watchdog)
        except StoppedError:  # raised on all ranks at the same step
            _disconnect(watchdog)
            raise
        _disconnect(watchdog)
    except (ConfigError, RunError, OSError, KeyboardInterrupt) as error:
        if watchdog.report(str(error) or "interrupted"):
            error.is_reported = True  # type: ignore[union-attr]  # rank 0 reports it
        raise
    except Exception as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):  # gloo raises plain RuntimeErrors
            watchdog.report(f"{type(error).__name__}: {error}")
            raise
        raise RunError(f"{watchdog.find_cause(error)}; {watchdog.advice}") from None  # a process is gone
    finally:
        watchdog.stop()
        _wait_for(children)


def _set_group_timeout(timeout: timedelta) -> None:
    """Set the timeout of later collectives."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout)
    else:  # torch < 2.14
        dist.distributed_c10d._set_pg_timeout(timeout)


def _disconnect(watchdog: Watchdog) -> None:
    """Leave the process group on all ranks at once, so that no rank reports another one as gone.

    While rank 0 writes the result, the other ranks wait here and are still watched, so its failure ends them, too.
    """
    dist.barrier()
    watchdog.stop()
    dist.destroy_process_group()


def _wait_for(children: list[subprocess.Popen], seconds: float = EXIT_SECONDS) -> None:
    """Wait until the children exit; then kill those that have not, such as a stopped process."""
    for child in children:
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()


@contextlib.contextmanager
def _exit_with_children(children: list[subprocess.Popen], devices: int) -> Iterator[None]:
    """Exit at once if a child exits while the processes connect, because the watchdog does not run yet."""
    is_connected = threading.Event()
    first_rank = int(os.environ.get("NODE_RANK", 0)) * devices  # of this process

    def poll_children() -> None:
        while not is_connected.wait(0.5):
            for rank, child in enumerate(children, start=first_rank + 1):
                if child.poll() is not None:
                    message = f"error: rank {rank} exited during startup with code {child.returncode}"
                    print(f"{message}; see its output above", file=sys.stderr)
                    _wait_for(children, 0)
                    os._exit(1)

    threading.Thread(target=poll_children, daemon=True, name="startup").start()
    try:
        yield
    finally:
        is_connected.set()


def _find_environment(trainer: TrainerConfig) -> tuple[ClusterEnvironment, list[subprocess.Popen]]:
    """Return the launcher's environment, and the processes started here."""
    counts = {"torchrun": int(os.environ["WORLD_SIZE"])} if "TORCHELASTIC_RUN_ID" in os.environ else {}
    by_srun = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if by_srun > 1 and not counts:  # one task may start the others itself, and torchrun may be started by srun
        counts["srun"] = by_srun
    for launcher, count in counts.items():
        if count != trainer.world_size:
            raise RunError(
                f"{launcher} started {count} processes, but trainer.devices * trainer.num_nodes = "
                f"{trainer.world_size}; make them equal"
            )
    if "srun" in counts:
        return SLURMEnvironment(auto_requeue=False), []
    if counts.get("torchrun", 1) > 1:
        return TorchElasticEnvironment(), []
    children = _start_children(trainer) if trainer.world_size > 1 and "LOCAL_RANK" not in os.environ else []
    return LightningEnvironment(), children


def _start_children(trainer: TrainerConfig) -> list[subprocess.Popen]:
    os.environ.setdefault("NODE_RANK", "0")
    if trainer.num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise RunError(
            f"trainer.num_nodes={trainer.num_nodes}: no launcher found; start with srun or torchrun, or on each node "
            "with MASTER_ADDR, MASTER_PORT and NODE_RANK set (single machine: trainer.num_nodes=1 trainer.devices=1)"
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(LightningEnvironment().main_port))
    os.environ["LOCAL_RANK"] = "0"
    command = [sys.executable, "-m", "stackexp", *sys.argv[1:]]
    first = int(os.environ["NODE_RANK"]) * trainer.devices
    return [
        subprocess.Popen(command, env=os.environ | {"LOCAL_RANK": str(local), "RANK": str(first + local)})
        for local in range(1, trainer.devices)
    ]


def _connect(environment: ClusterEnvironment, trainer: TrainerConfig, device_type: str) -> int:
    """Join the process group and return the rank."""
    size = trainer.world_size
    local = environment.local_rank()
    rank = environment.node_rank() * trainer.devices + local
    os.environ["RANK"] = str(rank)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
    if device_type == "cuda":
        if local >= torch.cuda.device_count():
            raise RunError(
                f"trainer.devices: local rank {local}, but only {torch.cuda.device_count()} GPUs are visible; lower "
                "it, or in Slurm give every task all GPUs of the node (--gpus-per-node)"
            )
        torch.cuda.set_device(local)
        # Otherwise torch aborts the process at an NCCL error, before our watchdog names the cause. torchrun sets 1.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    startup, collective = trainer.startup_timeout_seconds, trainer.collective_timeout_seconds
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=startup)))
        store.set_timeout(timedelta(seconds=collective))
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=startup + collective),
            device_id=torch.device("cuda", local) if device_type == "cuda" else None,
        )
    except (dist.DistError, RuntimeError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunError(
            f"cannot connect to the other {size - 1} processes at {address} ({first_line(error)}); set "
            "another MASTER_PORT if it is in use, or raise trainer.startup_timeout_seconds"
        ) from None
    return rank
