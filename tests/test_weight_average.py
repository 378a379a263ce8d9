"""The moving average of the weights: its equation, its part of a checkpoint, and all that can read it."""

import json
import shutil

import numpy as np
import pytest
import torch
from records import only_run
from safetensors.torch import load_file
from torch import nn

from stackexp.cli import main
from stackexp.config.compose import compose
from stackexp.errors import RunError
from stackexp.evaluation.request import ResumableEvaluation
from stackexp.files import read_json_lines
from stackexp.frame import read_rows
from stackexp.models import checkpoints
from stackexp.models.checkpoints import write_weights
from stackexp.modules.optimizers import WeightAverage
from stackexp.planning.memory_use import build_meta_model, compute_optimizer_bytes
from stackexp.runs import RunFolder

DECAY = 0.6  # reached at step 13 of (1 + n) / (10 + n)
OPTIONS = (f"trainer.ema_decay={DECAY}", "trainer.max_steps=16", "trainer.checkpoint_interval=1")
OPTIONS += ("trainer.val_check_interval=16", "logging.progress_bar=false")


@pytest.fixture(scope="module")
def averaged(corpus, tmp_path_factory) -> RunFolder:
    """A run of 16 steps that keeps the checkpoint of every step; not to be changed."""
    from conftest import write_tiny

    folder = tmp_path_factory.mktemp("averaged")
    assert main(["fit", "--config", str(write_tiny(corpus, folder)), *OPTIONS, "trainer.keep_checkpoints=99"]) == 0
    return only_run(folder / "runs")


