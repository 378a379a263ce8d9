"""Load a finished or running experiment from its run folder: for notebooks, scripts and the verbs that run a model."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from stackexp import runs
from stackexp.config.compose import compose, load_config
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.model import TransformerConfig
from stackexp.data.tokenizer import encode_text, load_tokenizer
from stackexp.datamodules.arithmetic import check_symbols
from stackexp.errors import ConfigError, RunError
from stackexp.evaluation.evaluate import open_data
from stackexp.evaluation.generation import continue_text
from stackexp.evaluation.request import EvaluationRequest, ResumableEvaluation
from stackexp.evaluation.sampling import find_sampling_error
from stackexp.lazy import LazyModule
from stackexp.models import checkpoints
from stackexp.models.stack_recording import record_memories
from stackexp.models.warm_start import warn_about_options
from stackexp.modules.base import TrainingModule
from stackexp.runs import RunFolder
from stackexp.training.objectives import build_objective
from stackexp.training.processes import start_processes
from stackexp.training.trainer import build_trainer, find_device_type

log = logging.getLogger(__name__)
pandas = LazyModule("pandas")


@dataclass(frozen=True, repr=False)
class LoadedRun:
    """A run with its weights. `module` is its LightningModule; `tokenizer` is None for formal languages."""

    folder: RunFolder
    config: ExperimentConfig
    checkpoint: Path
    module: TrainingModule
    tokenizer: Tokenizer | None
    overrides: tuple[str, ...] = ()
    """The changes by `modify`, as KEY=VALUE."""

    def __repr__(self) -> str:
        facts = [str(self.folder.path), f"checkpoint {self.checkpoint.name}", type(self.model).__name__]
        facts += [f"{self.model.num_parameters():,} parameters", *self.overrides]
        return f"LoadedRun({', '.join(facts)})"

    @property
    def model(self) -> Any:
        """The model, a torch.nn.Module; after `load_run`, on the CPU and in eval mode."""
        return self.module.model

    @cached_property
    def metrics(self) -> Any:
        """metrics.jsonl as a pandas DataFrame, with a row for each line and NaN where a line lacks a metric."""
        return pandas.DataFrame(list(self.folder.read_metrics()))

    def generate(
        self,
        prompt: str = "",
        max_new_tokens: int = 128,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
    ) -> str:
        """Return the prompt and its continuation, on the device of the model.

        Raises RunError for formal languages, and ConfigError for options out of range, such as a negative temperature.
        """
        if error := find_sampling_error(max_new_tokens, temperature, top_p, seed):
            raise ConfigError(f"generate: {error}")
        ids = self._encode("generate", prompt)
        if len(ids) > (context := self.config.data.context_length):
            log.warning(f"the prompt has {len(ids):,} tokens, more than the {context:,} of a training sequence")
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
        assert self.tokenizer is not None
        precision = self.config.trainer.precision
        return continue_text(self.model, self.tokenizer, prompt, precision=precision, seed=seed, **sampling)

    def logits(self, text: str | list[int]) -> Tensor:
        """Return the logits [T, V] of a text or of token ids, float32 on the CPU; row t predicts token t + 1.

        Raises RunError for an empty text, for ids that the model does not have, or for text if the run is one of formal
        languages, which have ids only.
        """
        return self._run_model(text if isinstance(text, list) else self._encode("logits", text, minimum=1))

    def inspect(self, text: str | list[int]) -> Any:
        """Return what each memory does at each token, as a pandas DataFrame with a row for each memory, token and head.

        The columns are layer, site, position, token, head, and the values that the verb `inspect` shows.

        Raises RunError if the model has no memory to inspect, and as `logits` does.
        """
        ids = text if isinstance(text, list) else self._encode("inspect", text, minimum=1)
        with record_memories(self.model) as recordings:
            self._run_model(ids)
        tokens = [self.tokenizer.decode([i], skip_special_tokens=False) if self.tokenizer else str(i) for i in ids]
        frames = []
        for recording in recordings:
            values = {name: value[0] for name, value in recording.values.items()}  # [T, H]
            num_heads = max(value.shape[1] for value in values.values())
            columns: dict[str, Any] = {"layer": recording.layer, "site": recording.site}
            columns |= {"position": np.repeat(np.arange(len(ids)), num_heads), "token": np.repeat(tokens, num_heads)}
            columns |= {"head": np.tile(np.arange(num_heads), len(ids))}
            columns |= {name: value.expand(-1, num_heads).flatten().cpu() for name, value in values.items()}
            frames.append(pandas.DataFrame(columns))
        return pandas.concat(frames, ignore_index=True)

    def validate(self, sets: Sequence[str] = ()) -> Any:
        """Score the model on the config's validation sets, or on `sets`, named as in `validate --sets`.

        Runs on the device of `trainer.accelerator`, and writes nothing.

        Returns:
            A pandas DataFrame with a row per set; for text: loss, perplexity, bits per byte, and their counts.

        Raises:
            ConfigError: There is no set of this name.
            RunError: A set is missing or does not fit the model.
        """
        names = (sets,) if isinstance(sets, str) else tuple(sets)
        request = EvaluationRequest("validate", self.config, self.folder, sets=names)
        device = next(self.model.parameters()).device
        with start_processes(self.config.trainer, find_device_type(self.config)) as processes:
            data = open_data(request, self.checkpoint)
            evaluation = ResumableEvaluation("validate", self.config, data, processes, self.checkpoint, output=None)
            evaluation.run(build_trainer(self.config, processes, []), self.module)
        self.module.eval().to(device)
        return pandas.DataFrame.from_dict(evaluation.sets, orient="index")

    def modify(self, **options: Any) -> "LoadedRun":
        """Return the run with other memory options, such as discipline="queue", and the weights of its checkpoint.

        Raises ConfigError for an unknown option, and RunError if the weights do not fit.
        """
        options = {f"model.memory.{name}": json.dumps(value) for name, value in options.items()}
        options = dict(override.split("=", 1) for override in self.overrides) | options
        return _load(self.folder, self.checkpoint, tuple(f"{key}={value}" for key, value in options.items()))

    def _encode(self, caller: str, text: str, minimum: int = 0) -> list[int]:
        """Return the ids of a text. Raises RunError for runs without a tokenizer and for texts that are too short."""
        if self.tokenizer is None:
            raise RunError(
                f"{self.folder.path}: trained on {self.config.data.kind}, not on text; it cannot {caller} text"
            )
        if self.config.data.objective == "arithmetic":
            check_symbols(f"{caller}: the text", text)
        ids = encode_text(self.tokenizer, text)
        if len(ids) < minimum:
            raise RunError(f"{caller}: the text has no tokens; give a longer one")
        return ids

    @torch.no_grad()
    def _run_model(self, ids: list[int]) -> Tensor:
        """Return the logits [T, V] of token ids. Raises RunError if there are none, or the model does not have one."""
        vocab_size = self.config.model.vocab_size
        if not ids or min(ids) < 0 or max(ids) >= vocab_size:
            found = f"{min(ids)} to {max(ids)}" if ids else "none"
            raise RunError(f"{self.folder.path}: expected token ids from 0 to {vocab_size - 1}, found {found}")
        tokens = torch.tensor([ids], device=next(self.model.parameters()).device)
        return self.model(tokens).logits[0].float().cpu()


def load_run(path: str | Path, checkpoint: str | Path | None = None) -> LoadedRun:
    """Load a run folder.

    Args:
        path: The run folder, runs/<name>/<id>.
        checkpoint: "best", "last", "ema" or the path of a checkpoint. None: the newest, for formal languages the best
            by validation, as in `validate` and `test`.

    Raises:
        RunError: `path` is not a run folder, or the checkpoint is missing or does not fit the config.
        ConfigError: The run has a plugin outside the current project, and STACKEXP_TRUST_PLUGINS is not 1.
    """
    folder = runs.open_run(str(path))
    objective = build_objective(load_config(folder.config))  # a bad config fails before a missing checkpoint
    path = checkpoints.find_checkpoint(folder, str(checkpoint)) if checkpoint else objective.choose_checkpoint(folder)
    run = _load(folder, path, ())
    warn_about_options(run.checkpoint, run.config)  # config.yaml can be edited
    return run


def _load(folder: RunFolder, checkpoint: Path, overrides: tuple[str, ...]) -> LoadedRun:
    """Load a run, its config changed so that the model runs whole and eager, on any single device."""
    config = compose([str(folder.config)], list(overrides), is_training=False)
    config.trainer.strategy = "single"
    config.trainer.devices = config.trainer.num_nodes = 1
    config.trainer.compile = False  # inputs of many lengths would each compile again
    if isinstance(config.model, TransformerConfig):
        config.model.attention = "sdpa"  # the other kernels need CUDA, and some need bfloat16
    if hasattr(config.model, "kernel"):
        config.model.kernel = "torch"  # fla needs CUDA
    module = build_objective(config).build_module(weights=checkpoint)
    tokenizer_file = folder.find_tokenizer(checkpoint)
    tokenizer = load_tokenizer(tokenizer_file) if tokenizer_file else None
    return LoadedRun(folder, config, checkpoint, module.eval(), tokenizer, overrides)
