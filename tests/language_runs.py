"""Write run folders of language models as `fit` leaves them, without training."""

from pathlib import Path
from typing import Any

import yaml

from stackexp.config.compose import compose, to_dict
from stackexp.files import write_hashed_json, write_json_lines

TOKENS_PER_STEP = 1024
_configs: dict[tuple[str, ...], dict[str, Any]] = {}  # composing is slow: once for all seeds


def write_run(
    folder: Path, *overrides: str, seed: int = 0, losses: list[float] | None = None, data: str = "aa"
) -> Path:
    """Write the config, the metrics and the hash log of an unfinished run on the quickstart's data."""
    if overrides not in _configs:
        _configs[overrides] = to_dict(compose(["quickstart"], overrides))
    folder.mkdir(parents=True)
    (folder / ".stackexp").touch()
    (folder / "config.yaml").write_text(yaml.safe_dump(_configs[overrides] | {"seed": seed}, sort_keys=False))
    lines = [
        {"step": step, "tokens": step * TOKENS_PER_STEP, "train/loss": loss}
        for step, loss in enumerate(losses or [], 1)
    ]
    write_json_lines(folder / "metrics.jsonl", lines)
    record = {"step": 10, "tokens": 10 * TOKENS_PER_STEP, "hash": f"{data}{seed:02d}"}
    write_json_lines(folder / "data.jsonl", [record])
    return folder


def finish(folder: Path, loss: float, **figures: Any) -> Path:
    """Write the result of a run: this loss on its validation set, and 0.5 less in training."""
    result = {"version": 1, "steps": 10, "tokens": 10 * TOKENS_PER_STEP, "parameters": 1000, "memory_parameters": 0}
    result |= {"train_loss": {"first": 9.0, "last_20_steps": loss - 0.5}}
    result |= {"sets": {"held-out": {"loss": loss, "perplexity": 100 * loss}}, "average": {"loss": loss}}
    write_hashed_json(folder / "result.json", result | figures)
    return folder
