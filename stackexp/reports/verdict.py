"""The verdict on each arm, with the tuning of every arm, the split of the gain, and the cost in time."""

import math
import statistics
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np

from stackexp.config.memory import MECHANISM, StackMemoryConfig
from stackexp.errors import RunError
from stackexp.frame import read_run
from stackexp.metric_tags import AVERAGED_STEPS, TOKENS_PER_SECOND, TRAIN_LOSS
from stackexp.reports.arms import ArmComparison, describe_noise
from stackexp.reports.compare import format_loss, read_curve
from stackexp.reports.interventions import build_interventions
from stackexp.reports.report import PALETTE, Report, Table, new_figure
from stackexp.reports.training_data import open_pairs
from stackexp.runs import DATE_FORMAT, RunFolder
from stackexp.sequential import (
    LEVEL,
    MIN_PAIRS,
    POWER,
    Judgment,
    Outcome,
    compute_deviation_interval,
    compute_interval,
    count_pairs,
    estimate_deviation,
    find_detectable_effect,
    format_pairs,
)
from stackexp.sweeps.controls import ADAPTER, FLOPS, PARAMETERS, PLAIN, SCALE, STREAM
from stackexp.sweeps.schema import Values, format_value, shorten_keys
from stackexp.sweeps.sweep import STEPS
from stackexp.sweeps.trials import has_diverged, has_failed, read_failure
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

HEADER = ["arm", "verdict", "difference", f"{1 - LEVEL:.0%} interval", "pairs", "p", "time per run"]
OUTCOME_COLORS = dict(zip(Outcome, (PALETTE[2], PALETTE[1], PALETTE[0], PALETTE[7]), strict=True))
AVERAGED = "ema."
"""Prefix of the scores of averaged weights in result.json."""
LOADED = "Times are those of whole runs, because copies have no metrics; other work on the machine is part of them."
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
            stage, unequal = open_pairs(verdict, plan)
            notes += [f"{label}: {note}" for note in [*unequal, *_describe_failures(stage)]]
            scores, seconds = stage.read_scores(), measure_seconds(stage)
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
        trials = verdict.tuning.trials if verdict.tuning else {}
        done = {trials[key].name for key in verdict.tuning.read_scores()} if verdict.tuning else set()
        count = len({trial.name for trial in trials.values()})  # arms may share runs
        notes.append("no pairs yet" + f"; {len(done)} of {count} tuning runs are done" * bool(count))
        return Report(tables, notes, [])
    stage, unequal = open_pairs(verdict, plan)
    notes += unequal
    scores = stage.read_scores()
    judgments = judge_pairs(plan, scores)
    seconds = measure_seconds(stage)
    lines = _build_lines(judgments, plan, scores, seconds)
    at = "" if plan.speeds is None else ", at equal time"
    title = f"Verdict against {plan.baseline}, effect {plan.effect:g}, {plan.pairs} pairs planned{at}"
    columns = len(HEADER) - all(line[-1] == ABSENT for line in lines)
    tables.insert(0, Table(title, HEADER[:columns], [line[:columns] for line in lines], num_labels=2))
    if averaged := _build_averaged(verdict, plan, stage, judgments):
        tables.append(averaged)
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
    notes += [*_describe(plan, stage, judgments, scores), *_describe_chunks(verdict, plan, stage)]
    notes += [
        *_describe_edges(verdict, plan),
        *([LOADED] if columns == len(HEADER) and not _has_metrics(stage) else []),
    ]
    records = [{"arm": arm, "seed": seed, "score": value} for (arm, _, seed), value in scores.items()]
    diverged = find_diverged(plan, scores)
    return Report(tables, notes, records, lambda: _draw(plan, judgments, diverged))


