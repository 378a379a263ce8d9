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
    log.warning("%s: %s; set %s=%d", key, problem, key, required)