def read_average(run: RunFolder, step: int = 16) -> dict[str, torch.Tensor]:
    return checkpoints.read_weights(run.checkpoints / f"{step:08d}" / "ema")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_average_follows_its_equation(dtype):
    torch.manual_seed(0)
    model = nn.Linear(8, 4).to(dtype)
    average, expected = WeightAverage(model, 0.75), model.weight.detach().double()
    for step in range(1, 60):
        with torch.no_grad():
            model.weight.add_(torch.randn(4, 8).to(dtype))
        average.update(step)
        decay = min(0.75, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach().double()
    assert average.tensors["weight"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(average.tensors["weight"].double(), expected, atol=1e-5, rtol=0)


def test_a_run_averages_the_weights_of_every_step(averaged):
    weights = [checkpoints.read_weights(path) for path in averaged.list_checkpoints()]
    assert len(weights) == 16
    expected = {name: tensor.double() for name, tensor in read_average(averaged, 1).items()}
    for step, tensors in enumerate(weights[1:], 2):
        decay = min(DECAY, (1 + step) / (10 + step))
        expected = {name: decay * mean + (1 - decay) * tensors[name].double() for name, mean in expected.items()}
    for name, mean in read_average(averaged).items():
        torch.testing.assert_close(mean.double(), expected[name], atol=1e-6, rtol=0)
    assert not torch.equal(mean, weights[-1][name])


def test_resumed_run_has_the_same_average_bit_for_bit(averaged, tiny, tmp_path):
    stopped = tmp_path / "runs" / "tiny" / "20261125-120000-abcd"
    shutil.copytree(averaged.path, stopped)
    for path in RunFolder(stopped).list_checkpoints()[5:]:
        shutil.rmtree(path)
    (stopped / "result.json").unlink()
    assert main(["fit", "--config", str(tiny), *OPTIONS, "--run", str(stopped)]) == 0
    resumed, expected = read_average(RunFolder(stopped)), read_average(averaged)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())


def test_every_reader_of_weights_takes_the_average(averaged, tiny, tmp_path, invoke):
    run, file = tmp_path / "run", tmp_path / "ema.safetensors"
    shutil.copytree(averaged.path, run)
    invoke("checkpoint consolidate --run", run, "--ckpt_path", "ema", "--to", file)
    stored = load_file(file)
    assert all(torch.equal(stored[name], tensor) for name, tensor in read_average(averaged).items())

    invoke("validate --run", run)
    invoke("validate --run", run, "--ckpt_path", "ema")
    invoke("validate --run", run, "--ckpt_path", f"{run}/checkpoints/00000015/ema")
    out = tmp_path / "file.json"
    invoke("validate --config", tiny, "--ckpt_path", file, "--out", out)
    names = ("validate", "validate-ema", "validate-00000015-ema")
    raw, ema, earlier = (json.loads((run / f"{name}.json").read_text()) for name in names)
    assert ema["sets"] == json.loads(out.read_text())["sets"]
    assert len({record["average"]["loss"] for record in (raw, ema, earlier)}) == 3
    assert (raw["step"], ema["step"]) == (16, None), "reports only include scores of a step"
    result = averaged.read_result().to_dict()
    assert result["average"]["loss"] == pytest.approx(raw["average"]["loss"], abs=1e-6)
    assert result["ema"]["sets"].keys() == raw["sets"].keys()
    assert result["ema"]["average"]["loss"] == pytest.approx(ema["average"]["loss"], abs=1e-6)
    (row,) = read_rows(averaged.path)
    assert row["ema/average/loss"] == result["ema"]["average"]["loss"]
    assert row["val/average/loss"] == result["average"]["loss"]

    invoke("generate --run", run, "--ckpt_path", "ema", "--prompt", "def", "--max_new_tokens", "2")
    folder = tmp_path / "exported"
    invoke("checkpoint export --run", run, "--ckpt_path", "ema", "--to", folder)
    card = (folder / "README.md").read_text()
    assert f"exponential moving average with decay {DECAY}" in card
    assert f"{ema['average']['loss']:.4f}" in card
    weights = f"warm_start.weights={run}/checkpoints/00000016/ema"
    printed = invoke("fit --config", tiny, "name=next", "trainer.max_steps=3", weights)
    assert f"weights from {run}/checkpoints/00000016/ema" in printed.replace("\n" + " " * 12, " ")


def test_saved_sets_are_those_of_the_final_weights(tiny, tmp_path, monkeypatch):
    """Without a validation after the last step, both weights are scored with the same trainer."""
    monkeypatch.setattr(ResumableEvaluation, "delete_partial_results", lambda evaluation: None)  # as after a kill
    assert main(["fit", "--config", str(tiny), *OPTIONS, "trainer.val_check_interval=null"]) == 0
    run = only_run(tmp_path / "runs")
    result = run.read_result().to_dict()
    for name, scores in result["sets"].items():
        nats, counts = np.load(run.path / "result.chunks" / f"{name}.npy")
        assert nats.sum() / counts.sum() == pytest.approx(scores["loss"], abs=1e-9)
        assert scores["loss"] != result["ema"]["sets"][name]["loss"]
    saved = read_json_lines(run.path / "result.partial.jsonl")
    assert [(line["set"], line["figures"]) for line in saved] == list(result["sets"].items())


def test_mistakes_are_one_line(averaged, trained, tiny, tmp_path, invoke):
    with pytest.raises(RunError, match=r"weights\.safetensors: cannot be written"):
        write_weights(read_average(averaged), tmp_path / "missing" / "weights.safetensors", "")
    error = invoke("validate --run", trained, "--ckpt_path", "ema", expect=1)
    assert error.endswith("00000012: has no averaged weights; train with trainer.ema_decay")
    path = f"{averaged.checkpoints}/00000016/ema"
    error = invoke("fit --config", tiny, "--ckpt_path", path, expect=1)
    assert error.endswith("no such checkpoint; give a folder in a run's checkpoints/, or last")
    error = invoke("fit --config", tiny, "--ckpt_path", path[:-4], "trainer.max_steps=20", expect=1)
    assert f"trainer.ema_decay is {DECAY} in the checkpoint, None in the config" in error


def test_only_the_newest_checkpoints_are_averaged(trained, tmp_path, invoke):
    """The best one is kept as well, but it may be much older."""
    run, target = tmp_path / "run", str(tmp_path / "mean.safetensors")
    shutil.copytree(trained, run)
    config = (run / "config.yaml").read_text()
    assert config.count("keep_checkpoints: 9\n") == 1
    (run / "config.yaml").write_text(config.replace("keep_checkpoints: 9\n", "keep_checkpoints: 2\n"))
    error = invoke("checkpoint average --run", run, "--last", "3", "--to", target, expect=1)
    assert error.endswith("--last 3, but it has 2; see trainer.keep_checkpoints")
    assert invoke("checkpoint average --run", run, "--last", "2", "--to", target).startswith("steps 8, 12 -> ")


def test_plan_includes_the_average():
    config = compose(["quickstart"])
    before = compute_optimizer_bytes(config, ranks=1)
    parameters = sum(parameter.numel() for parameter in build_meta_model(config).parameters())
    config.trainer.ema_decay = 0.9
    assert compute_optimizer_bytes(config, ranks=1) == before + 4 * parameters


@pytest.mark.process
def test_sharded_average_is_that_of_one_process_and_survives_another_number_of_processes(
    averaged, tiny, forks, tmp_path
):
    two = ("trainer.strategy=fsdp", "trainer.devices=2", "data.micro_batch_size=2", "trainer.keep_checkpoints=99")
    forks.run("fit", "--config", tiny, *OPTIONS, *two, ranks=2)
    run = only_run(tmp_path / "runs")
    expected = read_average(averaged)
    for name, mean in read_average(run).items():
        torch.testing.assert_close(mean, expected[name], atol=1e-5, rtol=0)

    for path in run.list_checkpoints()[8:]:
        shutil.rmtree(path)
    run.result.unlink()
    forks.run("fit", "--config", tiny, *OPTIONS, "--run", run.path)
    for name, mean in read_average(run).items():
        torch.testing.assert_close(mean, expected[name], atol=1e-5, rtol=0)
