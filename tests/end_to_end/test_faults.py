"""What goes wrong on a cluster: signals, processes that die or hang, disks, clocks, losses. Real processes."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import Forks
from processes import kill, wait_until
from records import losses, record

from stackexp.cli import main
from stackexp.models.checkpoints import load_state
from stackexp.runs import RunFolder

LONG = ("trainer.max_steps=100000", "trainer.val_check_interval=null", "trainer.checkpoint_interval=20")
LONG += ("logging.progress_bar=false",)
FSDP2 = ("trainer.strategy=fsdp", "trainer.devices=2", "data.micro_batch_size=2")


def the_run(folder: Path) -> RunFolder:
    (path,) = folder.glob("tiny/*")
    return RunFolder(path)


def has_saved(root: Path) -> bool:
    return any(RunFolder(path).saved() for path in root.glob("tiny/*"))


def environments(process: subprocess.Popen) -> Iterator[bytes]:
    """Of its children."""
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            yield pid.encode() + b":" + Path(f"/proc/{pid}/environ").read_bytes()


def second_rank(process: subprocess.Popen) -> int:
    """The process id of rank 1, which the first process has started."""
    (found,) = [environment for environment in environments(process) if b"LOCAL_RANK=1\0" in environment]
    return int(found.split(b":")[0])


def plugin(folder: Path, rank: int, action: str) -> str:
    """A plugin file that lets one process misbehave in its memory's forward pass, in the 30th or so step."""
    path = folder / "misbehave.py"
    path.write_text(
        "import os, time\nfrom stackexp.models.memories.stack import StackMemory\n"
        "forward, calls = StackMemory.forward, []\n"
        "def misbehaving(self, h, *rest):\n    calls.append(1)\n"
        f"    if os.environ.get('LOCAL_RANK', '0') == '{rank}' and self.training and len(calls) > 120: {action}\n"
        "    return forward(self, h, *rest)\nStackMemory.forward = misbehaving\n"
    )
    return f"plugins=[{path}]"


def ended(process: subprocess.Popen, seconds: float = 60) -> tuple[str, str]:
    """All it printed, and the last line that is no progress bar."""
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        kill(process)
    assert "Traceback" not in output
    return output, [line for line in output.splitlines() if line.strip()][-1]


@pytest.mark.parametrize(
    ("number", "strategy"),
    [
        pytest.param(signal.SIGTERM, (), id="SIGTERM"),
        pytest.param(signal.SIGUSR1, FSDP2, id="SIGUSR1-fsdp", marks=pytest.mark.slow),
    ],
)
def test_told_to_stop_it_saves_and_goes_on_exactly_where_it_was(program, tiny, tmp_path, number, strategy):
    forks, ranks = Forks(tmp_path), 2 if strategy else 1
    command = ("fit", "--config", tiny, *strategy, "trainer.max_steps=36", "logging.progress_bar=false")
    run, whole = RunFolder(tmp_path / "stopped"), RunFolder(tmp_path / "whole")
    process = program.start(*command, "trainer.checkpoint_interval=1000", "data.num_workers=1", "--run", run.path)
    wait_until(lambda: len(record(run)) > 9, process)
    if strategy:
        os.kill(second_rank(process), number)  # one process hears of it, all stop
    else:
        os.killpg(process.pid, number)  # all processes of a task hear of it, the loader's too, as with some launchers
    output, _ = ended(process)
    assert process.returncode == 75
    assert "error" not in output
    step = int(run.newest_checkpoint().name)
    assert record(run)[-1]["step"] == step < 36
    assert f"newest checkpoint {step:08d}; resume with --ckpt_path last" in output

    forks.run(*command, "--run", run.path, ranks=ranks)
    forks.run(*command, "--run", whole.path, ranks=ranks)
    assert record(run) == record(whole), "bit for bit"
    assert "finished" in forks.run(*command, "--run", run.path, ranks=ranks), "once more changes nothing"


@pytest.mark.parametrize("strategy", [(), pytest.param(FSDP2, marks=pytest.mark.slow)], ids=["single", "fsdp"])
def test_told_to_stop_within_a_validation_it_makes_it_up(tiny, tmp_path, strategy):
    forks, ranks = Forks(tmp_path), 2 if strategy else 1
    command = ("fit", "--config", tiny, *strategy, "trainer.max_steps=20", "trainer.checkpoint_interval=7")
    command += ("trainer.val_check_interval=14", "data.eval_batch_size=1", "logging.progress_bar=false")
    run, whole = RunFolder(tmp_path / "stopped"), RunFolder(tmp_path / "whole")
    started = forks.start(*command, "--run", run.path, ranks=ranks)
    started.wait_until(lambda: 14 in losses(run))
    os.kill(started[-1].pid, signal.SIGTERM)  # the last rank's; the others hear of it
    assert started.join() == [75] * ranks, started.output.read_text()
    assert "newest checkpoint 00000014; resume with --ckpt_path last" in started.output.read_text()
    last = record(run)[-1]
    assert (last["step"], "loss/train" in last) == (14, True), "its validation was not recorded"

    forks.run(*command, "--run", run.path, ranks=ranks)
    forks.run(*command, "--run", whole.path, ranks=ranks)
    assert record(run) == record(whole), "bit for bit"


