"""A real two-node Slurm cluster on this machine, with its own daemons, ports and files. Needs root."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from processes import wait_until

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
NODES = ("n0", "n1")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/slurmctld/state
SlurmdSpoolDir={folder}/%n/spool
SlurmctldPidFile={folder}/slurmctld/pid
SlurmdPidFile={folder}/%n/pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
JobRequeue=1
KillWait=2
MessageTimeout=2
SlurmdTimeout=5
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def explain_missing() -> str | None:
    """Return why Slurm cannot be started here, or None."""
    if os.getuid():
        return "starting a test cluster needs root"
    absent = [name for name in COMMANDS if not shutil.which(name)]
    return f"not installed: {', '.join(absent)}" if absent else None


class Slurm:
    """A cluster and its operator. The environment `variables` select it for commands and jobs.

    After SlurmdTimeout, 5 seconds, the controller gives up a silent node and requeues its jobs.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1"}
        self.daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Slurm":
        for name in ("munge", "slurmctld", *NODES):
            (self.folder / name).mkdir()
        config = CONFIG.format(host=socket.gethostname(), folder=self.folder, ports=_free_ports(3))
        (self.folder / "slurm.conf").write_text(config)
        try:
            self._start_munge()
            self.start_controller()
            for node in NODES:
                self.start_node(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for node in set(NODES) & set(self.daemons):
            self.kill_node(node)
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()

    def start_controller(self) -> None:
        """Start the controller with the state that it saved."""
        self._start("slurmctld", "slurmctld", "-D")
        wait_until(lambda: self.call("scontrol", "ping").returncode == 0)

    def stop_controller(self) -> None:
        self.daemons["slurmctld"].terminate()
        self.daemons["slurmctld"].wait()

    def start_node(self, node: str) -> None:
        """Start a node, also after a kill, and wait until it accepts jobs."""
        self._start(node, "slurmd", "-D", "-N", node)
        wait_until(lambda: self.call("sinfo", "-h", "-n", node, "-t", "idle,mix,alloc", "-o", "%n").stdout)

    def kill_node(self, node: str) -> None:
        """Kill a node's daemon and all its processes, as a power failure does."""
        self.daemons[node].kill()
        self.daemons[node].wait()
        while processes := list(self._processes(node)):
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def call(self, *command: object) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # jobs use this Python
        environment = os.environ | self.variables | {"PATH": path}
        return subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)

    def output(self, *command: object) -> str:
        """Run a command and return its output; fails if the command fails."""
        result = self.call(*command)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def squeue(self) -> dict[str, str]:
        """Return the id (`12`, or `12_3` in an array) and state of each job that has not ended."""
        return dict(line.split() for line in self.output("squeue", "-h", "--array", "-o", "%i %T").splitlines())

    def hurry(self) -> None:
        """Start requeued jobs now instead of after two minutes.

        The pause lets their last steps end; otherwise Slurm starts the job without its steps.
        """
        time.sleep(3)
        for job, state in self.squeue().items():
            if state == "PENDING":
                self.call("scontrol", "update", f"JobId={job}", "StartTime=now")

    def reset(self) -> None:
        """Cancel all jobs and restart stopped daemons."""
        if self.daemons["slurmctld"].poll() is not None:
            self.start_controller()
        self.output("scancel", "--user=root")
        for node in NODES:
            if self.daemons[node].poll() is not None:
                self.start_node(node)
        wait_until(lambda: not self.squeue())

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        folder.joinpath("key").touch(mode=0o600)
        folder.joinpath("key").write_bytes(secrets.token_bytes(128))
        files = {"key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed", "socket": "socket"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        self._start("munge", "munged", "--foreground", "--force", *options)
        wait_until(folder.joinpath("socket").exists)

    def _start(self, name: str, *command: str) -> None:
        """Start a daemon in the folder of its name; a node's job steps have the same working directory."""
        with open(self.folder / name / "log.txt", "a") as log:
            self.daemons[name] = subprocess.Popen(
                command, cwd=self.folder / name, stdout=log, stderr=log, env=os.environ | self.variables
            )

    def _processes(self, node: str) -> Iterator[int]:
        """Yield the job steps of a node, found by working directory, and their children, found by environment."""
        marks = {f"SLURM_CONF={self.folder}/slurm.conf".encode(), f"SLURMD_NODENAME={node}".encode()}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                step = os.readlink(process / "cwd") == str(self.folder / node)
                if step or marks <= set((process / "environ").read_bytes().split(b"\0")):
                    yield int(process.name)


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]
