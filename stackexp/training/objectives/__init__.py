"""Training objectives: the parts of a run that differ between language modeling, formal languages and arithmetic."""

import importlib

from stackexp.config.experiment import ExperimentConfig
from stackexp.training.objectives.base import Objective

OBJECTIVES = {
    "language_modeling": "stackexp.training.objectives.language_modeling:LanguageModelingObjective",
    "arithmetic": "stackexp.training.objectives.arithmetic:ArithmeticObjective",
    "transduction": "stackexp.training.objectives.formal_language:FormalLanguageObjective",
}


def build_objective(config: ExperimentConfig) -> Objective:
    """Build the objective that fits the config's kind of data."""
    module, name = OBJECTIVES[config.data.objective].split(":")
    return getattr(importlib.import_module(module), name)(config)
