"""Options of formal language datasets (Deletang et al. 2023)."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from omegaconf import OmegaConf

from stackexp.config.experiment import ExperimentConfig
from stackexp.config.fields import Problems, at_least, from_up_to, within
from stackexp.config.registry import register

TASKS: dict[str, Any] = importlib.import_module("stackexp.tasks").TASKS
"""The tasks by name. They live on a higher floor, but importing them needs neither numpy nor torch."""

if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[tuple(TASKS)]

OmegaConf.register_resolver("task_inputs", lambda task: TASKS[task].num_symbols + 1, replace=True)  # + empty token
OmegaConf.register_resolver("task_outputs", lambda task: TASKS[task].num_answer_symbols, replace=True)


@register("data", "formal_language", builds="stackexp.datamodules.formal_language:FormalLanguageData")
@dataclass
class FormalLanguageConfig:
    """Strings of one task, drawn as they are needed: symbols, then an empty token for each symbol of the answer.

    A batch has one length: with `longest_fraction` the longest, otherwise uniform in 1 .. longest. Lengths above
    max_length are for the test.
    """

    objective: ClassVar[str] = "transduction"
    lengths_vary: ClassVar[bool] = True

    kind: str = "formal_language"
    task: TaskName = "reverse_string"
    vocab_size: int = "${task_inputs:${data.task}}"  # type: ignore[assignment]  # the empty token is the last id
    output_vocab_size: int = "${task_outputs:${data.task}}"  # type: ignore[assignment]
    batch_size: int = at_least(1, 128)  # sequences per optimizer step, over all devices
    max_length: int = at_least(1, 40)  # longest string to train on
    curriculum_steps: int = at_least(0, 0)  # the longest grows from curriculum_start to max_length over these steps
    curriculum_start: int = at_least(1, 4)
    longest_fraction: float = within(0, 1, 0.0)  # this share of the batches has the longest strings of its step
    label_smoothing: float = from_up_to(0, 1, 0.0)  # in training: this share of a target goes to all symbols alike
    validation_max_length: int = at_least(1, 60)  # while fitting: every length above max_length up to this
    validation_sequences: int = at_least(1, 32)  # of each such length, from a seed of their own
    eval_max_length: int = at_least(1, 500)
    eval_length_stride: int = at_least(1, 1)  # test every so many-th length, counted from max_length + 1 both ways
    eval_sequences: int = at_least(1, 512)  # of each length tested
    eval_batch_size: int = at_least(1, 128)  # changes no figure

    def problems(self) -> Problems:
        least = TASKS[self.task].min_length
        for name in ["curriculum_start", "max_length"] if self.curriculum_steps else ["max_length"]:
            if (length := getattr(self, name)) < least:
                yield name, f"{length} is too short: strings of {self.task} have {least} symbols or more; set {least}"
        if self.curriculum_steps and self.curriculum_start > self.max_length:
            yield "curriculum_start", f"must not be larger than max_length {self.max_length}"
        for name in ("validation_max_length", "eval_max_length"):
            if getattr(self, name) <= self.max_length:
                yield name, f"must be larger than max_length {self.max_length}: it is there to test longer strings"

    @property
    def tested_lengths(self) -> list[int]:
        first = self.max_length + 1
        return [n for n in range(1, self.eval_max_length + 1) if (n - first) % self.eval_length_stride == 0]

    # As the sections of language modeling tell it, for the plan.
    @property
    def context_length(self) -> int:
        """Symbols and empty tokens of the longest training string."""
        return self.max_length + TASKS[self.task].output_length(self.max_length)

    @property
    def global_batch_tokens(self) -> int:
        """Of a step in the mean over the lengths, as they are once a curriculum has ended."""
        task = TASKS[self.task]
        lengths = range(task.min_length, self.max_length + 1)
        uniform = sum(n + task.output_length(n) for n in lengths) / len(lengths)
        return round(self.batch_size * (uniform + self.longest_fraction * (self.context_length - uniform)))

    def micro_batch(self, devices: int) -> int:
        return self.batch_size // devices

    def experiment_problems(self, config: ExperimentConfig, trains: bool) -> Problems:
        """What model and trainer must agree in with the strings."""
        output, devices = config.model.output_vocab_size, config.trainer.devices * config.trainer.num_nodes
        if output != self.output_vocab_size:
            found = f"{self.task} has {self.output_vocab_size} answers, but the model {output}"
            yield "model.output_vocab_size", f"{found}; set model.output_vocab_size=${{data.output_vocab_size}}"
        if self.batch_size % devices:
            multiple = f"trainer.devices * num_nodes = {devices}"
            yield "data.batch_size", f"{self.batch_size} is not a multiple of {multiple}"


def model_label(options: Mapping[str, Any]) -> str:
    """What results call a model, of a config's full keys: transformer, stacktrans, stacktrans-depth, stack_attention,
    lstm, stack_rnn; stacktrans-queue, stacktrans-depth-push_only; or the name of a plugin's kind."""
    kind, memory = options["model.kind"], options.get("model.memory.kind")
    if kind != "transformer" or memory != "stack":
        return kind if kind != "transformer" else memory or kind
    discipline = options["model.memory.discipline"]
    depth = ["depth"] * (options["model.memory.axis"] == "depth")
    return "-".join(["stacktrans", *depth, *[discipline] * (discipline != "stack")])
