"""Write a run's model as a Hugging Face folder that works without stackexp.

`memory: null` becomes a LlamaForCausalLM. A stack memory becomes a StackTransForCausalLM, whose code is a copy of
`modeling_stacktrans.py` in the folder.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import Tokenizer
from torch import Tensor

from stackexp import runs
from stackexp.config.compose import load_config
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.memory import StackMemoryConfig
from stackexp.config.model import TransformerConfig
from stackexp.data.tokenizer import get_end_of_text_id
from stackexp.errors import RunError
from stackexp.evaluation.loading import load_run
from stackexp.export.model_card import build_model_card
from stackexp.files import make_temporary_path, write_json
from stackexp.models.llama_import import to_llama_name

MODELING_FILE = Path(__file__).with_name("modeling_stacktrans.py")
MAX_SHARD_SIZE = "5GB"
MEMORY_OPTIONS = (
    *("axis", "discipline", "num_heads", "head_dim", "num_slots", "projection", "read", "read_mask", "residual_gate"),
    *("site", "push_norm", "action_input", "action_scale", "action_bias", "action_sharpness"),
)


def export_run(run: str, ckpt_path: str | None, target: Path, dtype: str, license_name: str) -> Path:
    """Write the folder `target`, which must not exist, and return the exported checkpoint.

    Args:
        run: A run folder.
        ckpt_path: "best", "last" (None) or the path of a checkpoint.
        target: The folder to write. It appears when it is complete.
        dtype: The dtype of the weights, float32 or bfloat16.
        license_name: The license in the model card.

    Raises:
        RunError: The model has an option that the exported code does not support, the checkpoint is unusable, or
            tokenizer.json is missing or differs from that of the training.
    """
    check_support(load_config(runs.open_run(run).config))
    loaded = load_run(run, ckpt_path or "last")
    if loaded.tokenizer is None:
        raise RunError(f"{loaded.folder.tokenizer}: missing; restore the tokenizer of the training data")
    partial = make_temporary_path(target)
    partial.mkdir(parents=True)
    try:
        end = get_end_of_text_id(loaded.tokenizer)
        config = build_hf_config(loaded.config, end, dtype)
        write_json(partial / "config.json", config)
        write_json(partial / "generation_config.json", _list_special_ids(end) | {"pad_token_id": end})
        if loaded.config.model.memory is not None:
            shutil.copyfile(MODELING_FILE, partial / MODELING_FILE.name)
        weights = convert_weights(loaded.model.state_dict(), loaded.config.model)
        weights = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in weights.items()}
        save_torch_state_dict(weights, partial, max_shard_size=MAX_SHARD_SIZE)
        _write_tokenizer(partial, loaded.tokenizer, loaded.config.data.context_length)
        (partial / "README.md").write_text(build_model_card(loaded, license_name, target.name), encoding="utf-8")
        partial.rename(target)  # fails if another process has written files there
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return loaded.checkpoint


def check_support(config: ExperimentConfig) -> None:
    """Raise RunError if the model has an option that the exported code does not support."""
    model, reason = config.model, None
    if config.data.objective != "language_modeling":
        found = f"task: {config.data.task}" if config.data.objective == "transduction" else f"kind: {config.data.kind}"
        reason = f"data.{found} is not text; only language models can be exported"
    elif not isinstance(model, TransformerConfig):
        reason = f"model.kind: {model.kind} cannot be exported; only kind: transformer can"
    elif not model.causal:
        reason = "model.causal: false cannot be exported; only causal models can"
    elif model.positional != "rope":
        reason = f"model.positional: {model.positional} cannot be exported; only rope can"
    elif unsupported := next((n for n in ("attention_window", "attention_log_base") if getattr(model, n)), None):
        reason = f"model.{unsupported}: {getattr(model, unsupported)} cannot be exported; only null can"
    elif model.qkv_bias:
        reason = "model.qkv_bias: true cannot be exported; only false can"
    elif model.memory is not None and type(model.memory) is not StackMemoryConfig:
        reason = f"model.memory.kind: {model.memory.kind} cannot be exported; only kind: stack and memory: null can"
    elif model.memory is not None and model.memory.feedback:
        reason = "model.memory.feedback: true cannot be exported; only false can"
    if reason:
        raise RunError(reason)


def build_hf_config(config: ExperimentConfig, end_of_text: int, dtype: str) -> dict[str, Any]:
    """Return the contents of config.json for transformers 4.57 and 5."""
    model, memory = config.model, config.model.memory
    contents: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if memory is not None:
        names = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
        auto_map = {auto: f"{MODELING_FILE.stem}.StackTrans{name}" for auto, name in names.items()}
        contents = {"architectures": ["StackTransForCausalLM"], "model_type": "stacktrans", "auto_map": auto_map}
        options = {name: getattr(memory, name) for name in MEMORY_OPTIONS}
        contents["memory"] = options | {"num_slots": memory.eval_num_slots or memory.num_slots}
    return contents | {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.hidden_size // model.num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.data.context_length,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": model.rope_theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},  # transformers 5
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": dtype,
        "torch_dtype": dtype,  # older tools
        **_list_special_ids(end_of_text),
    }


def _list_special_ids(end_of_text: int) -> dict[str, int]:
    """Return the ids that start and end a document. The padding id stays unset: Llama would not train its embedding."""
    return {"bos_token_id": end_of_text, "eos_token_id": end_of_text}


def convert_weights(weights: dict[str, Tensor], model: TransformerConfig) -> dict[str, Tensor]:
    """Return the weights of a `Transformer` under the names of LlamaForCausalLM or StackTransForCausalLM.

    `embedding_scale` is multiplied into the embedding. If the embedding is tied, the last norm is divided by it, which
    keeps the logits. muP's factor on the logits is multiplied into the last norm.
    """
    last_norm = 1.0 if model.mup_base_size is None else model.mup_base_size / model.hidden_size
    last_norm /= model.embedding_scale if model.tie_embeddings else 1
    factors = {"embedding.weight": model.embedding_scale, "norm.weight": last_norm}
    site = getattr(model.memory, "site", None)
    names = {".attention_memory.": ".memories.after_attention."}
    names[".memory."] = f".memories.{'after_block' if site == 'each_sublayer' else site}."
    converted = {}
    for name, tensor in weights.items():
        if name in factors:
            tensor = factors[name] * tensor
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        converted[to_llama_name(name)] = tensor
    return converted


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, context_length: int) -> None:
    """Write tokenizer.json, which adds no special tokens, as in the training data, and tokenizer_config.json."""
    contents = json.loads(tokenizer.to_str())
    if tokenizer.encode("").ids:
        contents["post_processor"] = None
    write_json(folder / "tokenizer.json", contents)
    end = tokenizer.id_to_token(get_end_of_text_id(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), end),
        "split_special_tokens": True,  # a text that contains the end-of-text token does not end a document
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    write_json(folder / "tokenizer_config.json", settings)
