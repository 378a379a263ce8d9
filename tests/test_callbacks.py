"""What the callbacks measure, ask for, show and copy, each without a Trainer."""

import io
import re
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from stackexp.config.compose import compose
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.metrics import StepMetrics, set_tags
from stackexp.training.callbacks import checkpoint as step_checkpoint
from stackexp.training.callbacks import throughput
from stackexp.training.callbacks.checkpoint import StopRequest, Wishes
from stackexp.training.callbacks.memory_probes import StackProbes
from stackexp.training.callbacks.progress_bar import StepProgress
from stackexp.training.callbacks.tensorboard import TensorBoardCopy, write_curve
from stackexp.training.callbacks.throughput import Throughput, peak_flops

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOKENS, CONTEXT, FLOPS = 1024, 64, 2.0**31  # tokens per step, context length, FLOPs per token


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


def fake_module(device: torch.device = CPU) -> SimpleNamespace:
    data = SimpleNamespace(global_batch_tokens=TOKENS, context_length=CONTEXT)
    model = SimpleNamespace(flops_per_token=lambda context_length: {CONTEXT: FLOPS}[context_length])
    return SimpleNamespace(
        config=SimpleNamespace(data=data),
        model=model,
        device=device,
        step_metrics=StepMetrics(),
        probe=False,
        tokens=0,
        sequence_length=CONTEXT,
    )


def test_tokens_per_second_are_those_between_the_ends_of_steps(clock):
    callback, module, trainer = Throughput(), fake_module(), SimpleNamespace(global_step=7, world_size=2)
    callback.on_train_start(trainer, module)
    clock.now += 1.5
    callback.on_train_batch_end(trainer, module)  # a micro-batch
    assert module.step_metrics.drain() == {}
    clock.now += 0.5
    trainer.global_step, module.tokens = 8, TOKENS
    callback.on_train_batch_end(trainer, module)
    assert module.step_metrics.drain() == {
        "throughput/tokens_per_second": TOKENS / 2,
        "throughput/flops_per_second": TOKENS / 2 * FLOPS,
    }
    clock.now += 60  # validation
    callback.on_validation_end(trainer, module)
    clock.now += 4
    trainer.global_step, module.tokens = 9, 2 * TOKENS
    callback.on_train_batch_end(trainer, module)
    assert module.step_metrics.drain()["throughput/tokens_per_second"] == TOKENS / 4


