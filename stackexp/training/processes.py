"""The processes of a run, one per device: started here, by srun or by torchrun; they agree on things, and end together.

Alone on a machine, the first process starts the others with its own command line. On several machines without Slurm
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
from stackexp.errors import RunError, Stopped, first_line
from stackexp.training.callbacks.watchdog import Watchdog

T = TypeVar("T")
CHILDREN_SECONDS = 30  # what the processes started here are given to end after this one
STARTING = timedelta(minutes=5)  # what processes may differ by in starting; while they run the watchdog is quicker


@dataclass
class Processes:
    rank: int
    size: int
    environment: ClusterEnvironment
    watchdog: Watchdog | None = None  # where there are several

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agree(self, decide: Callable[[], T]) -> T:
        """What the first process decides, or the error it raises, in all of them."""
        if self.size == 1:
            return decide()
        answer: list[Any] = [None, None]
        if self.first:
            try:
                answer[0] = decide()
            except (RunError, OSError) as error:
                answer[1] = error
        dist.broadcast_object_list(answer)
        if answer[1] is not None:
            answer[1].is_reported = not self.first  # by the first
            raise answer[1]
        return answer[0]

    def together(self, work: Callable[[], T]) -> T:
        """`work` on data in every process; of the warnings and errors that all of them meet only the first tells."""
        if self.size == 1:
            return work()
        error, log, result = None, logging.getLogger("stackexp.data"), None
        if not self.first:
            log.setLevel(logging.ERROR)
        try:
            result = work()
        except RunError as met:
            error = met
        finally:
            log.setLevel(logging.NOTSET)
        met_by: list[str | None] = [None] * self.size
        dist.all_gather_object(met_by, str(error) if error else None)
        if error is not None:
            error.is_reported = not self.first and met_by[0] == str(error)
            raise error
        return result


@contextlib.contextmanager
def started(trainer: TrainerConfig, device_type: str) -> Iterator[Processes]:
    """All processes of the run, connected. Raises RunError if their number is not that of the config's devices."""
    size = trainer.devices * trainer.num_nodes
    environment, children = _environment(trainer)
    if size == 1 and not trainer.sharded:
        yield Processes(0, 1, environment)
        return
    with _watching(children):
        rank = _connect(environment, trainer, device_type)
    watchdog = Watchdog(rank, size, trainer.collective_timeout)
    watchdog.start()
    try:
        try:
            yield Processes(rank, size, environment, watchdog)
        except Stopped:  # in all of them, at the same step
            _part(watchdog)
            raise
        _part(watchdog)
    except (RunError, OSError, KeyboardInterrupt) as error:
        watchdog.tell(str(error) or "interrupted")
        raise
    except Exception as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            watchdog.tell(f"{type(error).__name__}: {error}")
            raise
        raise RunError(f"{watchdog.cause(error)}; go on with --ckpt_path last") from None  # a process has gone
    finally:
        watchdog.stop()
        _wait_for(children)


def _part(watchdog: Watchdog) -> None:
    """All processes have come to their end together: none takes another for gone."""
    watchdog.stop()
    dist.barrier()
    dist.destroy_process_group()


def _wait_for(children: list[subprocess.Popen]) -> None:
    for child in children:
        try:
            child.wait(CHILDREN_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()


@contextlib.contextmanager
def _watching(children: list[subprocess.Popen]) -> Iterator[None]:
    """While the processes meet, before the watchdog: end at once if one of ours has ended."""
    met = threading.Event()

    def watch() -> None:
        while not met.wait(0.5):
            for local_rank, child in enumerate(children, start=1):
                if child.poll() is not None:
                    print(f"error: rank {local_rank} ended at its start, exit code {child.returncode}", file=sys.stderr)
                    for other in children:
                        other.kill()
                    os._exit(1)

    threading.Thread(target=watch, daemon=True, name="start").start()
    try:
        yield
    finally:
        met.set()


def _environment(trainer: TrainerConfig) -> tuple[ClusterEnvironment, list[subprocess.Popen]]:
    """Who started us, and the processes that this one has started besides."""
    asked = trainer.devices * trainer.num_nodes
    by_srun = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    by_torchrun = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    for name, found in {"srun": by_srun, "torchrun": by_torchrun}.items():
        if found > 1 and found != asked:
            raise RunError(
                f"{name} started {found} processes, but trainer.devices * trainer.num_nodes = {asked}; make them equal"
            )
    if by_srun > 1:
        return SLURMEnvironment(auto_requeue=False), []
    if by_torchrun > 1:
        return TorchElasticEnvironment(), []
    children = _start_others(trainer) if asked > 1 and "LOCAL_RANK" not in os.environ else []
    return LightningEnvironment(), children


def _start_others(trainer: TrainerConfig) -> list[subprocess.Popen]:
    os.environ.setdefault("NODE_RANK", "0")
    if trainer.num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise RunError(
            f"trainer.num_nodes={trainer.num_nodes}: start with srun or torchrun, or on each node with MASTER_ADDR, "
            "MASTER_PORT and NODE_RANK set; one machine alone: trainer.num_nodes=1 trainer.devices=1"
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
    """Join the process group; our rank in it."""
    size = trainer.devices * trainer.num_nodes
    local = environment.local_rank()
    rank = environment.node_rank() * trainer.devices + local
    os.environ["RANK"] = str(rank)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
    if device_type == "cuda":
        if local >= torch.cuda.device_count():
            raise RunError(
                f"rank {rank}: it is process {local} of its node, but sees {torch.cuda.device_count()} GPUs; let every "
                "task see all GPUs of the node (--gpus-per-node, not --gpus-per-task)"
            )
        torch.cuda.set_device(local)
    try:
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=trainer.collective_timeout) + STARTING,
            device_id=torch.device("cuda", local) if device_type == "cuda" else None,
        )
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunError(
            f"rank {rank}: cannot meet the other {size - 1} processes at {where} ({first_line(error)})"
        ) from None
    return rank
