"""TensorBoard events of a run: charts, HParams, and the event file rebuilt on resume."""

import re
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from stackexp.config.compose import compose
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.scores import tag_scores
from stackexp.training.callbacks.throughput import Throughput
from stackexp.training.tensorboard import TensorBoardCopy, write_curve


def make_probed_line() -> dict[str, float]:
    """Return everything that a real module and callback log at a probed step, with two layers."""
    small = ["hidden_size=16", "num_layers=2", "intermediate_size=16", "num_heads=2", "num_kv_heads=1"]
    overrides = [f"model.{option}" for option in (*small, "vocab_size=300")]
    module = LanguageModeling(compose(["quickstart"], [*overrides, "data.vocab_size=300", "trainer.z_loss=0.1"]))
    module.probe = True
    module.training_step({"tokens": torch.arange(16).view(2, 8), "index": torch.arange(2)}, 0).backward()
    module.configure_gradient_clipping(module.configure_optimizers()["optimizer"])
    callback, trainer = Throughput(), SimpleNamespace(global_step=0, world_size=1)
    callback.on_train_start(trainer, module)
    trainer.global_step = 1
    callback.on_train_batch_end(trainer, module)
    return {"step": 1, "tokens": 16, "time": 1000.0} | module.step_metrics.drain()


def set_tags_of(figure: str) -> set[str]:
    return {f"validation/{figure}/{name}" for name in ("left", "right", "average")}


def layer_tags(figure: str) -> set[str]:
    return {f"memory/{figure}/layer_00", f"memory/{figure}/layer_01"}


V3_AVERAGES = {f"sample/v3/average/{figure}" for figure in ("perplexity", "exp_mean_loss")}
SHOWN_TAGS = {
    "Training": {
        "loss": {"loss/train"} | set_tags_of("loss"),
        "loss by tokens": {"loss/train_by_tokens"},
        "gradient norm": {"optimizer/grad_norm"},
        "learning rate": {"optimizer/lr"},
        "tokens per second": {"throughput/tokens_per_second"},
    },
    "Validation": {
        "loss": set_tags_of("loss"),
        "perplexity": set_tags_of("perplexity"),
        "bits per byte": set_tags_of("bits_per_byte"),
    },
    "V2": {
        "loss": {"v2/a", "v2/average/loss"},
        "mean perplexity": {"v2/average/perplexity", "v2/average/exp_mean_loss"},
    },
    "V3": {"loss": {"sample/v3/a", "sample/v3/average/loss"}, "mean perplexity": V3_AVERAGES},
    "Formal languages": {
        "accuracy by length": {"length/accuracy"},
        "accuracy": {"accuracy/train", "validation/accuracy/average"},
        "longest training string": {"data/max_length"},
    },
    "Memory by layer": {
        "push probability": layer_tags("push"),
        "pop probability": layer_tags("pop"),
        "no-op probability": layer_tags("no_op"),
        "action entropy (nats)": layer_tags("entropy"),
        "occupancy (sum of M)": layer_tags("occupancy"),
        "read share of the residual": layer_tags("read_share"),
    },
}


def read_events(folder) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


@pytest.fixture(scope="module")
def probed_line() -> dict[str, float]:
    return make_probed_line()


@pytest.mark.parametrize("objective", ["language_modeling", "transduction"])
def test_charts_show_their_tags_and_only_those_of_the_objective(probed_line, tmp_path, objective):
    copy = TensorBoardCopy(tmp_path, [], objective)
    copy.write(probed_line)
    result = {"loss": 2.0, "perplexity": 7.4, "bits_per_byte": 1.0}
    tags = tag_scores("validation", {"left": result, "right": result})
    for name, lead in (("v2/a", ""), ("v3/a", "sample/")):
        tags |= tag_scores("validation", {name: result}, lead)
    tags |= {"accuracy/train": 0.5, "validation/accuracy/average": 0.5, "data/max_length": 4.0}
    copy.write({"step": 1, "tokens": 16, "time": 1001.0} | tags)
    copy.close()
    write_curve(tmp_path, "length/accuracy", {1: 1.0, 2: 0.5}, "test.lengths")
    events = read_events(tmp_path)
    tags = events.Tags()["scalars"]
    [layout] = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0])
    shown = {
        category.title: {
            # TensorBoard's plugin shows a tag if a regex matches from its beginning.
            chart.title: {tag for tag in tags for regex in chart.multiline.tag if re.match(regex, tag)}
            for chart in category.chart
        }
        for category in layout.category
    }
    hidden = ["Formal languages"] if objective == "language_modeling" else ["Validation", "V2", "V3"]
    assert shown == {group: charts for group, charts in SHOWN_TAGS.items() if group not in hidden}


def test_a_resumed_run_rebuilds_the_copy_from_the_log(tmp_path):
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
    events = read_events(tmp_path)
    points = [(p.step, p.value, p.wall_time) for p in events.Scalars("loss/train")]
    assert points == [(1, 4.0, 1001.0), (2, 3.0, 1002.0), (3, 2.5, 2000.0)]
    assert [(p.step, p.value) for p in events.Scalars("loss/train_by_tokens")] == [(16, 4.0), (32, 3.0), (48, 2.5)]
    assert sorted(events.Tags()["scalars"]) == ["loss/train", "loss/train_by_tokens"], "no step, tokens or time"


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
    [point] = read_events(tmp_path).Scalars("final/loss/train")
    assert (point.step, point.value) == (9, 3.0)
