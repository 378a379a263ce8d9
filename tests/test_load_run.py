"""stackexp.load_run: the public Python API for run folders."""

import pytest
import torch
from safetensors.torch import save_file

import stackexp
from stackexp import runs
from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.errors import RunError
from stackexp.files import write_json_lines
from stackexp.models.generation import generate
from stackexp.training.objectives import build_objective

TINY = ["model.hidden_size=8", "model.num_layers=1", "trainer.accelerator=cpu"]


@pytest.fixture
def folder(tmp_path):
    config = compose(["formal/lstm"], [*TINY, f"logging.root={tmp_path}"])
    folder = runs.allocate_run(config)
    with folder.start_session(config):
        write_json_lines(folder.metrics, [{"step": 1, "train/loss": 2.0}, {"step": 2, "v": 0.5}])
        model = build_objective(config).build_module().model
        save_file(dict(model.state_dict()), folder.path / "weights.safetensors")
    return folder


def test_load_run_returns_model_config_and_metrics(folder):
    run = stackexp.load_run(folder.path, folder.path / "weights.safetensors")
    assert not run.model.training
    assert run.config.model.hidden_size == 8
    assert run.tokenizer is None
    again = stackexp.load_run(folder.path, folder.path / "weights.safetensors")
    for one, two in zip(run.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert list(run.metrics["step"]) == [1, 2]
    assert list(run.metrics) == ["step", "train/loss", "v"]


def test_load_run_of_a_model_with_a_cuda_kernel_runs_on_a_cpu(tmp_path):
    small = ["model.hidden_size=8", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=1"]
    small += ["model.intermediate_size=8", "data.kind=shards", "data.path=none", "data.vocab_size=13"]
    options = ["model.attention=varlen", "trainer.precision=bf16-mixed", "trainer.compile=true"]
    config = compose(["quickstart"], [*small, *options, f"logging.root={tmp_path}"])
    folder, weights = runs.allocate_run(config), tmp_path / "weights.safetensors"
    with folder.start_session(config):
        save_file(dict(registry.build("model", config.model).state_dict()), weights)
    loaded = stackexp.load_run(folder.path, weights)
    tokens = torch.arange(6)[None]
    torch._dynamo.utils.counters.clear()
    assert loaded.model(tokens).logits.isfinite().all()
    assert generate(loaded.model, tokens, 3).shape == (1, 9)
    assert not torch._dynamo.utils.counters["frames"]


def test_missing_folder_or_checkpoint_is_one_line(folder, tmp_path):
    with pytest.raises(RunError, match="not a run folder"):
        stackexp.load_run(tmp_path)
    with pytest.raises(RunError, match="no checkpoint yet"):
        stackexp.load_run(folder.path)