def test_a_process_that_dies_at_its_start_is_not_waited_for(program, tiny):
    process = program.start("fit", "--config", tiny, *FSDP2)
    wait_until(lambda: b"LOCAL_RANK=1\0" in b"".join(environments(process)), process)
    os.kill(second_rank(process), signal.SIGKILL)
    _, line = ended(process, 30)
    assert process.returncode == 1
    assert line == "error: rank 1 exited during startup with code -9; see its output above"


@pytest.mark.slow  # half a minute of silence
def test_a_first_process_that_freezes_is_named(program, tiny, tmp_path):
    process = program.start("fit", "--config", tiny, *FSDP2, *LONG)
    wait_until(lambda: has_saved(tmp_path / "runs"), process)
    other = second_rank(process)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: not Path(f"/proc/{other}/cmdline").read_bytes(), process, 60)
    kill(process)
    assert "error: rank 1: rank 0 is gone" in process.stdout.read()


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_others_end_with_the_cause_when_a_process_is_killed(program, tiny, tmp_path, victim):
    process = program.start("fit", "--config", tiny, *FSDP2, *LONG)
    wait_until(lambda: has_saved(tmp_path / "runs"), process)
    other = second_rank(process)
    os.kill(process.pid if victim == 0 else other, signal.SIGKILL)
    started = time.monotonic()
    output, _ = process.communicate(timeout=60)  # until every process has closed its output
    assert time.monotonic() - started < 60
    cause = f"error: rank 1 (process {other} on " if victim == 1 else "error: rank 1: rank 0 "
    assert cause in output
    assert "is gone" in output
    assert "Traceback" not in output
    assert process.returncode == (1 if victim == 1 else -signal.SIGKILL)
    load_state(the_run(tmp_path / "runs").newest_checkpoint())


def test_a_process_that_hangs_is_named(program, tiny, tmp_path):
    hang = plugin(tmp_path, 1, "time.sleep(1000)")
    process = program.start("fit", "--config", tiny, *FSDP2, *LONG, hang, "trainer.collective_timeout=6")
    output, _ = ended(process, 120)
    assert process.returncode == 1
    (line,) = [line for line in output.splitlines() if line.startswith("error: no progress")]
    assert "no progress for 6 s: rank 1 at " in line
    assert "misbehave.py:6 (misbehaving); the others wait at torch/distributed/" in line


def test_a_loss_that_is_not_finite_names_the_batch_and_the_process(program, tiny, tmp_path):
    process = program.start("fit", "--config", tiny, *FSDP2, *LONG, plugin(tmp_path, 1, "h = h * float('nan')"))
    output, _ = ended(process, 120)
    assert process.returncode == 1
    run = the_run(tmp_path / "runs")
    (line,) = [line for line in output.splitlines() if line.startswith("error: step")]
    assert line.startswith(f"error: step {record(run)[-1]['step'] + 1}: loss nan ")
    assert "] of rank 1; nothing was updated" in line
    assert f"last good checkpoint: {run.newest_checkpoint()}" in line