def _build_lines(
    judgments: dict[str, Judgment],
    plan: PairPlan,
    scores: dict[TrialKey, float],
    seconds: "dict[str, dict[int, float]]",
) -> list[list[str]]:
    lines, diverged = [], find_diverged(plan, scores)
    for arm, judgment in judgments.items():
        ratio, sum_of_pair = _compare_seconds(seconds.get(arm, {}), seconds.get(plan.baseline, {}))
        new = _count_new_pairs(judgment, plan, list_differences(plan, scores, arm), len(judgments))
        left = sum(not {(arm, 0, seed), (plan.baseline, 0, seed)} <= scores.keys() for seed in plan.seeds)
        outcome = format_outcome(judgment, plan, diverged.get(arm), left, new, sum_of_pair)
        interval = f"{judgment.low:+.4f} to {judgment.high:+.4f}" if math.isfinite(judgment.low) else ABSENT
        mean = f"{judgment.mean:+.4f}" if judgment.pairs else ABSENT
        p = f"{min(1.0, judgment.p_value):.2g}" if judgment.pairs else ABSENT
        time = f"{ratio:.2f}x" if ratio else ABSENT
        lines.append([arm, outcome, mean, interval, f"{judgment.pairs}/{plan.pairs}", p, time])
    return lines


def format_outcome(
    judgment: Judgment, plan: PairPlan, diverged: int | None, left: int, new_pairs: int, seconds: float | None
) -> str:
    """Return the verdict in words; an undecided one with the diverged seed, or with the pairs it takes and their hours.

    These are the `left` pairs of the plan or, after all of them, `new_pairs` on fresh seeds. The hours are those
    of both runs of a pair, `seconds`, one after the other.
    """
    if judgment.outcome != Outcome.UNDECIDED:
        return judgment.outcome.describe(plan.effect)
    if diverged is not None:
        return f"undecided: seed {diverged} diverged"
    missing, kind = (left, "more") if left else (new_pairs, "new")
    hours = f" ({missing * seconds / 3600:.1f} hours)" if seconds else ""
    return f"undecided: {format_pairs(missing)} {kind} pair{'s' * (missing != 1)}{hours}"


def _count_new_pairs(judgment: Judgment, plan: PairPlan, differences: Sequence[float], arms: int) -> int:
    """Return the pairs of a new verdict on fresh seeds that finds the effect; 0 while pairs of this plan are left."""
    if judgment.pairs < plan.pairs:
        return 0
    deviation, _, _ = estimate_deviation(differences)
    return count_pairs(plan.effect, deviation, LEVEL / arms, degrees=judgment.pairs - 1)


def _list_finished(stage: QuestionStage) -> dict[TrialKey, RunFolder]:
    return {key: trial.folder for key, trial in stage.trials.items() if trial.folder.is_finished}


def _has_metrics(stage: QuestionStage) -> bool:
    """Return True if every finished run has its metrics, which copies of runs lack."""
    return all(folder.metrics.exists() for folder in _list_finished(stage).values())


def measure_seconds(stage: QuestionStage) -> dict[str, dict[int, float]]:
    """Return the mean duration of the finished runs of an arm and seed; at their median speed, if all have metrics."""
    seconds: dict[str, dict[int, list[float]]] = {}
    has_metrics = _has_metrics(stage)
    for (arm, _, seed), folder in _list_finished(stage).items():
        duration = folder.read_result().seconds
        if has_metrics:
            tokens, speeds = read_curve(folder, TOKENS_PER_SECOND)
            duration = tokens[-1] / statistics.median(speeds) if speeds else None
        if duration:
            seconds.setdefault(arm, {}).setdefault(seed, []).append(duration)
    return {arm: {seed: statistics.fmean(x) for seed, x in values.items()} for arm, values in seconds.items()}


def _compare_seconds(ours: dict[int, float], base: dict[int, float]) -> tuple[float | None, float | None]:
    """Return the medians of ours / base and of ours + base over the seeds that both arms have."""
    pairs = [(ours[seed], base[seed]) for seed in ours.keys() & base.keys()]
    if not pairs:
        return None, None
    return statistics.median(a / b for a, b in pairs), statistics.median(a + b for a, b in pairs)