def test_mfu_is_against_the_peak_of_all_devices(clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(throughput.torch, "tensor", lambda value, device: torch.as_tensor(value))  # there is no device
    callback, module, trainer = Throughput(), fake_module(CUDA), SimpleNamespace(global_step=0, world_size=4)
    callback.on_train_start(trainer, module)
    clock.now += 0.5
    trainer.global_step, module.tokens = 1, TOKENS
    callback.on_train_batch_end(trainer, module)
    assert module.step_metrics.drain() == {
        "throughput/tokens_per_second": 2 * TOKENS,
        "throughput/mfu": pytest.approx(2 * TOKENS * FLOPS / (4 * 989e12)),
    }


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 3060", 0.0),
    ],
)
def test_peak_of_a_card(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(CUDA) == peak
    assert peak_flops(CPU) == 0.0


@pytest.fixture
def _signals_as_before():
    before = {number: signal.getsignal(number) for number in step_checkpoint.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals_as_before")
def test_a_signal_or_the_end_of_the_time_asks_to_stop(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(step_checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stop = StopRequest("00:00:01:30")
    now[0] += 90
    assert stop.reason is None
    now[0] += 1
    assert stop.reason == "trainer.max_time 00:00:01:30 is over"
    stop = StopRequest(None)
    assert stop.reason is None
    signal.raise_signal(signal.SIGUSR1)
    assert stop.reason == "SIGUSR1"


def test_time_as_slurm_writes_it():
    assert [step_checkpoint.seconds(time) for time in ("00:00:00:07", "2:03:04:05")] == [7, 183845]


def test_a_checkpoint_is_wished_for_after_so_many_minutes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(step_checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    callback, module, trainer = Wishes(SimpleNamespace(reason=None), 0.5), fake_module(), SimpleNamespace(global_step=0)
    callback.on_train_start(trainer, module)
    wished = []
    for trainer.global_step in range(1, 6):
        now[0] += 20
        for _ in range(2):  # micro-batches
            callback.on_train_batch_end(trainer, module)
        module.step_metrics.drain()
        if wish := module.step_metrics.requests:
            wished.append((now[0], wish))
            callback.on_save_checkpoint(trainer, module, {})
    assert wished == [(40, {"save"}), (80, {"save"})]


def test_probes_are_on_at_the_first_step_and_at_multiples_and_off_in_validation():
    callback, module, trainer = StackProbes(interval=3), fake_module(), SimpleNamespace(global_step=0)
    probed = []
    for trainer.global_step in range(7):
        for micro_batch in range(2):
            callback.on_train_batch_start(trainer, module, None, micro_batch)
            probed += [trainer.global_step + 1] * module.probe
        callback.on_validation_start(trainer, module)
        assert not module.probe
    assert probed == [1, 1, 3, 3, 6, 6]


def test_progress_counts_steps_and_shows_loss_and_speed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    record = SimpleNamespace(last_line={})
    data = SimpleNamespace(set_names=lambda stage: {"validate": ["left", "right"]}[stage])
    trainer, callback = SimpleNamespace(global_step=5, max_steps=20, datamodule=data), StepProgress(record)
    callback.on_train_start(trainer, None)
    for step, loss in [(5, None), (6, 9.0), (6, 9.0), (7, 2.34567)]:  # 5, and 6 again: micro-batches
        trainer.global_step = step
        if loss:
            record.last_line = {"loss/train": loss, "throughput/tokens_per_second": 12345.6}
        callback.on_train_batch_end(trainer, None, None, None, 0)
    callback.on_validation_batch_start(trainer, None, None, 0, 1)
    callback.on_validation_end(trainer, None)
    callback.on_train_end(trainer, None)
    output = sys.stdout.getvalue()
    assert "validating right" in output
    last = output.rstrip("\n").rpartition("\r")[2]
    assert last.startswith("fit")
    assert " 7/20 " in last
    assert "loss 2.346, 12,346 tokens/s" in last


def test_progress_is_silent_where_lightning_wants_it(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    trainer = SimpleNamespace(global_step=0, max_steps=20)
    callback = StepProgress(SimpleNamespace(last_line={"loss/train": 1.0, "throughput/tokens_per_second": 1.0}))
    callback.disable()
    callback.on_train_start(trainer, None)
    trainer.global_step = 1
    callback.on_train_batch_end(trainer, None, None, None, 0)
    callback.on_train_end(trainer, None)
    assert sys.stdout.getvalue() == ""


def step_line() -> dict[str, float]:
    """A line with everything that a real module and callback record at a probed step, two layers."""
    small = [
        "hidden_size=16",
        "num_layers=2",
        "intermediate_size=16",
        "num_heads=2",
        "num_kv_heads=1",
        "vocab_size=300",
    ]
    overrides = [f"model.{option}" for option in small] + ["data.vocab_size=300", "trainer.z_loss=0.1"]
    module = LanguageModeling(compose(["quickstart"], overrides))
    module.probe = True
    module.training_step({"tokens": torch.arange(16).view(2, 8), "index": torch.arange(2)}, 0).backward()
    module.configure_gradient_clipping(module.configure_optimizers()["optimizer"])
    callback, trainer = Throughput(), SimpleNamespace(global_step=0, world_size=1)
    callback.on_train_start(trainer, module)
    trainer.global_step = 1
    callback.on_train_batch_end(trainer, module)
    return {"step": 1, "tokens": 16, "time": 1000.0} | module.step_metrics.drain()


def of_sets(figure: str) -> set[str]:
    return {f"validation/{figure}/{name}" for name in ("left", "right", "average")}


def of_layers(figure: str) -> set[str]:
    return {f"memory/{figure}/layer_00", f"memory/{figure}/layer_01"}


AVERAGES_OF_V3 = {f"sample/v3/average/{figure}" for figure in ("perplexity", "exp_mean_loss")}
SHOWN = {
    "Training": {
        "loss": {"loss/train"} | of_sets("loss"),
        "loss against tokens": {"loss/train_by_tokens"},
        "gradient norm": {"optimizer/grad_norm"},
        "learning rate": {"optimizer/lr"},
        "tokens per second": {"throughput/tokens_per_second"},
    },
    "Validation": {
        "loss": of_sets("loss"),
        "perplexity": of_sets("perplexity"),
        "bits per byte": of_sets("bits_per_byte"),
    },
    "V2": {
        "loss": {"v2/a", "v2/average/loss"},
        "averages of perplexity": {"v2/average/perplexity", "v2/average/exp_mean_loss"},
    },
    "V3": {"loss": {"sample/v3/a", "sample/v3/average/loss"}, "averages of perplexity": AVERAGES_OF_V3},
    "Formal languages": {
        "Accuracy against length": {"length/accuracy"},
        "accuracy": {"accuracy/train", "validation/accuracy/average"},
        "longest string of the curriculum": {"data/max_length"},
    },
    "Memory, by layer": {
        "push probability": of_layers("push"),
        "pop probability": of_layers("pop"),
        "no-op probability": of_layers("no_op"),
        "action entropy (nats)": of_layers("entropy"),
        "occupancy (sum of M)": of_layers("occupancy"),
        "read's share of the residual": of_layers("read_share"),
    },
}


def events_of(folder) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


@pytest.mark.parametrize("objective", ["language_modeling", "transduction"])
def test_every_chart_shows_the_tags_it_is_for_and_none_is_of_another_objective(tmp_path, objective):
    copy = TensorBoardCopy(tmp_path, [], objective)
    copy.write(step_line())
    result = {"loss": 2.0, "perplexity": 7.4, "bits_per_byte": 1.0}
    tags = set_tags("validation", {"left": result, "right": result})
    for name, lead in (("v2/a", ""), ("v3/a", "sample/")):
        tags |= set_tags("validation", {name: result}, lead)
    tags |= {"accuracy/train": 0.5, "validation/accuracy/average": 0.5, "data/max_length": 4.0}
    copy.write({"step": 1, "tokens": 16, "time": 1001.0} | tags)
    copy.close()
    write_curve(tmp_path, "length/accuracy", {1: 1.0, 2: 0.5}, "test.lengths")
    events = events_of(tmp_path)
    tags = events.Tags()["scalars"]
    [layout] = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0])
    shown = {
        category.title: {
            # As TensorBoard's plugin does it: a tag is shown if a regex matches from its beginning.
            chart.title: {tag for tag in tags for regex in chart.multiline.tag if re.match(regex, tag)}
            for chart in category.chart
        }
        for category in layout.category
    }
    others = ["Formal languages"] if objective == "language_modeling" else ["Validation", "V2", "V3"]
    assert shown == {group: charts for group, charts in SHOWN.items() if group not in others}


def test_a_resumed_copy_is_made_anew_from_the_lines(tmp_path):
    first = TensorBoardCopy(tmp_path, [], "language_modeling")
    for step in (1, 2, 3):
        first.write({"step": step, "tokens": 16 * step, "time": 1000.0 + step, "loss/train": 10.0 - step})
    first.close()
    old = {path: path.read_bytes() for path in tmp_path.iterdir()}
    kept = [{"step": s, "tokens": 16 * s, "time": 1000.0 + s, "loss/train": 5.0 - s} for s in (1, 2)]
    second = TensorBoardCopy(tmp_path, kept, "language_modeling")
    second.write({"step": 3, "tokens": 48, "time": 2000.0, "loss/train": 2.5})
    second.close()
    [path] = tmp_path.iterdir()
    assert path.read_bytes() not in old.values()
    events = events_of(tmp_path)
    points = [(p.step, p.value, p.wall_time) for p in events.Scalars("loss/train")]
    assert points == [(1, 4.0, 1001.0), (2, 3.0, 1002.0), (3, 2.5, 2000.0)]
    assert [(p.step, p.value) for p in events.Scalars("loss/train_by_tokens")] == [(16, 4.0), (32, 3.0), (48, 2.5)]
    assert sorted(events.Tags()["scalars"]) == ["loss/train", "loss/train_by_tokens"], "step, tokens and time are none"


def test_hyperparameters_are_written_once_with_the_final_figures(tmp_path):
    copy = TensorBoardCopy(tmp_path, [], "language_modeling")
    copy.finish({"optimizer.lr": 0.5, "model.memory.axis": "depth", "model.memory": None}, {"final/loss/train": 3.0}, 9)
    [path] = tmp_path.iterdir()
    values = [value for event in EventFileLoader(str(path)).Load() for value in event.summary.value]
    tags = [value.tag for value in values if value.tag.startswith("_hparams_/")]
    assert sorted(tags) == [f"_hparams_/{name}" for name in ("experiment", "session_end_info", "session_start_info")]
    [start] = [value for value in values if value.tag.endswith("session_start_info")]
    content = plugin_data_pb2.HParamsPluginData.FromString(start.metadata.plugin_data.content)
    written = {key: getattr(v, v.WhichOneof("kind")) for key, v in content.session_start_info.hparams.items()}
    assert written == {"optimizer.lr": 0.5, "model.memory.axis": "depth", "model.memory": "None"}
    [point] = events_of(tmp_path).Scalars("final/loss/train")
    assert (point.step, point.value) == (9, 3.0)
