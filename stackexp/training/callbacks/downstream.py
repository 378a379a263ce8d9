"""Score downstream benchmarks every few steps of a run."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.seed import isolate_rng
from tokenizers import Tokenizer

from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import ConfigError, RunError
from stackexp.metric_tags import DOWNSTREAM
from stackexp.modules.base import TrainingModule
from stackexp.runs import RunFolder
from stackexp.training.callbacks.metrics_log import MetricsLog
from stackexp.training.callbacks.steps import StepCallback, Throughput, raise_if_stopped
from stackexp.training.signals import StopRequest
from stackexp.training.watchdog import restart_timeouts


@isolate_rng()  # lm-eval draws random numbers for each task name
def load_tasks(config: ExperimentConfig, tokenizer: Tokenizer | None) -> list[Any]:
    """Return the tasks of `evaluation.tasks` with their datasets, before the first step.

    Raises RunError if a dataset cannot be read, or the tokenizer is unknown; ConfigError for unknown tasks, and for
    tasks that generate with sharded weights.
    """
    section = config.evaluation
    if not section.tasks:
        return []
    if tokenizer is None:
        raise RunError("evaluation.tasks: the tokenizer of the training data is unknown; prepare them with a tokenizer")
    from stackexp.evaluation.benchmarks.tasks import TaskLoader, check_installed

    check_installed()
    import stackexp.evaluation.benchmarks.evaluate  # noqa: F401  # takes seconds, in which other ranks would wait

    loader = TaskLoader(Path(section.datasets) if section.datasets else None)
    tasks = [loader.load(name) for name in loader.expand(section.tasks)]
    generating = [task.task_name for task in tasks if task.OUTPUT_TYPE == "generate_until"]
    if generating and config.trainer.is_sharded:
        strategy = config.trainer.strategy
        raise ConfigError(
            f"evaluation.tasks: {generating[0]} generates text, which {strategy} does not support; remove it, or set "
            "trainer.strategy=ddp"
        )
    return tasks


class Downstream(StepCallback, pl.callbacks.Checkpoint):
    """Scores `tasks` every `evaluation.interval` steps, after the checkpoint of that step.

    Every rank scores a share of the requests. A stop takes effect between two tasks; the resumed run, which has
    logged the step but not its scores, scores all tasks again before its next step. Lightning calls callbacks of
    the type Checkpoint after all others, in their order, so this one must have that type too.
    """

    def __init__(
        self, config: ExperimentConfig, tasks: list[Any], folder: RunFolder, metrics_log: MetricsLog, stop: StopRequest
    ):
        self._config, self._tasks, self._folder = config, tasks, folder
        self._metrics_log, self._stop = metrics_log, stop

    def on_train_start(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Score the tasks if the run stopped before it had logged them."""
        super().on_train_start(trainer, module)
        if trainer.strategy.broadcast(self._is_missing(trainer.global_step)):
            self._score(trainer, module)

    def on_step_end(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        if self._step % self._config.evaluation.interval == 0:
            self._score(trainer, module)

    def _is_missing(self, step: int) -> bool:
        if not step or step % self._config.evaluation.interval:
            return False
        logged = self._folder.find_logged_tags(step)
        return bool(logged) and not any(tag.startswith(f"{DOWNSTREAM}/") for tag in logged)

    @isolate_rng()
    def _score(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        from stackexp.evaluation.benchmarks.evaluate import score_task
        from stackexp.evaluation.benchmarks.models import RunModel

        config = self._config
        lm = RunModel(
            module.model,
            trainer.datamodule.tokenizer,
            config.data.context_length,
            batch_size=config.evaluation.batch_size,
            precision=config.trainer.precision,
            is_sharded=config.trainer.is_sharded,
            after_batch=lambda done, total: restart_timeouts(trainer, self._stop),
        )
        metrics: dict[str, float] = {}
        for task in self._tasks:
            if self._saved_step == trainer.global_step:  # otherwise a stop now would lose steps
                raise_if_stopped(self._stop, module.device)
            scores = score_task(lm, task, config.evaluation.limit)
            metrics |= {f"{DOWNSTREAM}/{task.task_name}/{name}": value for name, value in scores.flatten().items()}
            restart_timeouts(trainer, self._stop)
        self._metrics_log.write(trainer, module, metrics)
        for callback in trainer.callbacks:
            if isinstance(callback, Throughput):
                callback.restart()
