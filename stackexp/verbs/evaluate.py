"""`stackexp validate` and `stackexp test`: the figures of a checkpoint on every named set."""

import json
import time
from pathlib import Path
from typing import Any, Literal

from stackexp import runs
from stackexp.config import registry
from stackexp.config.schema import ExperimentConfig
from stackexp.errors import RunError
from stackexp.modules import checkpoints
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.metrics import macro_average
from stackexp.reports.tables import set_table
from stackexp.runs import RunFolder
from stackexp.verbs.processes import started
from stackexp.verbs.trainer import accelerator, build_trainer, interruptible


def run(
    stage: Literal["validate", "test"],
    run: str | None,
    config: ExperimentConfig,
    ckpt_path: str | None,
    overrides: list[str],
) -> int:
    """Evaluate on the whole of every set: a run's newest checkpoint, or `ckpt_path`.

    `config` is the run's with `overrides` on top, or any other. With a run the figures also go to <run>/<stage>.json.
    """
    folder = runs.at(run) if run else None
    with started(config.trainer, accelerator(config)) as processes:
        checkpoint = processes.agree(lambda: checkpoints.choose(folder, ckpt_path) if folder else Path(ckpt_path))
        data = registry.build("data", config.data, seed=config.seed)
        module = LanguageModeling(config, weights=checkpoint)
        trainer = build_trainer(config, processes, [])
        evaluate = trainer.validate if stage == "validate" else trainer.test
        if not data.set_names(stage):
            raise RunError(f"data.{stage}: no sets to {stage} on; name some in the config's data section")
        with interruptible():
            evaluate(module, data, verbose=False)
        if processes.first:
            print(f"{checkpoint}\n\n{set_table(module.set_metrics)}")
            if folder is not None:
                _write(folder, stage, checkpoint, overrides, module.set_metrics)
    return 0


def _write(folder: RunFolder, stage: str, checkpoint: Path, overrides: list[str], sets: dict[str, Any]) -> None:
    record = {
        "checkpoint": str(checkpoint),
        "overrides": overrides,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "sets": sets,
        "average": macro_average(sets),
    }
    runs.write_atomically(folder.path / f"{stage}.json", json.dumps(record, indent=2))
