"""The paper's ablation (arXiv 2507.15343): losses of the variants and of the paper, and paired differences."""

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stackexp.data.olmo import NAMES
from stackexp.errors import ConfigError, RunError
from stackexp.frame import Row, get_scores
from stackexp.modules.scores import get_t_quantile
from stackexp.reports.arms import (
    CHOICES,
    COLUMNS,
    OTHER,
    TRAINING,
    ArmComparison,
    Arms,
    Difference,
    Losses,
    average_sets,
    choose_column,
    compare_arms,
    compute_flops,
    count_runs,
    describe_noise,
    describe_sweep,
    find_baseline,
    find_variant,
    group_bigrams,
    list_paths,
    list_seeds,
    list_sets,
    load_arms,
    rank_arm,
    read_losses,
    select_finished,
)
from stackexp.reports.compare import format_loss
from stackexp.reports.report import PALETTE, Report, Table, new_figure
from stackexp.sequential import LEVEL, Outcome, adjust_holm
from stackexp.tables import ABSENT

PAPER = {
    "Transformer": ((2.411, None), (3.518, 34.38), (3.195, 25.33)),
    "StackTrans": ((2.359, None), (3.432, 32.89), (3.092, 24.50)),
    "Queue": ((2.679, None), (3.679, 35.14), (3.211, 25.97)),
    "Push-Only": ((2.875, None), (4.032, 39.02), (3.407, 27.13)),
    "Single-Head": ((2.493, None), (3.552, 33.56), (3.130, 24.91)),
    "Full-Dimension": ((2.370, None), (3.457, 33.05), (3.105, 24.73)),
}
"""Variant -> (loss, perplexity) that the paper prints: in training, on V2 and on V3."""
LEGEND = (
    "Losses are means over the seeds, in nats per token, with perplexity after the slash. Training loss: mean of the "
    "last 20 steps. Average: the run's own sets outside V2 and V3.",
    "Differences are paired by seed: both runs trained on the same tokens in the same order (equal hashes) and on the "
    "same number of them. Parameters and FLOPs per token are not matched; their residual mismatch is given.",
    "Intervals are 95 %: Student's t over seeds, for validation widened by the sampling of the chunks of the sets, if "
    "both runs have recorded these and no set has too few. In square brackets: one seed, chunks only. Bold or *: an "
    "interval over seeds excludes zero; by chance, one in twenty does.",
    "Verdict: helps or hurts if the interval excludes zero, after Holm's correction over all arms with two pairs or "
    "more (level 0.05). No effect above E if the interval lies between -E and +E (--effect). Otherwise undecided; "
    '"after Holm": only the correction makes it undecided.',
)


def contradicts_itself(loss: float, perplexity: float | None) -> bool:
    """Return True if a printed mean perplexity is below exp(mean loss), which no average can be."""
    return perplexity is not None and perplexity < math.exp(loss - 0.0005)


def build_ablation(
    paths: Sequence[Path], baseline: str | None = None, measure: str | None = None, effect: float = 0.01
) -> Report:
    """Build the report of the runs at or below `paths`.

    `baseline` names an arm. The default is `transformer`, or else the Transformer without a memory that was trained on
    the most tokens; if there are several, the smallest. The verdict is on the column `measure`, by default the first of
    V2, the average and the training loss that all arms have; `effect` is the difference in question, in nats.
    """
    if not 0 < effect < math.inf:
        raise ConfigError(f"--effect {effect:g}: not a difference in nats; use a positive number such as 0.01")
    arms, skipped = load_arms(paths)
    finished = {name: rows for name in arms if (rows := select_finished(arms[name]))}
    if baseline in arms and baseline not in finished:
        command = f"python -m stackexp fit --run {shlex.quote(arms[baseline][0]['path'])}"
        raise RunError(f"{baseline} has no finished run; finish it with `{command}`, or choose another --baseline")
    base = find_baseline(finished, baseline)
    variants = _assign_variants(finished)
    order = [*(variants[v] for v in PAPER if v in variants), *(a for a in finished if a not in variants.values())]
    comparisons = [compare_arms(a, finished[a], base, finished[base]) for a in order if a != base] if base else []
    paired = [comparison for comparison in comparisons if comparison.pairs]
    column = choose_column(measure, [x.differences for x in paired])
    verdicts = judge_arms({x.arm: x.differences.get(column) for x in paired}, effect)
    tables = [_build_losses(finished, order, variants)]
    if base and paired:
        tables.append(_build_differences(paired, base, _format_verdicts(verdicts, column, effect)))
    notes = [describe_sweep(paths, "ablation"), *describe_noise(paired)]
    if base is None:
        notes.append("no differences: no finished run of a Transformer without a memory; choose another --baseline")
    waiting = [name for name in arms if name not in finished and find_variant(arms[name][0]) == "Transformer"]
    if base and baseline is None and waiting:
        waiting.sort(key=lambda name: rank_arm(arms, name))
        notes.append(f"the baseline is {base}, because no run of {', '.join(waiting)} is finished")
    notes += list_seeds(mismatch for comparison in comparisons for mismatch in comparison.mismatches)
    rows = [row for arm in order for row in finished[arm]]
    notes += [*_describe_incomplete(finished), *_describe_missing(rows), *skipped]
    rates = {row["optimizer.lr"] for row in rows if "optimizer.lr" in row}
    if paired and len(rates) == 1:
        notes.append(f"All arms share the learning rate {rates.pop():g}; a difference may be one of tuning.")
    records = _build_records(finished, order, variants, comparisons)
    for record in records:
        if verdict := verdicts.get(record["arm"]):
            record[f"{column} verdict"] = verdict.outcome.describe(effect)
    draw = (lambda: draw_differences(paired, str(base), column, effect)) if paired else None
    return Report(tables, [*notes, *LEGEND], records, draw)


