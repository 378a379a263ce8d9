"""Requested stops: SIGTERM, SIGUSR1, Ctrl-C and time limits. A stopped run resumes bit for bit."""

import ctypes
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import ENDLESS, FSDP, find_second_rank, list_children, read_to_end, wait_until
from records import has_checkpoint, losses, only_run, record
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stackexp.cli import main
from stackexp.errors import RunError
from stackexp.files import read_json_lines, write_json_lines
from stackexp.runs import RunFolder
from stackexp.training import signals
from stackexp.training.callbacks import steps
from stackexp.training.callbacks.metrics_log import MetricsLog
from stackexp.training.objectives import Objective


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "strategy"),
    [
        pytest.param(signal.SIGTERM, (), id="SIGTERM"),
        pytest.param(signal.SIGUSR1, FSDP, id="SIGUSR1-fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_run_stopped_by_a_signal_resumes_exactly(program, tiny, forks, tmp_path, number, strategy):
    ranks = 2 if strategy else 1
    command = ("fit", "--config", tiny, *strategy, "trainer.max_steps=36", "logging.progress_bar=false")
    run, reference = RunFolder(tmp_path / "stopped"), RunFolder(tmp_path / "reference")
    process = program.start(*command, "trainer.checkpoint_interval=1000", "data.num_workers=1", "--run", run.path)
    wait_until(lambda: len(record(run)) > 9, process)
    if strategy:
        os.kill(find_second_rank(process), number)  # one rank receives the signal, all stop
    else:
        os.killpg(process.pid, number)  # the data workers receive it too, as from some launchers
        while process.poll() is None:  # more of both signals, up to the exit
            process.send_signal(random.choice([signal.SIGTERM, signal.SIGUSR1]))
            time.sleep(0.005)
    output, _ = read_to_end(process, expect=75)
    assert "error" not in output
    step = int(run.newest_checkpoint().name)
    assert record(run)[-1]["step"] == step < 36
    assert f"newest checkpoint {step:08d}; resume with `python -m stackexp fit --run {run.path}`" in output

    forks.run(*command, "--run", run.path, ranks=ranks)
    forks.run(*command, "--run", reference.path, ranks=ranks)
    assert record(run) == record(reference), "bit for bit"
    assert "finished" in forks.run(*command, "--run", run.path, ranks=ranks), "a finished run is left alone"


@pytest.mark.process
@pytest.mark.parametrize("strategy", [(), pytest.param(FSDP, marks=pytest.mark.slow)], ids=["single", "fsdp"])
def test_run_stopped_during_validation_repeats_it_on_resume(tiny, forks, tmp_path, strategy):
    ranks = 2 if strategy else 1
    command = ("fit", "--config", tiny, *strategy, "trainer.max_steps=20", "trainer.checkpoint_interval=7")
    command += ("trainer.val_check_interval=14", "data.eval_batch_size=1", "logging.progress_bar=false")
    run, reference = RunFolder(tmp_path / "stopped"), RunFolder(tmp_path / "reference")
    started = forks.start(*command, "--run", run.path, ranks=ranks)
    started.wait_until(lambda: 14 in losses(run))
    os.kill(started[-1].pid, signal.SIGTERM)
    assert started.join() == [75] * ranks, started.output.read_text()
    assert "newest checkpoint 00000014; resume with `python" in started.output.read_text()
    last = record(run)[-1]
    assert (last["step"], "train/loss" in last) == (14, True), "the validation was not logged"

    forks.run(*command, "--run", run.path, ranks=ranks)
    forks.run(*command, "--run", reference.path, ranks=ranks)
    assert record(run) == record(reference), "bit for bit"


@pytest.mark.process
def test_ctrl_c_saves_and_stops_after_the_step(program, tiny, tmp_path):
    """The terminal signals the data workers too; they ignore it. The printed command resumes the run."""
    process = program.start("fit", "--config", tiny, *ENDLESS, "data.num_workers=1")
    wait_until(lambda: has_checkpoint(tmp_path / "runs"), process)
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in list_children(process)]
    assert statuses
    assert all(int(re.search(r"SigIgn:\s*(\w+)", s)[1], 16) & 1 << signal.SIGINT - 1 for s in statuses)
    os.killpg(process.pid, signal.SIGINT)
    output, line = read_to_end(process, expect=130)
    assert "press Ctrl-C again to stop at once" in output
    run = only_run(tmp_path / "runs")
    assert run.newest_checkpoint().name == f"{record(run)[-1]['step']:08d}", "the last step is saved"
    command = re.search("resume with `python -m stackexp (.*)`", line)[1]
    few = f"trainer.max_steps={int(run.newest_checkpoint().name) + 2}"
    program.run(*shlex.split(command), few)
    assert run.is_finished


@pytest.mark.slow
def test_ctrl_c_stops_two_processes(program, tiny, tmp_path):
    """The terminal signals both, and neither waits for the other."""
    process = program.start("fit", "--config", tiny, *FSDP, *ENDLESS)
    wait_until(lambda: has_checkpoint(tmp_path / "runs"), process)
    os.killpg(process.pid, signal.SIGINT)
    output, line = read_to_end(process, expect=130)
    assert "resume with `python -m stackexp fit --run " in line
    assert "lost" not in output


@pytest.mark.process
def test_a_second_ctrl_c_stops_inside_a_batch(program, tiny, tmp_path):
    sleeping, plugin = tmp_path / "sleeping", tmp_path / "sleep.py"
    plugin.write_text(
        "import time\nfrom stackexp.models.memories.stack import StackMemory\n"
        "def sleep(self, h, state, previous, probe=False):\n"
        f"    open({str(sleeping)!r}, 'w').close()\n    time.sleep(1000)\n"
        "StackMemory.forward = sleep\n"
    )
    process = program.start("fit", "--config", tiny, *ENDLESS, f"plugins=[{plugin}]")
    wait_until(sleeping.exists, process)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    process.send_signal(signal.SIGINT)
    _, line = read_to_end(process, expect=130)
    assert line.startswith("interrupted: ")


@pytest.mark.process
@pytest.mark.parametrize("has_batches", [False, True])
def test_stop_request_ends_a_run_whose_loader_is_frozen(program, tiny, tmp_path, has_batches):
    """While the worker is frozen, the run still has the batches that it loaded before.

    The signal goes to a thread other than the main thread, as the kernel may choose.
    """
    process = program.start("fit", "--config", tiny, *ENDLESS, "data.num_workers=1", "trainer.stop_grace_seconds=3")
    wait_until(lambda: has_checkpoint(tmp_path / "runs"), process)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in list_children(process)}
    workers = [pid for pid, command in commands.items() if b"resource_tracker" not in command]
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0 if has_batches else 3)
    thread = max(int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir())
    assert ctypes.CDLL(None).tgkill(process.pid, thread, signal.SIGTERM) == 0
    output, _ = process.communicate(timeout=60)
    stuck = "error: SIGTERM: no batch has ended for 3 s; exiting without a checkpoint" in output
    assert process.returncode == (1 if stuck else 75), output
    assert stuck or has_batches
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_time_limit_stops_and_minute_interval_saves(tiny, tmp_path, monkeypatch, capsys):
    seconds = itertools.count()  # a clock that advances by a second with every look
    clock = SimpleNamespace(monotonic=lambda: next(seconds), perf_counter=time.perf_counter)
    monkeypatch.setattr(steps, "time", clock)
    monkeypatch.setattr(signals, "time", clock)
    options = (
        "trainer.checkpoint_interval_minutes=0.1",
        "trainer.checkpoint_interval=100000",
        "trainer.keep_checkpoints=99",
    )
    fit = ["fit", "--config", str(tiny), *ENDLESS, *options, "trainer.max_time=00:00:00:40"]
    assert main(fit) == 75
    assert "trainer.max_time 00:00:00:40 is over; newest checkpoint" in capsys.readouterr().err
    run = only_run(tmp_path / "runs")
    saved = [int(path.name) for path in run.list_checkpoints()]
    assert len(saved) > 2
    assert saved[-1] == record(run)[-1]["step"]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