def test_a_diverged_loss_stops_the_run(capsys, tiny, tmp_path):
    assert main(["fit", "--config", str(tiny), "optimizer.lr=1e30", "trainer.checkpoint_interval=1"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    run = the_run(tmp_path / "runs")
    assert f"step {int(run.newest_checkpoint().name) + 1}: " in line
    assert "samples [" in line
    assert not run.finished


def test_interrupted_from_the_keyboard(program, tiny, tmp_path):
    """By Ctrl-C, which signals its loader's processes too: they leave it to the run."""
    process = program.start("fit", "--config", tiny, *LONG, "data.num_workers=1")
    wait_until(lambda: has_saved(tmp_path / "runs"), process)
    others = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ignored = [re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1] for pid in others]
    assert ignored
    assert all(int(mask, 16) & 1 << signal.SIGINT - 1 for mask in ignored)
    os.killpg(process.pid, signal.SIGINT)
    output, line = ended(process)
    assert process.returncode == 130
    assert "again to stop at once" in output
    assert "--ckpt_path last" in line


@pytest.mark.slow
def test_two_processes_are_interrupted_from_the_keyboard(program, tiny, tmp_path):
    """A terminal signals both, and neither waits for the other."""
    process = program.start("fit", "--config", tiny, *FSDP2, *LONG)
    wait_until(lambda: has_saved(tmp_path / "runs"), process)
    os.killpg(process.pid, signal.SIGINT)
    output, line = ended(process)
    assert process.returncode == 130, output
    assert "--ckpt_path last" in line
    assert "lost" not in output


def test_interrupted_twice_it_ends_within_a_batch(program, tiny, tmp_path):
    sleeping = tmp_path / "sleeping"
    action = f"open({str(sleeping)!r}, 'w').close(); time.sleep(1000)"
    process = program.start("fit", "--config", tiny, *LONG, plugin(tmp_path, 0, action))
    wait_until(sleeping.exists, process)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    process.send_signal(signal.SIGINT)
    _, line = ended(process)
    assert process.returncode == 130
    assert "--ckpt_path last" in line


def mounted(*options: str, at: Path) -> None:
    """Mount, or skip the test where that is not allowed."""
    at.mkdir(exist_ok=True)
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("needs the right to mount")
    done = subprocess.run(["mount", *options, str(at)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")


def test_a_full_disk_loses_no_checkpoint(program, tiny, tmp_path):
    disk = tmp_path / "disk"
    mounted("-t", "tmpfs", "-o", "size=1500k", "tmpfs", at=disk)
    try:
        command = ("fit", "--config", tiny, *LONG, f"logging.root={disk}", "trainer.checkpoint_interval=4")
        output = program.run(*command, "trainer.keep_checkpoints=1000", "logging.progress_bar=false", expect=1)
        assert "no space left" in output.splitlines()[-1]
        assert "Traceback" not in output
        run = the_run(disk)
        assert not run.finished
        assert not list(run.checkpoints.glob(".*")), "no half-written checkpoint"
        assert main(["generate", "--run", str(run.path), "--max_new_tokens", "1"]) == 0, "the last one is whole"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_becomes_read_only_loses_no_checkpoint(program, tiny, tmp_path):
    process = program.start("fit", "--config", tiny, *LONG, "trainer.checkpoint_interval=100")
    wait_until(lambda: has_saved(tmp_path / "runs"), process)
    run = the_run(tmp_path / "runs")
    newest = run.newest_checkpoint()
    mounted("--bind", str(run.checkpoints), at=run.checkpoints)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(run.checkpoints)], check=True)
        _, line = ended(process)
        assert process.returncode == 1
        assert "error: " in line
        assert "Read-only file system" in line
        assert run.newest_checkpoint() >= newest
        assert main(["fit", "--config", str(tiny), *LONG, "--run", str(run.path)]) == 1, "nor can it go on here"
    finally:
        subprocess.run(["umount", str(run.checkpoints)], check=True)
    few = f"trainer.max_steps={int(newest.name) + 3}"
    assert main(["fit", "--config", str(tiny), *LONG, few, "--run", str(run.path)]) == 0, "mended, it goes on"


def test_a_clock_that_goes_backwards_loses_nothing(tiny, tmp_path, monkeypatch):
    fit = ["fit", "--config", str(tiny), "logging.progress_bar=false"]
    assert main([*fit, "trainer.max_time=00:00:00:00"]) == 75, "no time: it stops after its first step"
    first = the_run(tmp_path / "runs")
    hours = iter(range(10**6))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600 * next(hours))
    assert main([*fit, "--ckpt_path", "last"]) == 0
    lines = record(first)
    assert [line["step"] for line in lines if "loss/train" in line] == list(range(1, 13))
    assert first.newest_checkpoint().name == "00000012"


def test_time_limits_and_checkpoints_by_the_minute(program, tiny, tmp_path):
    often = ("trainer.checkpoint_minutes=0.01", "trainer.keep_checkpoints=99", "trainer.checkpoint_interval=100000")
    output = program.run("fit", "--config", tiny, *LONG, *often, "trainer.max_time=00:00:00:09", expect=75)
    assert "trainer.max_time 00:00:00:09 is over; newest checkpoint" in output
    steps = [int(path.name) for path in the_run(tmp_path / "runs").saved()]
    assert len(steps) > 2
    assert steps[-1] == record(the_run(tmp_path / "runs"))[-1]["step"]


@pytest.mark.parametrize("skip", [False, True])
def test_loss_spikes_are_told_and_can_be_skipped(tiny, tmp_path, caplog, skip):
    """A threshold so low that every second step or so is a spike."""
    options = ["trainer.spike_threshold=0.001", f"trainer.skip_spikes={skip}", "trainer.max_steps=60"]
    options += ["trainer.checkpoint_interval=1", "trainer.keep_checkpoints=99", "trainer.val_check_interval=null"]
    assert main(["fit", "--config", str(tiny), *options, "optimizer.lr=1e-6"]) == 0
    run = the_run(tmp_path / "runs")
    spikes = [line["step"] for line in record(run) if "loss/spike" in line]
    assert spikes
    assert min(spikes) > 32, "not before there is something to compare with"
    told = [message for message in caplog.messages if "standard deviations above" in message]
    assert [int(message.split()[1].rstrip(":")) for message in told] == spikes
    assert all("samples [" in message for message in told)
    for step in range(33, 60):
        before, after = (weights(run.checkpoints / f"{s:08d}") for s in (step - 1, step))
        assert (before == after) == (skip and step in spikes)
    assert json.loads(run.result.read_text())["steps"] == 60


def weights(checkpoint: Path) -> bytes:
    import torch

    from stackexp.models.checkpoints import load_tensors

    tensors = {"model": {"embedding.weight": torch.empty(300, 32)}}
    load_tensors(tensors, checkpoint)
    return tensors["model"]["embedding.weight"].numpy().tobytes()
