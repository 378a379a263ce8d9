"""Adaptive search by Optuna, asked and told in the driver. Its study is in memory: the run folders are the record."""

import json
import time
from collections.abc import Iterable
from typing import Any

from stackexp.errors import ConfigError
from stackexp.files import write_atomically
from stackexp.sweeps.grid import Sweep, label
from stackexp.sweeps.schema import Search, Space
from stackexp.sweeps.status import State, reached, state_of, tail
from stackexp.sweeps.trials import Trial

MEAN_STEPS = 20
"""Training loss is averaged over so many steps before trials are compared by it."""
DRAWS = 30
"""So many in a row without a new trial mean that the space is exhausted."""


class Study:
    """The trials of a sweep's `search`: those in its folder, and new ones while there are fewer than `search.trials`.

    `parallel`: how many may be unfinished at once; the fewer they are, the more is known when the next is chosen.
    Raises ConfigError if Optuna is missing.
    """

    def __init__(self, sweep: Sweep, parallel: int | None = None) -> None:
        try:
            import optuna
        except ModuleNotFoundError:
            raise ConfigError("search needs Optuna, which is not installed: pip install 'stackexp[optuna]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        assert sweep.config.search is not None
        self._optuna, self._sweep, self._search = optuna, sweep, sweep.config.search
        prune = self._search.prune
        pruner = (
            optuna.pruners.SuccessiveHalvingPruner(prune.min_steps, prune.reduction_factor)
            if prune
            else optuna.pruners.NopPruner()
        )
        self._parallel = parallel or self._search.trials
        self._asked: dict[Trial, Any] = {}
        self._study = optuna.create_study(direction=sweep.config.direction, pruner=pruner)
        self._told: set[Trial] = set()
        self._reported: dict[Trial, int] = {}
        self._exhausted = False
        self.trials()
        seed = self._search.seed + len(self._asked)  # not to draw the same again
        self._tpe = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        self._random = optuna.samplers.RandomSampler(seed=seed)

    def trials(self) -> list[Trial]:
        """Those known, with those that another driver has added."""
        for trial in self._sweep.begun({trial.folder for trial in self._asked}):
            self._study.enqueue_trial(trial.values)
            self._asked[trial] = self._ask()[1]
            self._report(trial, trial.folder.read_metrics())
        self._tell()
        return list(self._asked)

    def add(self, count: int) -> None:
        unfinished = sum(state_of(trial) != State.FAILED for trial in self._asked.keys() - self._told)
        for _ in range(min(count, self._parallel - unfinished)):
            if not self.complete():
                self._add()

    def complete(self) -> bool:
        return self._exhausted or len(self._asked) >= self._search.trials

    def hopeless(self, running: list[Trial]) -> list[Trial]:
        """Those whose newest figure is not among the best at their rung; a pruned.json keeps step and figure."""
        given_up = []
        for trial in running:
            verdict = None if trial.pruned.exists() else self._report(trial, tail(trial.folder.metrics))
            if verdict:
                write_atomically(trial.pruned, json.dumps(verdict, indent=2))
                given_up.append(trial)
        return given_up

    def _add(self) -> None:
        """Ask for a trial that there is not yet; what has been tried before gives way to a draw by chance."""
        for draw in range(DRAWS):
            self._study.sampler = self._random if draw else self._tpe
            values, asked = self._ask()
            try:
                trial = self._sweep.trial(values, label(values))
            except ConfigError as error:
                print(f"left out: {error}", flush=True)
            else:
                if trial not in self._asked:
                    self._asked[trial] = asked
                    return
            self._study.tell(asked, state=self._optuna.trial.TrialState.FAIL)
        print(f"{DRAWS} draws gave no new trial: the space is exhausted", flush=True)
        self._exhausted = True

    def _ask(self) -> tuple[dict[str, Any], Any]:
        asked = self._study.ask()
        return {key: _suggest(asked, key, space) for key, space in self._search.space.items()}, asked

    def _tell(self) -> None:
        """Tell Optuna what has come of the trials that have ended."""
        states = self._optuna.trial.TrialState
        for trial in self._asked.keys() - self._told:
            state = state_of(trial)
            if state == State.DONE:
                value, _ = reached(trial, self._sweep.config.objective)  # None: as good as failed
                self._study.tell(self._asked[trial], value, states.FAIL if value is None else None)
            elif state == State.PRUNED:
                self._study.tell(self._asked[trial], state=states.PRUNED)
            else:
                continue
            self._told.add(trial)

    def _report(self, trial: Trial, lines: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
        """Report what is new in these lines of metrics.jsonl; the figure to give the trial up for, if there is one."""
        if self._search.prune is None:
            return None
        metric, verdict = self._search.prune.metric, None
        for step, value in _figures(lines, metric):
            if step > self._reported.get(trial, 0):
                self._asked[trial].report(value, step)
                self._reported[trial] = step
                hopeless = self._asked[trial].should_prune()  # which also notes the rung, for the others
                verdict = {"step": step, metric: value, "time": time.strftime("%FT%T%z")} if hopeless else None
        return verdict


def _figures(lines: Iterable[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    """(step, value) of a metric; the training loss as means over MEAN_STEPS steps."""
    found = [(line["step"], line[metric]) for line in lines if metric in line]
    if metric != "loss/train":
        return found
    groups: dict[int, list[float]] = {}
    for step, value in found:
        groups.setdefault(-(-step // MEAN_STEPS) * MEAN_STEPS, []).append(value)
    return [(step, sum(g) / MEAN_STEPS) for step, g in groups.items() if len(g) == MEAN_STEPS]


def _suggest(asked: Any, key: str, space: Space) -> Any:
    """A value of the space; real numbers to four digits, which is what the trial's name shows."""
    if space.values is not None:
        return asked.suggest_categorical(key, space.values)
    if space.int:
        return asked.suggest_int(key, round(space.low), round(space.high), log=space.log)
    value = float(f"{asked.suggest_float(key, space.low, space.high, log=space.log):.4g}")
    return min(max(value, space.low), space.high)


def ends(search: Search) -> list[dict[str, Any]]:
    """What to check before anything starts: every choice and both ends of every range, one key at a time."""
    choices = {key: s.values or [int(x) if s.int else x for x in (s.low, s.high)] for key, s in search.space.items()}
    first = {key: values[0] for key, values in choices.items()}
    return [first, *(first | {key: value} for key, values in choices.items() for value in values[1:])]
