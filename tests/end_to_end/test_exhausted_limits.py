"""A run that exceeds a limit of the machine, or loses a process, ends with one line and no traceback."""

import os
import resource
import signal
import time
from pathlib import Path

import pytest
from processes import ENDLESS, FSDP, find_second_rank, list_children, read_to_end, wait_until
from records import has_checkpoint, only_run

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        (resource.RLIMIT_FSIZE, 60 * KIB, "error: file size limit exceeded; raise it (ulimit -f), then resume"),
        (resource.RLIMIT_NOFILE, 20, "error: too many open files"),
    ],
    ids=["file size", "open files"],
)
def test_a_limit_of_the_shell_is_named(tiny, forks, tmp_path, limit, value, message):
    hard = resource.getrlimit(limit)[1]
    set_limit = f"import resource\nresource.setrlimit({int(limit)}, ({value}, {hard}))\n"
    (tmp_path / "limit.py").write_text(set_limit)
    plugin = f"plugins=[{tmp_path / 'limit.py'}]"
    options = ("data.num_workers=1", "trainer.checkpoint_interval=1", "trainer.val_check_interval=null")
    output = forks.run("fit", "--config", tiny, plugin, *options, expect=1)
    assert message in output
    assert "Traceback" not in output


@pytest.mark.process
def test_too_little_memory_is_named(program, tiny, tmp_path):
    process = program.start("fit", "--config", tiny)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (500 * MIB, 500 * MIB))
    _, line = read_to_end(process, expect=1)
    assert line.startswith("error: out of memory")
    assert "ulimit -v" in line


@pytest.mark.process
def test_a_killed_loader_worker_is_named(program, tiny, tmp_path):
    process = program.start("fit", "--config", tiny, *ENDLESS, "data.num_workers=1")
    wait_until(lambda: has_checkpoint(tmp_path / "runs"), process)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in list_children(process)}
    [worker] = [pid for pid, command in commands.items() if b"resource_tracker" not in command]
    os.kill(worker, signal.SIGKILL)
    _, line = read_to_end(process, expect=1)
    assert line.startswith("error: DataLoader worker")
    assert f"{worker})" in line
    assert "; if it ran out of memory, lower data.num_workers" in line
    assert "; last good checkpoint: " in line


@pytest.mark.process
def test_a_worker_killed_while_it_sends_a_batch_is_named(program, tiny, tmp_path):
    (tmp_path / "kill.py").write_text(
        "import multiprocessing\nfrom multiprocessing.resource_sharer import _resource_sharer\n"
        "from threading import Timer\n"
        "def lose_connection(_):\n"
        "    [worker] = multiprocessing.active_children()\n"
        "    Timer(0.5, worker.kill).start()\n"
        "    raise ConnectionResetError\n"
        "_resource_sharer.get_connection = lose_connection\n"
    )
    process = program.start("fit", "--config", tiny, f"plugins=[{tmp_path / 'kill.py'}]", "data.num_workers=1")
    _, line = read_to_end(process, expect=1)
    assert line.startswith("error: DataLoader worker (pid")


@pytest.mark.process
def test_many_interrupts_do_not_disturb_the_exit(program, tiny, tmp_path):
    process = program.start("fit", "--config", tiny, *ENDLESS)
    wait_until(lambda: has_checkpoint(tmp_path / "runs"), process)
    for _ in range(30):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    _, line = read_to_end(process, expect=130)
    # A busy machine may deliver all signals as one, which stops the run after the step
    assert line.startswith("interrupted: ") or ": interrupted; " in line


def test_a_log_that_is_deleted_during_the_run_is_named(tiny, forks, tmp_path):
    (tmp_path / "delete.py").write_text(
        "from pathlib import Path\nfrom stackexp.modules.base import TrainingModule\n"
        "def delete(self):\n    [path.unlink() for path in Path('runs').glob('tiny/*/metrics.jsonl')]\n"
        "TrainingModule.on_train_end = delete\n"
    )
    output = forks.run("fit", "--config", tiny, f"plugins=[{tmp_path / 'delete.py'}]", expect=1)
    assert "metrics.jsonl: deleted or emptied during the run; start a new run" in output
    assert "Traceback" not in output
    assert not only_run(tmp_path / "runs").is_finished


@pytest.mark.process
def test_a_frozen_second_rank_is_killed_with_its_worker(program, tiny, tmp_path):
    process = program.start("fit", "--config", tiny, *FSDP, *ENDLESS, "data.num_workers=1")
    wait_until(lambda: has_checkpoint(tmp_path / "runs"), process)
    second = find_second_rank(process)
    workers = Path(f"/proc/{second}/task/{second}/children").read_text().split()
    os.kill(second, signal.SIGSTOP)
    output, _ = read_to_end(process, 90, expect=1)
    assert f"error: rank 1 (process {second} on " in output
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in [second, *workers]), seconds=20)