def test_a_training_that_a_callback_stops_keeps_its_last_step(hook, tiny, tmp_path, monkeypatch, invoke):
    monkeypatch.chdir(tmp_path)
    lines = [
        "import lightning.pytorch as pl",
        "class Stop(pl.Callback):",
        f"    def {hook}(self, trainer, *_):",
    ]
    Path("early.py").write_text("\n".join([*lines, "        trainer.should_stop |= trainer.global_step == 5"]))
    options = ["trainer.val_check_interval=5", "logging.progress_bar=false", "logging.loggers=[tensorboard]"]
    options += ["trainer.callbacks=['early.py:Stop']"]
    invoke("fit --config", tiny, *options)
    run = only_run(tmp_path / "runs")
    result = run.read_result()
    assert (result.steps, len(losses(run))) == (5, 5)
    assert result.tokens == record(run)[-1]["tokens"] == list(read_json_lines(run.path / "data.jsonl"))[-1]["tokens"]
    (final,) = EventAccumulator(str(run.path)).Reload().Scalars("train/final_loss")
    assert final.step == 5
    assert "5/12" in invoke("runs list")

    invoke("validate --run", run.path)
    scores = json.loads((run.path / "validate.json").read_text())
    assert scores["checkpoint"].endswith("00000005")
    assert scores["average"]["loss"] == pytest.approx(result.figures["average"]["loss"], abs=1e-7)
    branch = ["--ckpt_path", str(run.newest_checkpoint()), "name=branch", "trainer.callbacks=[]"]
    invoke("fit --config", tiny, *options, *branch)
    assert only_run(tmp_path / "runs", "branch").read_result().steps == 12


