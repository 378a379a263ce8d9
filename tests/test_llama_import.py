"""Import of Hugging Face folders: the same logits as transformers, and one-line errors for what is not supported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stackexp.cli import main
from stackexp.config.compose import compose
from stackexp.models import checkpoints
from stackexp.models.transformer import Transformer

transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 310, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 48, "max_position_embeddings": 64}


def save_folder(path: Path, family: str = "Llama", *, shard: str = "1GB", dtype=torch.float32, **options: Any) -> None:
    """Save a randomly initialized model of transformers."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms start at 1 and biases at 0, which would hide an exchange of two
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "proj" in name:
                parameter.mul_(5)  # so that attention is not uniform
    model.save_pretrained(path, max_shard_size=shard)


def import_folder(folder: Path, *options: str) -> Path:
    target = folder.parent / "init.safetensors"
    assert main(["checkpoint", "import", "--from", str(folder), "--to", str(target), *options]) == 0
    return target


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def get_error(capsys, folder: Path, *options: str) -> str:
    target = folder.parent / "init.safetensors"
    assert main(["checkpoint", "import", "--from", str(folder), "--to", str(target), *options]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert not target.exists()
    return line


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 24}  # of the frequencies, 1 is kept, 1 is interpolated and 2 are divided
CASES = {
    "grouped queries, untied": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "tied, another theta": {"tie_word_embeddings": True, "rope_theta": 123.0, "rms_norm_eps": 1e-3},
    "sharded": {"shard": "20KB", "num_key_value_heads": 1},
    "bfloat16": {"dtype": torch.bfloat16},
    "Llama 3.1": {"rope_scaling": LLAMA3, "num_key_value_heads": 2, "rope_theta": 1000.0},
    "linear scaling": {"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_theta": 1000.0},
    "Qwen2.5": {"family": "Qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_logits_equal_those_of_transformers(tmp_path, options):
    folder, tokens = tmp_path / "model", torch.randint(310, (2, 40), generator=torch.Generator().manual_seed(1))
    save_folder(folder, **options)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (folder / "model.safetensors").exists() != ("shard" in options)
    weights = import_folder(folder)
    config = compose(["quickstart", str(tmp_path / "init.yaml")], ["model.memory=null", "data.vocab_size=300"])
    ours = Transformer(config.model)
    checkpoints.load_weights(ours, weights)
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(ours(tokens).logits, expected, atol=1e-5, rtol=0)
    assert {tensor.dtype for tensor in load_file(weights).values()} == {options.get("dtype", torch.float32)}


def test_rope_parameters_of_transformers_5(tmp_path):
    folder = tmp_path / "model"
    save_folder(folder, rope_theta=777.0)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_theta"], config["rope_scaling"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 777.0}
    (folder / "config.json").write_text(json.dumps(config))
    import_folder(folder)
    assert compose(["quickstart", str(tmp_path / "init.yaml")], ["data.vocab_size=300"]).model.rope_theta == 777


def test_next_commands_and_the_model_section_are_printed(tmp_path, capsys):
    folder = tmp_path / "model"
    save_folder(folder)
    import_folder(folder)
    printed = capsys.readouterr().out
    assert "init.safetensors: 21 tensors, " in printed
    assert "put its tokenizer.json into" in printed
    (folder / "tokenizer.json").touch()
    import_folder(folder)
    printed = capsys.readouterr().out
    assert f"data prepare TEXTS --to DATA --tokenizer {folder}/tokenizer.json" in printed
    assert f"--config NAME --config {tmp_path}/init.yaml data.path=DATA warm_start.weights={tmp_path}" in printed


def test_a_config_is_compared_with_the_folder(tmp_path, capsys):
    folder = tmp_path / "model"
    save_folder(folder)
    message = get_error(capsys, folder, "--config", "quickstart", "model.num_heads=4")
    start = "error: quickstart: not the model of "
    assert message.startswith(start)
    changes = message.partition("; set ")[2].split()
    assert "model.hidden_size=32" in changes
    assert not [change for change in changes if "num_heads" in change]
    import_folder(folder, "--config", "quickstart", "model.num_heads=4", "data.vocab_size=300", *changes)
    assert not (tmp_path / "init.yaml").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type is mistral"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        ({"rope_scaling": "linear"}, "rope_scaling is linear, not an object"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no original_max_position_embeddings"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_factor: expected a number >= 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling is dynamic"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters is yarn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"head_dim": 16}, "head_dim is 16"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"hidden_size": "wide"}, "hidden_size: expected an integer"),
        ({"hidden_size": 10**400}, "hidden_size: expected a number"),
        ({"vocab_size": -310}, "vocab_size"),
        ({"vocab_size": 10**400}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_heads"),
        ({"num_attention_heads": [4]}, "num_heads"),
        ({"num_key_value_heads": -2}, "num_kv_heads"),
        ({"rms_norm_eps": 10**400}, "norm_eps"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_theta": "x"}, "rope_theta"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 10**400}}, "rope_original_context"),
        ({"rope_scaling": {"rope_type": ["llama3"]}}, "rope_scaling"),
        ({"tie_word_embeddings": "maybe"}, "tie_embeddings"),
        ({"head_dim": 10**400}, "head_dim"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is absent, but [32] in the model"),
        ({"num_hidden_layers": 1}, "layers.1.input_layernorm.weight is [32], but absent in the model"),
        ({"tie_word_embeddings": True}, "lm_head.weight is [310, 32], but absent in the model"),
        ({"intermediate_size": 50}, "down_proj.weight is [32, 48], but [32, 50] in the model"),
    ],
)
def test_an_unsupported_config_is_refused_in_one_line(tmp_path, capsys, changes, message):
    folder = tmp_path / "model"
    save_folder(folder)
    edit_json(folder / "config.json", **changes)
    assert message in get_error(capsys, folder)


def test_missing_and_damaged_files_are_reported_in_one_line(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    assert "no config.json" in get_error(capsys, folder)
    save_folder(folder, shard="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    shards[0].unlink()
    assert f"{shards[0].name}: model.safetensors.index.json names this file" in get_error(capsys, folder)
    for text in ("[]", '{"weight_map": {"norm.weight": 5}}', '{"weight_map": {"norm.weight": ["a"], "b": "c"}}'):
        (folder / "model.safetensors.index.json").write_text(text)
        assert "model.safetensors.index.json: has no weight_map" in get_error(capsys, folder)
    (folder / "model.safetensors.index.json").unlink()
    assert "no model.safetensors or" in get_error(capsys, folder)
    weights = folder / "model.safetensors"
    save_folder(folder)
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "model.safetensors: cannot be read as safetensors" in get_error(capsys, folder)
    config = folder / "config.json"
    config.write_text(config.read_text()[:-30])
    assert "config.json: not valid JSON" in get_error(capsys, folder)
    config.write_text('{"model_type": "llama"}')
    assert "the key vocab_size is missing" in get_error(capsys, folder)


def test_weights_in_one_file_precede_shards_as_in_transformers(tmp_path):
    folder, other = tmp_path / "model", tmp_path / "other"
    save_folder(folder, shard="20KB")
    save_folder(other, hidden_act="silu")
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    embedding = load_file(import_folder(folder))["embedding.weight"]
    assert torch.equal(embedding, theirs.get_input_embeddings().weight)


def test_rotary_tables_and_a_copy_of_the_tied_embedding_are_ignored(tmp_path, capsys):
    folder = tmp_path / "model"
    save_folder(folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    weights = import_folder(folder)
    assert len(load_file(weights)) == len(tensors)
    weights.unlink()
    save_file(
        {n: t.to(torch.int8) for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    assert "is int8; quantized weights are not supported" in get_error(capsys, folder)


def test_existing_files_and_configs_of_other_models_are_refused(tmp_path, invoke):
    arguments = ["checkpoint", "import", "--from", str(tmp_path), "--to"]
    (tmp_path / "a.yaml").write_text("name: mine\n")
    error = invoke(*arguments, tmp_path / "a.safetensors", expect=2)
    assert "a.yaml exists and is not from `checkpoint import`; choose another name" in error
    save_folder(tmp_path)
    error = invoke(*arguments, tmp_path / "b.safetensors", "--config", "formal/lstm", expect=1)
    assert error.endswith("; set model.kind=transformer")


def test_sizes_and_values_that_no_model_has_are_reported(tmp_path, capsys):
    folder = tmp_path / "hf"
    save_folder(folder)
    config = (folder / "config.json").read_text()
    edit_json(folder / "config.json", vocab_size=2**62)
    assert "vocab_size: expected an integer from 1 to 2147483647" in get_error(capsys, folder)
    (folder / "config.json").write_text(config)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "the tensor model.norm.weight has values that are not finite" in get_error(capsys, folder)
