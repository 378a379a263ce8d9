"""stackexp.load_run: the public Python API for run folders."""

import json
import re
import shutil
from pathlib import Path

import pandas
import pytest
import torch
from records import only_run
from safetensors.torch import save_file

import stackexp
from stackexp import runs
from stackexp.cli import main
from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.errors import ConfigError, RunError
from stackexp.evaluation.loading import LoadedRun
from stackexp.files import write_json_lines
from stackexp.models.generation import generate
from stackexp.planning.cost import make_plan
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


def load_new_run(base: str, *options: str, root: Path) -> LoadedRun:
    small = ["model.hidden_size=8", "model.num_layers=1", "model.num_heads=2", "model.intermediate_size=8"]
    config = compose([base], [*small, *options, f"logging.root={root}"])
    folder, weights = runs.allocate_run(config), root / "weights.safetensors"
    with folder.start_session(config):
        save_file(dict(registry.build("model", config.model).state_dict()), weights)
    return stackexp.load_run(folder.path, weights)


def test_load_run_of_a_model_with_a_cuda_kernel_runs_on_a_cpu(tmp_path):
    options = ["model.num_kv_heads=1", "data.kind=shards", "data.path=none", "data.vocab_size=13"]
    options += ["model.attention=varlen", "trainer.precision=bf16-mixed", "trainer.compile=true"]
    loaded = load_new_run("quickstart", *options, root=tmp_path)
    tokens = torch.arange(6)[None]
    torch._dynamo.utils.counters.clear()
    assert loaded.model(tokens).logits.isfinite().all()
    assert generate(loaded.model, tokens, 3).shape == (1, 9)
    assert not torch._dynamo.utils.counters["frames"]


def test_load_run_and_plan_of_a_delta_net_replace_the_cuda_kernel(tmp_path):
    options = ["data.task=parity_check", "model.kernel=fla"]
    loaded = load_new_run("formal/delta_net", *options, root=tmp_path)
    assert loaded.model(torch.ones(1, 6, dtype=torch.long)).logits.isfinite().all()
    assert make_plan(compose(["formal/delta_net"], options)).parameters > 0


def test_missing_folder_or_checkpoint_is_one_line(folder, tmp_path):
    with pytest.raises(RunError, match="not a run folder"):
        stackexp.load_run(tmp_path)
    with pytest.raises(RunError, match="no checkpoint yet"):
        stackexp.load_run(folder.path)


NOTEBOOK = Path(__file__).parents[1] / "docs" / "python-api.ipynb"


def test_scores_are_those_of_validate_and_nothing_is_written(trained):
    run = stackexp.load_run(trained)
    before = sorted(trained.rglob("*"))
    scores = run.validate()
    assert sorted(trained.rglob("*")) == before
    result = json.loads((trained / "result.json").read_text())["sets"]
    assert list(scores.index) == ["left", "right"]
    for name in scores.index:
        assert scores["loss"][name] == pytest.approx(result[name]["loss"], abs=1e-6)
    assert run.validate("left").equals(scores.loc[["left"]])
    assert not run.model.training
    with pytest.raises(ConfigError, match=r"'up'.*left, right"):
        run.validate(["up"])


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("64-true", torch.float64)])
def test_a_run_is_loaded_in_the_precision_of_its_weights(tiny, tmp_path, precision, dtype):
    options = [f"trainer.precision={precision}", "trainer.max_steps=3", "logging.progress_bar=false"]
    assert main(["fit", "--config", str(tiny), *options]) == 0
    folder = only_run(tmp_path / "runs")
    run = stackexp.load_run(folder.path)
    assert {parameter.dtype for parameter in run.model.parameters()} == {dtype}
    before = run.logits("left of the house")
    losses = run.validate()["loss"]
    assert losses.to_dict() == {name: scores["loss"] for name, scores in folder.read_result().figures["sets"].items()}
    assert torch.equal(run.logits("left of the house"), before), "an evaluation changes nothing"


