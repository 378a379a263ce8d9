"""A verdict: tune every arm equally, then train pairs of arm and baseline on fresh seeds until all are decided.

Both stages are sweeps, <name>/tuning and <name>/pairs. <name>/verdict.json is written between them, once: the tuned
values, the seeds and the number of pairs.
"""

import dataclasses
import itertools
import math
import re
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from stackexp.config.affects import AFFECT_RESULTS, changes_scores, find_changed_keys, flatten_config, get_effect
from stackexp.config.compose import build_dataclass
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.layers import find_origin, read_overrides, split_overrides
from stackexp.config.yaml_files import Tree, display_path, read_file
from stackexp.errors import ConfigError, RunError, StoppedError
from stackexp.files import hold_lock, read_hashed_json, write_hashed_json
from stackexp.runs import DATE_FORMAT, RunFolder, hash_plugins
from stackexp.sequential import LEVEL, MIN_PAIRS, MIN_PLANNED, Judgment, choose_batch, count_pairs, judge
from stackexp.sweeps.question import FREE, STEP_OPTIONS, VerdictConfig, check_scaled, scale_steps
from stackexp.sweeps.schema import SweepConfig, Values, expand, format_value
from stackexp.sweeps.sweep import STEPS, Sweep
from stackexp.sweeps.trials import Trial, compute_config_hash, has_diverged, read_failure, read_score
from stackexp.sweeps.tuning import Tuned, Tuning, choose_point, estimate_noise, measure_speeds
from stackexp.sweeps.worker import DevicePool, run_sweep

PLAN = "verdict.json"


@dataclass(frozen=True)
class PairPlan:
    """Decisions made before the first pair: the values of each arm, the number of pairs and the effect.

    `deviation` is the standard deviation of paired differences between tuning seeds, with `degrees` of freedom; None if
    not measured. `speeds` are the tokens per second of each arm that its steps follow from; None for equal tokens.
    `runs` is the first run of each arm, whose name has the hash of its config. `written` is the time; None in plans of
    earlier versions.
    """

    question: dict[str, Any]  # the file without the keys that may change
    values: dict[str, Values]
    seeds: list[int]
    deviation: float | None = None
    degrees: float | None = None
    speeds: dict[str, float] | None = None
    runs: dict[str, str] = field(default_factory=dict)
    written: str | None = None
    version: int = 1

    @property
    def baseline(self) -> str:
        """The name of the arm that the others are compared with."""
        return self.question["baseline"]

    @property
    def effect(self) -> float:
        """The difference in question, in nats per token."""
        return self.question["effect"]

    @property
    def pairs(self) -> int:
        """The number of planned pairs."""
        return len(self.seeds)


TrialKey = tuple[str, int, int]
"""Arm, index of the tuned point (0 in pairs), and seed of a run."""


@dataclass(frozen=True)
class QuestionStage:
    """A sweep with its trials by arm, point and seed."""

    sweep: Sweep
    trials: dict[TrialKey, Trial]

    def read_scores(self, objective: str | None = None) -> dict[TrialKey, float]:
        """Return the scores of the trials that ended: inf for those whose loss or score was not finite.

        `objective` is another score than the verdict's. Raises RunError if a result has no such score, or is not that
        of the trial's config.
        """
        scores = {}
        for key, trial in self.trials.items():
            if trial.folder.is_finished:
                scores[key] = read_score(trial, objective or self.sweep.config.objective)
            elif has_diverged(trial):
                scores[key] = math.inf
        return scores


