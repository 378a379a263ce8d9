"""Warm starts: memories that start as the identity, the tensors that are loaded, and runs from given weights."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from records import losses, only_run, record
from safetensors.torch import save_file
from scans import DISCIPLINES, READS
from stack_memories import PROJECTIONS, decoder_config

from stackexp.cli import main
from stackexp.config import registry
from stackexp.config.compose import compose
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.memory import (
    AttentionResidualConfig,
    ManifoldHyperConnectionsConfig,
    ResidualStackConfig,
    StackAttentionConfig,
)
from stackexp.errors import RunError
from stackexp.files import compute_sha256, read_json
from stackexp.models import checkpoints
from stackexp.models.memories.base import Memory
from stackexp.models.transformer import Transformer
from stackexp.models.warm_start import init_identity, prepare_warm_start
from stackexp.runs import RunFolder

TOKENS = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(0))
CHEAP = ("logging.progress_bar=false", "trainer.val_check_interval=null")


def build(config: Any, seed: int = 3) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(config).eval()


# Memories that start as the identity


def logits_of_identity_and_backbone(config: Any) -> tuple[Transformer, torch.Tensor, torch.Tensor]:
    model, backbone = build(config), build(dataclasses.replace(config, memory=None))
    before = model(TOKENS).logits
    init_identity(model)
    after, expected = model(TOKENS).logits, backbone(TOKENS).logits
    return model, torch.stack([before, after]), expected


STACKS = [
    {"axis": axis, "discipline": discipline, "read": read, "read_mask": mask}
    for axis, discipline, (read, mask) in itertools.product(("depth", "time", "token_major"), DISCIPLINES, READS)
]
STACKS += [{"projection": p, "residual_gate": "read"} for p in PROJECTIONS]
STACKS += [{"projection": "shared_slices"}, {"site": "each_sublayer"}, {"site": "before_attention"}, {"init_std": 0.02}]
STACKS += [{"push_norm": "head", "action_bias": 2.0}, {"axis": "time", "feedback": True}]


@pytest.mark.parametrize("options", STACKS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_stack_starts_as_the_identity_and_learns(options):
    model, (before, after), expected = logits_of_identity_and_backbone(decoder_config(**options))
    assert not torch.equal(before, expected), "the usual start is not the identity"
    tolerance = 2e-6 if options.get("axis") == "token_major" else 0  # it computes token by token
    torch.testing.assert_close(after, expected, atol=tolerance, rtol=0)
    after = model(TOKENS).logits
    torch.nn.functional.cross_entropy(after.flatten(0, 1), TOKENS.flatten()).backward()
    memory = model.memories[0]
    learned = memory.gate if memory.up is None else memory.up  # the other of the two learns after this one
    assert learned.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (AttentionResidualConfig(), "not supported by AttentionResidual; use default, or define "),
        (StackAttentionConfig(), "not supported by StackAttention"),
        (ManifoldHyperConnectionsConfig(), "not supported by mhc"),
        (ResidualStackConfig(), "does not support residual_stack with update: stack; use default"),
        (decoder_config(projection="none").memory, "projection: none require model.memory.residual_gate: read"),
    ],
)
def test_memories_without_such_a_start_are_refused(memory, message):
    model = build(dataclasses.replace(decoder_config(), memory=memory))
    with pytest.raises(RunError, match=message):
        init_identity(model)


def test_a_memory_of_a_plugin_may_define_its_start():
    class Mine(Memory):
        def init_identity(self) -> None:
            self.was_called = True

    model = build(decoder_config())
    model.layers[0].memory = model.layers[1].memory = memory = Mine(None, model.config, 0)
    init_identity(model)
    assert memory.was_called


# The tensors that are loaded


@pytest.fixture
def config(trained) -> Any:
    """Compose the config of the trained run with overrides and with weights from this run."""
    return lambda *overrides: compose([str(trained / "config.yaml")], [f"warm_start.weights={trained}", *overrides])


def get_error(config: ExperimentConfig) -> str:
    with pytest.raises(RunError) as caught:
        prepare_warm_start(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_means_its_last_checkpoint(config, trained, caplog):
    start = prepare_warm_start(config())
    checkpoint = trained / "checkpoints" / "00000012"
    sha256 = compute_sha256(checkpoint / "manifest.json")
    assert start.to_dict() == {"path": str(checkpoint), "step": 12, "sha256": sha256}
    assert f"warm_start.weights: 30 tensors from {checkpoint}" in caplog.text
    assert "dropped" not in caplog.text
    earlier = prepare_warm_start(config(f"warm_start.weights={trained}/checkpoints/00000004"))
    assert (earlier.step, len(earlier.names)) == (4, 30)


def test_new_and_dropped_tensors_are_listed(config, caplog):
    assert len(prepare_warm_start(config("model.memory.kind=value_skip")).names) == 20
    dropped = ", ".join(f"layers.*.memory.{name}" for name in ("actions", "down", "gate", "query", "up"))
    new = "layers.*.memory.down.weight, layers.*.memory.up.weight"
    assert caplog.messages[-1].endswith(f"; initialized as usual: {new}; dropped: {dropped}")


def test_options_that_change_what_the_weights_compute_are_warned_about(config, caplog):
    prepare_warm_start(config("model.norm_eps=0.1", "model.memory.read_mask=log", "model.memory.entropy_weight=0"))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ["model.norm_eps=1e-05" in warnings[0], "read_mask=multiply" in warnings[1]] == [True, True]
    assert len(warnings) == 2


def test_loaded_weights_are_those_of_the_source(config, trained):
    start = prepare_warm_start(config("model.memory.num_heads=3", "warm_start.skip=[memory,layers.1,embedding]"))
    source = Transformer(config().model)
    checkpoints.load_weights(source, trained / "checkpoints" / "00000012")
    model = Transformer(config("model.memory.num_heads=3").model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    start.apply(model)
    for name, tensor in model.state_dict().items():
        is_new = "memory" in name or name.startswith(("layers.1.", "embedding."))
        assert torch.equal(tensor, before[name] if is_new else source.state_dict()[name]), name
    assert sum("layers.0." in name for name in start.names) == 9


def test_skipping_the_memory_skips_both_memories_of_a_block(config, tmp_path):
    options = ("model.memory.site=each_sublayer",)
    weights = tmp_path / "both.safetensors"
    save_file(dict(Transformer(config(*options).model).state_dict()), weights)
    given = (*options, f"warm_start.weights={weights}")
    assert any("attention_memory" in name for name in prepare_warm_start(config(*given)).names)
    start = prepare_warm_start(config(*given, "warm_start.skip=[memory]", "warm_start.memory=identity"))
    assert not [name for name in start.names if "memory" in name]
    start = prepare_warm_start(config(*given, "warm_start.skip=[attention_memory]"))
    assert {name.split(".")[2] for name in start.names if "memory" in name} == {"memory"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.vocab_size=400"], "embedding.weight is [300, 32], but [400, 32] in the model"),
        (["model.num_layers=3"], "has no layers.*.attention.k_proj.weight, "),
        (["model.tie_embeddings=false"], "has no head.weight; use the model options"),
        (["model.memory.head_dim=3"], "layers.0.memory.actions is [2, 3, 4], but [2, 3, 3]"),
        (["warm_start.skip=[heads]"], "warm_start.skip: 'heads' matches no tensor; the model has embedding.weight, "),
        (["warm_start.memory=identity"], "warm_start.memory is identity, but the weights include layers.0.memory."),
        (["warm_start.weights=nowhere"], "warm_start.weights: nowhere: no such file or folder"),
        (["warm_start.weights=."], ".: not a stackexp checkpoint (no state.pt)"),
    ],
)
def test_weights_that_do_not_fit_are_reported_in_one_line(config, empty_folder, overrides, message):
    assert message in get_error(config(*overrides))


def test_the_printed_names_can_be_skipped(config):
    for overrides in (["model.num_layers=3"], ["model.tie_embeddings=false"]):
        names = get_error(config(*overrides)).partition("has no ")[2].partition(";")[0].replace(" ", "")
        start = prepare_warm_start(config(*overrides, f"warm_start.skip=[{names}]"))
        assert start.names
        assert not any(".2." in name or "head." in name for name in start.names)
    names = get_error(config("warm_start.skip=[heads]")).partition("the model has ")[2].replace(" ", "")
    assert prepare_warm_start(config(f"warm_start.skip=[{names}]")).names == ()


def test_damaged_and_foreign_sources_are_reported_in_one_line(config, trained, tmp_path):
    source = tmp_path / "00000012"
    shutil.copytree(trained / "checkpoints" / source.name, source)
    (file,) = source.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-100])
    assert "00000012: damaged" in get_error(config(f"warm_start.weights={source}"))
    (source / "config.json").touch()
    assert (
        f"a Hugging Face folder; convert it with `checkpoint import --from {source} --to init.safetensors`"
        in get_error(config(f"warm_start.weights={source}"))
    )
    assert "must end in .safetensors" in get_error(config(f"warm_start.weights={trained}/result.json"))
    weights = tmp_path / "a.safetensors"
    weights.write_bytes(b"12")
    assert "cannot be read as safetensors" in get_error(config(f"warm_start.weights={weights}"))


def test_a_formal_language_model_starts_a_text_model(config, tmp_path, caplog):
    sizes = ["model.hidden_size=32", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=1"]
    formal = compose(["formal/transformer"], [*sizes, "model.intermediate_size=64"])
    weights = tmp_path / "formal.safetensors"
    save_file(registry.build("model", formal.model).state_dict(), weights, metadata=None)
    text = config(f"warm_start.weights={weights}", "model.positional=alibi")
    assert "embedding.weight is" in get_error(text)
    start = prepare_warm_start(config(f"warm_start.weights={weights}", "warm_start.skip=[embedding,head]"))
    assert len(start.names) == 19
    assert "dropped: head.weight" in caplog.text
    assert start.sha256 == compute_sha256(weights)


# Runs


def fit(trained: Path, folder: Path, *options: str) -> RunFolder:
    command = ["fit", "--config", str(trained / "config.yaml"), *CHEAP, f"logging.root={folder}/runs"]
    assert main([*command, f"--run={folder / 'run'}" if "--run" in options else "name=warm", *options]) == 0
    return only_run(folder / "runs", "warm")


def test_a_run_starts_from_given_weights_and_resumes_without_them(trained, tmp_path, capsys, invoke):
    source = tmp_path / "source"
    shutil.copytree(trained, source)
    options = ("trainer.max_steps=4", "trainer.checkpoint_interval=2", "schedule.warmup_steps=0")
    options += (f"warm_start.weights={source}", "warm_start.memory=identity", "model.memory.kind=dense_former")
    run = fit(trained, tmp_path / "a", *options)
    plain = fit(trained, tmp_path / "b", *options, "model.memory=null")
    assert losses(run)[1] == losses(plain)[1] < losses(RunFolder(trained))[1] - 0.5
    assert losses(run)[4] != losses(plain)[4]
    assert f"weights from {source}/checkpoints/00000012" in capsys.readouterr().out

    (session,) = read_json(run.environment)
    assert (session["origin"]["step"], len(session["origin"]["sha256"])) == (12, 64)
    expected, tensors = record(run), (run.checkpoints / "00000004" / "manifest.json").read_text()
    run.result.unlink()
    shutil.rmtree(run.checkpoints / "00000004")
    shutil.rmtree(source)
    assert main(["fit", "--run", str(run.path)]) == 0
    assert record(run) == expected
    ours, theirs = (json.loads(text) for text in ((run.checkpoints / "00000004/manifest.json").read_text(), tensors))
    assert ours["files"]["__0_0.distcp"] == theirs["files"]["__0_0.distcp"]
    shown = invoke("runs show", run.path)
    assert f"origin       {session['origin']['path']}, step 12, SHA-256 {session['origin']['sha256']}\n" in shown


@pytest.mark.process
@pytest.mark.parametrize("source", ["checkpoint", "safetensors"])
def test_two_sharded_processes_start_like_one(trained, tiny, forks, tmp_path, source):
    weights = trained / "checkpoints" / "00000012"
    if source == "safetensors":
        weights = tmp_path / "init.safetensors"
        assert main(["checkpoint", "consolidate", "--run", str(trained), "--to", str(weights)]) == 0
    fit = ("fit", "--config", tiny, *CHEAP, "trainer.max_steps=3", f"warm_start.weights={weights}")
    fit += ("warm_start.memory=identity", "warm_start.skip=[memory]")
    forks.run(*fit, "name=one")
    forks.run(*fit, "name=two", "trainer.strategy=fsdp", "trainer.devices=2", "data.micro_batch_size=2", ranks=2)
    one, two = (losses(only_run(tmp_path / "runs", name)) for name in ("one", "two"))
    assert one[1] < losses(RunFolder(trained))[1] - 0.5
    assert two == pytest.approx(one, abs=1e-5, rel=0)