class ArmVerdict(NamedTuple):
    """The verdict on an arm, with its interval over seeds if there is one."""

    outcome: Outcome
    interval: tuple[float, float] | None


def classify_effect(low: float, high: float, effect: float, is_significant: bool = True) -> Outcome:
    """Return the verdict on the interval of a loss difference.

    `is_significant` is False if the interval excludes zero only before a correction for multiple comparisons.
    """
    if is_significant and (high < 0 or low > 0):
        return Outcome.HELPS if high < 0 else Outcome.HURTS
    return Outcome.NO_EFFECT if -effect < low and high < effect else Outcome.UNDECIDED


def judge_arms(differences: Mapping[str, Difference | None], effect: float) -> dict[str, ArmVerdict]:
    """Return the verdict on each arm by its difference from the baseline. An arm without two pairs is undecided.

    All arms together have the error rate: Holm corrects the claim of an effect, Bonferroni that of none.
    """
    intervals: dict[str, tuple[float, float, float]] = {}
    for arm, difference in differences.items():
        if difference and difference.seeds > 1 and difference.low is not None and difference.high is not None:
            intervals[arm] = difference.low, difference.high, difference.degrees
    verdicts = dict.fromkeys(differences, ArmVerdict(Outcome.UNDECIDED, None))
    p_values = adjust_holm([_compute_p_value(*interval) for interval in intervals.values()])
    for (arm, (low, high, degrees)), p_value in zip(intervals.items(), p_values, strict=True):
        is_significant = p_value <= LEVEL
        ratio = get_t_quantile(degrees, LEVEL / len(intervals)) / get_t_quantile(degrees) if low < high else 1.0
        more = 0.0 if is_significant else (high - low) / 2 * (ratio - 1)
        outcome = classify_effect(low - more, high + more, effect, is_significant)
        verdicts[arm] = ArmVerdict(outcome, (low, high))
    return verdicts


def _compute_p_value(low: float, high: float, degrees: float) -> float:
    """Return the p-value of no difference from a 95 % interval, as if all of it came from Student's t with `degrees`.

    `degrees` are the fewest of its parts. The others widen less at smaller levels, so the p-value is not too small.
    """
    from scipy.special import stdtr

    if low == high:
        return float(low == 0)
    return float(2 * stdtr(degrees, -abs(high + low) / (high - low) * get_t_quantile(degrees)))


def _format_verdicts(verdicts: Mapping[str, ArmVerdict], column: str, effect: float) -> str:
    """Return one line: the arms of each verdict, with the largest gain that their interval does not exclude."""
    count = sum(verdict.interval is not None for verdict in verdicts.values())
    name = column if column in ("V2", "V3") else f"the {column}"
    if not count:
        return f"Verdict on {name}: undecided; an interval over seeds needs two pairs or more."
    groups: dict[str, list[str]] = {}
    for arm, (outcome, interval) in verdicts.items():
        is_corrected = outcome == Outcome.UNDECIDED and interval and not interval[0] <= 0 <= interval[1]
        gain = f"{max(0.0, -interval[0]):.3f}" if interval else "one pair"
        word = outcome.describe(effect) + " after Holm" * bool(is_corrected)
        groups.setdefault(word, []).append(f"{arm} ({gain})")
    parts = [f"{word}: {', '.join(arms)}" for word, arms in sorted(groups.items())]
    return (
        f"Verdict on {name} (effect {effect:g} nats, 95 %, Holm over {count} arm{'s' * (count > 1)}; a gain above the "
        f"number in parentheses is excluded): {'; '.join(parts)}."
    )


