"""The training callbacks, each without a Trainer: throughput, stop and save requests, and their order."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stackexp.config.compose import compose
from stackexp.errors import InterruptedRunError
from stackexp.modules.step_metrics import StepMetrics
from stackexp.runs import RunFolder
from stackexp.training import signals
from stackexp.training.callbacks import steps
from stackexp.training.callbacks.data_record import DataRecord
from stackexp.training.callbacks.metrics_log import MetricsLog
from stackexp.training.callbacks.steps import StepRequests, Throughput, get_peak_flops, raise_if_stopped
from stackexp.training.checkpointing import RunState
from stackexp.training.lightning_internals import rescale_progress
from stackexp.training.resume import Start
from stackexp.training.signals import StopRequest, parse_seconds
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
    assert [type(callback).__name__ for callback in built] == [*order, "MissedValidation", "RunState", "StepCheckpoint"]


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
    stop = StopRequest(None, 120)
    assert not stop.is_set
    signal.raise_signal(signal.SIGUSR1)
    assert stop.is_set
    assert str(stop.build_error()) == "SIGUSR1"
    assert capfd.readouterr().err == "SIGUSR1: finishing this step\n"


@pytest.mark.usefixtures("restored_signals")
def test_first_interrupt_requests_a_stop_and_the_second_raises(capfd):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where pytest runs in the background
    stop = StopRequest(None, 120)
    with stop.handle_interrupts():
        signal.raise_signal(signal.SIGINT)
        assert isinstance(stop.build_error(), InterruptedRunError)
        assert "interrupted: finishing this step" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_max_time_is_parsed_to_seconds():
    assert [parse_seconds(time) for time in ("00:00:00:07", "2:03:04:05")] == [7, 183845]


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
    assert raise_if_stopped(stop, no_device, 3.0) == 3.0
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


def save_state(device: torch.device) -> dict:
    checkpoint, config = {}, compose(["quickstart"])
    module = SimpleNamespace(config=config, tokens=0)
    RunState(RunFolder(Path())).on_save_checkpoint(make_trainer(device), module, checkpoint)
    progress = {name: {"ready": 0, "completed": 0} for name in ("total", "current")}
    return checkpoint | {"loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}}


def make_trainer(device: torch.device) -> SimpleNamespace:
    return SimpleNamespace(strategy=SimpleNamespace(root_device=device))


def test_every_rank_restores_the_cuda_state_of_rank_0(cuda_states):
    first = next(iter(cuda_states))
    cuda_states[first] = torch.tensor([7], dtype=torch.uint8)
    checkpoint = save_state(first)
    cuda_states[first] = torch.tensor([8], dtype=torch.uint8)
    for device in cuda_states:
        RunState(RunFolder(Path())).on_load_checkpoint(
            make_trainer(device), SimpleNamespace(config=compose(["quickstart"])), checkpoint
        )
    assert [state.item() for state in cuda_states.values()] == [7, 7]


def test_a_checkpoint_of_cpus_has_no_cuda_state(cuda_states):
    checkpoint = save_state(CPU)
    assert checkpoint["stackexp"]["cuda_rng"] is None
    for device in (CPU, *cuda_states):
        RunState(RunFolder(Path())).on_load_checkpoint(
            make_trainer(device), SimpleNamespace(config=compose(["quickstart"])), checkpoint
        )
    assert [state.item() for state in cuda_states.values()] == [0, 1]


def test_progress_is_rescaled_to_another_number_of_micro_batches_per_step():
    """In a checkpoint, Lightning has not completed the last micro-batch."""
    progress = {"total": {"ready": 12, "completed": 11}, "current": {"ready": 8, "completed": 7}}
    checkpoint = {"loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}}
    rescale_progress(checkpoint, before=4, now=1)
    assert progress == {"total": {"ready": 3, "completed": 2}, "current": {"ready": 2, "completed": 1}}
    rescale_progress(checkpoint, before=1, now=2)
    assert progress == {"total": {"ready": 6, "completed": 5}, "current": {"ready": 4, "completed": 3}}