def _describe(
    plan: PairPlan, stage: QuestionStage, judgments: dict[str, Judgment], scores: dict[TrialKey, float]
) -> list[str]:
    arms = len(judgments)
    detectable = ""
    if plan.deviation is not None:
        low_high = compute_deviation_interval(plan.deviation, plan.degrees) if plan.degrees else None
        interval = f" ({low_high[0]:.4f} to {low_high[1]:.4f})" if low_high else ""
        effect = find_detectable_effect(plan.pairs, plan.deviation, LEVEL / arms, degrees=plan.degrees or math.inf)
        detectable = (
            f" With the deviation {plan.deviation:.4f}{interval} of the tuning pairs, they find an effect of "
            f"{effect:.4f} with probability {POWER:g}."
        )
    notes = [
        f"Differences are arm minus baseline in nats per token; negative is better. {_describe_date(plan, stage)}"
        f"{detectable}",
        _describe_intervals(arms),
    ]
    for arm, judgment in judgments.items():
        if judgment.pairs > 2:
            differences = list_differences(plan, scores, arm)
            deviation, low, high = estimate_deviation(differences)
            text = f"{arm}: standard deviation of a pair {deviation:.4f} ({low:.4f} to {high:.4f})"
            if judgment.look < judgment.pairs:
                mean = statistics.fmean(differences)
                text += f"; decided after {judgment.look} pairs, whose mean is shown; all have {mean:+.4f}"
            notes.append(text)
    notes += _describe_failures(stage)
    diverged = sorted({(arm, seed) for (arm, _, seed), value in scores.items() if not math.isfinite(value)})
    notes += [f"{arm}: seed {seed} has no finite score; its pairs count up to there" for arm, seed in diverged]
    return notes


def _describe_failures(stage: QuestionStage) -> list[str]:
    """Return a note for each run that failed without diverging: its pair is missing, so later ones do not count."""
    failed = {trial.name: trial for trial in stage.trials.values() if has_failed(trial.folder)}
    return [
        f"{name}: failed ({read_failure(trial)['cause']}); the pairs after it count once it has run"
        for name, trial in failed.items()
        if not has_diverged(trial)
    ]


def _describe_date(plan: PairPlan, stage: QuestionStage) -> str:
    """Return a sentence on whether the plan was written before the pairs were trained."""
    text = "Seeds, tuned values and the number of pairs are those of verdict.json,"
    if plan.written is None:
        return f"{text} which has no date, so it is not known whether it was written before the first pair."
    starts = {folder.path: folder.read_start() for folder in _list_finished(stage).values()}
    unknown = sum(start is None for start in starts.values())
    earlier = sum(start < datetime.strptime(plan.written, DATE_FORMAT) for start in starts.values() if start)
    if earlier or unknown:
        return f"{text} written {plan.written}: {earlier} runs started earlier, {unknown} have no date."
    return f"{text} written {plan.written}, before the first pair."


def _describe_chunks(verdict: Question, plan: PairPlan, stage: QuestionStage) -> list[str]:
    """Return notes on the noise of seeds and evaluation chunks, if the runs have the losses of the chunks."""
    rows = {key: read_run(folder) for key, folder in _list_finished(stage).items()}
    comparisons: dict[tuple[str, ...], ArmComparison] = {}  # arms with the same config share their runs
    for arm in verdict.arms:
        keys = [((arm, 0, seed), (plan.baseline, 0, seed)) for seed in plan.seeds]
        pairs = [(rows[ours], rows[base]) for ours, base in keys if ours in rows and base in rows]
        pairs = [(ours, base) for ours, base in pairs if ours["path"] != base["path"]]
        if pairs:
            comparisons.setdefault(tuple(ours["path"] for ours, _ in pairs), ArmComparison(arm, pairs))
    notes = describe_noise(list(comparisons.values()))
    return [f"{note} All pairs share the chunks, so more pairs do not reduce the latter." for note in notes]


def get_chosen_values(
    verdict: Question, plan: PairPlan | None, arm: str, points: list[tuple[Values, list[float]]]
) -> Values:
    """Return the tuned values of an arm; {} if none is finite.

    At equal time, they are chosen again, because the plan has scaled the steps of the schedule.
    """
    if plan is not None and plan.speeds is None:
        return plan.values[arm]
    return choose_point(points, verdict.config.effect) or {}


