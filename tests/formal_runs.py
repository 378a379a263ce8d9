"""Run folders on formal languages as `fit` leaves them, without training: for tests of what is made of them."""

import json
from pathlib import Path
from typing import Any

import yaml

from stackexp.config.compose import compose, to_dict
from stackexp.config.formal_language import TASKS

TRANSFORMER = [
    *("model.kind=transformer", "model.hidden_size=64", "model.num_layers=5", "model.num_heads=4"),
    *("model.num_kv_heads=4", "model.tie_embeddings=false", "model.positional=none"),
]
STACK = [*TRANSFORMER, "model.memory.kind=stack", "model.memory.head_dim=8"]
OTHER = "even_pairs"
MODELS = {
    "LSTM": ["model.kind=lstm"],
    "StackRNN": ["model.kind=stack_rnn"],
    "StackAttn": [*TRANSFORMER, "model.memory.kind=stack_attention"],
    "Transformer": TRANSFORMER,
    "StackTrans": [*STACK, "model.memory.axis=time", "model.memory.read=top", "model.memory.feedback=true"],
    "StackTrans depth": STACK,
}
_trees: dict[tuple[str, ...], dict[str, Any]] = {}  # composing takes a while: once for all tasks and seeds


def write_run(folder: Path, model: str, task: str, *overrides: str, seed: int = 0) -> Path:
    """A run that has been begun: its config.yaml in `folder`, which is made."""
    if (model, *overrides) not in _trees:
        own = ["name=formal_table", "data.kind=formal_language", "schedule.warmup_steps=0"]
        sizes = [f"data.task={OTHER}", f"model.output_vocab_size={TASKS[OTHER].num_answer_symbols}"]
        _trees[model, *overrides] = to_dict(compose([], [*own, *sizes, *MODELS[model], *overrides]))
    tree = _trees[model, *overrides]
    sizes = {"vocab_size": TASKS[task].num_symbols + 1, "output_vocab_size": TASKS[task].num_answer_symbols}
    tree = tree | {"seed": seed, "model": tree["model"] | sizes, "data": tree["data"] | sizes | {"task": task}}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return folder


def finish(
    run: Path,
    *,
    beyond: float,
    up_to_100: float | None = None,
    validation: float = 1.0,
    loss: float = 0.25,
    file: str = "result.json",
    stride: int = 1,
    sequences: int = 512,
    longest: int = 500,
) -> Path:
    """Write what `fit` leaves when it is done: accuracy 1 up to 40, `up_to_100` (or `beyond`) to 100, then `beyond`."""
    lengths = [n for n in range(1, longest + 1) if (n - 41) % stride == 0]
    near = beyond if up_to_100 is None else up_to_100
    accuracy = {str(n): 1.0 if n <= 40 else near if n <= 100 else beyond for n in lengths}
    result = {"steps": 10_000, "parameters": 139_650, "memory_parameters": 1_300, "train_accuracy": 0.99}
    result |= {"validation_accuracy": validation, "validation_loss": loss, "accuracy": accuracy}
    (run / file).write_text(json.dumps(result | {"sequences_per_length": sequences, "length_stride": stride}))
    return run
