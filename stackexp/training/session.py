"""A run of `stackexp fit` as its parts see it, and what of the verbs depends on the objective."""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import lightning.pytorch as pl

from stackexp.config.compose import to_dict
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.yaml_files import flatten
from stackexp.modules.base import TrainingModule
from stackexp.runs import RunFolder
from stackexp.training.callbacks.metrics_log import RunRecord
from stackexp.training.processes import Processes

VERBS = {"language_modeling": "stackexp.training.language_modeling", "transduction": "stackexp.training.transduction"}


def objective(config: ExperimentConfig) -> ModuleType:
    """The module with the functions that training and evaluation call for an objective:

    begin(config, stage): warn of what the config cannot reach. trains_on(config): in a line.
    callbacks(config, folder): besides those of every run. checkpoint_of(run): the one that is evaluated unless another
    is asked for. finish(session): what comes after the last step, result.json last. side_by_side(config, folders): text
    that compares finished runs, of which "" is that of `config`. report(asked, checkpoint, sets): print and write the
    figures of an evaluation.
    """
    return importlib.import_module(VERBS[config.data.objective])


@dataclass(frozen=True)
class Session:
    config: ExperimentConfig
    module: TrainingModule
    data: pl.LightningDataModule
    trainer: pl.Trainer
    processes: Processes
    folder: RunFolder
    record: RunRecord
    started_at: float  # time.perf_counter()


def hyperparameters(config: ExperimentConfig, chosen: tuple[str, ...], but: tuple[str, ...] = ()) -> dict[str, Any]:
    """The options whose full keys begin as `chosen`, for the HParams tab; not those that begin as `but`."""
    options = flatten(to_dict(config))
    return {key: value for key, value in options.items() if key.startswith(chosen) and not key.startswith(but)}
