"""The verdict on each arm, with the tuning of every arm, the split of the gain, and the cost in time."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stackexp.config.memory import MECHANISM, StackMemoryConfig
from stackexp.data.hash_log import FILE_NAME, read_hashes
from stackexp.errors import RunError
from stackexp.frame import Row
from stackexp.metric_tags import AVERAGED_STEPS, TOKENS_PER_SECOND, TRAIN_LOSS
from stackexp.reports.arms import OTHER, choose_column, compare_arms, find_baseline, load_arms, select_finished
from stackexp.reports.compare import format_loss, read_curve
from stackexp.reports.interventions import build_interventions
from stackexp.reports.noise import TOTAL, PairGrid, build_noise, find_grids, pool_deviations, split_variance
from stackexp.reports.report import PALETTE, Report, Table, new_figure
from stackexp.reports.training_data import GENERATED_DATA, compare_data
from stackexp.runs import RunFolder
from stackexp.sequential import (
    LEVEL,
    MAX_PLANNED,
    POWER,
    Judgment,
    Outcome,
    compute_interval,
    count_pairs,
    estimate_deviation,
    find_detectable_effect,
)
from stackexp.sweeps.controls import ADAPTER, FLOPS, PARAMETERS, PLAIN, SCALE, STREAM
from stackexp.sweeps.schema import format_value, shorten_keys
from stackexp.sweeps.sweep import STEPS
from stackexp.sweeps.tuning import Tuned, choose_point
from stackexp.sweeps.verdict import (
    PairPlan,
    Question,
    QuestionStage,
    TrialKey,
    find_diverged,
    judge_pairs,
    list_differences,
)
from stackexp.tables import ABSENT
from stackexp.terminal import format_duration

HEADER = ["arm", "verdict", "difference", f"{1 - LEVEL:.0%} interval", "pairs", "p", "time per run"]
OUTCOME_COLORS = dict(zip(Outcome, (PALETTE[2], PALETTE[1], PALETTE[0], PALETTE[7]), strict=True))
BAND = (0.1, 0.9)
"""Quantiles of the best loss of random subsets of the tuning trials."""


def build_verdicts(verdicts: Sequence[Question]) -> Report:
    """Build the report of one verdict, or a table with a line for each arm of several."""
    if len(verdicts) == 1:
        return build_verdict(verdicts[0])
    rows, records, notes, waiting = [], [], [], []
    for verdict in verdicts:
        label = verdict.name.rpartition("/")[2]
        if plan := verdict.read_plan():
            stage, uncompared = _open_pairs(verdict, plan)
            notes += [f"{label}: {note}" for note in uncompared]
            scores, seconds = stage.read_scores(), {arm: _measure_seconds(stage, arm) for arm in verdict.arms}
            rows += [[label, *line] for line in _build_lines(judge_pairs(plan, scores), plan, scores, seconds)]
            records += [
                {"question": label, "arm": arm, "seed": seed, "score": x} for (arm, _, seed), x in scores.items()
            ]
        else:
            waiting.append(label)
    notes += [f"no pairs yet: {', '.join(waiting)}"] if waiting else []
    notes.append(f"{_describe_intervals(len(verdicts[0].arms) - 1)} Questions are not corrected for.")
    title = f"Verdicts against {verdicts[0].baseline}, effect {verdicts[0].config.effect:g}"
    return Report([Table(title, ["question", *HEADER], rows, num_labels=3)] if rows else [], notes, records)


def build_verdict(verdict: Question) -> Report:
    """Build the report from the run folders of both stages, finished or not."""
    tables, notes = [], []
    tuned = verdict.read_tuning()
    if any(tuned.values()):
        tables.append(_build_tuning(verdict, tuned))
    plan = verdict.read_plan()
    if plan is None:
        counts = (len(verdict.tuning.read_scores()), len(verdict.tuning.trials)) if verdict.tuning else (0, 0)
        notes.append("no pairs yet" + f"; {counts[0]} of {counts[1]} tuning runs are done" * bool(counts[1]))
        return Report(tables, notes, [])
    stage, uncompared = _open_pairs(verdict, plan)
    notes += uncompared
    scores = stage.read_scores()
    judgments = judge_pairs(plan, scores)
    seconds = {arm: _measure_seconds(stage, arm) for arm in verdict.arms}
    lines = _build_lines(judgments, plan, scores, seconds)
    at = "" if plan.speeds is None else ", at equal time"
    title = f"Verdict against {plan.baseline}, effect {plan.effect:g}, {plan.pairs} pairs planned{at}"
    columns = len(HEADER) - all(line[-1] == ABSENT for line in lines)  # copies of runs have no speeds
    tables.insert(0, Table(title, HEADER[:columns], [line[:columns] for line in lines], num_labels=2))
    if plan.speeds is not None:
        tables.append(_build_equal_time(verdict, plan, stage, plan.speeds))
    if split := _build_split(verdict, plan, stage, scores):
        tables.append(split)
    if speed := _build_speed(verdict, plan, stage, seconds):
        tables.append(speed)
    if verdict.config.interventions_chunks:
        interventions, missing = build_interventions(verdict, stage)
        tables += [interventions] if interventions else []
        notes += missing
    notes += _describe(plan, judgments, scores)
    records = [{"arm": arm, "seed": seed, "score": value} for (arm, _, seed), value in scores.items()]
    diverged = find_diverged(plan, scores)
    return Report(tables, notes, records, lambda: _draw(plan, judgments, diverged))


def _open_pairs(verdict: Question, plan: PairPlan) -> tuple[QuestionStage, list[str]]:
    """Return the stage of the pairs, and a note if the data of some were not compared.

    Raises RunError if the two runs of a pair had other data or another device.
    """
    verdict.check_plugins()
    stage, uncompared = verdict.build_pairs(plan), 0
    for (arm, _, seed), trial in stage.trials.items():
        pair = trial.folder, stage.trials[plan.baseline, 0, seed].folder
        if arm == plan.baseline or not all(folder.is_finished for folder in pair):
            continue
        difference = unknown = ""
        if trial.config.data.kind not in GENERATED_DATA:  # the config determines these, and arms may differ in them
            difference, unknown = compare_data(*(read_hashes(folder.path) for folder in pair))
        uncompared += bool(unknown)
        devices = [(folder.read_sessions() or [{}])[0].get("gpus") or "a CPU" for folder in pair]
        if devices[0] != devices[1]:
            difference = f"{devices[0]}, not {devices[1]}"
        if difference:
            raise RunError(
                f"{pair[0].path}: had other data or another device than {pair[1].path} ({difference}), so they are no "
                "pair; remove one of them and repeat the command"
            )
    note = f"{uncompared} pairs: not checked for equal training data; {FILE_NAME} is missing or has no common step"
    return stage, [note] if uncompared else []


def _build_lines(
    judgments: dict[str, Judgment],
    plan: PairPlan,
    scores: dict[TrialKey, float],
    seconds: "dict[str, dict[int, float]]",
) -> list[list[str]]:
    lines, diverged = [], find_diverged(plan, scores)
    for arm, judgment in judgments.items():
        ours, base = _average_shared_seeds(seconds[arm], seconds[plan.baseline])
        outcome = format_outcome(judgment, plan, diverged.get(arm), ours, base)
        interval = f"{judgment.low:+.4f} to {judgment.high:+.4f}" if math.isfinite(judgment.low) else ABSENT
        mean = f"{judgment.mean:+.4f}" if judgment.pairs else ABSENT
        p = f"{min(1.0, judgment.p_value):.2g}" if judgment.pairs else ABSENT
        time = f"{ours / base:.2f}x" if ours and base else ABSENT
        lines.append([arm, outcome, mean, interval, f"{judgment.pairs}/{plan.pairs}", p, time])
    return lines


def format_outcome(
    judgment: Judgment, plan: PairPlan, diverged: int | None, ours: float | None = None, base: float | None = None
) -> str:
    """Return the verdict in words; an undecided one with the diverged seed, or the pairs left and their hours.

    The hours are those of both runs of each pair, one run after the other.
    """
    if judgment.outcome != Outcome.UNDECIDED:
        return judgment.outcome.describe(plan.effect)
    if diverged is not None:
        return f"undecided: seed {diverged} diverged"
    left = plan.pairs - judgment.pairs
    hours = f" ({left * (ours + base) / 3600:.1f} hours)" if ours and base and left else ""
    return f"undecided: {left} more pairs{hours}" if left else "undecided after all planned pairs"


def _measure_seconds(stage: QuestionStage, arm: str) -> dict[int, float]:
    """Return the mean duration of the arm's finished runs of each seed, at their median speed."""
    seconds: dict[int, list[float]] = {}
    for (name, _, seed), trial in stage.trials.items():
        if name == arm and trial.folder.is_finished and trial.folder.metrics.exists():
            tokens, speeds = read_curve(trial.folder, TOKENS_PER_SECOND)
            if speeds:
                seconds.setdefault(seed, []).append(tokens[-1] / statistics.median(speeds))
    return {seed: statistics.fmean(values) for seed, values in seconds.items()}


