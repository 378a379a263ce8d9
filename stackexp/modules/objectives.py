"""Which LightningModule an experiment trains: its data say what they are to be used for."""

import importlib
from pathlib import Path

from stackexp.config.experiment import ExperimentConfig
from stackexp.modules.base import TrainingModule

MODULES = {
    "language_modeling": "stackexp.modules.language_modeling:LanguageModeling",
    "transduction": "stackexp.modules.transduction:Transduction",
}


def build_module(config: ExperimentConfig, weights: Path | None = None) -> TrainingModule:
    module, name = MODULES[config.data.objective].split(":")
    return getattr(importlib.import_module(module), name)(config, weights)
