"""The training callbacks, each without a Trainer: order, throughput, stop and save requests, profiles."""

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from config_files import BASE, compose_error
from records import losses, only_run

from stackexp.config.compose import compose
from stackexp.errors import ConfigError, InterruptedRunError, StoppedError
from stackexp.modules.metrics import StepMetrics
from stackexp.runs import RunFolder
from stackexp.training import checkpointing, signals
from stackexp.training.callbacks import steps
from stackexp.training.callbacks.data_record import DataRecord
from stackexp.training.callbacks.metrics_log import MetricsLog
from stackexp.training.callbacks.steps import StepRequests, Throughput, get_peak_flops, raise_if_stopped
from stackexp.training.checkpointing import Start, StepCheckpoint
from stackexp.training.lightning_internals import rescale_progress
from stackexp.training.signals import STOP_SIGNALS, StopRequest, parse_seconds
from stackexp.training.trainer import build_callbacks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOKENS, CONTEXT, FLOPS = 1024, 64, 2.0**31  # tokens per step, context length, FLOPs per token


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """A clock that the callbacks read instead of the real one."""
    clock = Clock()
    for module in (steps, signals):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def module() -> SimpleNamespace:
    """A stand-in with the attributes of a training module that callbacks use."""
    model = SimpleNamespace(flops_per_token=lambda context_length: {CONTEXT: FLOPS}[context_length])
    return SimpleNamespace(model=model, device=CPU, step_metrics=StepMetrics(), tokens=0, sequence_length=CONTEXT)


def test_callbacks_measure_then_request_then_log_then_save(tmp_path):
    config, folder = compose(["quickstart"]), RunFolder(tmp_path)
    built = build_callbacks(
        config, Start(folder), MetricsLog(folder, config), SimpleNamespace(), [DataRecord(tmp_path, 9)]
    )
    order = ["Throughput", "DataRecord", "StepRequests", "MetricsLog", "Progress"]
    assert [type(callback).__name__ for callback in built] == [*order, "MissedValidation", "StepCheckpoint"]


@pytest.mark.parametrize(
    ("name", "options", "advice"),
    [
        ("ModelCheckpoint", "{dirpath: mc}", ", and set trainer.checkpoint_interval"),
        ("GradientAccumulationScheduler", "{scheduling: {0: 2}}", ", and set data.micro_batch_size"),
        ("BatchSizeFinder", "{}", ", and set data.micro_batch_size"),
        ("LearningRateFinder", "{}", ", and set optimizer.lr"),
        ("StochasticWeightAveraging", "{swa_lrs: 0.001}", ", and set trainer.ema_decay"),
        ("EMAWeightAveraging", "{}", ", and set trainer.ema_decay"),
        ("ModelPruning", "{pruning_fn: l1_unstructured}", ""),
        ("BackboneFinetuning", "{}", ""),
    ],
)
def test_callbacks_that_change_weights_steps_or_checkpoints_are_refused(tmp_path, name, options, advice):
    entry = f'{{class: "lightning.pytorch.callbacks:{name}", options: {options}}}'
    config, folder = compose(["quickstart"], [f"trainer.callbacks=[{entry}]"]), RunFolder(tmp_path)
    with pytest.raises(ConfigError) as caught:
        build_callbacks(config, Start(folder), MetricsLog(folder, config), SimpleNamespace(), [])
    assert str(caught.value) == f"trainer.callbacks: {name} is not supported; remove it{advice}"


def test_tokens_per_second_are_measured_between_step_ends(clock, module):
    callback, trainer = Throughput(), SimpleNamespace(global_step=7, world_size=2)
    callback.on_train_start(trainer, module)
    clock.now += 1.5
    callback.on_train_batch_end(trainer, module)  # a micro-batch
    assert module.step_metrics.drain() == {}
    clock.now += 0.5
    trainer.global_step, module.tokens = 8, TOKENS
    callback.on_train_batch_end(trainer, module)
    assert module.step_metrics.drain() == {
        "train/tokens_per_second": TOKENS / 2,
        "train/flops_per_second": TOKENS / 2 * FLOPS,
    }
    clock.now += 60  # a validation is left out
    callback.on_validation_end(trainer, module)
    clock.now += 4
    trainer.global_step, module.tokens = 9, 2 * TOKENS
    callback.on_train_batch_end(trainer, module)
    assert module.step_metrics.drain()["train/tokens_per_second"] == TOKENS / 4