def _average_shared_seeds(ours: dict[int, float], base: dict[int, float]) -> tuple[float | None, float | None]:
    """Return the mean durations over the seeds that both arms have; other runs may have had more threads."""
    seeds = ours.keys() & base.keys()
    if not seeds:
        return None, None
    return statistics.fmean(ours[seed] for seed in seeds), statistics.fmean(base[seed] for seed in seeds)


def _describe(plan: PairPlan, judgments: dict[str, Judgment], scores: dict[TrialKey, float]) -> list[str]:
    arms = len(judgments)
    detectable = (
        ""
        if plan.deviation is None
        else (
            f" With the deviation {plan.deviation:.4f} of the tuning pairs, they find an effect of "
            f"{find_detectable_effect(plan.pairs, plan.deviation, LEVEL / arms):.4f} with probability {POWER:g}."
        )
    )
    notes = [
        "Differences are arm minus baseline in nats per token; negative is better. Seeds, tuned values and the number "
        f"of pairs were fixed before the first pair.{detectable}",
        _describe_intervals(arms),
    ]
    for arm, judgment in judgments.items():
        if judgment.pairs > 2:
            differences = list_differences(plan, scores, arm)
            deviation, low, high = estimate_deviation(differences)
            text = f"{arm}: standard deviation of a pair {deviation:.4f} ({low:.4f} to {high:.4f})"
            if not judgment.is_decided and judgment.pairs == plan.pairs:
                pairs = count_pairs(plan.effect, deviation, LEVEL / arms, degrees=judgment.pairs - 1)
                text += f"; a new verdict on fresh seeds would take {pairs} pairs for an effect of {plan.effect:g}"
            if judgment.look < judgment.pairs:
                mean = statistics.fmean(differences)
                text += f"; decided after {judgment.look} pairs, whose mean is shown; all have {mean:+.4f}"
            notes.append(text)
    diverged = sorted({(arm, seed) for (arm, _, seed), value in scores.items() if not math.isfinite(value)})
    notes += [f"{arm}: seed {seed} has no finite score; its pairs count up to there" for arm, seed in diverged]
    return notes


