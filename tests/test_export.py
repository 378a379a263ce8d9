"""`checkpoint export`: the folder works with transformers alone and gives the same logits and tokens."""

import ast
import json
import math
import os
import re
import shutil
import subprocess
import time
import venv
from pathlib import Path

import exported_models
import pytest
import torch
import transformers
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from stackexp import runs
from stackexp.cli import main
from stackexp.config.compose import compose
from stackexp.data.tokenizer import train_tokenizer
from stackexp.errors import RunError
from stackexp.export import huggingface
from stackexp.files import write_hashed_json
from stackexp.models.generation import generate
from stackexp.training.objectives import build_objective

TINY = (
    *("model.hidden_size=16", "model.num_layers=3", "model.num_heads=4", "model.num_kv_heads=2"),
    *("model.intermediate_size=24", "model.embedding_scale=3", "data.vocab_size=300", "trainer.accelerator=cpu"),
    *("model.memory.num_heads=2", "model.memory.head_dim=4", "model.memory.num_slots=4"),
)
NORMALIZED = (
    "model.memory=stacktrans-normalized",
    "model.memory.action_input=hidden",
    "model.memory.action_scale=slice",
)
LLAMA3 = ("model.rope_scaling=llama3", "model.rope_original_context=16", "model.rope_theta=100", "model.rope_factor=4")
VARIANTS = {
    "llama": ("model.memory=null",),
    "untied-mup": (
        *("model.memory=null", "model.tie_embeddings=false", "model.mup_base_size=8"),
        *("model.embedding_std=0.5", "model.rope_theta=500"),
    ),
    "llama3-rope": ("model.memory=null", *LLAMA3),
    "depth": (),
    "queue": ("model.memory.discipline=queue", "model.memory.read_mask=log", "model.tie_embeddings=false"),
    "push-only": ("model.memory.discipline=push_only", "model.memory.residual_gate=read"),
    "slices": ("model.memory.projection=shared_slices", "model.memory.read_mask=additive"),
    "full": ("model.memory.projection=none", "model.memory.head_dim=8", "model.memory.read=top"),
    "normalized": (*NORMALIZED, "model.memory.action_sharpness=3"),
    "each-sublayer": ("model.memory.site=each_sublayer", "model.memory.eval_num_slots=6"),
    "before-attention": ("model.memory.site=before_attention",),
    "after-attention": (
        "model.memory.site=after_attention",
        "model.memory.axis=token_major",
        "model.rope_scaling=linear",
    ),
    "time": ("model.memory.axis=time", "model.memory.read_mask=log"),
    "time-queue": ("model.memory.axis=time", "model.memory.discipline=queue", "model.memory.site=before_attention"),
    "token-major": ("model.memory.axis=token_major", "model.memory.site=each_sublayer"),
}


@pytest.fixture(autouse=True)
def module_cache(tmp_path_factory, monkeypatch):
    """Keep the code that transformers imports from exported folders out of the home folder."""
    cache = tmp_path_factory.getbasetemp() / "hf_modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(cache))


def write_run(root: Path, *overrides: str) -> tuple[runs.RunFolder, torch.nn.Module]:
    """Write a run folder with random weights."""
    overrides = [*TINY, *overrides, f"logging.root={root}"]
    if "model.memory=null" in overrides:
        overrides = [item for item in overrides if not item.startswith("model.memory.")]
    config = compose(["quickstart"], overrides)
    folder = runs.allocate_run(config)
    torch.manual_seed(0)
    model = build_objective(config).build_module().model.eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    with folder.start_session(config):
        save_file(dict(model.state_dict()), folder.path / "weights.safetensors")
        train_tokenizer(["a <|endoftext|> b ab abc"] * 3, 300).save(str(folder.tokenizer))
    return folder, model