def _describe_edges(verdict: Question, plan: PairPlan) -> list[str]:
    """Return a note for each tuned number and end of its range that arms have chosen."""
    ends: dict[tuple[str, str], list[str]] = {}
    for arm, tuned in verdict.read_tuning().items():
        points, chosen = verdict.points[arm], get_chosen_values(verdict, plan, arm, tuned)
        for key in points[0]:
            tried = sorted({point[key] for point in points if isinstance(point[key], int | float)})
            for word, end in (("smallest", tried[:1]), ("largest", tried[-1:])):
                if len(tried) > 2 and [chosen.get(key)] == end:
                    ends.setdefault((word, key), []).append(arm)
    return [
        f"{', '.join(arms)}: chose the {word} {key} that was tried, so the best may lie beyond"
        for (word, key), arms in ends.items()
    ]


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
        values = get_chosen_values(verdict, plan, arm, points)
        chosen = next((i for i, (own, _) in enumerate(points) if values and own.items() <= values.items()), 0)
        curve = []
        for count in counts:
            mean, low, high = compute_best_of(losses, count) if count <= len(losses) else (math.nan,) * 3
            curve.append(f"{mean:.4f} ({low:.4f} to {high:.4f})" if math.isfinite(mean) else ABSENT)
        halves = (len(losses) // 2, -(-len(losses) // 2)) if len(losses) > 1 else ()  # of an odd number, between both
        best_of_half = statistics.fmean(compute_best_of(losses, n)[0] for n in halves) if halves else math.nan
        gain = best_of_half - min(losses)
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


def _format_mean(differences: Sequence[float], plan: PairPlan, level: float = LEVEL) -> list[str]:
    """Return the mean of paired differences, its interval, and the number of pairs, as cells of a table."""
    mean, low, high = compute_interval(differences, plan.pairs, level)
    return [f"{mean:+.4f}", f"{low:+.4f} to {high:+.4f}", str(len(differences))]


# Averaged weights


def _build_averaged(
    verdict: Question, plan: PairPlan, stage: QuestionStage, judgments: dict[str, Judgment]
) -> Table | None:
    """Return the differences with averaged weights, or without if those are the score; None without an average."""
    if any(trial.config.trainer.ema_decay is None for trial in stage.trials.values()):
        return None
    score = verdict.config.score
    other = score.removeprefix(AVERAGED) if score.startswith(AVERAGED) else AVERAGED + score
    try:
        scores = stage.read_scores(other)
    except RunError:  # only language models are also evaluated with averaged weights
        return None
    differences = {arm: list_differences(plan, scores, arm) for arm in judgments}
    rows = [
        [arm, *_format_mean(x, plan, LEVEL / len(judgments))] for arm, x in differences.items() if len(x) >= MIN_PAIRS
    ]
    title = f"The differences in {other}, for comparison; intervals are corrected like those of the verdict"
    return Table(title, ["arm", "difference", f"{1 - LEVEL:.0%} interval", "pairs"], rows) if rows else None


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
        differences = list_differences(plan, scores, arm, base)  # none if one of them is not an arm
        if len(differences) >= MIN_PAIRS:
            rows.append([cause, f"{arm} minus {base}", *_format_mean(differences, plan)])
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
        ratio, _ = _compare_seconds(seconds.get(arm, {}), seconds.get(plan.baseline, {}))
        if arm == plan.baseline or not ratio:
            continue
        shares = []
        for seed in plan.seeds:
            pair = [stage.trials[name, 0, seed].folder for name in (arm, plan.baseline)]
            if all(folder.is_finished and folder.metrics.exists() for folder in pair):
                shares.append(find_share_of_steps(*pair))
        reached = [share for share in shares if share is not None]
        if len(reached) == len(shares) > 0:
            rows.append([arm, f"{statistics.fmean(reached):.3f}", f"{statistics.fmean(reached) * ratio:.3f}"])
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
    axes.set_xlabel(
        f"Loss minus that of {plan.baseline} (nats per token)\nintervals: Bonferroni; outcomes: also Holm, less strict"
    )
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))  # the last of each: the mean
    figure.legend(by_label.values(), by_label, loc="outside upper center", ncols=4, fontsize=8)
    return figure