@dataclass(frozen=True)
class Question:
    """The file `path` with its stages."""

    path: Path
    config: VerdictConfig
    tree: Tree
    overrides: tuple[str, ...] = ()
    budget: float = 1.0  # factor by which --budget scaled the file's steps

    @property
    def name(self) -> str:
        """The configured name, or that of the file."""
        return self.config.name or self.path.stem

    @property
    def arms(self) -> list[str]:
        """The names of the arms."""
        return [entry["name"] for entry in self.config.arms]

    @property
    def baseline(self) -> str:
        """The name of the arm that the others are compared with."""
        return self.config.baseline or self.arms[0]

    @cached_property
    def folder(self) -> Path:
        """<logging.root>/<name>."""
        return Path(self._build_sweep(self.name, []).base_trial.config.logging.root, self.name)

    @cached_property
    def points(self) -> dict[str, list[Values]]:
        """The values of the tuning trials of each arm; none without tuning."""
        tuning = self.config.tuning
        return {arm: tuning.draw_points(arm) if tuning else [] for arm in self.arms}

    @cached_property
    def tuning(self) -> "QuestionStage | None":
        """The stage that tunes the arms, point by point; None without tuning."""
        if self.config.tuning is None:
            return None
        runs = {
            (arm, i, seed): self.points[arm][i]
            for i in range(len(self.points[self.baseline]))
            for arm in self.arms
            for seed in self.config.tuning.seeds
        }
        return self._build_stage("tuning", runs)

    def build_pairs(self, plan: PairPlan) -> "QuestionStage":
        """Return the stage of the pairs, seed by seed. Raises ConfigError if a config is not that of the plan."""
        runs = {(arm, 0, seed): plan.values[arm] for seed in plan.seeds for arm in self.arms}
        stage = self._build_stage("pairs", runs)
        self._check_equality({arm: stage.trials[arm, 0, plan.seeds[0]].config for arm in self.arms})
        found = {arm: stage.trials[arm, 0, plan.seeds[0]].name for arm in self.arms}
        if changed := [arm for arm, name in plan.runs.items() if found[arm] != name]:
            raise ConfigError(
                f"{display_path(self.path)}: the config of {', '.join(changed)} changed since {self.folder / PLAN} was "
                "written; undo the change, or give the file another name"
            )
        return stage

    def _check_equality(self, configs: dict[str, ExperimentConfig]) -> None:
        """Raise ConfigError if the arms do not get as many tokens, or are not scored on the same sets."""
        base = configs[self.baseline]
        for arm, config in configs.items():
            where = f"{display_path(self.path)}: arms: {arm}"
            if self.config.equal == "tokens" and config.total_tokens != base.total_tokens:
                raise ConfigError(
                    f"{where} trains on {config.total_tokens:,} tokens, {self.baseline} on {base.total_tokens:,}; give "
                    "both as many, or set equal: time"
                )
            ours, theirs = flatten_config(config), flatten_config(base)
            changed = [key for key in find_changed_keys(ours, theirs, AFFECT_RESULTS) if key.startswith("data.")]
            if scored := [key for key in changed if changes_scores(ours, key) or get_effect(ours, key) == "evaluation"]:
                raise ConfigError(f"{where} is scored with another {scored[0]} than {self.baseline}; use the same")
            is_averaged = config.trainer.ema_decay is not None and config.data.objective == "language_modeling"
            if self.config.score.startswith("ema.") and not is_averaged:
                raise ConfigError(f"{where} has no {self.config.score}; set trainer.ema_decay (for language models)")

    def _build_stage(self, name: str, runs: dict["TrialKey", Values]) -> "QuestionStage":
        """Build a sweep whose trials are distinct; arms with the same config share theirs."""
        build = partial(self._build_sweep, f"{self.name}/{name}", is_search=name == "tuning")
        base, entries = build([]), dict[str, Values]()
        trials: dict[TrialKey, Trial] = {}
        for (arm, point, seed), values in runs.items():
            entry = next(entry for entry in self.config.arms if entry["name"] == arm)
            label = arm if name == "pairs" else f"{arm}-{point}"
            entry = entry | values | {"name": f"{label}-seed={seed}", "seed": seed}
            ((label, own),) = expand(SweepConfig(list=[entry]))
            trial = trials[arm, point, seed] = base.build_trial(own, label)
            entries.setdefault(compute_config_hash(trial.config), entry)
        sweep = build(list(entries.values()))
        first = {compute_config_hash(trial.config): trial for trial in reversed(trials.values())}
        return QuestionStage(sweep, {key: first[compute_config_hash(trial.config)] for key, trial in trials.items()})

    def check(self) -> None:
        """Compose every trial. Raises ConfigError for an invalid one."""
        self.check_arms()
        trials = self.tuning.trials.values() if self.tuning else []
        if self.config.equal == "tokens" and len({trial.config.total_tokens for trial in trials}) > 1:
            raise ConfigError(f"{display_path(self.path)}: an option of tuning.space changes the tokens; omit it")

    def check_arms(self) -> None:
        """Compose the pairs and the first point of each arm. Raises ConfigError for an invalid arm."""
        if tuning := self.config.tuning:
            self._build_stage("tuning", {(arm, 0, tuning.seeds[0]): self.points[arm][0] for arm in self.arms})
        if plan := self.read_plan():
            self.build_pairs(plan)
        else:
            self._build_plan({arm: {} for arm in self.arms}, MIN_PLANNED)

    def _build_sweep(self, name: str, entries: list[Values], is_search: bool = False) -> Sweep:
        config = self.config
        overrides = config.overrides + (config.tuning.overrides if config.tuning and is_search else [])
        keys: list[str] = [key for key in self.tree if key in ("config", "overrides")]
        origins = {key: find_origin(self.tree[key]) for key in keys}
        origins |= {key: find_origin(self.tree["arms"]) for entry in config.arms for key in entry}
        if config.tuning:
            origins |= {key: find_origin(self.tree["tuning"]["space"][key]) for key in config.tuning.space}
        origins.setdefault("config", display_path(self.path))
        sweep = SweepConfig(
            name=name,
            config=config.config,
            folder=config.folder,
            overrides=overrides,
            objective=config.score,
            resources=config.resources,
            retries=config.retries,
            list=entries,
        )
        return Sweep(self.path, sweep, origins, self.overrides)

    # Results

    def read_tuning(self) -> Tuned:
        """Return the points of each arm whose runs are all finished, with the scores of the seeds."""
        if self.tuning is None:
            return {}
        scores, seeds = self.tuning.read_scores(), self.config.tuning.seeds
        tuned: Tuned = {arm: [] for arm in self.arms}
        for arm, points in self.points.items():
            for i, values in enumerate(points):
                if all((arm, i, seed) in scores for seed in seeds):
                    tuned[arm].append((values, [scores[arm, i, seed] for seed in seeds]))
        return tuned

    def read_plan(self) -> PairPlan | None:
        """Return the plan in the folder, or None.

        Raises ConfigError if the question has changed, and RunError for a damaged or incompatible plan.
        """
        path = self.folder / PLAN
        if not path.is_file():
            return None
        contents, ours = read_hashed_json(path, "restore the file"), self._describe_question()
        if contents.get("version") != PairPlan.version or not contents["question"].keys() <= ours.keys():
            raise RunError(f"{path}: not a plan of this version; move the folder elsewhere")
        plan = PairPlan(**contents)
        if changed := [key for key, value in plan.question.items() if ours[key] != value]:
            raise ConfigError(
                f"{display_path(self.path)}: {', '.join(changed)} changed since {path} was written; "
                f"give it another name, and fresh seeds with first_seed: {plan.seeds[-1] + 1}"
            )
        return plan

    def load_or_write_plan(self) -> PairPlan:
        """Return the plan in the folder; write it if there is none.

        Raises what `read_plan` and `choose_plan` raise, and RunError if there are pairs without a plan.
        """
        if plan := self.read_plan():
            return plan
        self.folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(self.folder / f".{PLAN}.lock", f"{self.folder / PLAN}"):
            if plan := self.read_plan():
                return plan
            plan = self.choose_plan()
            if self.build_pairs(plan).read_scores():
                raise RunError(
                    f"{self.folder}/pairs: has results of these seeds, but {PLAN} is missing; restore it, or set "
                    "another name and first_seed"
                )
            plan = dataclasses.replace(plan, written=time.strftime(DATE_FORMAT))
            write_hashed_json(self.folder / PLAN, dataclasses.asdict(plan))
        return plan

    def choose_plan(self) -> PairPlan:
        """Choose the best values of each arm, the number of pairs, and the steps at equal time, by the tuning runs.

        Raises RunError if an arm has no finished point, or what `measure_speeds` raises.
        """
        tuned, config = self.read_tuning(), self.config
        values: dict[str, Values] = {arm: {} for arm in self.arms}
        speeds = None
        for arm, points in tuned.items():
            best = choose_point(points, config.effect)
            if best is None:
                problem = f"no point of {arm} has a finite loss on all tuning seeds; change tuning.space"
                if not points:
                    problem = f"{arm} has no finished trial; see `sweep status {self.folder}/tuning`"
                raise RunError(f"{self.folder}/tuning: {problem}")
            values[arm] = dict(best)
        if config.equal == "time":
            speeds = measure_speeds(self._list_tuning_runs(values))
            self._equalize_time(values, speeds)
        is_noise_known = config.tuning is not None and len(config.tuning.seeds) > 1
        deviation, degrees = estimate_noise(tuned, self.baseline) if is_noise_known else (None, None)
        pairs = config.pairs
        if pairs is None:
            assert deviation is not None
            assert degrees is not None
            level = LEVEL / (len(self.arms) - 1)
            pairs = min(config.max_pairs, count_pairs(config.effect, deviation, level, degrees=degrees))
        return dataclasses.replace(self._build_plan(values, pairs), deviation=deviation, degrees=degrees, speeds=speeds)

    def _list_tuning_runs(self, values: dict[str, Values]) -> dict[str, list[RunFolder]]:
        """Return the finished tuning runs of each arm with the chosen values."""
        trials = self.tuning.trials.items()
        chosen = [(arm, trial.folder) for (arm, i, _), trial in trials if self.points[arm][i] == values[arm]]
        return {arm: [folder for name, folder in chosen if name == arm and folder.is_finished] for arm in self.arms}

    def _equalize_time(self, values: dict[str, Values], speeds: dict[str, float]) -> None:
        """Add to the values of each arm the steps that take as long as the baseline's, and the schedule for them."""
        configs = self._build_configs(values)
        seconds = configs[self.baseline].total_tokens / speeds[self.baseline]
        for arm, config in configs.items():
            steps = max(1, round(seconds * speeds[arm] / config.data.global_batch_tokens))
            share = steps / config.trainer.max_steps
            lengths = {key: getattr(config.schedule, key, None) for key in ("warmup_steps", "decay_steps")}
            values[arm] |= {f"schedule.{key}": max(1, int(share * n)) for key, n in lengths.items() if n}
            values[arm][STEPS] = steps

    def _build_configs(self, values: dict[str, Values]) -> dict[str, ExperimentConfig]:
        """Compose the config of each arm with these values."""
        sweep = self._build_sweep(self.name, [])
        entries = {entry["name"]: {key: v for key, v in entry.items() if key != "name"} for entry in self.config.arms}
        return {arm: sweep.build_trial(entries[arm] | values[arm], arm).config for arm in self.arms}

    def _build_plan(self, values: dict[str, Values], pairs: int) -> PairPlan:
        seeds = list(range(self.config.first_seed, self.config.first_seed + pairs))
        plan = PairPlan(self._describe_question(), values, seeds)
        trials = self.build_pairs(plan).trials
        return dataclasses.replace(plan, runs={arm: trials[arm, 0, seeds[0]].name for arm in self.arms})

    def _describe_question(self) -> dict[str, Any]:
        own = [override for override in self.overrides if not override.startswith("logging.")]
        overrides = [*self.config.overrides, *own]
        ours = dataclasses.asdict(self.config) | {"baseline": self.baseline, "overrides": overrides}
        return {key: value for key, value in ours.items() if key not in FREE}

    def run(
        self,
        launcher: str = "local",
        max_parallel: int | None = None,
        check: "Callable[[Question, PairPlan], object] | None" = None,
    ) -> bool:
        """Run the missing trials of both stages, until every arm is decided. Return False if some were only submitted.

        On this machine, the arms are judged after every pair, or after as many as keep it busy; decided arms stop. The
        looks do not depend on the runs that exist, so several processes agree. With Slurm, a call submits the next
        stage. `check` is called before the pairs are judged. Raises what it and `run_sweep` raise, unless the failed
        trials diverged.
        """
        self.check_plugins()
        run = partial(self._run_part, launcher=launcher, max_parallel=max_parallel)
        if self.tuning and not run(self.tuning, list(self.tuning.trials)):
            return False
        plan = self.load_or_write_plan()
        stage, arms = self.build_pairs(plan), self.arms
        before = stage.read_scores()
        workers = DevicePool(stage.sweep, stage.sweep.trials, max_parallel).parallel if launcher == "local" else None
        end = 0
        while arms and end < plan.pairs:
            end = min(plan.pairs, max(MIN_PAIRS, end + choose_batch(len(arms), workers))) if workers else plan.pairs
            seeds = plan.seeds[:end]
            keys = [(arm, 0, seed) for seed in seeds for arm in arms]
            if not run(stage, keys):
                return False
            if check:
                check(self, plan)
            scores = {key: score for key, score in stage.read_scores().items() if key[2] in seeds}
            judgments = judge_pairs(plan, scores)
            if not before.keys() >= set(keys):
                outcomes = (f"{arm} {judgment.outcome}" for arm, judgment in judgments.items())
                print(f"after {end} of {plan.pairs} pairs: {', '.join(outcomes)}", flush=True)
            if self.config.stop_when_decided:
                arms = list_undecided(plan, scores)
        return True

    def check_plugins(self) -> None:
        """Raise ConfigError if a run of this verdict had other contents of a plugin than the file has now."""
        configs = self._build_configs({arm: {} for arm in self.arms})
        plugins = hash_plugins(list(dict.fromkeys(name for config in configs.values() for name in config.plugins)))
        for path in sorted(self.folder.glob("*/*/environment.json")) if plugins else ():
            for session in RunFolder(path.parent).read_sessions():
                recorded = session.get("plugins", {})
                if changed := [name for name, sha256 in plugins.items() if recorded.get(name, sha256) != sha256]:
                    raise ConfigError(
                        f"{changed[0]}: changed since {path.parent} was trained; undo the change, or give "
                        f"{display_path(self.path)} another name"
                    )

    def _run_part(self, stage: QuestionStage, keys: list[TrialKey], launcher: str, max_parallel: int | None) -> bool:
        """Run the trials of a stage that have not ended. Return False if they were only submitted."""
        scores = stage.read_scores()
        missing = {stage.trials[key] for key in keys if key not in scores}
        if not missing:
            return True
        try:
            run_sweep(stage.sweep, launcher=launcher, max_parallel=max_parallel, only=missing)
        except RunError:
            if launcher != "local":
                raise
            ended = stage.read_scores()
            failed = [stage.trials[key] for key in keys if key not in ended]  # the others diverged
            if failed and (cause := read_failure(failed[0]).get("cause")):
                raise RunError(
                    f"{stage.sweep.folder}: {len(failed)} of {len(keys)} runs failed, the first {failed[0].name}: "
                    f"{cause}; `sweep status` shows all causes; the same command retries them"
                ) from None
            if failed:
                raise
            return True
        except (StoppedError, KeyboardInterrupt) as error:  # resuming the sweep would run all pairs
            options = [f"--budget={self.budget!r}"] * (self.budget != 1)
            options += [f"--max-parallel={max_parallel}"] * (max_parallel is not None)
            command = shlex.join(["python", "-m", "stackexp", "verdict", str(self.path), *self.overrides, *options])
            raise type(error)(f"{self.folder}: stopped; resume with: {command}") from None
        return launcher == "local"


