"""Options of formal language datasets (Deletang et al. 2023)."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import OmegaConf

from stackexp.config.experiment import ExperimentConfig
from stackexp.config.fields import Errors, option
from stackexp.config.registry import register

TASKS: dict[str, Any] = importlib.import_module("stackexp.tasks").TASKS
"""The tasks by name. They live on a higher floor, but importing them needs neither numpy nor torch."""

OmegaConf.register_resolver(  # the inputs include the empty token; an unknown task is reported later
    "task_inputs", lambda task: TASKS[task].num_symbols + 1 if task in TASKS else 1, replace=True
)
OmegaConf.register_resolver(
    "task_outputs", lambda task: TASKS[task].num_answer_symbols if task in TASKS else 1, replace=True
)


@register("data", "formal_language", builds="stackexp.datamodules.formal_language:FormalLanguageData")
@dataclass
class FormalLanguageConfig:
    """Random strings of one task. A sequence is a string, then an empty token for each symbol of the answer.

    All strings of a batch have one length: uniform from the shortest of the task to max_length, or with probability
    `longest_fraction` the longest. With a curriculum, the longest length grows from curriculum_start to max_length over
    curriculum_steps.
    """

    objective: ClassVar[str] = "transduction"
    lengths_vary: ClassVar[bool] = True

    kind: str = "formal_language"
    task: str = option("reverse_string", choices=TASKS, changes_scores=True)
    """The formal language."""
    vocab_size: int = "${task_inputs:${data.task}}"  # type: ignore[assignment]
    """Number of input token ids, set by the task; the last id is the empty token."""
    output_vocab_size: int = "${task_outputs:${data.task}}"  # type: ignore[assignment]
    """Number of different answer symbols, set by the task."""

    batch_size: int = option(128, min=1)
    """Strings per optimizer step over all devices."""
    max_length: int = option(40, min=1)
    """Longest training string."""
    curriculum_steps: int = option(0, min=0)
    """Steps over which the longest string grows from curriculum_start to max_length."""
    curriculum_start: int = option(4, min=1)
    """Longest string at the first step of the curriculum."""
    longest_fraction: float = option(0.0, min=0, max=1)
    """Share of the batches whose strings all have the longest length."""
    label_smoothing: float = option(0.0, min=0, below=1)
    """Probability mass that training targets spread evenly over all symbols."""

    validation_max_length: int = option(60, min=1, affects="evaluation")
    """Validations during training test every length from max_length + 1 to this one."""
    validation_sequences: int = option(32, min=1, affects="evaluation")
    """Strings of each length in validations during training."""

    eval_max_length: int = option(500, min=1, affects="evaluation")
    """Longest test string."""
    eval_length_stride: int = option(1, min=1, affects="evaluation")
    """Test every N-th length, starting at max_length + 1."""
    eval_sequences: int = option(512, min=1, affects="evaluation")
    """Test strings of each length."""
    eval_batch_size: int = option(128, min=1, affects="execution")
    """Strings per device and forward pass in an evaluation."""

    def find_errors(self) -> Errors:
        """Yield the errors that involve several options."""
        task = TASKS[self.task]
        sizes = {"vocab_size": task.num_symbols + 1, "output_vocab_size": task.num_answer_symbols}
        for name, size in sizes.items():
            if getattr(self, name) != size:
                yield name, f"data.task {self.task} has {size}, found {getattr(self, name)}; remove this option"
        least = task.min_length
        for name in ["curriculum_start", "max_length"] if self.curriculum_steps else ["max_length"]:
            if (length := getattr(self, name)) < least:
                yield name, f"{length} is too short: the shortest string of {self.task} has {least} symbols"
        if self.curriculum_steps and self.curriculum_start > self.max_length:
            yield "curriculum_start", f"must not be larger than max_length {self.max_length}"
        for name in ("validation_max_length", "eval_max_length"):
            if getattr(self, name) <= self.max_length:
                yield name, f"must be larger than max_length {self.max_length}, to include longer strings"
        first, last = self.max_length + 1, self.eval_max_length
        if first <= last and max(self.tested_lengths) < first + (last - first) // 2:
            yield "eval_length_stride", f"tests no length in the upper half of {first} to {last}; use a smaller one"

    def find_experiment_errors(self, config: ExperimentConfig, is_training: bool) -> Errors:
        """Yield the errors that involve other sections; keys are full keys."""
        if (output := config.model.output_vocab_size) != self.output_vocab_size:
            found = f"data.task {self.task} has {self.output_vocab_size} output symbols, the model {output}"
            yield "model.output_vocab_size", f"{found}; set model.output_vocab_size=${{data.output_vocab_size}}"
        if self.batch_size % config.trainer.world_size:
            multiple = f"trainer.devices * trainer.num_nodes = {config.trainer.world_size}"
            yield "data.batch_size", f"{self.batch_size} is not a multiple of {multiple}"

    @property
    def tested_lengths(self) -> list[int]:
        """Return the string lengths of the test."""
        first = self.max_length + 1
        return [n for n in range(1, self.eval_max_length + 1) if (n - first) % self.eval_length_stride == 0]

    @property
    def context_length(self) -> int:
        """Return the tokens in the longest training sequence, including empty tokens."""
        return self.max_length + TASKS[self.task].output_length(self.max_length)

    @property
    def global_batch_tokens(self) -> int:
        """Return the mean tokens per optimizer step after the curriculum."""
        task = TASKS[self.task]
        lengths = range(task.min_length, self.max_length + 1)
        uniform = sum(n + task.output_length(n) for n in lengths) / len(lengths)
        return round(self.batch_size * (uniform + self.longest_fraction * (self.context_length - uniform)))


def get_model_label(options: Mapping[str, Any]) -> str:
    """Return the short name of a model from the options {full key: value} of its config.

    One of transformer, stacktrans, stacktrans-depth, stacktrans-queue, stacktrans-depth-push_only, ...,
    stack_attention, lstm, stack_rnn, or the kind of a plugin.
    """
    kind, memory = options["model.kind"], options.get("model.memory.kind")
    if kind != "transformer" or memory != "stack":
        return kind if kind != "transformer" else memory or kind
    discipline = options["model.memory.discipline"]
    depth = ["depth"] * (options["model.memory.axis"] == "depth")
    return "-".join(["stacktrans", *depth, *[discipline] * (discipline != "stack")])
