"""Write run folders on formal languages as `fit` leaves them, without training."""

from pathlib import Path
from typing import Any

import yaml

from stackexp.config.compose import compose, to_dict
from stackexp.files import write_hashed_json
from stackexp.reports.formal import build_formal
from stackexp.reports.report import format_report
from stackexp.tasks import TASKS

ALL_LENGTHS, NEAR_LENGTHS = (41, 500), (41, 100)
TRANSFORMER = [
    *("model.kind=transformer", "model.hidden_size=64", "model.num_layers=5", "model.num_heads=4"),
    *("model.num_kv_heads=4", "model.tie_embeddings=false", "model.positional=none"),
]
STACK = [*TRANSFORMER, "model.memory.kind=stack", "model.memory.head_dim=8"]
MODELS = {
    "LSTM": ["model.kind=lstm"],
    "StackRNN": ["model.kind=stack_rnn"],
    "StackAttn": [*TRANSFORMER, "model.memory.kind=stack_attention"],
    "Transformer": TRANSFORMER,
    "StackTrans": [*STACK, "model.memory.axis=time", "model.memory.read=top", "model.memory.feedback=true"],
    "StackTrans depth": STACK,
}
_configs: dict[tuple[str, ...], dict[str, Any]] = {}  # composing is slow: once for all tasks and seeds


def write_run(folder: Path, model: str, task: str, *overrides: str, seed: int = 0) -> Path:
    """Write the config.yaml and the marker of a started run into the new folder and return the folder."""
    if (model, *overrides) not in _configs:
        base = ["name=formal_table", "data.kind=formal_language", "schedule.warmup_steps=0", "data.task=even_pairs"]
        base.append(f"model.output_vocab_size={TASKS['even_pairs'].num_answer_symbols}")
        _configs[model, *overrides] = to_dict(compose([], [*base, *MODELS[model], *overrides]))
    config = _configs[model, *overrides]
    sizes = {"vocab_size": TASKS[task].vocab_size, "output_vocab_size": TASKS[task].num_answer_symbols}
    model_config, data = config["model"] | sizes, config["data"] | sizes | {"task": task}
    folder.mkdir(parents=True)
    (folder / ".stackexp").touch()
    tree = config | {"seed": seed, "model": model_config, "data": data}
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
    """Write the result of a run: accuracy 1 up to length 40, `up_to_100` (or `beyond`) to 100, then `beyond`."""
    lengths = [n for n in range(1, longest + 1) if (n - 41) % stride == 0]
    near = beyond if up_to_100 is None else up_to_100
    accuracy = {str(n): 1.0 if n <= 40 else near if n <= 100 else beyond for n in lengths}
    result = {"steps": 10_000, "parameters": 139_650, "memory_parameters": 1_300, "train_accuracy": 0.99}
    result |= {"validation_accuracy": validation, "validation_loss": loss, "accuracy": accuracy}
    result |= {"version": 1, "sequences_per_length": sequences, "length_stride": stride}
    write_hashed_json(run / file, result)
    return run


def format_formal(runs: Path, lengths: tuple[int, int] = ALL_LENGTHS) -> str:
    return format_report(build_formal([runs], lengths), "markdown")


def read_row(text: str, task: str) -> dict[str, str]:
    """Return the cells of a task in its Markdown table by column; the paper's scores as `paper of COLUMN`."""
    lines = text.splitlines()
    line = next(line for line in lines if line.startswith("|") and f"| {task} " in line)
    header = [line for line in lines[: lines.index(line)] if "| task " in line][-1]
    names = [name.strip() for name in header.strip("|").split("|")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    names = [f"paper of {names[i - 1]}" if name == "paper" else name for i, name in enumerate(names)]
    row = dict(zip(names, cells, strict=True))
    del row["class"]
    return row
