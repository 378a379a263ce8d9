"""Cluster faults: dead or hanging processes, non-finite losses, full and read-only disks."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from processes import ENDLESS, FSDP, find_second_rank, kill, read_to_end, wait_until
from records import has_checkpoint, only_run, record

from stackexp import stack
from stackexp.cli import main
from stackexp.models.checkpoints import load_state, load_tensors


def write_faulty_plugin(folder: Path, action: str, first: str = "pass") -> str:
    """Write a plugin for the memory's forward pass: all run `first` in the first one, rank 1 `action` at step 30."""
    path = folder / "faulty.py"
    path.write_text(
        "import os, time\nfrom stackexp.models.memories.stack import StackMemory\n"
        "forward, calls = StackMemory.forward, []\n"
        "def faulty_forward(self, h, state, previous, probe=False):\n    calls.append(1)\n"
        f"    if len(calls) == 1: {first}\n"
        f"    if os.environ.get('LOCAL_RANK', '0') == '1' and self.training and len(calls) > 120: {action}\n"
        "    return forward(self, h, state, previous, probe)\nStackMemory.forward = faulty_forward\n"
    )
    return f"plugins=[{path}]"


@pytest.mark.process
def test_a_process_that_dies_during_startup_ends_the_run(program, tiny):
    process = program.start("fit", "--config", tiny, *FSDP)
    wait_until(lambda: find_second_rank(process) is not None, process)
    os.kill(find_second_rank(process), signal.SIGKILL)
    _, line = read_to_end(process, 30, expect=1)
    assert line == "error: rank 1 exited during startup with code -9; see its output above"


@pytest.mark.process
def test_first_process_that_dies_during_startup_ends_the_others(program, tiny):
    process = program.start("fit", "--config", tiny, *FSDP, "trainer.startup_timeout_seconds=5")
    wait_until(lambda: find_second_rank(process) is not None, process)
    process.kill()
    output, _ = process.communicate(timeout=60)  # until every process has closed its output
    assert "error: rank 1: cannot connect to the other 1 processes" in output


@pytest.mark.process
def test_a_node_that_is_lost_while_it_connects_ends_the_other(program, tiny, tmp_path):
    path = tmp_path / "lost.py"
    path.write_text(
        "import os, torch.distributed as dist\n"
        "connect, is_lost = dist.init_process_group, os.environ['NODE_RANK'] == '1'\n"
        "dist.init_process_group = lambda *a, **k: os._exit(3) if is_lost else connect(*a, **k)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = [f"plugins=[{path}]", "trainer.num_nodes=2", "trainer.devices=1", "trainer.accelerator=cpu"]
    options += ["trainer.startup_timeout_seconds=10", "trainer.collective_timeout_seconds=5"]
    nodes = []
    for rank in (0, 1):
        program.environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(rank)}
        nodes.append(program.start("fit", "--config", tiny, *options))
    read_to_end(nodes[1], 60, expect=3)
    _, line = read_to_end(nodes[0], 60, expect=1)
    assert "cannot connect to the other 1 processes" in line


@pytest.mark.process
def test_busy_port_ends_all_processes(program, tiny):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program.environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        process = program.start("fit", "--config", tiny, *FSDP)
        output, _ = read_to_end(process, expect=1)
    assert f"cannot connect to the other 1 processes at 127.0.0.1:{port}" in output
    assert "set another MASTER_PORT if it is in use" in output


@pytest.mark.process
def test_a_frozen_first_rank_is_named(program, tiny, tmp_path):
    process = program.start("fit", "--config", tiny, *FSDP, *ENDLESS)
    wait_until(lambda: has_checkpoint(tmp_path / "runs"), process)
    second = find_second_rank(process)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: not Path(f"/proc/{second}/cmdline").read_bytes(), process, 60)
    kill(process)
    assert "error: rank 1: rank 0 is gone" in process.stdout.read()


@pytest.mark.process
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_and_ends_the_others(program, tiny, tmp_path, victim):
    process = program.start("fit", "--config", tiny, *FSDP, *ENDLESS)
    wait_until(lambda: has_checkpoint(tmp_path / "runs"), process)
    second = find_second_rank(process)
    os.kill(process.pid if victim == 0 else second, signal.SIGKILL)
    began = time.monotonic()
    output, _ = read_to_end(process, expect=1 if victim == 1 else -signal.SIGKILL)
    assert time.monotonic() - began < 60
    cause = f"error: rank 1 (process {second} on " if victim == 1 else "error: rank 1: rank 0 "
    assert cause in output
    assert (
        f"is gone; resume with `python -m stackexp fit --run {only_run(tmp_path / 'runs').path}`" in output
        or not victim
    )
    load_state(only_run(tmp_path / "runs").newest_checkpoint())


def compile_stack_kernels() -> None:
    """Fill numba's cache on disk: a run that compiles for more than the timeout would count as hanging."""
    x, logits = torch.randn(1, 1, 2, 4, requires_grad=True), torch.randn(1, 1, 2, 3, requires_grad=True)
    state = stack.empty((1, 1, 2), 4, 4, like=x, axis="depth")
    options = {"num_slots": 4, "discipline": "stack", "read": "global", "read_mask": "multiply"}
    output, _ = stack.step(state, x, logits, torch.randn(2, 4), **options)
    output.read.sum().backward()