def fail(*_):
    """End a run before its result, as a kill does."""
    raise RunError("killed")


STOPPER = """
import lightning.pytorch as pl


class Stopper(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop |= batch_idx == 8
"""


@pytest.mark.parametrize("validation", ["5", "null"])
def test_a_stop_in_the_middle_of_an_accumulated_step_ends_the_run_after_it(tiny, tmp_path, monkeypatch, validation):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stopper.py").write_text(STOPPER)
    callback = {"class": f"{tmp_path}/stopper.py:Stopper", "options": {}}
    options = [f"trainer.val_check_interval={validation}", "logging.progress_bar=false"]
    options += [f"trainer.callbacks=[{json.dumps(callback)}]", "trainer.checkpoint_interval=100"]
    assert main(["fit", "--config", str(tiny), *options]) == 0
    run = only_run(tmp_path / "runs")
    assert run.read_result().steps == 5, "micro-batches 8 and 9 are the fifth step"
    assert run.newest_checkpoint().name == "00000005"
    run.result.unlink()
    assert main(["fit", "--run", str(run.path)]) == 0
    assert run.read_result().steps == 5
    run.result.unlink()
    assert main(["fit", "--run", str(run.path), "trainer.callbacks=[]"]) == 0
    assert run.read_result().steps == 12, "without the callback, the run continues"


@pytest.mark.process
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
def test_a_callback_that_stops_one_rank_stops_all(hook, tiny, tmp_path, forks):
    lines = ["import lightning.pytorch as pl", "class Stop(pl.Callback):", f"    def {hook}(self, trainer, *_):"]
    lines += ["        trainer.should_stop |= trainer.global_rank == 1 and trainer.global_step == 5"]
    (tmp_path / "one_rank.py").write_text("\n".join(lines))
    options = ("trainer.val_check_interval=5", "trainer.checkpoint_interval=100", "logging.progress_bar=false")
    options += ("trainer.callbacks=['one_rank.py:Stop']", "trainer.collective_timeout_seconds=60")
    two = ("trainer.strategy=ddp", "trainer.devices=2", "data.micro_batch_size=2")
    forks.run("fit", "--config", tiny, *options, *two, ranks=2)
    run = only_run(tmp_path / "runs")
    assert run.read_result().steps == 5
    assert run.newest_checkpoint().name == "00000005"


