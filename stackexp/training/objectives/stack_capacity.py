"""A warning for stacks with too few slots for the strings of a formal language."""

import logging

from stackexp.config.experiment import ExperimentConfig
from stackexp.config.formal_language import FormalLanguageConfig
from stackexp.tasks import TASKS

log = logging.getLogger(__name__)


def warn_about_small_stack(config: ExperimentConfig, stage: str) -> None:
    """Warn if the stack is too small for the longest strings of a stage; "fit" also checks the training strings."""
    data, memory = config.data, getattr(config.model, "memory", None) or config.model
    assert isinstance(data, FormalLanguageConfig)
    num_slots = getattr(memory, "num_slots", None)
    if num_slots is None or getattr(memory, "axis", "time") == "depth":
        return
    section = "model" if memory is config.model else "model.memory"
    if stage == "fit":
        _check_slots(f"{section}.num_slots", num_slots, data, data.max_length)
    longest = data.validation_max_length if stage == "validate" else data.eval_max_length
    _check_slots(f"{section}.eval_num_slots", memory.eval_num_slots or num_slots, data, longest)


def _check_slots(key: str, num_slots: int, data: FormalLanguageConfig, length: int) -> None:
    required = TASKS[data.task].required_slots(length)
    if required is None or num_slots >= required:
        return
    problem = f"{num_slots} slots are too few for {data.task} at length {length}, which requires {required}"
    if data.task == "reverse_string" and length > data.max_length:
        accuracy = compute_best_accuracy(num_slots, range(data.max_length + 1, length + 1))
        problem += f" (accuracy at most {accuracy:.2f} over lengths {data.max_length + 1}..{length})"
    log.warning("%s: %s; set %s=%d", key, problem, key, required)


def compute_best_accuracy(num_slots: int, lengths: range) -> float:
    """Return the mean accuracy over `lengths` of a stack that reverses `num_slots` symbols and guesses the others."""
    return sum(0.5 + 0.5 * min(1.0, num_slots / length) for length in lengths) / len(lengths)