def _assign_variants(arms: Arms) -> dict[str, str]:
    """Return the paper's variant -> its arm: the one with the variant's name, or else the only one with its options.

    A cell of a grid, such as H=2-S=4, is not a variant.
    """
    variants = {}
    for variant, name in CHOICES.items():
        found = [arm for arm, rows in arms.items() if find_variant(rows[0]) == variant]
        if name in found or (len(found) == 1 and "=" not in found[0]):
            variants[variant] = name if name in found else found[0]
    return variants


def _find_partial_columns(rows: Sequence[Row]) -> dict[int, list[str]]:
    """Return the columns in which runs lack sets that other runs of the arm have: {index of the run: columns}."""
    names = {c: frozenset().union(*(list_sets(row, c) for row in rows)) for c in COLUMNS}
    return {i: [c for c in COLUMNS if list_sets(row, c) != names[c]] for i, row in enumerate(rows)}


def _average_runs(rows: Sequence[Row]) -> Losses:
    """Return the mean losses of an arm, without runs that lack sets of a column."""
    partial = _find_partial_columns(rows)
    return _average_losses(
        [{c: loss for c, loss in read_losses(row).items() if c not in partial[i]} for i, row in enumerate(rows)]
    )


def _average_losses(losses: Sequence[Losses]) -> Losses:
    averages: Losses = {}
    for column in COLUMNS:
        if values := [loss[column] for loss in losses if column in loss]:
            perplexities = [perplexity for _, perplexity in values if perplexity is not None]
            perplexity = statistics.fmean(perplexities) if perplexities else None
            averages[column] = statistics.fmean(loss for loss, _ in values), perplexity
    return averages


def _build_losses(arms: Arms, order: Sequence[str], variants: dict[str, str]) -> Table:
    """Return the table of losses: the paper's variants, other arms and bigram counts.

    A variant without runs has a row, unless no arm is a variant. One that several arms could be has none.
    """
    losses = {arm: _average_runs(arms[arm]) for arm in order}
    columns = [c for c in COLUMNS if c != OTHER or any(OTHER in loss for loss in losses.values())]

    def build_row(name: str, seeds: int, own: Losses, paper: Sequence[str] = (ABSENT,) * 3) -> list[str]:
        paper = paper if variants else ()
        return [name, str(seeds), *(format_loss(*own.get(column, (None, None))) for column in columns), *paper]

    rows = []
    ambiguous = {find_variant(runs[0]) for runs in arms.values()} - variants.keys()
    shown = [variant for variant in PAPER if variants and variant not in ambiguous]
    for variant, printed in ((variant, PAPER[variant]) for variant in shown):
        paper = [format_loss(*cell) + "†" * contradicts_itself(*cell) for cell in printed]
        arm = variants.get(variant, CHOICES[variant])
        name = arm if arm == CHOICES[variant] else f"{arm} ({variant})"
        rows.append(build_row(name, len(arms.get(arm, [])), losses.get(arm, {}), paper))
    rows += [build_row(arm, len(arms[arm]), losses[arm]) for arm in order if arm not in variants.values()]
    for name, runs in group_bigrams((arm, row) for arm in order for row in arms[arm]):
        rows.append(build_row(name, len(runs), _average_losses([average_sets(get_scores(r, "bigrams")) for r in runs])))
    if not variants:
        return Table("Losses", ["run", "seeds", *columns], rows)
    title = "Losses. †: impossible in the paper, because a mean perplexity is at least exp(mean loss)"
    return Table(title, ["run", "seeds", *columns, *(f"paper: {c}" for c in (TRAINING, "V2", "V3"))], rows)


def _build_differences(comparisons: list[ArmComparison], base: str, conclusion: str) -> Table:
    columns = [c for c in COLUMNS if any(c in x.differences for x in comparisons)]
    rows = [
        [x.arm, str(len(x.pairs)), *x.sizes, *(str(x.differences.get(c, ABSENT)) for c in columns)] for x in comparisons
    ]
    header = ["run", "pairs", "parameters", "FLOPs/token", *columns]
    return Table(f"Differences from {base}", header, rows, conclusion=conclusion)


