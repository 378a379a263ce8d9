"""Training objectives: everything about a run that depends on what its model is trained for."""

import importlib

from stackexp.config.experiment import ExperimentConfig
from stackexp.training.objectives.base import Objective

OBJECTIVES = {
    "language_modeling": "stackexp.training.objectives.language_modeling:LanguageModelingObjective",
    "transduction": "stackexp.training.objectives.formal_language:FormalLanguageObjective",
}


def build_objective(config: ExperimentConfig) -> Objective:
    """Build the objective that the config's data are for."""
    module, name = OBJECTIVES[config.data.objective].split(":")
    return getattr(importlib.import_module(module), name)(config)
