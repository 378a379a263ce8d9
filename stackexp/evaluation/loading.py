"""Load a finished or running experiment from its run folder, for notebooks and scripts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import nn

from stackexp import runs
from stackexp.config.compose import load_config
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.model import TransformerConfig
from stackexp.data.tokenizer import load_tokenizer
from stackexp.errors import RunError
from stackexp.models import checkpoints
from stackexp.runs import RunFolder
from stackexp.training.objectives import build_objective


@dataclass(frozen=True)
class LoadedRun:
    """A run with its weights. `model` is on the CPU in eval mode; `tokenizer` is None for formal languages.

    `metrics` is a pandas DataFrame if pandas is installed, otherwise a dict of lists; both have one row for each line
    of metrics.jsonl and NaN (None in lists) where a line lacks a metric.
    """

    folder: RunFolder
    config: ExperimentConfig
    checkpoint: Path
    model: nn.Module
    tokenizer: Tokenizer | None
    metrics: Any


def load_run(path: str | Path, checkpoint: str | Path | None = None) -> LoadedRun:
    """Load a run folder.

    Args:
        path: The run folder, runs/<name>/<id>.
        checkpoint: "best", "last" or the path of a checkpoint. None: the best by validation, or else the last.

    Raises:
        RunError: `path` is not a run folder, or the checkpoint is missing or does not fit the config.
        ConfigError: The run has a plugin outside the current project, and STACKEXP_TRUST_PLUGINS is not 1.
    """
    folder = runs.open_run(str(path))
    config = _load_config(folder)
    chosen = str(checkpoint) if checkpoint else "best" if folder.best_checkpoint() else "last"
    found = checkpoints.find_checkpoint(folder, chosen)
    model = build_objective(config).build_module(weights=found).model.eval()
    tokenizer_file = folder.find_tokenizer(found)
    tokenizer = load_tokenizer(tokenizer_file) if tokenizer_file else None
    return LoadedRun(folder, config, found, model, tokenizer, _read_metrics(folder))


def open_text_run(path: str) -> tuple[RunFolder, ExperimentConfig]:
    """Return the folder of a language model and its config, with the whole model on one device.

    Raises RunError if `path` is not a run folder, or the run was not trained on text.
    """
    folder = runs.open_run(path)
    config = _load_config(folder)
    if config.data.objective == "transduction":
        raise RunError(f"{path}: trained on {config.data.task}, not on text; score it with `test --run {path}`")
    return folder, config


def _load_config(folder: RunFolder) -> ExperimentConfig:
    """Return the config of a run, changed so that the model runs whole and eager, on any device."""
    config = load_config(folder.config)
    config.trainer.strategy = "single"
    config.trainer.compile = False  # inputs of many lengths would each compile again
    if isinstance(config.model, TransformerConfig):
        config.model.attention = "sdpa"  # the other kernels need CUDA, and some need bfloat16
    return config


def _read_metrics(folder: RunFolder) -> Any:
    lines = list(folder.read_metrics())
    columns = {key: [line.get(key) for line in lines] for key in dict.fromkeys(key for line in lines for key in line)}
    try:
        import pandas  # optional
    except ModuleNotFoundError:
        return columns
    return pandas.DataFrame(columns)
