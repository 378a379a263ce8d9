"""The callbacks of a training run, and the order in which Lightning calls them after each batch."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from stackexp.config.experiment import ExperimentConfig
from stackexp.training.callbacks.checkpoint import RunState, StepCheckpoint
from stackexp.training.callbacks.downstream import Downstream
from stackexp.training.callbacks.metrics_log import MetricsLog
from stackexp.training.callbacks.missed_validation import MissedValidation
from stackexp.training.callbacks.profiler import Profiler
from stackexp.training.callbacks.progress import Progress
from stackexp.training.callbacks.step_requests import StepRequests
from stackexp.training.callbacks.throughput import Throughput
from stackexp.training.callbacks.weight_average import AverageWeights
from stackexp.training.resume import Start
from stackexp.training.signals import StopRequest


def build_callbacks(
    config: ExperimentConfig,
    start: Start,
    metrics_log: MetricsLog,
    stop: StopRequest,
    metric_callbacks: list[pl.Callback],
    tasks: Sequence[Any] = (),
) -> list[pl.Callback]:
    """Build the callbacks in the order in which they must run; `metric_callbacks` are the objective's callbacks.

    `tasks` are the benchmarks of `evaluation.tasks`.

    1. Measure: throughput and `metric_callbacks` add their values to `module.step_metrics`; the average of
       the weights is updated.
    2. Request: stop and save requests are added to the same metrics.
    3. Log: one all-reduce shares metrics and requests. Rank 0 writes them to the log, and the progress shows them.
    4. Save: the checkpoint is written after the log. This callback also acts on the requests shared in step 3.
    5. Score benchmarks: a stop during them resumes from the checkpoint of step 4.

    A resumed run first opens the log, then runs the validation that it missed. The profiler comes before all others,
    so that its trace includes them.
    """
    return [
        *([Profiler(start.folder.path, config.trainer.profile)] if config.trainer.profile else []),
        Throughput(),
        *([AverageWeights()] if config.trainer.ema_decay is not None else []),
        *metric_callbacks,
        StepRequests(stop, config.trainer.checkpoint_interval_minutes),
        metrics_log,
        Progress(config.logging, metrics_log),
        MissedValidation(start.folder, config.trainer, start.step),
        RunState(start.folder),
        StepCheckpoint(start.folder, config.trainer, stop),
        *([Downstream(config, list(tasks), start.folder, metrics_log, stop)] if tasks else []),
    ]
