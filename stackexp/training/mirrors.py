"""Copies of metrics.jsonl in Weights & Biases and MLflow, sent by a thread so that training never waits for them."""

import importlib.util
import logging
import os
import queue
import re
import threading
from typing import Any

from stackexp.config.affects import flatten_config
from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import ConfigError, first_line
from stackexp.files import write_atomically
from stackexp.runs import RunFolder

CLOSE_TIMEOUT_SECONDS = 30  # to send the remaining lines when a session ends
MLFLOW_PARAMS_PER_REQUEST = 100
log = logging.getLogger(__name__)


def check_installed(config: ExperimentConfig) -> None:
    """Raise ConfigError if the library of one of `logging.mirrors` is missing."""
    for name in config.logging.mirrors:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of this name is not the library
            raise ConfigError(f"logging.mirrors: {name}: not installed; run pip install 'stackexp[{name}]'")


class WandbService:
    """Weights & Biases. Offline runs cannot be resumed, so each session writes all lines to a folder of its own."""

    def open(self, run: RunFolder, config: ExperimentConfig, run_id: str | None) -> tuple[str, int]:
        """Start a run, or continue `run_id`; return its id and the last step that it has.

        It belongs to the project $WANDB_PROJECT or `stackexp`, and to a group named like the config.
        """
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "stackexp"),
            group=config.name,
            name=run.path.name,
            id=run_id,
            resume="allow",
            dir=run.path,
            config=flatten_config(config),
            settings=wandb.Settings(console="off", quiet=True),
        )
        self._run.define_metric("*", step_metric="step")
        return self._run.id, self._run.summary.get("step", 0)

    def write(self, line: dict[str, Any]) -> None:
        """Send a line of metrics.jsonl."""
        self._run.log({tag: value for tag, value in line.items() if tag != "time" and value is not None})

    def close(self, is_finished: bool) -> None:
        """Wait until everything is sent, and mark the run as finished or stopped."""
        self._run.finish(exit_code=0 if is_finished else 1)


class MlflowService:
    """MLflow at $MLFLOW_TRACKING_URI, or MLflow's default: the file mlflow.db in the current folder."""

    def open(self, run: RunFolder, config: ExperimentConfig, run_id: str | None) -> tuple[str, int]:
        """Start a run of the experiment named like the config, or continue `run_id`; return its id and last step."""
        for library in ("mlflow", "alembic", "urllib3"):  # urllib3 logs every retry
            logging.getLogger(library).setLevel(logging.ERROR)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client, self._id = MlflowClient(), run_id or ""
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            return run_id, int(self._client.get_run(run_id).data.metrics.get("step", 0))
        experiment = self._client.get_experiment_by_name(config.name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(config.name)
        self._id = self._client.create_run(experiment_id, run_name=run.path.name).info.run_id
        params = [Param(_clean(key), str(value)) for key, value in flatten_config(config).items()]
        for first in range(0, len(params), MLFLOW_PARAMS_PER_REQUEST):
            self._client.log_batch(self._id, params=params[first : first + MLFLOW_PARAMS_PER_REQUEST])
        return self._id, 0

    def write(self, line: dict[str, Any]) -> None:
        """Send a line of metrics.jsonl. A tag has _ in place of characters that MLflow does not permit."""
        from mlflow.entities import Metric

        milliseconds = round(line["time"] * 1000)
        values = {_clean(tag): value for tag, value in line.items() if value is not None}
        metrics = [Metric(tag, value, milliseconds, line["step"]) for tag, value in values.items() if tag != "time"]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, is_finished: bool) -> None:
        """Mark the run as finished or stopped."""
        self._client.set_terminated(self._id, "FINISHED" if is_finished else "KILLED")


def _clean(name: str) -> str:
    """Replace the characters that MLflow does not permit in names."""
    return re.sub(r"[^\w./ -]", "_", name)


SERVICES: dict[str, type[WandbService | MlflowService]] = {"wandb": WandbService, "mlflow": MlflowService}


class Mirror:
    """A thread that sends the lines of a run to one service.

    A resumed run continues the same mirrored run, whose id is in the run folder. It first receives the lines of
    metrics.jsonl that it lacks; steps that the run repeats are sent again. If the service fails, one warning is logged,
    and nothing more is sent in this session.
    """

    def __init__(self, name: str, run: RunFolder, config: ExperimentConfig):
        self._name, self._run, self._config = name, run, config
        self._lines, self._has_failed = list(run.read_metrics()), False
        self._queue: queue.SimpleQueue[dict[str, Any] | bool] = queue.SimpleQueue()  # a bool closes the mirror
        self._thread = threading.Thread(target=self._send_all, name=f"mirror-{name}", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Queue a line."""
        self._queue.put(line)

    def close(self, is_finished: bool) -> None:
        """Wait for the lines that are not sent yet, but at most CLOSE_TIMEOUT_SECONDS."""
        self._queue.put(is_finished)
        self._thread.join(CLOSE_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            self._warn(f"still sending after {CLOSE_TIMEOUT_SECONDS} s, gave up")

    def _send_all(self) -> None:
        try:
            service = SERVICES[self._name]()
            path = self._run.path / f"mirror.{self._name}"
            run_id, last_step = service.open(self._run, self._config, path.read_text() if path.exists() else None)
            write_atomically(path, run_id)
            for line in self._lines:
                if line["step"] >= last_step:  # again, because a step and its validation have lines of their own
                    service.write(line)
            while not isinstance(item := self._queue.get(), bool):
                service.write(item)
            service.close(item)
        except Exception as error:  # of any library; the run must not depend on a mirror
            self._warn(first_line(error) or type(error).__name__)

    def _warn(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            text = "logging.mirrors: %s: %s; nothing more is sent to it, but %s has every line"
            log.warning(text, self._name, reason, self._run.metrics)