def _describe_intervals(arms: int) -> str:
    return (
        "Intervals allow for a look after every pair (O'Brien and Fleming's boundary for Student's t) and for "
        f"{arms} arm{'s' * (arms > 1)} (Bonferroni). Helps and hurts: Holm over the arms, at most {LEVEL:.0%} false "
        "verdicts among arms without an effect. p: the smallest level at which a look so far decides."
    )


# Tuning


def compute_best_of(losses: Sequence[float], count: int) -> tuple[float, float, float]:
    """Return mean, 10 % and 90 % quantile of the best of `count` randomly drawn losses (Dodge et al. 2019)."""
    ordered, total = np.sort(np.asarray(losses, float)), len(losses)
    weights = np.array([math.comb(total - i - 1, count - 1) for i in range(total)]) / math.comb(total, count)
    low, high = (ordered[np.searchsorted(weights.cumsum(), q - 1e-12)] for q in BAND)
    used = weights > 0
    return float(weights[used] @ ordered[used]), float(low), float(high)


def _build_tuning(verdict: Question, tuned: Tuned) -> Table:
    """Return the chosen values of each arm and the best loss by number of trials.

    The next doubling gains at most twice as much as the last one, because the expected best loss is convex.
    """
    counts = [1 << i for i in range(10) if 1 << i < max(map(len, tuned.values()))]
    names = shorten_keys(key for points in tuned.values() for values, _ in points for key in values)
    rows, plan = [], verdict.read_plan()
    for arm, points in tuned.items():
        losses = [statistics.fmean(scores) for _, scores in points]
        if not losses:
            continue
        values = plan.values[arm] if plan else choose_point(points, verdict.config.effect)
        chosen = next((i for i, (own, _) in enumerate(points) if values and own.items() <= values.items()), 0)
        curve = []
        for count in counts:
            mean, low, high = compute_best_of(losses, count) if count <= len(losses) else (math.nan,) * 3
            curve.append(f"{mean:.4f} ({low:.4f} to {high:.4f})" if math.isfinite(mean) else ABSENT)
        gain = compute_best_of(losses, len(losses) // 2)[0] - min(losses) if len(losses) > 1 else math.nan
        enough = "yes" if gain < verdict.config.effect / 2 else "no"
        doubling = f"{gain:.4f}" if math.isfinite(gain) else ABSENT
        shown = ", ".join(f"{names[key]}={format_value(value)}" for key, value in points[chosen][0].items())
        rows.append([arm, str(len(losses)), shown, format_loss(losses[chosen]), *curve, doubling, enough])
    header = ["arm", "trials", "chosen values", "loss", *(f"best of {count}" for count in counts)]
    seeds = [str(seed) for seed in verdict.config.tuning.seeds] if verdict.config.tuning else []
    title = (
        f"Tuning: mean over the seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}. Best of n: mean and 10 to 90 % of "
        "random subsets. Enough: the last doubling gained less than half the effect"
    )
    return Table(title, [*header, "last doubling", "enough"], rows, num_labels=3)


# Split of the gain


def _build_split(
    verdict: Question, plan: PairPlan, stage: QuestionStage, scores: dict[TrialKey, float]
) -> Table | None:
    """Return the differences between controls that each isolate one cause, as far as these arms exist.

    Stacks are compared with the adapter; every other option in which the two differ is named as a cause, too.
    """
    steps = [("parameters", PLAIN, PARAMETERS), ("residual width at equal FLOPs", FLOPS, STREAM)]
    steps += [("scaling of the residual stream", PLAIN, SCALE)]
    models = {arm: stage.trials[arm, 0, plan.seeds[0]].config.model for arm in verdict.arms}
    memories = {arm: getattr(model, "memory", None) for arm, model in models.items()}
    if isinstance(adapter := memories.get(ADAPTER), StackMemoryConfig):
        for arm, memory in memories.items():
            if arm != ADAPTER and isinstance(memory, StackMemoryConfig):
                others = [key for key, value in vars(memory).items() if value != getattr(adapter, key)]
                others = [key for key in others if not key.startswith(MECHANISM)]
                steps.append((", ".join(["mechanism", *others]), ADAPTER, arm))
    rows = []
    for cause, base, arm in steps:
        if not {arm, base} <= set(verdict.arms):
            continue
        differences = list_differences(plan, scores, arm, base)
        mean, low, high = compute_interval(differences, plan.pairs)
        if math.isfinite(low):
            rows.append(
                [cause, f"{arm} minus {base}", f"{mean:+.4f}", f"{low:+.4f} to {high:+.4f}", str(len(differences))]
            )
    header = ["cause", "difference", "mean", f"{1 - LEVEL:.0%} interval", "pairs"]
    return Table("Split of the gain; intervals allow for looks, not for several rows", header, rows) if rows else None


# Time


def _build_equal_time(verdict: Question, plan: PairPlan, stage: QuestionStage, speeds: dict[str, float]) -> Table:
    """Return the steps of each arm, which follow from its speed."""
    rows = []
    tokens = {arm: stage.trials[arm, 0, plan.seeds[0]].config.total_tokens for arm in verdict.arms}
    for arm in verdict.arms:
        share = tokens[arm] / tokens[plan.baseline]
        rows.append([arm, f"{speeds[arm]:,.0f}", str(plan.values[arm][STEPS]), f"{share:.3f}"])
    title = "Steps at equal time, by the median speed of the tuning runs; fixed before the first pair"
    return Table(title, ["arm", "tokens/s", "steps", "tokens of the baseline's"], rows)


def _build_speed(
    verdict: Question, plan: PairPlan, stage: QuestionStage, seconds: dict[str, dict[int, float]]
) -> Table | None:
    """Return the share of the baseline's time in which an arm reaches its final training loss."""
    rows = []
    for arm in verdict.arms:
        ours, base = _average_shared_seeds(seconds[arm], seconds[plan.baseline])
        if arm == plan.baseline or not ours or not base:
            continue
        shares = []
        for seed in plan.seeds:
            pair = [stage.trials[name, 0, seed].folder for name in (arm, plan.baseline)]
            if all(folder.is_finished and folder.metrics.exists() for folder in pair):
                shares.append(find_share_of_steps(*pair))
        reached = [share for share in shares if share is not None]
        if len(reached) == len(shares) > 0:
            rows.append([arm, f"{statistics.fmean(reached):.3f}", f"{statistics.fmean(reached) * ours / base:.3f}"])
        elif shares:
            rows.append([arm, f"not on {len(shares) - len(reached)} of {len(shares)} seeds", ABSENT])
    title = (
        "Time to the baseline's final training loss, as a share of the baseline's. Upper bounds: the arm's learning "
        "rate has not decayed by then"
    )
    return Table(title, ["arm", "of its steps", "of its time"], rows) if rows else None


def find_share_of_steps(ours: RunFolder, base: RunFolder) -> float | None:
    """Return the share of steps after which a run's training loss stays below the base's mean over its last 20 steps.

    The loss is a mean over 20 steps. None if the run does not end below it.
    """
    losses, target = (np.asarray(read_curve(folder, TRAIN_LOSS)[1]) for folder in (ours, base))
    window = min(AVERAGED_STEPS, len(losses))
    means = np.convolve(losses, np.ones(window) / window, "valid")
    above = np.flatnonzero(means > target[-window:].mean() + 1e-9)  # a run reaches its own loss
    first = int(above[-1]) + 1 if above.size else 0
    return (first + window) / len(losses) if first < len(means) else None


def _draw(plan: PairPlan, judgments: dict[str, Judgment], diverged: dict[str, int]) -> Any:
    """Draw the difference of each arm with its interval, and the effect in question as a band."""
    figure, axes = new_figure(6.0, 1.5 + 0.26 * len(judgments))
    axes.axvspan(-plan.effect, plan.effect, color="0.92", label=f"effect of {plan.effect:g}")
    for row, judgment in enumerate(judgments.values()):
        style = {"color": OUTCOME_COLORS[judgment.outcome], "label": str(judgment.outcome)}
        if math.isfinite(judgment.low):
            axes.plot([judgment.low, judgment.high], [row, row], **style)
        if judgment.pairs:
            axes.plot(judgment.mean, row, "o", **style)
    axes.axvline(0, color="black", linewidth=0.8)
    names = [f"{arm} (seed {diverged[arm]} diverged)" if arm in diverged else arm for arm in judgments]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(f"Loss minus that of {plan.baseline} (nats per token)")
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))  # the last of each: the mean
    figure.legend(by_label.values(), by_label, loc="outside upper center", ncols=4, fontsize=8)
    return figure


