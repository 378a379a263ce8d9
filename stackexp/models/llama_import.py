"""Read a Hugging Face folder of the Llama family: config.json, and the weights as safetensors.

transformers and stackexp both rotate pairs that are half a head apart (RoPE), so weights are copied without permuting
them.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stackexp.config.compose import build_dataclass
from stackexp.config.model import TransformerConfig
from stackexp.config.yaml_files import Leaf
from stackexp.errors import RunError
from stackexp.files import read_json
from stackexp.models.checkpoints import check_shapes, read_safetensors
from stackexp.models.transformer import Transformer

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MODEL_TYPES = {"llama": False, "qwen2": True}  # model_type -> whether queries, keys and values have a bias
REQUIRED_KEYS = {  # ours -> key in config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
}
SUPPORTED_VALUES = {  # key in config.json -> its only supported value, which a missing key has
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1,
    "use_sliding_window": False,
    "quantization_config": None,
}
ROPE_KEYS = {  # rope_type -> ours -> key in rope_scaling
    "linear": {"rope_factor": "factor"},
    "llama3": {
        "rope_factor": "factor",
        "rope_original_context": "original_max_position_embeddings",
        "rope_low_freq_factor": "low_freq_factor",
        "rope_high_freq_factor": "high_freq_factor",
    },
}
NAMES = (  # ours -> Hugging Face's
    (r"^layers\.", "model.layers."),
    (r"^embedding\.", "model.embed_tokens."),
    (r"^norm\.", "model.norm."),
    (r"^head\.", "lm_head."),
    (r"\.attention\.", ".self_attn."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.feed_forward_norm\.", ".post_attention_layernorm."),
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DERIVED = "rotary_emb.inv_freq"  # in old folders; follows from rope_theta


def read_model_options(folder: Path) -> dict[str, Any]:
    """Return the options of the section `model` that config.json determines.

    Reads rope_theta from the top level (transformers 4) or from rope_parameters (transformers 5). Raises RunError,
    naming the key in config.json, for an architecture that `Transformer` does not have.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise RunError(f"{folder}: no {CONFIG}; give the folder of a Hugging Face model")
    config = read_json(path)
    if not isinstance(config, dict):
        raise RunError(f"{path}: not an object; download the file again")
    if config.get("model_type") not in list(MODEL_TYPES):  # a dict would refuse a list as its key
        raise _unsupported(path, "model_type", config.get("model_type"), " or ".join(MODEL_TYPES))
    rope = _read_rope(path, config)
    for key, supported in SUPPORTED_VALUES.items():
        found = (config | rope).get(key, supported)
        if found != supported:
            raise _unsupported(path, key, found, supported)
    if missing := [key for key in REQUIRED_KEYS.values() if key not in config]:
        raise RunError(f"{path}: the key {missing[0]} is missing; download the file again")
    options = {ours: config[theirs] for ours, theirs in REQUIRED_KEYS.items()}
    options |= {
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "qkv_bias": MODEL_TYPES[config["model_type"]],
        "positional": "rope",
        "rope_theta": rope.get("rope_theta", 10_000.0),
        "rope_scaling": "none" if rope["rope_type"] == "default" else rope["rope_type"],
    }
    if rope["rope_type"] != "default":
        for ours, theirs in ROPE_KEYS[rope["rope_type"]].items():
            if theirs not in rope:
                raise RunError(f"{path}: rope_scaling has no {theirs}; download the file again")
            options[ours] = rope[theirs]
    model = build_dataclass(TransformerConfig, {key: Leaf(value, str(path)) for key, value in options.items()})
    head_size = model.hidden_size // model.num_heads
    if config.get("head_dim") not in (None, head_size):
        raise _unsupported(path, "head_dim", config["head_dim"], f"hidden_size / num_attention_heads = {head_size}")
    # config.json has no keys for these options; a Llama has their defaults
    fixed = ("causal", "attention_window", "attention_log_base", "embedding_scale", "mup_base_size")
    return {key: value for key, value in dataclasses.asdict(model).items() if key in (*options, *fixed)}


def _read_rope(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters of either style, with `rope_type`. Raises RunError for an unsupported type."""
    rope = {key: config[key] for key in ("rope_theta",) if config.get(key) is not None}
    for key in ("rope_scaling", "rope_parameters"):
        section = config.get(key) or {}
        if not isinstance(section, dict):
            raise RunError(f"{path}: {key} is {section}, not an object; download the file again")
        kind = section.get("rope_type", section.get("type", "default"))
        if kind not in ("default", *ROPE_KEYS):
            raise _unsupported(path, key, kind, f"default, {' or '.join(ROPE_KEYS)}")
        if section:
            rope |= section | {"rope_type": kind}
    return {"rope_type": "default"} | rope


def _unsupported(path: Path, key: str, found: Any, supported: Any) -> RunError:
    return RunError(f"{path}: {key} is {found}, which is not supported; supported: {supported}")


def read_tensors(folder: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a folder under the names of a `Transformer` with these model options.

    The tensors are mapped from the files, so they take no memory until they are read. Raises RunError if a file is
    missing or truncated, a tensor is missing or unknown, a shape differs, or a value is not finite.
    """
    tensors = _map_files(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Transformer(TransformerConfig(**options)).state_dict().items()}
    names = {to_llama_name(name): name for name in shapes}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(DERIVED)}
    if HEAD not in names and {HEAD, EMBEDDING} <= tensors.keys() and torch.equal(tensors[HEAD], tensors[EMBEDDING]):
        del tensors[HEAD]  # a copy of the tied embedding
    expected = {theirs: shapes[ours] for theirs, ours in names.items()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    check_shapes(folder, found, expected, f"fix {CONFIG}, or download the files again")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise RunError(f"{folder}: the tensor {name} is {dtype}; quantized weights are not supported")
        if not tensor.isfinite().all():
            raise RunError(f"{folder}: the tensor {name} has values that are not finite; download the files again")
    return {ours: tensors[theirs] for theirs, ours in names.items()}


def to_llama_name(name: str) -> str:
    """Return the Hugging Face name of a backbone tensor: norm.weight -> model.norm.weight."""
    for ours, theirs in NAMES:
        name = re.sub(ours, theirs, name)
    return name


def _map_files(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all weight files of a folder, mapped from the files."""
    if (folder / WEIGHTS).is_file():  # transformers prefers it, too
        files = [WEIGHTS]
    elif (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        names = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise RunError(f"{folder / INDEX}: has no weight_map of file names; download it again")
        files = sorted(set(names.values()))
    else:
        raise RunError(f"{folder}: no {WEIGHTS} or {INDEX}; save the model as safetensors")
    tensors: dict[str, Tensor] = {}
    for name in files:
        path = folder / Path(name).name  # a file name: an index cannot name another folder
        if not path.is_file():
            raise RunError(f"{path}: {INDEX} names this file, but it is missing; download it")
        tensors |= read_safetensors(path)
    return tensors
