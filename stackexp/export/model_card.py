"""The model card (README.md) of an exported model, filled from its run."""

from pathlib import Path

import yaml

from stackexp.data import hash_log
from stackexp.evaluation.loading import LoadedRun
from stackexp.evaluation.scores import format_scores
from stackexp.files import read_json
from stackexp.models.checkpoints import EMA, split_path

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
    stacks = f"{memory.num_heads} stacks of {memory.num_slots} slots of size {memory.head_dim}"
    return (
        f"StackTrans (arXiv 2507.15343), a Transformer with differentiable stacks between its layers, with {size}, "
        f"and {stacks} (axis {memory.axis}, discipline {memory.discipline})."
    )


def _list_facts(loaded: LoadedRun) -> dict[str, str]:
    """Return what is known about the training of the exported checkpoint, as cells of a Markdown table."""
    config, step, path = loaded.config, _find_step(loaded), loaded.folder.path
    facts = {"run": f"`{path}`", "checkpoint": f"`{loaded.checkpoint}`"}
    if step is not None:
        facts |= {"steps": f"{step:,}", "training tokens": f"{step * config.data.global_batch_tokens:,}"}
    if loaded.checkpoint.name == EMA:
        facts["weights"] = f"exponential moving average with decay {config.trainer.ema_decay}"
    facts["context length"] = f"{config.data.context_length:,} tokens"
    hashes = [line for line in hash_log.read_hash_log(path) if step is not None and line["step"] <= step]
    if hashes:
        facts["training data"] = f"hash `{hashes[-1]['hash']}` of all tokens of steps 1 to {hashes[-1]['step']:,}"
    if sessions := loaded.folder.read_sessions():
        facts |= {"stackexp commit": f"`{sessions[-1].get('commit')}`", "command": f"`{sessions[0].get('command')}`"}
    return facts


def _find_step(loaded: LoadedRun) -> int | None:
    """Return the step of the checkpoint; None for a file with weights only."""
    name = split_path(loaded.checkpoint)[0].name
    return int(name) if name.isdecimal() else None


def _format_validation(loaded: LoadedRun) -> str:
    """Return the table of the recorded scores of this checkpoint, or the command that computes them."""
    folder, step, is_average = loaded.folder, _find_step(loaded), loaded.checkpoint.name == EMA
    records = [read_json(path) for path in sorted(folder.path.glob("validate*.json"))]
    parts = (folder.path.resolve().name, *loaded.checkpoint.parts[-3 if is_average else -2 :])
    records = [r for r in records if Path(r["checkpoint"]).parts[-len(parts) :] == parts and not r.get("overrides")]
    sets = {name: scores for record in records for name, scores in record["sets"].items()}
    if folder.is_finished and not is_average and (result := folder.read_result()).steps == step:
        sets |= result.figures.get("sets", {})
    if sets:
        return format_scores(sets, style="markdown")
    command = f"python -m stackexp validate --run {folder.path} --ckpt_path {loaded.checkpoint}"
    return f"This checkpoint has no recorded scores; compute them with\n\n    {command}"