def test_the_validation_of_a_stop_by_a_callback_survives_a_kill(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stopper.py").write_text(STOPPER)
    options = ["trainer.val_check_interval=3", "trainer.checkpoint_interval=3", "logging.progress_bar=false"]
    assert main(["fit", "--config", str(tiny), *options, "trainer.callbacks=['stopper.py:Stopper']"]) == 0
    run = only_run(tmp_path / "runs")
    whole, scores = record(run), run.read_result().figures["sets"]
    assert list_validations(run) == [3, 5], "Lightning validates at the stop"
    for kept in (whole, whole[:-1]):  # killed after and before this validation
        run.result.unlink()
        write_json_lines(run.metrics, [{"time": 0.0} | line for line in kept])
        assert main(["fit", "--run", str(run.path)]) == 0
        assert (record(run), run.read_result().figures["sets"]) == (whole, scores)
    run.result.unlink()
    shutil.rmtree(run.newest_checkpoint())
    assert main(["fit", "--run", str(run.path), "trainer.val_check_interval=2"]) == 0
    assert list_validations(run) == [3, 4, 5]


def list_validations(run: RunFolder) -> list[int]:
    return [line["step"] for line in record(run) if "val/loss/average" in line]


def test_a_branch_gives_callbacks_the_validation_of_its_checkpoint(tiny, tmp_path):
    options = {"monitor": "val/loss/average", "mode": "max", "patience": 2}
    callback = {"class": "lightning.pytorch.callbacks:EarlyStopping", "options": options}
    fit = ["fit", "--config", str(tiny), f"trainer.callbacks=[{json.dumps(callback)}]", "trainer.keep_checkpoints=9"]
    fit += ["trainer.val_check_interval=2", "trainer.checkpoint_interval=2", "logging.progress_bar=false"]
    assert main(fit) == 0
    whole = only_run(tmp_path / "runs")
    assert list_validations(whole) == [2, 4, 6], "the loss falls, so the run stops"
    assert main([*fit, "name=branch", "--ckpt_path", str(whole.checkpoints / "00000004")]) == 0
    after = [line for line in record(whole) if line["step"] > 4 or (line["step"] == 4 and "train/loss" not in line)]
    assert record(only_run(tmp_path / "runs", "branch")) == after


EARLY_STOPPING = {"monitor": "val/loss/average", "stopping_threshold": 100.0}  # the first validation is better


def test_early_stopping_holds_after_a_kill(tiny, tmp_path, monkeypatch):
    callback = {"class": "lightning.pytorch.callbacks:EarlyStopping", "options": EARLY_STOPPING}
    options = ["--config", str(tiny), "trainer.val_check_interval=5", "logging.progress_bar=false"]
    options += [f"trainer.callbacks=[{json.dumps(callback)}]"]
    with monkeypatch.context() as patch:
        patch.setattr(Objective, "evaluate", fail)
        assert main(["fit", *options]) == 1
    run = only_run(tmp_path / "runs")
    assert run.newest_checkpoint().name == "00000005"
    assert main(["fit", *options, "--ckpt_path", "last"]) == 0
    assert (run.read_result().steps, len(losses(run))) == (5, 5)
    assert [line["step"] for line in read_json_lines(run.path / "data.jsonl")] == [5]

    # A kill after a logged validation: the callback, whose state is in the checkpoint before it, needs its scores again
    shutil.rmtree(tmp_path / "runs")
    patient = {"class": callback["class"], "options": EARLY_STOPPING | {"patience": 2, "min_delta": 10.0}}
    del patient["options"]["stopping_threshold"]
    waiting = [*options[:-1], f"trainer.callbacks=[{json.dumps(patient)}]", "trainer.checkpoint_interval=5"]
    waiting.append("trainer.max_steps=30")
    assert main(["fit", *waiting, "name=whole"]) == 0
    whole = only_run(tmp_path / "runs", "whole")
    assert whole.read_result().steps == 15, "the second validation without an improvement"
    killed = RunFolder(Path(shutil.copytree(whole.path, tmp_path / "runs/killed/0")))
    killed.result.unlink()
    shutil.rmtree(killed.newest_checkpoint())
    assert killed.newest_checkpoint().name == "00000010"
    assert main(["fit", "--run", str(killed.path)]) == 0
    assert record(killed) == record(whole)

    shutil.rmtree(tmp_path / "runs")
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "on_validation_end", fail)
        assert main(["fit", *options, "trainer.checkpoint_interval=5"]) == 1
    run = only_run(tmp_path / "runs")
    assert main(["fit", *options, "trainer.checkpoint_interval=5", "--ckpt_path", "last"]) == 0
    assert (run.read_result().steps, len(losses(run))) == (5, 5)


def test_backward_clock_loses_no_data(tiny, tmp_path, monkeypatch):
    fit = ["fit", "--config", str(tiny), "logging.progress_bar=false"]
    assert main([*fit, "trainer.max_time=00:00:00:00"]) == 75, "stops after the first step"
    run = only_run(tmp_path / "runs")
    hours, now = iter(range(10**6)), time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600 * next(hours))
    assert main([*fit, "--ckpt_path", "last"]) == 0
    assert list(losses(run)) == list(range(1, 13))
    assert run.newest_checkpoint().name == "00000012"
