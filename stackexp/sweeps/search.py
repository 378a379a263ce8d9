"""Adaptive search with Optuna inside the driver. The study is in memory; the run folders are the record."""

import time
from collections.abc import Iterable
from typing import Any

from stackexp.errors import ConfigError
from stackexp.files import write_json
from stackexp.metric_tags import AVERAGED_STEPS, TRAIN_LOSS
from stackexp.sweeps.driver import TrialSource
from stackexp.sweeps.grid import Values, format_label
from stackexp.sweeps.schema import Space
from stackexp.sweeps.sweep import Sweep
from stackexp.sweeps.trials import State, Trial, get_state, read_objective, read_tail

MAX_DRAWS = 30
"""The search space counts as exhausted after this many draws in a row without a new trial."""


class Study(TrialSource):
    """The trials of a sweep's `search`: those in its folder, and new ones until there are `search.trials`.

    `parallel` limits the unfinished trials: with fewer of them, more results inform the choice of the next trial.
    Raises ConfigError if Optuna is missing.
    """

    def __init__(self, sweep: Sweep, parallel: int | None = None) -> None:
        try:
            import optuna
        except ModuleNotFoundError:
            raise ConfigError("search requires Optuna; run: pip install 'stackexp[optuna]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        assert sweep.config.search is not None
        self._optuna, self._sweep, self._search = optuna, sweep, sweep.config.search
        self._parallel = parallel or self._search.trials
        prune = self._search.prune
        pruner: Any = optuna.pruners.NopPruner()
        if prune:
            pruner = optuna.pruners.SuccessiveHalvingPruner(prune.min_steps, prune.reduction_factor)
        self._study = optuna.create_study(direction=sweep.config.direction, pruner=pruner)
        self._optuna_trials: dict[Trial, Any] = {}
        self._reported_results: set[Trial] = set()
        self._reported_steps: dict[Trial, int] = {}
        self._prune_reasons: dict[Trial, dict[str, Any]] = {}
        self._is_exhausted = False
        self.get_trials()
        seed = self._search.seed + len(self._optuna_trials)  # a resumed search must not repeat its draws
        self._tpe = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        self._random = optuna.samplers.RandomSampler(seed=seed)

    def get_trials(self) -> list[Trial]:
        """Return the known trials, including those that another driver has added."""
        for trial in self._sweep.find_search_trials({trial.folder for trial in self._optuna_trials}):
            self._study.enqueue_trial(trial.values)
            self._optuna_trials[trial] = self._draw()[1]
            self._report_progress(trial, trial.folder.read_metrics())
        self._report_results()
        return list(self._optuna_trials)

    def add_trials(self, count: int) -> None:
        """Choose up to `count` new trials, within the limits of the search."""
        open_trials = self._optuna_trials.keys() - self._reported_results
        unfinished = sum(get_state(trial) != State.FAILED for trial in open_trials)
        for _ in range(min(count, self._parallel - unfinished)):
            if not self.is_complete():
                self._add_trial()

    def is_complete(self) -> bool:
        """Return True if no trial will be added."""
        return self._is_exhausted or len(self._optuna_trials) >= self._search.trials

    def find_pruned(self, running: list[Trial]) -> list[Trial]:
        """Return the trials whose newest value is not among the best at its step; pruned.json records both."""
        pruned = []
        for trial in running:
            if trial in self._reported_results:  # finished, but its process has not ended yet
                continue
            reason = None if trial.pruned.exists() else self._report_progress(trial, read_tail(trial.folder.metrics))
            if reason:
                write_json(trial.pruned, reason)
                pruned.append(trial)
        return pruned

    def _add_trial(self) -> None:
        """Draw a new trial. If TPE repeats a trial, the following draws are random."""
        for draw in range(MAX_DRAWS):
            self._study.sampler = self._random if draw else self._tpe
            values, optuna_trial = self._draw()
            try:
                trial = self._sweep.build_trial(values, format_label(values))
            except ConfigError as error:
                print(f"skipped an invalid trial: {error}", flush=True)
            else:
                if trial not in self._optuna_trials:
                    self._optuna_trials[trial] = optuna_trial
                    return
            self._study.tell(optuna_trial, state=self._optuna.trial.TrialState.FAIL)
        print(f"{MAX_DRAWS} draws gave no new trial: the search space is exhausted", flush=True)
        self._is_exhausted = True

    def _draw(self) -> tuple[Values, Any]:
        trial = self._study.ask()
        return {key: _suggest(trial, key, space) for key, space in self._search.space.items()}, trial

    def _report_results(self) -> None:
        """Report the trials that have ended to Optuna."""
        states = self._optuna.trial.TrialState
        for trial in self._optuna_trials.keys() - self._reported_results:
            state = get_state(trial)
            if state == State.DONE:
                value, _ = read_objective(trial, self._sweep.config.objective)
                self._study.tell(self._optuna_trials[trial], value, states.FAIL if value is None else None)
            elif state == State.PRUNED:
                self._study.tell(self._optuna_trials[trial], state=states.PRUNED)
            else:
                continue
            self._reported_results.add(trial)

    def _report_progress(self, trial: Trial, lines: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
        """Report new values from lines of metrics.jsonl. Return the record for pruned.json if the trial should end."""
        if self._search.prune is None:
            return None
        metric = self._search.prune.metric
        is_higher_better = "accuracy" in metric
        sign = 1 if is_higher_better == (self._sweep.config.direction == "maximize") else -1  # Optuna has one direction
        for step, value in _read_values(lines, metric):
            if step > self._reported_steps.get(trial, 0):
                self._optuna_trials[trial].report(sign * value, step)
                self._reported_steps[trial] = step
                if self._optuna_trials[trial].should_prune():  # also records the rung, so it is True only once
                    self._prune_reasons[trial] = {"step": step, metric: value, "time": time.strftime("%FT%T%z")}
        return self._prune_reasons.get(trial)


def _read_values(lines: Iterable[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    """Return (step, value) of a metric; the training loss as means over AVERAGED_STEPS steps."""
    values = [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]  # null: not finite
    if metric != TRAIN_LOSS:
        return values
    groups: dict[int, list[float]] = {}
    for step, value in values:
        groups.setdefault(-(-step // AVERAGED_STEPS) * AVERAGED_STEPS, []).append(value)
    return [(step, sum(group) / AVERAGED_STEPS) for step, group in groups.items() if len(group) == AVERAGED_STEPS]


def _suggest(trial: Any, key: str, space: Space) -> Any:
    """Draw a value of the space; real numbers have four significant digits, as in the trial's name."""
    if space.values is not None:
        return trial.suggest_categorical(key, space.values)
    assert space.low is not None
    assert space.high is not None
    if space.int:
        return trial.suggest_int(key, round(space.low), round(space.high), log=space.log)
    value = float(f"{trial.suggest_float(key, space.low, space.high, log=space.log):.4g}")
    return min(max(value, space.low), space.high)