def _describe_incomplete(arms: Arms) -> list[str]:
    """Return notes about the runs and losses that the means do not include."""
    partial = [
        (f"scored on some sets only, not in the mean of {column}", arm, rows[i]["seed"])
        for arm, rows in arms.items()
        for i, columns in _find_partial_columns(rows).items()
        for column in columns
        if list_sets(rows[i], column)
    ]
    rows = [row for arm in arms for row in arms[arm]]
    has_diverged = [
        row for row in rows if not read_losses(row) or any("loss" not in s for s in get_scores(row).values())
    ]
    diverged = list_paths("without a finite loss in training or on a set, not in that mean", has_diverged)
    unknown = [arms[arm][0] for arm in arms if compute_flops(arms[arm][0]) is None]
    command = "`python -m stackexp configs show RUN/config.yaml` says why"
    return [*list_seeds(partial), *diverged, *list_paths(f"without FLOPs per token, {command}", unknown)]


def _describe_missing(rows: Sequence[Row]) -> list[str]:
    """Return notes with the finished runs that lack some or all sets of V2 or V3."""
    names = {f"{group}/{name}" for group, members in NAMES.items() for name in members}
    remedy = "`python -m stackexp validate --run RUN --sets v2,v3` scores them"
    unscored = [row for row in rows if not names & get_scores(row).keys()]
    partial = [row for row in rows if row not in unscored and not names <= get_scores(row).keys()]
    notes = list_paths(f"with some sets of V2 and V3 only, unlike the paper's columns, {remedy}", partial)
    if len(unscored) == len(rows) > 1:
        return [f"all {count_runs(len(rows))} without V2 and V3, {remedy}", *notes]
    return [*list_paths(f"without V2 and V3, {remedy}", unscored), *notes]


def _build_records(
    arms: Arms, order: Sequence[str], variants: Mapping[str, str], comparisons: list[ArmComparison]
) -> list[dict[str, Any]]:
    """Return a record for each finished run, with the differences of its arm."""
    compared = {comparison.arm: comparison for comparison in comparisons}
    names = {arm: variant for variant, arm in variants.items()}
    records = []
    for arm, row in ((name, row) for name in order for row in arms[name]):
        record: dict[str, Any] = {"arm": arm, "variant": names.get(arm), "seed": row["seed"], "run": row["path"]}
        record |= {key: row.get(key) for key in ("tokens", "parameters", "memory_parameters")}
        record |= {"flops_per_token": compute_flops(arms[arm][0])}
        for column, (loss, perplexity) in read_losses(row).items():
            record |= {column: loss} | ({f"{column} perplexity": perplexity} if perplexity is not None else {})
        if arm in compared:
            for column, difference in compared[arm].differences.items():
                keys = (f"{column} difference", f"{column} low", f"{column} high")
                record |= dict(zip(keys, difference[:3], strict=True))
            for column, noise in compared[arm].noise.items():
                keys = (f"{column} seed noise", f"{column} chunk noise", f"{column} chunks needed")
                record |= dict(zip(keys, (noise.seed, noise.chunk, noise.chunks_needed), strict=True))
        records.append(record)
    return records


def draw_differences(comparisons: list[ArmComparison], baseline: str, column: str, effect: float) -> Any:
    """Draw the difference of each arm from the baseline with its interval, the lowest loss in `column` first.

    A band shows the differences smaller than `effect`.
    """
    columns = [c for c in COLUMNS if any(c in x.differences for x in comparisons)]
    order = sorted(comparisons, key=lambda x: x.differences[column].mean if column in x.differences else math.inf)
    names = [comparison.arm for comparison in order]
    figure, axes = new_figure(5.2 + 0.08 * max(map(len, [baseline, *names])), 1.7 + 0.34 * len(names))
    for i, name in enumerate(columns):
        for row, comparison in enumerate(order):
            if name in comparison.differences:
                _draw_interval(axes, comparison.differences[name], row + 0.16 * (i - (len(columns) - 1) / 2), i)
        label = "average (sets outside V2 and V3)" if name == OTHER else name
        axes.plot([], [], "os^D"[i], color=PALETTE[i], label=label)
    axes.axvspan(-effect, effect, color="black", alpha=0.1, linewidth=0, label=f"differences below {effect:g}")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=7)
    axes.set_xlabel(f"Loss minus that of {baseline} (nats per token)")
    has_single = any(difference.seeds < 2 for x in comparisons for difference in x.differences.values())
    axes.set_title("95 % intervals" + "; hollow: one seed, chunks only" * has_single, fontsize=8)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _draw_interval(axes: Any, difference: Difference, y: float, i: int) -> None:
    if difference.low is not None:
        axes.plot([difference.low, difference.high], [y, y], color=PALETTE[i], linewidth=1.4)
    face = "white" if difference.seeds < 2 else PALETTE[i]
    axes.plot(difference.mean, y, "os^D"[i], color=PALETTE[i], markerfacecolor=face, markersize=5)
