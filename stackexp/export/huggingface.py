"""Write a run's model as a Hugging Face folder that works without stackexp.

`memory: null` becomes a LlamaForCausalLM. A stack memory becomes a StackTransForCausalLM, whose code is a copy of
`modeling_stacktrans.py` in the folder.
"""

import json
import math
import shlex
import shutil
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import save_torch_state_dict
from tokenizers import Tokenizer
from torch import Tensor

from stackexp import runs
from stackexp.config.compose import load_config
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.layers import read_overrides
from stackexp.config.memory import StackMemoryConfig
from stackexp.config.model import TransformerConfig
from stackexp.data import hash_log
from stackexp.data.tokenizer import get_end_of_text_id
from stackexp.errors import RunError
from stackexp.evaluation.loading import LoadedRun, load_run
from stackexp.evaluation.scores import format_scores
from stackexp.files import create_folder_atomically, write_json
from stackexp.frame import has_run_options, read_evaluation
from stackexp.models.llama_import import ROPE_KEYS, to_llama_name
from stackexp.runs import DATE_FORMAT, EMA, split_path

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
    with create_folder_atomically(target) as folder:
        end = get_end_of_text_id(loaded.tokenizer)
        write_json(folder / "config.json", build_hf_config(loaded.config, end, dtype))
        write_json(folder / "generation_config.json", _list_special_ids(end) | {"pad_token_id": end})
        if loaded.config.model.memory is not None:
            shutil.copyfile(MODELING_FILE, folder / MODELING_FILE.name)
        weights = convert_weights(loaded.model.state_dict(), loaded.config.model)
        weights = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in weights.items()}
        save_torch_state_dict(weights, folder, max_shard_size=MAX_SHARD_SIZE)
        _write_tokenizer(folder, loaded.tokenizer, loaded.config.data.context_length)
        (folder / "README.md").write_text(build_model_card(loaded, license_name, target.name), encoding="utf-8")
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
    elif model.memory is not None and model.memory.empty_slot:
        reason = "model.memory.empty_slot: true cannot be exported; only false can"
    if reason:
        raise RunError(reason)


def build_hf_config(config: ExperimentConfig, end_of_text: int, dtype: str) -> dict[str, Any]:
    """Return the contents of config.json for transformers 4.57 and 5."""
    model, memory = config.model, config.model.memory
    kind = "default" if model.rope_scaling == "none" else model.rope_scaling
    rope = {"rope_type": kind} | {theirs: getattr(model, ours) for ours, theirs in ROPE_KEYS.get(kind, {}).items()}
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
        "rope_scaling": None if kind == "default" else rope,
        "rope_parameters": rope | {"rope_theta": model.rope_theta},  # transformers 5
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
    end_id = get_end_of_text_id(tokenizer)
    end = tokenizer.id_to_token(end_id)
    if end_id in tokenizer.encode(end, add_special_tokens=False).ids:
        problem = f"the exported tokenizer reads {end} in a text as the end of a document, unlike training"
        print(f"note: {problem}", file=sys.stderr)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), end),
        "split_special_tokens": True,  # a text that contains the end-of-text token does not end a document
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    write_json(folder / "tokenizer_config.json", settings)


# The model card (README.md) of an exported model, filled from its run

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
{license_line}
---

# {title}

