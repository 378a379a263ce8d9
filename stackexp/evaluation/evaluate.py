"""`stackexp validate` and `stackexp test`: the figures of a checkpoint on every named set."""

import logging
from pathlib import Path

import lightning.pytorch as pl

from stackexp import runs
from stackexp.config import registry
from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import RunError
from stackexp.evaluation.progress import EvaluationRecord
from stackexp.evaluation.requests import Evaluation, Sets, Stage, resumable
from stackexp.models import checkpoints
from stackexp.modules.objectives import build_module
from stackexp.training.keyboard import interruptible
from stackexp.training.processes import started
from stackexp.training.session import objective
from stackexp.training.trainer import accelerator, build_trainer


def run(
    stage: Stage,
    run: str | None,
    config: ExperimentConfig,
    ckpt_path: str | None,
    sets: list[str],
    out: str | None,
    overrides: list[str],
) -> int:
    """Evaluate a run's checkpoint (see `objective`), or `ckpt_path`, on all of the config's sets, or on `sets`.

    `config` is the run's with `overrides` on top, or any other. The figures go to `Evaluation.record` as each
    set is done; the same command after a kill does the rest.
    """
    folder, file = runs.at(run) if run else None, Path(out) if out else None
    return _evaluate(Evaluation(stage, config, folder, ckpt_path, tuple(sets), file, tuple(overrides)))


def _evaluate(asked: Evaluation) -> int:
    logging.basicConfig(format="%(message)s")
    config = asked.config
    with started(config.trainer, accelerator(config)) as processes:
        data = processes.together(lambda: _opened(asked))
        checkpoint = processes.agree(lambda: _checkpoint(asked))
        if processes.first:
            objective(config).begin(config, asked.stage)

        def evaluate(record: EvaluationRecord) -> Sets:
            module = build_module(config, weights=checkpoint)
            trainer = build_trainer(config, processes, [record])
            with interruptible(trainer):
                (trainer.validate if asked.stage == "validate" else trainer.test)(module, data, verbose=False)
            return module.set_metrics

        with resumable(asked.stage, config, data, processes, checkpoint, asked.record) as whole:
            sets = whole.figures(evaluate)
            if processes.first:
                objective(config).report(asked, checkpoint, sets)
    return 0


def _data(asked: Evaluation) -> pl.LightningDataModule:
    data = registry.build("data", asked.config.data, seed=asked.config.seed)
    if asked.run and asked.run.tokenizer.is_file():
        data.tokenizer_file = asked.run.tokenizer
    if asked.sets:
        data.choose(asked.stage, list(asked.sets))
    if not data.set_names(asked.stage):
        section = "data.validation" if asked.stage == "validate" else "data.test"
        raise RunError(
            f"{section}: no sets to {asked.stage} on; name some in the config's data section, or with --sets"
        )
    return data


def _opened(asked: Evaluation) -> pl.LightningDataModule:
    data = _data(asked)
    data.prepare_data()
    data.setup(asked.stage)
    return data


def _checkpoint(asked: Evaluation) -> Path:
    if not asked.run:
        return Path(asked.ckpt_path)
    if asked.ckpt_path:
        return checkpoints.choose(asked.run, asked.ckpt_path)
    return objective(asked.config).checkpoint_of(asked.run)
