"""Load a finished or running experiment from its run folder: for notebooks, scripts and the verbs that run a model."""

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import nn

from stackexp import runs
from stackexp.config.compose import load_config
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.model import TransformerConfig
from stackexp.data.tokenizer import load_tokenizer
from stackexp.datamodules.arithmetic import check_symbols
from stackexp.errors import RunError
from stackexp.evaluation.generation import continue_text
from stackexp.models import checkpoints
from stackexp.runs import RunFolder
from stackexp.training.objectives import build_objective

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedRun:
    """A run with its weights. `model` is on the CPU in eval mode; `tokenizer` is None for formal languages."""

    folder: RunFolder
    config: ExperimentConfig
    checkpoint: Path
    model: nn.Module
    tokenizer: Tokenizer | None

    @cached_property
    def metrics(self) -> Any:
        """metrics.jsonl as a pandas DataFrame, with a row for each line and NaN where a line lacks a metric."""
        import pandas  # takes half a second

        return pandas.DataFrame(list(self.folder.read_metrics()))

    def generate(
        self,
        prompt: str = "",
        max_new_tokens: int = 128,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
    ) -> str:
        """Return the prompt and its continuation, on the device of the model. Raises RunError for formal languages."""
        if self.tokenizer is None:
            raise RunError(f"{self.folder.path}: trained on {self.config.data.kind}, not on text; it cannot generate")
        if self.config.data.objective == "arithmetic":
            check_symbols("generate: --prompt", prompt)
        length, context = len(self.tokenizer.encode(prompt, add_special_tokens=False)), self.config.data.context_length
        if length > context:
            log.warning(f"the prompt has {length:,} tokens, more than the {context:,} of a training sequence")
        model: Any = self.model
        sampling: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
        }
        return continue_text(model, self.tokenizer, prompt, **sampling)


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
    return LoadedRun(folder, config, found, model, tokenizer)


def _load_config(folder: RunFolder) -> ExperimentConfig:
    """Return the config of a run, changed so that the model runs whole and eager, on any device."""
    config = load_config(folder.config)
    config.trainer.strategy = "single"
    config.trainer.compile = False  # inputs of many lengths would each compile again
    if isinstance(config.model, TransformerConfig):
        config.model.attention = "sdpa"  # the other kernels need CUDA, and some need bfloat16
    return config