def export(tmp_path: Path, name: str, *options: str) -> Path:
    """Export the random model of a variant; write its own results next to the folder."""
    folder, model = write_run(tmp_path / "runs", *VARIANTS[name])
    target = tmp_path / name
    weights = str(folder.path / "weights.safetensors")
    command = ["checkpoint", "export", "--run", str(folder.path), "--ckpt_path", weights, "--to", str(target)]
    assert main([*command, *options]) == 0
    if "model.memory.read_mask=additive" in VARIANTS[name]:  # rounding of the occupancy decides the read
        model.double()
    tokens = torch.randint(300, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = {
            "tokens": tokens,
            "logits": model(tokens).logits,
            "greedy": generate(model, tokens, 8, temperature=0),
        }
    torch.save(expected, target.with_suffix(".pt"))
    return target


@pytest.mark.parametrize("name", VARIANTS)
def test_exported_model_equals_the_original(tmp_path, name):
    exported_models.check_model(target := export(tmp_path, name))
    if name in ("llama", "depth"):
        check_tokenizer(target)


def check_tokenizer(target: Path) -> None:
    """Check that text that spells a special token is encoded as in training."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(target, trust_remote_code=True)
    text = "a <|endoftext|> b"
    expected = train_tokenizer(["a <|endoftext|> b ab abc"] * 3, 300).encode(text).ids
    assert tokenizer(text).input_ids == expected
    assert tokenizer.decode(expected) == text
    assert tokenizer.eos_token_id == 0


def test_exported_code_needs_no_stackexp(tmp_path):
    names = set()
    for node in ast.walk(ast.parse(huggingface.MODELING_FILE.read_text())):
        names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        names |= {node.module} if isinstance(node, ast.ImportFrom) else set()
    assert {name.split(".")[0] for name in names} == {"inspect", "math", "typing", "torch", "transformers"}


@pytest.mark.parametrize("name", ["depth", "time"])
def test_gradients_survive_checkpointing(tmp_path, name):
    target, gradients = export(tmp_path, name), []
    tokens = torch.load(target.with_suffix(".pt"))["tokens"]
    for reentrant in (None, True, False):
        model = exported_models.load(target).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for parameter, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0, parameter
        for recomputed in gradients[1:]:
            exported_models.assert_close(recomputed[parameter], gradient, 1e-5)


def test_stacks_over_tokens_refuse_what_they_cannot_do(tmp_path):
    target = export(tmp_path, "time")
    model, tokens = exported_models.load(target), torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"^StackTrans: axis time does not support this StaticCache; "):
        model.generate(tokens, cache_implementation="static", max_new_tokens=2, disable_compile=True)
    with pytest.raises(ValueError, match=r"^StackTrans: a stack over tokens cannot be rolled back"):
        model(tokens, use_cache=True).past_key_values.crop(1)
    with pytest.raises(ValueError, match=r"^StackTrans: axis time requires an attention_mask \[batch, tokens\]"):
        model(tokens, attention_mask=torch.ones(1, 1, 3, 3, dtype=torch.bool))


@pytest.mark.parametrize("name", ["depth", "time", "token-major"])
def test_a_cache_of_the_caller_is_filled(tmp_path, name):
    target = export(tmp_path, name)
    model, tokens = exported_models.load(target), torch.load(target.with_suffix(".pt"))["tokens"]
    cache = transformers.DynamicCache()
    with torch.no_grad():
        whole = model(tokens).logits
        parts = [model(tokens[:, :8], past_key_values=cache, use_cache=True).logits]
        assert cache.get_seq_length() == 8
        parts += [model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(8, 12)]
    exported_models.assert_close(torch.cat(parts, 1), whole, 1e-5)


def test_a_tokenizer_that_reads_end_of_text_in_a_text_is_named(tmp_path, capsys):
    tokenizer = Tokenizer(Unigram([("<unk>", 0.0), ("</s>", -1.0), ("a", -2.0), (" ", -2.0)], 0))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.encode_special_tokens = True
    tmp_path.mkdir(exist_ok=True)
    huggingface._write_tokenizer(tmp_path, tokenizer, 16)
    assert "note: the exported tokenizer reads </s> in a text as the end of a document" in capsys.readouterr().err
    huggingface._write_tokenizer(tmp_path, train_tokenizer(["a b"] * 3, 300), 16)
    assert capsys.readouterr().err == ""


def test_new_weights_follow_the_config(tmp_path):
    config = transformers.AutoConfig.from_pretrained(export(tmp_path, "normalized"), trust_remote_code=True)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    memory = model.model.layers[0].memories["after_block"]
    assert memory.gate.item() == 1
    assert memory.action_bias.tolist() == [[config.memory["action_bias"], 0, 0]] * 2
    assert 0 < memory.down.std() < 0.1


def test_large_models_have_an_index_and_options_reach_the_card(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "MAX_SHARD_SIZE", "20KB")
    exported_models.check_model(target := export(tmp_path / "large", "depth"))
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    target = export(tmp_path, "depth", "--dtype", "bfloat16", "--license", "apache-2.0")
    assert exported_models.load(target, "auto").dtype == torch.bfloat16
    card = (target / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "| context length | 256 tokens |" in card


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of the trained run, under its name."""
    return Path(shutil.copytree(trained, tmp_path / trained.name))


@pytest.fixture
def export_card(run, tmp_path, invoke):
    """`export_card(checkpoint)` exports a checkpoint of `run` or of another run, and returns the model card."""

    def export(checkpoint: Path) -> str:
        target = tmp_path / f"hf-{len(list(tmp_path.glob('hf-*')))}"
        invoke("checkpoint export --run", run, "--ckpt_path", checkpoint, "--to", target, "--license", "a: b")
        return (target / "README.md").read_text()

    return export


def read_losses(record: Path) -> dict[str, str]:
    """Return the losses of a record of `validate` as the card prints them."""
    return {name: f"{scores['loss']:.4f}" for name, scores in json.loads(record.read_text())["sets"].items()}


def test_the_card_has_the_scores_of_its_own_checkpoint(run, export_card, tmp_path, invoke):
    """Not those of another run's checkpoint, or with options that change them."""
    records = {"validate.json": "runs/x/other/checkpoints/00000012", "validate-a.json": f"{run}/checkpoints/00000012"}
    for name, checkpoint in records.items():
        record = {"checkpoint": checkpoint, "step": 12, "overrides": ["model.rope_theta=1"] * (name != "validate.json")}
        write_hashed_json(run / name, record | {"sets": {"left": {"loss": 9.75, "perplexity": 17154.2}}})
    card = export_card(run / "checkpoints" / "00000012")
    assert "9.75" not in card
    for scores in json.loads((run / "result.json").read_text())["sets"].values():
        assert f"{scores['loss']:.4f}" in card
    assert yaml.safe_load(card.split("---")[1])["license"] == "a: b"
    (run / "validate-notes.json").write_text('{"note": 1}')
    error = invoke("checkpoint export --run", run, "--to", tmp_path / "other", expect=1)
    assert "validate-notes.json: not as it was written" in error


def test_the_card_has_scores_that_are_not_finite(run, export_card):
    """Records have null for them."""
    checkpoint = run / "checkpoints" / "00000012"
    record = {"checkpoint": str(checkpoint), "step": 12, "overrides": []}
    write_hashed_json(run / "validate.json", record | {"sets": {"left": {"loss": math.nan, "perplexity": math.inf}}})
    (run / "result.json").unlink()
    assert re.search(r"^\| left .* nan \|", export_card(checkpoint), re.M)


def test_the_card_of_another_runs_checkpoint_has_nothing_of_the_run(run, export_card, tmp_path, invoke):
    other = shutil.copytree(run, tmp_path / "other")
    for step in ("00000008", "00000012"):
        invoke("validate --run", run, "--ckpt_path", run / "checkpoints" / step)
        card = export_card(other / "checkpoints" / step)
        assert "This checkpoint has no recorded scores" in card
        assert not any(f"| {fact} |" in card for fact in ("steps", "training tokens", "training data", "command"))
        assert f"| config | `{run}` |" in card


def test_the_card_has_the_scores_of_a_weights_file(run, export_card, tmp_path, invoke):
    average = tmp_path / "average.safetensors"
    invoke("checkpoint average --last 2 --run", run, "--to", average)
    assert "This checkpoint has no recorded scores" in export_card(average)
    invoke("validate --run", run, "--ckpt_path", average)
    (record,) = run.glob("validate-average*.json")
    assert all(loss in export_card(average) for loss in read_losses(record).values())
    os.utime(average, (time.time() + 60, time.time() + 60))  # written again later
    assert "This checkpoint has no recorded scores" in export_card(average)


def test_the_card_has_scores_with_harmless_overrides_of_the_sets_of_the_run(run, export_card, corpus, invoke):
    checkpoint = run / "checkpoints" / "00000008"
    validate = ["validate --run", run, "--ckpt_path", checkpoint]
    invoke(*validate, "data.eval_batch_size=4")
    replaced = f"left={corpus['right']}"
    invoke(*validate, "--sets", f"{replaced},mine={corpus['train']}")
    invoke(*validate, f"data.validation.{replaced}")
    card = export_card(checkpoint)
    rows = {line.split()[1]: line.split()[7] for line in card.splitlines() if line.startswith("| ") and "." in line}
    losses = read_losses(run / "validate-00000008.json")
    assert {name: rows[name] for name in losses} == losses
    assert losses["left"] != losses["right"]
    assert "mine" in rows


def test_unsupported_options_are_named():
    options = ("positional=alibi", "attention_window=8", "qkv_bias=true", "attention_log_base=8", "memory=value_skip")
    for option in (*options, "memory.feedback=true", "memory.empty_slot=true"):
        key, value = option.split("=")
        overrides = [f"model.{option}", *["model.memory.axis=time"] * (key == "memory.feedback")]
        with pytest.raises(RunError, match=rf"^model\.{key}(\.kind)?: {value}"):
            huggingface.check_support(compose(["quickstart"], overrides))
    for config in ("formal/quick", "arithmetic/addition"):
        with pytest.raises(RunError, match=r"^data\.(task|kind): .* is not text"):
            huggingface.check_support(compose([config]))


def test_nothing_but_the_new_folder_is_written(trained, tmp_path, invoke):
    """A hidden folder of the user stays; an existing target is refused, also if it appears during the export."""
    (tmp_path / ".hf.partial").mkdir()
    (tmp_path / ".hf.partial" / "mine").touch()
    export = ["checkpoint", "export", "--run", str(trained), "--to", str(tmp_path / "hf")]
    invoke(*export)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hf.partial", "hf"]
    assert (tmp_path / ".hf.partial" / "mine").exists()
    assert f"--to {tmp_path / 'hf'}: already exists" in invoke(*export, expect=2)
    before = (tmp_path / "hf" / "README.md").read_bytes()
    with pytest.raises(OSError, match="not empty"):
        huggingface.export_run(str(trained), None, tmp_path / "hf", "float32", "mit")
    assert (tmp_path / "hf" / "README.md").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hf.partial", "hf"]


@pytest.mark.parametrize("change", ["missing", "changed", "missing without a record"])
def test_the_tokenizer_of_the_training_is_required(trained, tmp_path, invoke, change):
    run = shutil.copytree(trained, tmp_path / trained.name)
    contents = json.loads((run / "tokenizer.json").read_text())
    (run / "tokenizer.json").unlink()
    if change == "changed":
        (run / "tokenizer.json").write_text(json.dumps(contents | {"post_processor": {"type": "ByteLevel"}}))
    weights = []
    if change == "missing without a record":  # as in runs of earlier versions
        random, _ = write_run(tmp_path / "runs")
        run, weights = random.path, ["--ckpt_path", str(random.path / "weights.safetensors")]
        random.tokenizer.unlink()
    line = invoke("checkpoint export --run", run, *weights, "--to", tmp_path / "hf", expect=1)
    assert f"{run / 'tokenizer.json'}: {'not the tokenizer' if change == 'changed' else 'missing'}" in line
    assert not (tmp_path / "hf").exists()


@pytest.mark.process
def test_exported_models_work_with_transformers_5(tmp_path):
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "base.pth").write_text(os.path.dirname(os.path.dirname(torch.__file__)))
    python = environment / "bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "transformers>=5"], check=True)
    # The code of the layers is the same with every version; these differ in what they take from transformers.
    names = ("llama", "untied-mup", "llama3-rope", "depth", "time-queue", "token-major")
    targets = [export(tmp_path, name) for name in names]
    script = Path(exported_models.__file__)
    variables = {"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([python, script, *targets], env=variables, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    expected = train_tokenizer(["a <|endoftext|> b ab abc"] * 3, 300).encode("a <|endoftext|> b").ids
    assert json.loads(result.stdout) == expected