def load_verdicts(path: Path, overrides: Iterable[str] = (), budget: float = 1.0) -> list[Question]:
    """Load a verdict for every combination of the values of `each`, in folders of their own below the name.

    `budget` multiplies all options of the file that end in _steps or _interval. Raises ConfigError.
    """
    _, tree = read_file(path)
    tree = tree if budget == 1 else scale_steps(tree, budget)
    overrides = tuple(f"{key}={text}" for key, text, _ in split_overrides(list(overrides)))
    config = build_dataclass(VerdictConfig, tree)
    tuning = config.tuning or Tuning()
    for key, _, _, origin in read_overrides([*config.overrides, *tuning.overrides, *overrides]):
        if key in config.list_own_keys():
            raise ConfigError(f"{key} is chosen by the verdict, or differs between its arms; change it there", origin)
    if budget != 1:
        check_scaled(config, path)
        if steps := [o for o in overrides if o.partition("=")[0].endswith(STEP_OPTIONS)]:
            raise ConfigError(f"{steps[0]}: --budget multiplies the steps of the file; change them there")
    name = (config.name or path.stem) + f"-budget-{budget:g}" * (budget != 1)
    config, each = dataclasses.replace(config, each={}), config.each
    verdicts: list[Question] = []
    for combination in itertools.product(*each.values()):
        own = [f"{key}={format_value(value)}" for key, value in zip(each, combination, strict=True)]
        folder = re.sub(r"[^\w.+-]", "-", "-".join(map(str, combination)))
        label = "/".join([name, folder] if each else [name])
        if label in (other.name for other in verdicts):
            raise ConfigError(f"{display_path(path)}: each: two questions have the folder {label}; change a value")
        changed = dataclasses.replace(config, name=label, overrides=config.overrides + own)
        verdicts.append(Question(path, changed, tree, overrides, budget))
    return verdicts