def test_mfu_is_relative_to_the_peak_of_all_devices(clock, module, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    callback, trainer = Throughput(), SimpleNamespace(global_step=0, world_size=4)
    module.device = CUDA
    callback.on_train_start(trainer, module)
    clock.now += 0.5
    trainer.global_step, module.tokens = 1, TOKENS
    callback.on_train_batch_end(trainer, module)
    expected = pytest.approx(2 * TOKENS * FLOPS / (4 * 989e12))
    assert module.step_metrics.drain() == {"train/tokens_per_second": 2 * TOKENS, "train/mfu": expected}


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H100 PCIe", 756e12), ("NVIDIA GeForce RTX 3060", 0.0)])
def test_get_peak_flops_by_device_name(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert (get_peak_flops(CUDA), get_peak_flops(CPU)) == (peak, 0.0)


@pytest.mark.usefixtures("restored_signals")
def test_a_signal_or_a_time_limit_requests_a_stop(clock, capfd):
    stop = StopRequest("00:00:01:30", 120)
    clock.now += 90
    assert not stop.is_set
    clock.now += 1
    assert stop.is_set
    assert str(stop.build_error()) == "trainer.max_time 00:00:01:30 is over"
    assert parse_seconds("2:03:04:05") == 183845
    stop = StopRequest(None, 120)
    assert not stop.is_set
    signal.raise_signal(signal.SIGUSR1)
    assert stop.is_set
    assert str(stop.build_error()) == "SIGUSR1"
    assert wait_for_stderr(capfd) == "SIGUSR1: finishing this step\n"


def wait_for_stderr(capfd) -> str:
    """Return what a thread is about to write to standard error."""
    while not (written := capfd.readouterr().err):
        time.sleep(0.01)
    return written


@pytest.mark.usefixtures("restored_signals")
@pytest.mark.parametrize("number", [*STOP_SIGNALS, signal.SIGINT])
def test_a_signal_reaches_a_main_thread_that_waits(number):
    """The kernel gives the signal to another thread, and the main thread's system call goes on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = StopRequest(None, grace_seconds=60)
    heard: list[bool] = []

    def receive() -> None:
        time.sleep(0.2)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), number)
        deadline = time.monotonic() + 10
        while not stop.is_set and time.monotonic() < deadline:
            time.sleep(0.01)
        heard.append(stop.is_set)
        worker.send(b"batch")

    worker, waiting = socket.socketpair()
    with worker, waiting, stop.handle_interrupts():
        threading.Thread(target=receive).start()
        waiting.recv(1)
        stop.end_grace_period()
    assert heard == [True]


@pytest.mark.usefixtures("restored_signals")
def test_first_interrupt_requests_a_stop_and_the_second_raises(capfd):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where pytest runs in the background
    stop = StopRequest(None, 120)
    with stop.handle_interrupts():
        signal.raise_signal(signal.SIGINT)
        assert isinstance(stop.build_error(), InterruptedRunError)
        assert "interrupted: finishing this step" in wait_for_stderr(capfd)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_checkpoint_is_requested_after_the_given_minutes(clock, module):
    stop, trainer = SimpleNamespace(is_set=False, note_progress=lambda: None), SimpleNamespace(global_step=0)
    callback = StepRequests(stop, 0.5)
    callback.on_train_start(trainer, module)
    requested = []
    for trainer.global_step in range(1, 6):
        clock.now += 20
        for _ in range(2):  # micro-batches
            callback.on_train_batch_end(trainer, module)
        module.step_metrics.drain()
        if module.step_metrics.requests:
            requested.append((trainer.global_step, module.step_metrics.requests))
            callback.on_save_checkpoint(trainer, module, {})
    assert requested == [(2, {"save"}), (4, {"save"})]


def test_a_stop_of_one_process_creates_no_tensor():
    stop = SimpleNamespace(is_set=False, build_error=lambda: InterruptedRunError("stop"))
    no_device = torch.device("cuda", 99)
    raise_if_stopped(stop, no_device)
    stop.is_set = True
    with pytest.raises(InterruptedRunError):
        raise_if_stopped(stop, no_device)


@pytest.fixture
def cuda_states(monkeypatch) -> dict[torch.device, torch.Tensor]:
    """A stand-in for the random states of two GPUs."""
    states = {torch.device("cuda", i): torch.tensor([i], dtype=torch.uint8) for i in range(2)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    return states


def load_state(device: torch.device, checkpoint: dict) -> None:
    module = SimpleNamespace(config=compose(["quickstart"]))
    make_checkpoint().on_load_checkpoint(make_device_trainer(device), module, checkpoint)


def save_state(device: torch.device) -> dict:
    checkpoint, config = {}, compose(["quickstart"])
    module = SimpleNamespace(config=config, tokens=0)
    make_checkpoint().on_save_checkpoint(make_device_trainer(device), module, checkpoint)
    progress = {name: {"ready": 0, "completed": 0} for name in ("total", "current")}
    return checkpoint | {"global_step": 0, "loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}}


def make_checkpoint() -> StepCheckpoint:
    return StepCheckpoint(RunFolder(Path()), compose(["quickstart"]).trainer, SimpleNamespace())


def make_device_trainer(device: torch.device) -> SimpleNamespace:
    strategy = SimpleNamespace(root_device=device)
    return SimpleNamespace(global_step=0, should_stop=False, validating=False, ckpt_path="1", strategy=strategy)


def test_the_global_random_state_of_numpy_is_restored():
    np.random.seed(3)
    checkpoint = save_state(CPU)
    expected = np.random.random(3).tolist()
    load_state(CPU, checkpoint)
    assert np.random.random(3).tolist() == expected
    del checkpoint["stackexp"]["numpy_rng"]
    load_state(CPU, checkpoint)  # of an earlier version


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_training(monkeypatch, caplog):
    def fail(path):
        raise OSError(39, "Directory not empty")

    callback = make_checkpoint()
    callback._folder = SimpleNamespace(best_checkpoint=lambda: None, list_checkpoints=lambda: [Path("1")] * 9)
    monkeypatch.setattr(checkpointing, "remove_checkpoint", fail)
    callback._delete_old()
    assert "could not delete an old checkpoint: [Errno 39] Directory not empty" in caplog.text


def test_every_rank_restores_the_cuda_state_of_rank_0(cuda_states):
    first = next(iter(cuda_states))
    cuda_states[first] = torch.tensor([7], dtype=torch.uint8)
    checkpoint = save_state(first)
    cuda_states[first] = torch.tensor([8], dtype=torch.uint8)
    for device in cuda_states:
        load_state(device, checkpoint)
    assert [state.item() for state in cuda_states.values()] == [7, 7]
    checkpoint = save_state(CPU)
    assert checkpoint["stackexp"]["cuda_rng"] is None
    for device in (CPU, *cuda_states):
        load_state(device, checkpoint)
    assert [state.item() for state in cuda_states.values()] == [7, 7], "a checkpoint of CPUs has no CUDA state"


def test_progress_is_rescaled_to_another_number_of_micro_batches_per_step():
    """In a checkpoint, Lightning has not completed the last micro-batch."""
    progress = {"total": {"ready": 12, "completed": 11}, "current": {"ready": 8, "completed": 7}}
    checkpoint = {"loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}}
    rescale_progress(checkpoint, before=4, now=1)
    assert progress == {"total": {"ready": 3, "completed": 2}, "current": {"ready": 2, "completed": 1}}
    rescale_progress(checkpoint, before=1, now=2)
    assert progress == {"total": {"ready": 6, "completed": 5}, "current": {"ready": 4, "completed": 3}}


class Stop:
    is_set = True

    def note_progress(self):
        pass

    def build_error(self):
        return StoppedError("SIGTERM")


def make_trainer(step, fn="fit"):
    return SimpleNamespace(global_step=step, state=SimpleNamespace(fn=fn))


def end_validation_batch(requests, trainer):
    requests.on_validation_batch_end(trainer, SimpleNamespace(device=torch.device("cpu")))


def test_a_validation_stops_at_once_if_its_step_is_saved():
    requests = StepRequests(Stop())
    requests.on_train_start(make_trainer(0), None)
    end_validation_batch(requests, make_trainer(6))
    requests.on_save_checkpoint(make_trainer(4), None, {})
    end_validation_batch(requests, make_trainer(6))
    requests.on_save_checkpoint(make_trainer(6), None, {})
    with pytest.raises(StoppedError):
        end_validation_batch(requests, make_trainer(6))
    resumed = StepRequests(Stop())
    resumed.on_train_start(make_trainer(6), None)
    for stopped, fn in ((resumed, "fit"), (StepRequests(Stop()), "validate"), (StepRequests(Stop()), "test")):
        with pytest.raises(StoppedError):
            end_validation_batch(stopped, make_trainer(6, fn))


@pytest.mark.usefixtures("restored_signals")
def test_a_stop_is_requested_even_if_nobody_reads_its_announcement(monkeypatch):
    """Ctrl-C in `fit 2>&1 | tee log` also ends tee."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failed = threading.Event()

    def fail(*_) -> None:
        failed.set()
        raise BrokenPipeError

    for number in (*STOP_SIGNALS, signal.SIGINT):
        stop = StopRequest(None, grace_seconds=60)
        failed.clear()
        with stop.handle_interrupts(), monkeypatch.context() as patch:  # after the resource tracker is probed
            patch.setattr(os, "write", fail)
            signal.raise_signal(number)
            assert failed.wait(10)
        assert stop.is_set
        stop.end_grace_period()


def count_optimizer_steps(run, steps):
    events = json.loads((run.path / "profile" / f"trace-{steps}.json").read_text())["traceEvents"]
    return sum(event.get("name", "").startswith("Optimizer.step#AdamW") for event in events)


@pytest.mark.process
def test_a_trace_holds_the_chosen_steps(tiny, forks, tmp_path):
    options = ("trainer.max_steps=6", "schedule.warmup_steps=0", "data.micro_batch_size=4")
    printed = forks.run("fit", "--config", tiny, *options, "trainer.profile=2-4")
    run = only_run(tmp_path / "runs")
    assert f"profile of steps 2-4: {run.path}/profile/trace-2-4.json" in printed
    assert count_optimizer_steps(run, "2-4") == 3
    forks.run("fit", "--config", tiny, *options, "name=plain")
    assert losses(run) == losses(only_run(tmp_path / "runs", "plain")), "the profiler changes no value"


@pytest.mark.process
def test_a_stop_does_not_lose_the_profile(tiny, forks, tmp_path):
    options = ("trainer.max_time=00:00:00:00", "trainer.max_steps=4", "trainer.profile=1-99")
    forks.run("fit", "--config", tiny, *options, expect=75)
    run = only_run(tmp_path / "runs")
    assert count_optimizer_steps(run, "1-1") == 1
    forks.run("fit", "--run", str(run.path), "trainer.max_time=null")
    assert count_optimizer_steps(run, "1-1") == 1, "the resumed run writes a file of its own"
    assert count_optimizer_steps(run, "2-4") == 3, "the run ended after step 4"


def test_steps_are_checked():
    for chosen in ("10", "0-3", "5-4", "a-b", "3-"):
        error = compose_error([BASE], f"trainer.profile={chosen}")
        assert "trainer.profile: expected two steps such as 10-15, found" in error
    error = compose_error([BASE], "trainer.max_steps=12", "schedule.warmup_steps=0", "trainer.profile=13-20")
    assert "trainer.profile: starts after the last step, trainer.max_steps 12" in error
