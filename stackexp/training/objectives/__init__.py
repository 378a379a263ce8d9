"""Training objectives: the parts of a run that differ between language modeling, formal languages and arithmetic."""

import pkgutil

from stackexp.config.experiment import ExperimentConfig
from stackexp.training.objectives.base import Objective

OBJECTIVES = {
    "language_modeling": "stackexp.training.objectives.language_modeling:LanguageModelingObjective",
    "arithmetic": "stackexp.training.objectives.arithmetic:ArithmeticObjective",
    "transduction": "stackexp.training.objectives.formal_language:FormalLanguageObjective",
}


def build_objective(config: ExperimentConfig) -> Objective:
    """Build the objective that fits the config's kind of data."""
    return pkgutil.resolve_name(OBJECTIVES[config.data.objective])(config)