def judge_pairs(plan: PairPlan, scores: dict[TrialKey, float]) -> dict[str, Judgment]:
    """Judge the arms by the scores of the finished pairs."""
    arms = [arm for arm in plan.values if arm != plan.baseline]
    return judge({arm: list_differences(plan, scores, arm) for arm in arms}, plan.pairs, plan.effect)


def list_undecided(plan: PairPlan, scores: dict[TrialKey, float]) -> list[str]:
    """Return the baseline and the arms that are neither decided nor diverged; empty if there are none."""
    diverged = find_diverged(plan, scores)
    arms = [arm for arm, x in judge_pairs(plan, scores).items() if not x.is_decided and arm not in diverged]
    return [plan.baseline, *arms] if arms else []


def list_differences(plan: PairPlan, scores: dict[TrialKey, float], arm: str, base: str | None = None) -> list[float]:
    """Return the differences of two arms in the order of the seeds, up to the first pair that is missing or diverged.

    An infinite difference has no deviation.
    """
    differences = []
    for seed in plan.seeds:
        difference = scores.get((arm, 0, seed), math.inf) - scores.get((base or plan.baseline, 0, seed), math.inf)
        if not math.isfinite(difference):
            break
        differences.append(difference)
    return differences


def find_diverged(plan: PairPlan, scores: dict[TrialKey, float]) -> dict[str, int]:
    """Return the first seed at which an arm, or the baseline, has no finite score; only for arms with such a seed."""
    infinite = [(arm, seed) for (arm, _, seed), score in scores.items() if not math.isfinite(score)]
    return {
        arm: min(seeds)
        for arm in plan.values
        if arm != plan.baseline and (seeds := [seed for name, seed in infinite if name in (arm, plan.baseline)])
    }
