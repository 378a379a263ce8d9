"""Build, open, resume and close the Lightning loggers of a run, given by name or as `module:Class`.

TensorBoard and CSV files are written again from metrics.jsonl when a run resumes. W&B and MLflow continue the same run,
whose id is in the run folder, after the last step that they have received.
"""

import importlib.util
import os
import shutil
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, WandbLogger

from stackexp.config.affects import flatten_config
from stackexp.config.experiment import LOGGERS, ExperimentConfig
from stackexp.config.registry import build_class
from stackexp.errors import ConfigError
from stackexp.files import write_atomically
from stackexp.metric_tags import TRAIN_LOSS
from stackexp.runs import RunFolder
from stackexp.training.tensorboard import RunTensorBoard


def build_loggers(config: ExperimentConfig, run: RunFolder) -> list[Logger]:
    """Build the loggers of `logging.loggers`; nothing is written yet.

    Raises ConfigError if a library is missing, or a user's class cannot be built.
    """
    return [_build_logger(entry, config, run) for entry in config.logging.loggers]


def _build_logger(entry: Any, config: ExperimentConfig, run: RunFolder) -> Logger:
    if entry not in LOGGERS:
        logger = build_class("logging.loggers", entry)
        if not isinstance(logger, Logger):
            raise ConfigError(
                f"logging.loggers: {entry}: not a Logger; derive it from lightning.pytorch.loggers.Logger"
            )
        return logger
    if entry == "tensorboard":
        return RunTensorBoard(run.path)
    if entry == "csv":
        return CSVLogger(run.path, name="csv", version="")
    spec = importlib.util.find_spec(entry)
    if spec is None or spec.origin is None:  # a folder of this name is not the library
        raise ConfigError(f"logging.loggers: {entry}: not installed; run pip install 'stackexp[{entry}]'")
    path = _find_id_file(run, entry)
    run_id = path.read_text(encoding="utf-8") if path.exists() else None
    if entry == "mlflow":
        import mlflow

        uri = mlflow.get_tracking_uri()
        return MLFlowLogger(config.name, run_name=run.path.name, run_id=run_id, tracking_uri=uri, save_dir=None)
    import wandb

    return WandbLogger(
        name=run.path.name,
        save_dir=run.path,
        id=run_id,
        project=os.environ.get("WANDB_PROJECT", "stackexp"),
        group=config.name,
        settings=wandb.Settings(console="off", quiet=True),
    )


def _find_id_file(run: RunFolder, name: str) -> Any:
    """Return the file with the id of the logger's run; earlier versions called it mirror.<name>."""
    old = run.path / f"mirror.{name}"
    return old if old.exists() else run.path / f"logger.{name}"


def open_logger(logger: Logger, config: ExperimentConfig, run: RunFolder) -> None:
    """Open a logger, which may need a network, and log the options of a new run. Call it on rank 0 only."""
    if isinstance(logger, CSVLogger):
        shutil.rmtree(logger.log_dir, ignore_errors=True)
    is_new = True
    for cls, name in ((WandbLogger, "wandb"), (MLFlowLogger, "mlflow")):
        if isinstance(logger, cls):
            is_new = not _find_id_file(run, name).exists()
            write_atomically(
                _find_id_file(run, name), str(logger.version if name == "mlflow" else logger.experiment.id)
            )
    if is_new and not isinstance(
        logger, RunTensorBoard | CSVLogger
    ):  # they log to the run folder, which has config.yaml
        logger.log_hyperparams(flatten_config(config))
    _ = logger.experiment if hasattr(logger, "experiment") else None


def find_first_step(logger: Logger, logged: int) -> int:
    """Return the first step whose lines a logger still needs; earlier sessions have logged up to step `logged`."""
    if isinstance(logger, WandbLogger):  # 0 offline: each offline session logs all lines
        return logger.experiment.summary.get("trainer/global_step", 0)
    if isinstance(logger, MLFlowLogger):
        return max((point.step for point in logger.experiment.get_metric_history(logger.run_id, TRAIN_LOSS)), default=0)
    return 0 if isinstance(logger, RunTensorBoard | CSVLogger) else logged


def send_line(logger: Logger, line: dict[str, Any]) -> None:
    """Send a line of metrics.jsonl to a logger."""
    if isinstance(logger, RunTensorBoard):
        logger.log_line(line)
    else:
        metrics = {tag: value for tag, value in line.items() if tag not in ("step", "time") and value is not None}
        logger.log_metrics(metrics, step=line["step"])


def close_logger(logger: Logger, is_finished: bool) -> None:
    """Wait until everything is sent, and mark the run as finished or failed."""
    if isinstance(logger, WandbLogger):
        logger.experiment.finish(exit_code=0 if is_finished else 1)
    elif isinstance(logger, RunTensorBoard):
        logger.close()
    else:
        logger.finalize("success" if is_finished else "failed")