@pytest.mark.process
def test_a_process_that_hangs_is_named(program, tiny, tmp_path):
    compile_stack_kernels()
    hang = write_faulty_plugin(tmp_path, "time.sleep(1000)", first="time.sleep(15)")  # a slow start is no hang
    process = program.start("fit", "--config", tiny, *FSDP, *ENDLESS, hang, "trainer.collective_timeout_seconds=12")
    output, _ = read_to_end(process, 300, expect=1)
    (line,) = [line for line in output.splitlines() if line.startswith("error: no progress")]
    assert "no progress for 12 s: rank 1 at " in line
    assert "faulty.py:7 (faulty_forward); the others wait at torch/distributed/" in line


@pytest.mark.process
def test_a_loss_that_is_not_finite_names_the_batch_and_the_rank(program, tiny, tmp_path):
    diverge = write_faulty_plugin(tmp_path, "h = h * float('nan')")
    process = program.start("fit", "--config", tiny, *FSDP, *ENDLESS, diverge)
    output, _ = read_to_end(process, 300, expect=1)
    run = only_run(tmp_path / "runs")
    (line,) = [line for line in output.splitlines() if line.startswith("error: step")]
    assert line.startswith(f"error: step {record(run)[-1]['step'] + 1}: loss nan ")
    assert "] of rank 1; " in line
    assert f"last good checkpoint: {run.newest_checkpoint()}" in line


def test_a_diverged_loss_stops_the_run(invoke, tiny, tmp_path):
    line = invoke("fit --config", tiny, "optimizer.lr=1e30", "trainer.checkpoint_interval=1", expect=1)
    run = only_run(tmp_path / "runs")
    assert f"step {int(run.newest_checkpoint().name) + 1}: " in line
    assert "samples [" in line
    assert not run.is_finished


def mount(*options: str, at: Path) -> None:
    """Mount a file system, or skip the test where that is not permitted."""
    at.mkdir(exist_ok=True)
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("needs permission to mount")
    done = subprocess.run(["mount", *options, str(at)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs permission to mount: {done.stderr.strip()}")


@pytest.mark.process
def test_a_full_disk_loses_no_checkpoint(program, tiny, tmp_path):
    disk = tmp_path / "disk"
    mount("-t", "tmpfs", "-o", "size=1500k", "tmpfs", at=disk)
    try:
        command = ("fit", "--config", tiny, *ENDLESS, f"logging.root={disk}", "trainer.checkpoint_interval=4")
        output = program.run(*command, "trainer.keep_checkpoints=1000", expect=1)
        assert re.search("no space left .*; free some space, then resume with `.* fit --run ", output.splitlines()[-1])
        run = only_run(disk)
        assert not run.is_finished
        assert not list(run.checkpoints.glob(".*")), "no incomplete checkpoint"
        assert main(["generate", "--run", str(run.path), "--max_new_tokens", "1"]) == 0, "the newest one is complete"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.process
def test_a_folder_that_becomes_read_only_loses_no_checkpoint(program, tiny, tmp_path):
    process = program.start("fit", "--config", tiny, *ENDLESS, "trainer.checkpoint_interval=100")
    wait_until(lambda: has_checkpoint(tmp_path / "runs"), process)
    run = only_run(tmp_path / "runs")
    newest = run.newest_checkpoint()
    mount("--bind", str(run.checkpoints), at=run.checkpoints)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(run.checkpoints)], check=True)
        _, line = read_to_end(process, expect=1)
        assert "error: " in line
        assert "Read-only file system" in line
        assert run.newest_checkpoint() >= newest
        assert main(["fit", "--config", str(tiny), *ENDLESS, "--run", str(run.path)]) == 1, "resuming fails too"
    finally:
        subprocess.run(["umount", str(run.checkpoints)], check=True)
    few = f"trainer.max_steps={int(newest.name) + 3}"
    assert main(["fit", "--config", str(tiny), *ENDLESS, few, "--run", str(run.path)]) == 0


@pytest.mark.parametrize("skip", [False, True])
def test_loss_spikes_are_logged_and_can_be_skipped(tiny, tmp_path, caplog, skip):
    """The threshold is so low that about every second step is a spike."""
    options = ["trainer.spike_threshold=0.001", f"trainer.skip_spikes={skip}", "trainer.max_steps=48"]
    options += ["trainer.checkpoint_interval=1", "trainer.keep_checkpoints=99", "trainer.val_check_interval=null"]
    assert main(["fit", "--config", str(tiny), *options, "optimizer.lr=1e-6"]) == 0
    run = only_run(tmp_path / "runs")
    spikes = [line["step"] for line in record(run) if "train/spike" in line]
    assert spikes
    assert min(spikes) > 32, "no spikes before the window is full"
    logged = [message for message in caplog.messages if "standard deviations above" in message]
    assert [int(message.split()[1].rstrip(":")) for message in logged] == spikes
    assert all("samples [" in message for message in logged)
    for step in range(33, 48):
        before, after = (load_embedding(run.checkpoints / f"{s:08d}") for s in (step - 1, step))
        assert torch.equal(before, after) == (skip and step in spikes)
    assert json.loads(run.result.read_text())["steps"] == 48


def load_embedding(checkpoint: Path) -> torch.Tensor:
    tensors = {"model": {"embedding.weight": torch.empty(300, 32)}}
    load_tensors(tensors, checkpoint)
    return tensors["model"]["embedding.weight"]