def test_a_run_whose_last_step_diverged_is_finished_without_a_text(tiny, tmp_path, invoke):
    rate = ["optimizer.lr=1e30", "schedule.warmup_steps=0", "schedule.kind=linear", "trainer.max_steps=1"]
    invoke("fit --config", tiny, *rate)
    folder = only_run(tmp_path / "runs")
    figures = folder.read_result().figures
    assert figures["sample"] is None
    assert figures["average"]["loss"] is None
    error = invoke("generate --prompt a --run", folder.path, expect=1)
    assert error.startswith("error: the logits are not finite: the weights have diverged")


def test_modified_runs_have_the_same_weights_and_another_memory(trained):
    run = stackexp.load_run(trained)
    changed = run.modify(read_mask="log")
    assert changed.config.model.memory.read_mask == "log"
    assert "model.memory.read_mask=" in repr(changed)
    assert repr(run).count("\n") == 0
    for one, two in zip(run.model.parameters(), changed.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(run.logits("def f"), changed.logits("def f"))
    assert torch.equal(run.logits("def f"), changed.modify(read_mask="multiply").logits("def f"))
    with pytest.raises(ConfigError, match="num_slot"):
        run.modify(num_slot=4)
    with pytest.raises(RunError, match="different architecture"):
        run.modify(head_dim=8)


def test_an_edited_config_is_warned_about(trained, tmp_path, caplog):
    run = shutil.copytree(trained, tmp_path / trained.name)
    stackexp.load_run(run).modify(read_mask="log")
    assert not caplog.messages
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub("rope_theta: .*", "rope_theta: 7.0", text))
    for command in (["generate", "--max_new_tokens", "1"], ["checkpoint", "export", "--to", str(tmp_path / "hf")]):
        caplog.clear()
        assert main([*command, "--run", str(run)]) == 0
        assert "trained with model.rope_theta=100000.0, but the config has 7.0" in caplog.text


def test_logits_and_inspections_are_those_of_the_model(trained):
    run = stackexp.load_run(trained)
    ids = run.tokenizer.encode("def main", add_special_tokens=False).ids
    logits = run.logits("def main")
    torch.testing.assert_close(logits, run.model(torch.tensor([ids])).logits[0])
    assert torch.equal(logits, run.logits(ids))
    table = run.inspect("def main")
    config = run.config.model
    assert len(table) == config.num_layers * len(ids) * config.memory.num_heads
    assert "".join(table.query("layer == 0 and head == 0")["token"]) == "def main"
    assert table[["push", "pop", "no_op"]].sum(axis=1).to_numpy() == pytest.approx(1)
    with pytest.raises(RunError, match="no tokens"):
        run.logits("")
    for ids, found in {(): "none", (0, 300): "0 to 300", (-1, 2): "-1 to 2"}.items():
        for call in (run.logits, run.inspect):
            with pytest.raises(RunError, match=f"expected token ids from 0 to 299, found {found}$"):
                call(list(ids))


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"temperature": 1e-9}, {"top_p": -1.0}, {"max_new_tokens": 0}, {"seed": -1}]
)
def test_generate_refuses_what_the_verb_refuses(trained, options):
    ((name, value),) = options.items()
    with pytest.raises(ConfigError, match=rf"^generate: {name} {value}: must be "):
        stackexp.load_run(trained).generate("a", **{"max_new_tokens": 2} | options)


def test_missing_text_or_memory_is_an_error(folder):
    run = stackexp.load_run(folder.path, folder.path / "weights.safetensors")
    assert run.logits([0, 1, 2]).shape[0] == 3
    with pytest.raises(RunError, match="not on text"):
        run.logits("abc")
    with pytest.raises(RunError, match="no stack"):
        run.inspect([0, 1, 2])
    scores = run.validate()
    assert isinstance(scores, pandas.DataFrame)
    assert "accuracy" in scores


@pytest.mark.process
def test_the_notebook_in_docs_runs(empty_folder):
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 6
    names = {"main": main}
    for cell in cells:
        exec("".join(cell["source"]).replace("data.eval_sequences=8", "data.max_chunks=8"), names)  # short sets
    assert names["run"].config.model.memory.kind == "stack"
