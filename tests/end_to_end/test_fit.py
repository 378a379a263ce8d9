"""One run from the command line, and what it leaves behind."""

import json
import math

import pytest
import yaml
from forks import Forks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stackexp.cli import main
from stackexp.config import compose
from stackexp.runs import RunFolder


def test_fit_then_every_verb_on_its_run(program, tiny, tmp_path):
    output, forks = program.run("fit", "--config", tiny), Forks(tmp_path)
    run = RunFolder(next((tmp_path / "runs" / "tiny").iterdir()))

    # What it says
    assert str(run.path) in output
    assert "tensorboard --logdir" in output
    for name in ("left", "right", "average of sets"):
        assert any(line.startswith(name) for line in output.splitlines())

    # metrics.jsonl: one line per step, two more for the validations
    lines = list(run.read_metrics())
    steps = [line for line in lines if "loss/train" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["tokens"] for line in steps] == [256 * step for step in range(1, 13)]
    assert [line["step"] for line in lines if "validation/loss/average" in line] == [6, 12]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert steps[-1]["loss/train"] < steps[0]["loss/train"]

    # TensorBoard has the same figures
    events = EventAccumulator(str(run.path), size_guidance={"scalars": 0}).Reload()
    assert [e.step for e in events.Scalars("loss/train")] == list(range(1, 13))
    assert [e.value for e in events.Scalars("loss/train")] == pytest.approx([s["loss/train"] for s in steps])
    assert [e.step for e in events.Scalars("loss/train_by_tokens")] == [256 * step for step in range(1, 13)]
    tags = set(events.Tags()["scalars"])
    assert {
        "optimizer/lr",
        "optimizer/grad_norm",
        "throughput/tokens_per_second",
        "throughput/flops_per_second",
    } <= tags
    assert {f"validation/{f}/{s}" for f in ("loss", "perplexity", "bits_per_byte") for s in ("left", "right")} <= tags
    probes = ("push", "pop", "no_op", "entropy", "occupancy", "read_share")
    assert {f"memory/{probe}/layer_{layer:02d}" for probe in probes for layer in (0, 1)} <= tags
    assert [e.step for e in events.Scalars("memory/push/layer_00")] == [1, 5, 10]
    assert {"custom_scalars__config__", "_hparams_/experiment", "_hparams_/session_end_info"} <= set(
        events.summary_metadata
    )

    # The rest of the folder
    assert compose.load(str(run.config)) == compose.compose([str(tiny)], [])
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == ["00000008", "00000012"]
    (session,) = json.loads((run.path / "environment.json").read_text())
    assert "fit --config" in session["command"]
    assert session["versions"]["torch"]
    result = json.loads(run.result.read_text())
    assert result["steps"] == 12
    assert set(result["sets"]) == {"left", "right"}
    assert result["train_loss"]["first"] == steps[0]["loss/train"]

    # validate agrees with the end of fit, test has its own sets, generate speaks
    validated = forks.run("validate", "--run", run.path)
    assert json.loads((run.path / "validate.json").read_text())["sets"] == result["sets"]
    assert f"{result['average']['loss']:.4f}" in validated
    forks.run("test", "--run", run.path, "data.eval_batch_size=3")
    tested = json.loads((run.path / "test.json").read_text())["sets"]
    assert tested["right"] == pytest.approx(result["sets"]["right"], rel=1e-6)
    said = forks.run("generate", "--run", run.path, "--prompt", "def f", "--max_new_tokens", "5")
    assert said.startswith("def f")

    # Done is done
    refusal = forks.run("fit", "--config", tiny, "--ckpt_path", "last", expect=1)
    assert "finished" in refusal
    assert len(refusal.splitlines()) == 1


def test_fit_without_validation_sets(tiny, tmp_path):
    config = yaml.safe_load(tiny.read_text())
    del config["data"]["validation"]
    tiny.write_text(yaml.safe_dump(config))
    output = Forks(tmp_path).run("fit", "--config", tiny, "trainer.max_steps=3")
    assert "no validation sets" in output
    assert RunFolder(next((tmp_path / "runs" / "tiny").iterdir())).finished


def test_what_makes_training_cheaper_changes_little(tiny, tmp_path):
    """bfloat16 within its rounding, recomputed activations exactly: through the whole program."""
    losses = {}
    for name, options in {
        "plain": [],
        "checkpointed": ["trainer.activation_checkpointing=true"],
        "bf16": ["trainer.precision=bf16-mixed"],
    }.items():
        assert main(["fit", "--config", str(tiny), f"name={name}", *options]) == 0
        (run,) = map(RunFolder, tmp_path.glob(f"runs/{name}/*"))
        losses[name] = [line["loss/train"] for line in run.read_metrics() if "loss/train" in line]
    assert losses["checkpointed"] == losses["plain"]
    assert losses["bf16"] != losses["plain"]
    assert losses["bf16"] == pytest.approx(losses["plain"], abs=0.05)


@pytest.mark.slow
def test_a_compiled_model_trains_alike(tiny, tmp_path):
    for name, compiled in {"plain": "false", "compiled": "true"}.items():
        assert main(["fit", "--config", str(tiny), f"name={name}", f"trainer.compile={compiled}"]) == 0
    plain, compiled = (RunFolder(next(tmp_path.glob(f"runs/{name}/*"))) for name in ("plain", "compiled"))
    losses = [[line["loss/train"] for line in run.read_metrics() if "loss/train" in line] for run in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