{description}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{title}"{trust})
tokenizer = AutoTokenizer.from_pretrained("{title}"{trust})
tokens = model.generate(**tokenizer("The first", return_tensors="pt"), max_new_tokens=50)
print(tokenizer.decode(tokens[0]))
```

{trust_note}The tokenizer adds no special tokens.

## Training

| | |
|---|---|
{rows}

## Validation

{validation}
"""


def build_model_card(loaded: LoadedRun, license_name: str, title: str) -> str:
    """Return the text of the model card; `title` is the name of the exported folder."""
    memory = loaded.config.model.memory
    return CARD.format(
        license_line=yaml.safe_dump({"license": license_name}).strip(),
        title=title,
        description=_describe(loaded),
        trust=", trust_remote_code=True" if memory else "",
        trust_note="The code of the model is `modeling_stacktrans.py` in this folder. " if memory else "",
        rows="\n".join(f"| {name} | {value} |" for name, value in _list_facts(loaded).items()),
        validation=_format_validation(loaded),
    )


def _describe(loaded: LoadedRun) -> str:
    model, count = loaded.config.model, f"{loaded.model.num_parameters():,}"
    size = f"{count} parameters: {model.num_layers} layers of width {model.hidden_size}"
    if model.memory is None:
        return f"A Transformer of the Llama family with {size}."
    memory = model.memory
    stacks = f"{memory.num_heads} stacks of {memory.eval_num_slots or memory.num_slots} slots of size {memory.head_dim}"
    return (
        f"StackTrans (arXiv 2507.15343), a Transformer with differentiable stacks between its layers, with {size}, "
        f"and {stacks} (axis {memory.axis}, discipline {memory.discipline})."
    )


def _list_facts(loaded: LoadedRun) -> dict[str, str]:
    """Return what is known about the training of the exported checkpoint, as cells of a Markdown table."""
    config, step, path = loaded.config, _find_step(loaded), loaded.folder.path
    facts = {"config" if step is None else "run": f"`{path}`", "checkpoint": f"`{loaded.checkpoint}`"}
    if step is not None:
        facts |= {"steps": f"{step:,}", "training tokens": f"{step * config.data.global_batch_tokens:,}"}
        if loaded.checkpoint.name == EMA:
            facts["weights"] = f"exponential moving average with decay {config.trainer.ema_decay}"
    facts["context length"] = f"{config.data.context_length:,} tokens"
    if step is None:
        return facts
    hashes = [line for line in hash_log.read_hash_log(path) if line["step"] <= step]
    if hashes:
        facts["training data"] = f"hash `{hashes[-1]['hash']}` of all tokens of steps 1 to {hashes[-1]['step']:,}"
    if sessions := loaded.folder.read_sessions():
        facts |= {"stackexp commit": f"`{sessions[-1].get('commit')}`", "command": f"`{sessions[0].get('command')}`"}
    return facts


def _find_step(loaded: LoadedRun) -> int | None:
    """Return the step of a checkpoint of the run itself; None for another run's, or for a file with weights only."""
    path, _ = split_path(loaded.checkpoint)
    return int(path.name) if loaded.folder.has_checkpoint(path) and path.name.isdecimal() else None


def _format_validation(loaded: LoadedRun) -> str:
    """Return the table of the recorded scores of this checkpoint, or the command that computes them."""
    folder, step, is_average = loaded.folder, _find_step(loaded), loaded.checkpoint.name == EMA
    records = [read_evaluation(path) for path in sorted(folder.path.glob("validate*.json"))]
    sets = {name: scores for r in records if _is_validation(r, loaded) for name, scores in _list_sets(r, loaded)}
    if folder.is_finished and (result := folder.read_result()).steps == step:
        sets |= (result.figures.get(EMA, {}) if is_average else result.figures).get("sets", {})
    if sets:  # JSON has null for NaN and infinity
        numbers = {name: {k: math.nan if v is None else v for k, v in scores.items()} for name, scores in sets.items()}
        return format_scores(numbers, style="markdown")
    run, checkpoint = (shlex.quote(str(path)) for path in (folder.path, loaded.checkpoint))
    command = f"python -m stackexp validate --run {run} --ckpt_path {checkpoint}"
    return f"This checkpoint has no recorded scores; compute them with\n\n    {command}"


def _is_validation(record: dict[str, Any], loaded: LoadedRun) -> bool:
    """Return True if a record has scores of this checkpoint, with the options and the validation sets of the run."""
    folder, checkpoint, path = loaded.folder, loaded.checkpoint, Path(record["checkpoint"])
    is_same = path.resolve() == checkpoint.resolve()
    if _find_step(loaded) is not None:  # the run may have moved since
        parts = (folder.path.resolve().name, *checkpoint.parts[-3 if checkpoint.name == EMA else -2 :])
        is_same |= path.parts[-len(parts) :] == parts
    elif is_same and checkpoint.is_file():  # it may have been replaced since
        scored = datetime.strptime(record["time"], DATE_FORMAT).timestamp()  # without the fraction of the second
        is_same = scored >= int(checkpoint.stat().st_mtime)
    has_own_sets = not any(key.startswith("data.validation") for key, *_ in read_overrides(record["overrides"]))
    return is_same and has_own_sets and has_run_options(record, folder.read_options())


def _list_sets(record: dict[str, Any], loaded: LoadedRun) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the scores of the sets of a record, except those read from a path under the name of a set of the run."""
    config = {name.partition("/")[0] for name in getattr(loaded.config.data, "validation", {})}
    replaced = config & {name.partition("/")[0] for name in record.get("paths", {})}
    yield from ((name, scores) for name, scores in record["sets"].items() if name.partition("/")[0] not in replaced)
