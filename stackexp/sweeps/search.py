"""Search with Optuna: draw the next trial from those in the run folders, and end bad ones early.

The run folders are the record. Each draw builds a new study from them, with a seed that depends on the number of
trials, so a search draws the same trials if it is interrupted. A worker draws under the lock of the sweep.
"""

import math
import time
from collections.abc import Iterable
from typing import Any

from stackexp.errors import ConfigError, RunError
from stackexp.files import read_json, read_json_lines, write_json
from stackexp.metric_tags import AVERAGED_STEPS, TRAIN_LOSS
from stackexp.runs import DATE_FORMAT
from stackexp.sweeps.schema import Space, format_label
from stackexp.sweeps.sweep import Sweep
from stackexp.sweeps.trials import Trial, TrialState, get_number, get_state, read_objective, read_tail

MAX_DRAWS = 30
"""The search space counts as exhausted after this many draws in a row without a new trial."""


class Study:
    """The search of a sweep. Raises ConfigError if Optuna is missing."""

    def __init__(self, sweep: Sweep) -> None:
        try:
            import optuna
        except ModuleNotFoundError:
            raise ConfigError("search requires Optuna; run: pip install 'stackexp[optuna]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        assert sweep.config.search is not None
        self._optuna, self._sweep, self._search = optuna, sweep, sweep.config.search
        self._judged: dict[Trial, int] = {}  # the newest step of a comparison
        self._is_exhausted = False

    def is_complete(self) -> bool:
        """Return True if no trial will be added."""
        return self._is_exhausted or len(self._sweep.trials) >= self._search.trials

    def draw(self) -> Trial | None:
        """Draw a new trial; None if the search space is exhausted. If a draw repeats a trial, the next are random.

        Raises ConfigError if no finished trial has the objective.
        """
        self._check_objective()
        known, samplers = self._sweep.trials, self._optuna.samplers
        seed = self._search.seed + len(known)
        random = samplers.RandomSampler(seed=seed)
        first = samplers.TPESampler(seed=seed, constant_liar=True) if self._search.kind == "tpe" else random
        study = self.build_study()
        for draw in range(MAX_DRAWS):
            study.sampler = random if draw else first
            drawn = study.ask()
            values = {key: _suggest(drawn, key, space) for key, space in self._search.space.items()}
            try:
                trial = self._sweep.build_trial(values, format_label(values))
            except ConfigError as error:
                print(f"skipped an invalid trial: {error}", flush=True)
            else:
                if trial not in known:
                    return trial
            study.tell(drawn, state=self._optuna.trial.TrialState.FAIL)
        print(f"{MAX_DRAWS} draws gave no new trial: the search space is exhausted", flush=True)
        self._is_exhausted = True
        return None

    def _check_objective(self) -> None:
        """Raise ConfigError if trials are finished and all lack the objective or the metric of `prune`.

        The search would be random, or end no trial early.
        """
        problem = ""
        for trial in self._sweep.trials:
            if get_state(trial) == TrialState.DONE:
                try:
                    get_number(trial.folder.read_result().to_dict(), self._sweep.config.objective, missing=math.inf)
                    self._check_metric(trial)
                except RunError as error:
                    problem = f"{self._sweep.folder}: {error}; correct it, then repeat the command"
                else:
                    return
        if problem:
            raise ConfigError(problem)

    def _check_metric(self, trial: Trial) -> None:
        if self._search.prune:
            metric, tags = self._search.prune.metric, set[str]()
            for line in read_json_lines(trial.folder.metrics, skip_damaged=True):
                tags |= line.keys()
            if tags and metric not in tags:
                found = ", ".join(sorted(tag for tag in tags if tag == TRAIN_LOSS or tag.startswith("val/")))
                raise RunError(f"prune.metric {metric}: not in metrics.jsonl, which has {found}")

    def build_study(self) -> Any:
        """Return an Optuna study with the trials in the run folders: finished, pruned and unfinished ones."""
        study = self._optuna.create_study(direction=self._sweep.config.direction)
        states, samplers = self._optuna.trial.TrialState, self._optuna.samplers
        study.sampler = samplers.RandomSampler(seed=0)
        for trial in self._sweep.trials:
            study.enqueue_trial(trial.values)
            enqueued = study.ask()
            for key, space in self._search.space.items():
                _suggest(enqueued, key, space)
            state = get_state(trial)
            if state == TrialState.DONE:
                value, _ = read_objective(trial, self._sweep.config.objective)
                study.tell(enqueued, value, states.FAIL if value is None else None)
            elif state == TrialState.PRUNED:
                self._report_pruned(enqueued, trial)
                study.tell(enqueued, state=states.PRUNED)
        return study

    def _report_pruned(self, enqueued: Any, trial: Trial) -> None:
        """Report the last value of a pruned trial, by which Optuna ranks it. Optuna has one direction for all."""
        record, metric = read_json(trial.pruned), self._search.prune.metric if self._search.prune else ""
        if metric in record:
            sign = 1 if ("accuracy" in metric) == (self._sweep.config.direction == "maximize") else -1
            enqueued.report(sign * record[metric], record["step"])

    def find_pruned(self, running: list[Trial]) -> list[Trial]:
        """Return the running trials to end early, after writing their pruned.json: the step and its value.

        Successive halving: when a trial reaches one of the steps min_steps * reduction_factor**k, its value there must
        be among the best 1 / reduction_factor of all trials so far.
        """
        prune, pruned = self._search.prune, []
        if prune is None:
            return []
        for trial in running:
            lines = [] if trial.is_settled else read_tail(trial.folder.metrics)
            newest = max((step for step, _ in _read_values(lines, prune.metric)), default=0)
            rung = prune.min_steps
            while rung * prune.reduction_factor <= newest:
                rung *= prune.reduction_factor
            if self._judged.get(trial, 0) < rung <= newest:
                self._judged[trial] = rung
                found = {t: pair for t in self._sweep.trials if (pair := _find_value(t, rung, prune.metric))}
                sign = -1 if "accuracy" in prune.metric else 1
                ranked = sorted(sign * value for _, value in found.values())
                if sign * found[trial][1] > ranked[max(0, len(ranked) // prune.reduction_factor - 1)]:
                    step, value = found[trial]
                    write_json(trial.pruned, {"step": step, prune.metric: value, "time": time.strftime(DATE_FORMAT)})
                    pruned.append(trial)
        return pruned


def _find_value(trial: Trial, step: int, metric: str) -> tuple[int, float] | None:
    """Return the first (step, value) of a metric from `step` on, or None."""
    lines = read_json_lines(trial.folder.metrics, skip_damaged=True)
    return next((pair for pair in _read_values(lines, metric) if pair[0] >= step), None)


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
