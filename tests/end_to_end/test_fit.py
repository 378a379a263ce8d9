"""One run from the command line, and the files in its run folder."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from conftest import write_tiny
from forks import Forks
from records import losses, only_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stackexp.config import compose
from stackexp.config.registry import build
from stackexp.data.bigrams import BigramModel
from stackexp.evaluation.loading import load_run
from stackexp.models.stack_recording import record_memories
from stackexp.runs import RunFolder


@pytest.fixture(scope="module")
def fitted(corpus, tmp_path_factory) -> tuple[RunFolder, str]:
    """A run of twelve steps, and its output."""
    folder = tmp_path_factory.mktemp("fitted")
    output = Forks(folder).run("fit", "--config", write_tiny(corpus, folder, ("tensorboard",)))
    return only_run(folder / "runs"), output


def test_fit_prints_its_folder_and_its_scores(fitted):
    run, output = fitted
    assert str(run.path) in output
    assert "tensorboard --logdir" in output
    for name in ("left", "right", "average of sets"):
        assert any(line.startswith(name) for line in output.splitlines())


def test_bigram_counts_are_those_of_the_training_tokens(fitted):
    run, output = fitted
    config = compose.load_config(run.config)
    data = build("data", config.data, seed=config.seed)
    data.setup("fit")
    data.trainer = SimpleNamespace(global_rank=0, world_size=1, num_devices=1)
    loader = data.train_dataloader()
    batches = [batch["tokens"].numpy() for _ in range(9) for batch in loader][:24]  # of several epochs
    assert sum(batch.size for batch in batches) == 12 * 256
    model = BigramModel(batches, config.data.vocab_size)
    bigrams = json.loads(run.result.read_text())["bigrams"]
    for dataset in data.sets("validate"):
        losses = np.concatenate([model.compute_losses(dataset.chunks[i]) for i in range(len(dataset.chunks))])
        assert bigrams["sets"][dataset.name]["loss"] == pytest.approx(losses.mean())
    average = bigrams["average"]["loss"]
    assert f"bigram counts of the same training tokens: average loss {average:.4f}" in output


def test_metrics_have_a_line_for_each_step_and_each_validation(fitted):
    run, _ = fitted
    lines = list(run.read_metrics())
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["tokens"] for line in steps] == [256 * step for step in range(1, 13)]
    assert [line["step"] for line in lines if "val/loss/average" in line] == [6, 12]
    assert all(math.isfinite(value) for line in lines for value in line.values() if not isinstance(value, str))
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]


def test_validations_measure_the_memory_on_the_first_rows_of_each_set(fitted):
    run, _ = fitted
    loaded = load_run(run.path, "last")
    data = build("data", loaded.config.data, seed=0)
    data.eval_limit = loaded.config.data.eval_sequences
    data.setup("validate")
    loaders = [data.build_eval_loader(dataset, 0, 1) for dataset in data.sets("validate")]
    assert len(loaders) == 2
    tokens = [torch.cat([batch["tokens"] for batch in loader])[:8] for loader in loaders]
    probes = [loaded.model(rows, probe=True).probes for rows in tokens]
    recorded = []
    for rows in tokens:
        with record_memories(loaded.model) as recordings:
            loaded.model(rows)
        recorded.append([recording.values for recording in recordings])
    logged = next(line for line in reversed(list(run.read_metrics())) if "val/loss/average" in line)
    for layer in range(2):
        for name in ("push", "read_share"):
            mean = np.mean([of_set[layer][name].item() for of_set in probes])
            assert logged[f"memory_val/{name}/layer_{layer:02d}"] == pytest.approx(mean, rel=1e-5)
        for name in ("overflow", "read_slot", "read_sharpness"):
            mean = np.mean([of_set[layer][name].mean().item() for of_set in recorded])
            assert logged[f"memory_val/{name}/layer_{layer:02d}"] == pytest.approx(mean, rel=1e-5, abs=1e-7)


def test_learning_rate_warms_up_from_the_first_step_and_ends_at_its_floor(fitted):
    """The config has lr 3e-3 and a warmup of 2 steps."""
    run, _ = fitted
    rates = [line["train/lr"] for line in run.read_metrics() if "train/lr" in line]
    floor = compose.load_config(run.config).schedule.final_fraction
    assert [rates[0], rates[1], rates[-1]] == pytest.approx([1.5e-3, 3e-3, 3e-3 * floor])


def test_tensorboard_has_the_metrics(fitted):
    run, _ = fitted
    events = EventAccumulator(str(run.path), size_guidance={"scalars": 0}).Reload()
    assert {e.step: e.value for e in events.Scalars("train/loss")} == pytest.approx(losses(run))
    assert [e.step for e in events.Scalars("loss/train_by_tokens")] == [256 * step for step in range(1, 13)]
    tags = set(events.Tags()["scalars"])
    assert {"train/lr", "train/grad_norm"} <= tags
    assert {"train/tokens_per_second", "train/flops_per_second"} <= tags
    assert {f"val/{f}/{s}" for f in ("loss", "perplexity", "bits_per_byte") for s in ("left", "right")} <= tags
    probes = ("push", "pop", "no_op", "entropy", "occupancy", "read_share")
    assert {f"memory/{probe}/layer_{layer:02d}" for probe in probes for layer in (0, 1)} <= tags
    assert [e.step for e in events.Scalars("memory/push/layer_00")] == [1, 5, 10]
    hparams = {"custom_scalars__config__", "_hparams_/experiment", "_hparams_/session_end_info"}
    assert hparams <= set(events.summary_metadata)


def test_run_folder_is_sufficient_to_rerun(fitted):
    run, _ = fitted
    assert compose.load_config(str(run.config)) == compose.compose([str(run.path.parents[2] / "tiny.yaml")], [])
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == ["00000008", "00000012"]
    (session,) = json.loads((run.path / "environment.json").read_text())
    assert "fit --config" in session["command"]
    assert session["versions"]["torch"]
    result = json.loads(run.result.read_text())
    assert result["steps"] == 12
    assert set(result["sets"]) == {"left", "right"}
    assert result["train_loss"]["first"] == losses(run)[1]


def test_every_verb_works_on_a_finished_run(fitted, forks):
    run = fitted[0]
    result = json.loads(run.result.read_text())
    for name, scores in result["sets"].items():
        nats, counts = np.load(run.path / "result.chunks" / f"{name}.npy")
        assert len(nats) == scores["instances"]
        assert math.fsum(nats) / math.fsum(counts) == scores["loss"]
    validated = forks.run("validate", "--run", run.path)
    assert json.loads((run.path / "validate.json").read_text())["sets"] == result["sets"]
    assert f"{result['average']['loss']:.4f}" in validated
    forks.run("test", "--run", run.path, "data.eval_batch_size=3")
    tested = json.loads((run.path / "test.json").read_text())["sets"]
    assert tested["right"] == pytest.approx(result["sets"]["right"], rel=1e-6)
    steps = [int(path.name) for path in run.list_checkpoints()]
    averaged = forks.run("checkpoint", "average", "--run", run.path, "--last", "2", "--to", "average.safetensors")
    assert averaged.startswith(f"steps {steps[-2]}, {steps[-1]} -> average.safetensors: ")
    scored = forks.run("validate", "--run", run.path, "--ckpt_path", "average.safetensors")
    assert "average of sets" in scored
    refusal = forks.run("checkpoint", "average", "--run", run.path, "--last", "9", "--to", "x.safetensors", expect=1)
    assert f"--last 9, but it has {len(steps)}; see trainer.keep_checkpoints" in refusal
    text = forks.run("generate", "--run", run.path, "--prompt", "def f", "--max_new_tokens", "5")
    assert text.startswith("def f")
    tiny = run.path.parents[2] / "tiny.yaml"
    refusal = forks.run("fit", "--config", tiny, "--ckpt_path", "last", expect=1)
    assert "finished" in refusal
    assert len(refusal.splitlines()) == 1


def test_fit_without_validation_sets(tiny, forks, tmp_path):
    config = yaml.safe_load(tiny.read_text())
    del config["data"]["validation"]
    tiny.write_text(yaml.safe_dump(config))
    output = forks.run("fit", "--config", tiny, "trainer.max_steps=3")
    assert "no validation sets" in output
    assert only_run(tmp_path / "runs").is_finished


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_model_trains_like_eager(tiny, forks, tmp_path, ranks):
    """Two ranks combine compilation, sharding and recomputation."""
    options = ["trainer.compile=true"]
    if ranks == 2:
        options += ["trainer.strategy=fsdp", "trainer.devices=2", "data.micro_batch_size=2"]
        options += ["trainer.activation_checkpointing=true", "trainer.recompute=selective"]
    forks.run("fit", "--config", tiny, "name=plain")
    forks.run("fit", "--config", tiny, "name=compiled", *options, ranks=ranks)
    plain, compiled = (losses(only_run(tmp_path / "runs", name)) for name in ("plain", "compiled"))
    assert compiled == pytest.approx(plain, abs=1e-4)