def format_plan(verdict: Question) -> str:
    """Return the runs of both stages, and the time they take if finished runs show it."""
    lines = []
    plan, tuning = verdict.read_plan(), verdict.tuning
    stages = [("tuning", tuning)] if tuning else []
    config = verdict.config
    if plan:
        stages.append(("pairs", verdict.build_pairs(plan)))
    else:
        pairs = config.pairs or config.max_pairs
        count = pairs * len(verdict.arms)
        bound = "" if config.pairs else ", at most; the tuning seeds show the noise"
        lines.append(f"pairs   {count} runs: {pairs} seeds of {len(verdict.arms)} arms{bound}")
    rows = []
    for name, stage in stages:
        trials = {trial.name: trial for trial in stage.trials.values()}.values()
        done = sum(trial.folder.is_finished for trial in trials)
        rows.append(f"{name:7} {len(trials)} runs, {done} done")
        seconds = [s for arm in verdict.arms for s in _measure_seconds(stage, arm).values()]
        if seconds and done < len(trials):
            left = (len(trials) - done) * statistics.fmean(seconds)
            rows[-1] += f"; the rest takes at most {format_duration(left)}, one run after the other"
    return "\n".join([f"folder  {verdict.folder}", *rows, *lines])


# Before any run


def build_pair_plan(paths: Sequence[Path], effect: float, baseline: str | None = None) -> Report:
    """Build a table of the pairs that find an effect with probability 0.8, from the noise of finished runs.

    A grid of `seed` and `data.shuffle_seed` also gives the noise by source. Without one, the last row pools the
    arms with the same seeds, where most arms share them. Raises RunError if no arm has two pairs with the baseline.
    """
    arms, _ = load_arms(paths)
    grid_base, grids, grid_notes = find_grids(arms, baseline)
    if grid_base:
        return _plan_grids(grid_base, grids, effect, grid_notes)
    finished = {name: rows for name in arms if (rows := select_finished(arms[name]))}
    base = find_baseline(finished, baseline)
    if base is None:
        raise RunError(f"{', '.join(map(str, paths))}: no Transformer without a memory; choose --baseline")
    compared = [compare_arms(arm, rows, base, finished[base]) for arm, rows in finished.items() if arm != base]
    compared = [comparison for comparison in compared if len(comparison.pairs) > 1]
    column = choose_column(None, [comparison.values for comparison in compared])
    differences = {
        c.arm: dict(zip((run["seed"] for run, _ in c.pairs), c.values[column], strict=True))
        for c in compared
        if column in c.values
    }
    if not differences:
        raise RunError(f"{base}: no arm has two finished runs with the same seeds and data; train more seeds")
    hours = _measure_hours([pair for comparison in compared for pair in comparison.pairs])
    lines = [
        _plan_row(arm, *estimate_deviation(list(values.values())), effect, hours) for arm, values in differences.items()
    ]
    groups: dict[tuple[int, ...], list[list[float]]] = {}
    for values in differences.values():
        groups.setdefault(tuple(sorted(values)), []).append([values[seed] for seed in sorted(values)])
    pooled = max(groups.values(), key=len)
    if len(pooled) > 1:
        label = f"pooled ({len(pooled)} arms of {len(pooled[0])} pairs)"
        lines.append(_plan_row(label, *pool_deviations(np.array(pooled)), effect, hours))
    left_out = [arm for arm in finished if arm not in (base, *differences)]
    notes = [f"left out, because they have fewer than two pairs ({column}): {', '.join(left_out)}"] if left_out else []
    return Report([_tabulate_plan(effect, lines)], [*notes, _describe_plan(base, effect, column)], [])


def _plan_grids(base: str, grids: dict[str, PairGrid], effect: float, notes: list[str]) -> Report:
    """Return the noise by source, and the pairs for its total."""
    hours = _measure_hours([pair for grid in grids.values() for pair in grid.pairs])
    (column,) = {grid.column for grid in grids.values()}
    total = {arm: split_variance(grid.differences)[TOTAL] for arm, grid in grids.items()}
    lines = [_plan_row(arm, float(x), float(low), float(high), effect, hours) for arm, (x, low, high) in total.items()]
    return Report(
        [build_noise(base, grids), _tabulate_plan(effect, lines)], [*notes, _describe_plan(base, effect, column)], []
    )


def _measure_hours(pairs: Sequence[tuple[Row, Row]]) -> float:
    """Return the median duration of both runs of a pair; NaN if none is recorded."""
    known = [ours["seconds"] + base["seconds"] for ours, base in pairs if "seconds" in ours and "seconds" in base]
    return statistics.median(known) / 3600 if known else math.nan


def _tabulate_plan(effect: float, rows: list[list[str]]) -> Table:
    header = ["arm", "deviation of a pair", f"pairs for {effect:g}", "hours"]
    return Table(f"Pairs for an effect of {effect:g}", header, rows)


def _describe_plan(base: str, effect: float, column: str) -> str:
    loss = {OTHER: "validation loss", "V2": "loss on V2"}.get(column, column)
    return (
        f"Pairs with {base} that find a difference of {effect:g} nats with probability {POWER:g} at level {LEVEL:g}, "
        f"with a look after every pair, for one arm. The noise is that of the {loss}. Deviations "
        "have 95 % intervals. Hours: the median duration of both runs, one after the other, times the pairs."
    )


def _plan_row(arm: str, deviation: float, low: float, high: float, effect: float, hours: float) -> list[str]:
    pairs = count_pairs(effect, deviation)
    above = "over " if pairs == MAX_PLANNED else ""
    time = f"{above}{pairs * hours:.1f}" if math.isfinite(hours) else ABSENT
    return [arm, f"{deviation:.4f} ({low:.4f} to {high:.4f})", f"{above}{pairs}", time]
