"""The paper's ablation: losses of the variants and of the paper, and paired differences from the baseline."""

import json
import math
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stackexp.config.affects import select_options
from stackexp.data.olmo import NAMES
from stackexp.errors import RunError
from stackexp.reports.arms import Arm, ArmRun, describe_unfinished, find_arm, rank_arm, read_arms
from stackexp.reports.differences import (
    COLUMNS,
    OTHER,
    TRAINING,
    Comparison,
    Difference,
    Losses,
    average_sets,
    compare_arms,
    name_sets,
    read_losses,
)
from stackexp.reports.figures import new_figure
from stackexp.reports.missing_runs import (
    build_fit_command,
    describe_sweeps,
    find_command,
    find_namesakes,
    find_sweeps,
)
from stackexp.reports.paper import CHOICES, PAPER, contradicts_itself, find_variant
from stackexp.reports.report import PALETTE, Report, Table
from stackexp.reports.summaries import format_loss
from stackexp.runs import format_resume_command
from stackexp.tables import ABSENT

LEGEND = (
    "Losses are means over the seeds, in nats per token, with perplexity after the slash. Training loss: mean of the "
    "last 20 steps. Average: the run's own sets outside V2 and V3.",
    "Differences are paired by seed: both runs trained on the same tokens in the same order (equal hashes) and on the "
    "same number of them. Parameters and FLOPs per token are not matched; their residual mismatch is given.",
    "Intervals are 95 %: Student's t over seeds, for validation widened by a paired bootstrap over the chunks of the "
    "sets, if both runs have recorded these. In square brackets: one seed, chunks only. Bold or *: an interval over "
    "seeds excludes zero; by chance, one in twenty does.",
)


def build_ablation(paths: Sequence[Path], baseline: str | None = None) -> Report:
    """Build the report of the runs at or below `paths`.

    `baseline` names an arm; by default it is `transformer`, or else the Transformer without a memory that was trained
    on the most tokens, of several the smallest.
    """
    arms, notes = read_arms(paths)
    finished = [arm for arm in arms if arm.runs]
    variants = _assign_variants(finished)
    base = _find_baseline(arms, variants, baseline)
    order = [variants[v] for v in PAPER if v in variants]
    order += [arm for arm in finished if arm not in order]
    comparisons = [compare_arms(arm, base) for arm in order if arm is not base] if base else []
    sweeps = find_sweeps(paths)
    missing = _find_missing(arms, paths, [*sweeps, *find_namesakes(paths)])
    notes = [*LEGEND, *missing, *_find_unscored(order), *describe_unfinished(arms), *describe_sweeps(sweeps), *notes]
    notes += [note for arm in order for note in _average_runs(arm)[1]]
    diverged = [run for arm in order for run in arm.runs if not read_losses(run)]
    notes += [f"without a finite loss, not in the means: {run.folder.path}" for run in diverged]
    unknown = [arm.runs[0].folder.config for arm in order if base and arm.runs[0].flops_per_token is None]
    command = "python -m stackexp configs show --config"
    notes += [f"no FLOPs per token: `{command} {shlex.quote(str(config))}` says why" for config in unknown]
    tables = [_build_losses(order, variants)]
    waiting = [arm.name for arm in arms if not arm.runs and find_variant(arm.config) == "Transformer"]
    if base and waiting and baseline is None:
        notes.append(f"the baseline is {base.name}, because no run of {', '.join(waiting)} is finished")
    if base is None:
        notes.append("no differences: no finished run of a Transformer without a memory; choose another --baseline")
    has_pairs = base is not None and any(comparison.pairs for comparison in comparisons)
    if base and has_pairs:
        tables.append(_build_differences(comparisons, base))
    notes += [line for comparison in comparisons for line in comparison.mismatches]
    draw = (lambda: draw_differences(comparisons, base.name)) if base and has_pairs else None
    return Report(tables, notes, _build_records(order, comparisons), draw)


def _assign_variants(arms: list[Arm]) -> dict[str, Arm]:
    """Return the paper's variant -> its arm: of several the first by `rank_arm`."""
    variants: dict[str, Arm] = {}
    for arm in sorted(arms, key=rank_arm):
        if (variant := find_variant(arm.config)) is not None:
            variants.setdefault(variant, arm)
    return variants


def _find_missing(arms: list[Arm], paths: Sequence[Path], sweeps: list[Path]) -> list[str]:
    """Return the commands that run the paper's variants and the controls without an arm.

    They run a sweep, or use the config of the narrowest arm, so that no variant is as wide as transformer_wide.
    """
    variants = _assign_variants(arms)
    narrowest = min(arms, key=lambda arm: (arm.config.get("model.intermediate_size") or math.inf, rank_arm(arm)))
    commands: dict[str, list[str]] = {}
    for variant, name in CHOICES.items():
        if variant not in variants:
            overrides = [f"name={name}", f"model.memory={'null' if variant == 'Transformer' else name}"]
            default = build_fit_command(narrowest.folders[0], paths, *overrides)
            commands.setdefault(find_command(name, sweeps, default), []).append(variant)
    if "StackTrans" in variants:
        adapter = build_fit_command(narrowest.folders[0], paths, "name=adapter", "model.memory=adapter")
        stack = shlex.quote(str(variants["StackTrans"].folders[0].config))
        match = f"python -m stackexp match --config {stack} model.memory=null --to {stack} --by parameters"
        if not any(_is_adapter(arm) for arm in arms):
            commands.setdefault(find_command("adapter", sweeps, adapter), []).append("the control adapter")
        if not any(_is_equal_transformer(arm, variants["StackTrans"]) for arm in arms):
            commands.setdefault(find_command("transformer_wide", sweeps, match), []).append(
                "a Transformer of equal size"
            )
    return [f"missing {', '.join(found)}: `{command}`" for command, found in commands.items()]


def _is_adapter(arm: Arm) -> bool:
    """Return True for a stack without memory: it always pushes and has one slot."""
    return (arm.config.get("model.memory.discipline"), arm.config.get("model.memory.num_slots")) == ("push_only", 1)


def _is_equal_transformer(arm: Arm, stack: Arm) -> bool:
    """Return True for a Transformer with the parameters of `stack`, to 1 %; also if one of them is unfinished."""
    size, wanted = arm.average("parameters"), stack.average("parameters")
    is_equal = size is None or wanted is None or math.isclose(size, wanted, rel_tol=0.01)
    return find_variant(arm.config) == "Transformer" and is_equal


def _find_baseline(arms: list[Arm], variants: dict[str, Arm], name: str | None) -> Arm | None:
    base = find_arm(arms, name) if name else variants.get("Transformer")
    if base and name and not base.runs:
        command = format_resume_command(base.unfinished[0])
        raise RunError(f"{name} has no finished run; finish it with `{command}`, or choose another --baseline")
    return base


def _average_runs(arm: Arm) -> tuple[Losses, list[str]]:
    """Return the mean losses of an arm, and notes about runs that lack sets of a column: they do not count there."""
    names = {c: set().union(*(name_sets(run, c) for run in arm.runs)) for c in COLUMNS}
    losses, notes = [], []
    for run in arm.runs:
        missing = [c for c in COLUMNS if name_sets(run, c) != names[c]]
        losses.append({c: loss for c, loss in read_losses(run).items() if c not in missing})
        if partial := [c for c in missing if name_sets(run, c)]:
            notes.append(
                f"{arm.name}, seed {run.seed}: scored on some sets only, not in the mean: {', '.join(partial)}"
            )
    return _average_losses(losses), notes


def _average_losses(losses: Sequence[Losses]) -> Losses:
    averages: Losses = {}
    for column in COLUMNS:
        values = [loss[column] for loss in losses if column in loss]
        if values:
            perplexities = [perplexity for _, perplexity in values if perplexity is not None]
            perplexity = statistics.fmean(perplexities) if perplexities else None
            averages[column] = statistics.fmean(loss for loss, _ in values), perplexity
    return averages


def _format_losses(losses: Losses, columns: Sequence[str]) -> list[str]:
    return [format_loss(*losses.get(column, (None, None))) for column in columns]


def _build_losses(order: list[Arm], variants: dict[str, Arm]) -> Table:
    """Return the table of losses: the paper's variants, missing ones included, other arms and bigram counts."""
    losses = {arm.name: _average_runs(arm)[0] for arm in order}
    columns = [c for c in COLUMNS if c != OTHER or any(OTHER in loss for loss in losses.values())]
    rows = []
    for variant, printed in PAPER.items():
        arm = variants.get(variant)
        paper = [format_loss(*cell) + "†" * contradicts_itself(*cell) for cell in printed]
        if arm is None:
            rows.append([CHOICES[variant], "0", *[ABSENT] * len(columns), *paper])
        else:
            name = arm.name if arm.name == CHOICES[variant] else f"{arm.name} ({variant})"
            rows.append([name, str(len(arm.runs)), *_format_losses(losses[arm.name], columns), *paper])
    for arm in order:
        if arm not in variants.values():
            rows.append([arm.name, str(len(arm.runs)), *_format_losses(losses[arm.name], columns), *[ABSENT] * 3])
    for name, seeds, averages in _average_bigrams(order):
        rows.append([name, str(seeds), *_format_losses(averages, columns), *[ABSENT] * 3])
    title = "Losses. †: impossible in the paper, because a mean perplexity is at least exp(mean loss)"
    return Table(title, ["run", "seeds", *columns, *(f"paper: {c}" for c in (TRAINING, "V2", "V3"))], rows)


def _average_bigrams(arms: Sequence[Arm]) -> list[tuple[str, int, Losses]]:
    """Return name, number of seeds and losses of the bigram counts of each corpus and number of training tokens."""
    counts: dict[str, tuple[str, dict[int, Losses]]] = {}
    for arm in arms:
        for run in arm.runs:
            if "bigrams" in run.result:
                data = {k: v for k, v in select_options(run.config, ["training"]).items() if k.startswith("data.")}
                key = json.dumps([run.result["tokens"], data], sort_keys=True, default=str)
                counts.setdefault(key, (arm.name, {}))[1][run.seed] = average_sets(run.result["bigrams"]["sets"])
    return [
        (
            f"bigram counts (data of {arm})" if len(counts) > 1 else "bigram counts",
            len(losses),
            _average_losses([*losses.values()]),
        )
        for arm, losses in counts.values()
    ]


def _build_differences(comparisons: list[Comparison], base: Arm) -> Table:
    rows, columns = [], [c for c in COLUMNS if any(c in x.differences for x in comparisons)]
    for comparison in comparisons:
        if comparison.pairs:
            cells = [str(comparison.differences.get(c, ABSENT)) for c in columns]
            rows.append([comparison.arm.name, str(len(comparison.pairs)), *comparison.format_sizes(base), *cells])
    return Table(f"Differences from {base.name}", ["run", "pairs", "parameters", "FLOPs/token", *columns], rows)


def _find_unscored(order: list[Arm]) -> list[str]:
    """Return the commands that score finished runs on V2 and V3."""
    runs = [run for arm in order for run in arm.runs]
    unscored = [run for run in runs if not _is_scored(run)]
    if len(unscored) == len(runs) > 1:
        return ["missing V2 and V3 of all runs: `python -m stackexp validate --run RUN --sets v2,v3` for each RUN"]
    command = "missing V2 and V3: `python -m stackexp validate --run {} --sets v2,v3`"
    return [command.format(shlex.quote(str(run.folder.path))) for run in unscored]


def _is_scored(run: ArmRun) -> bool:
    """Return True if a run has a score on every set of V2 and V3."""
    return all(f"{group}/{name}" in run.sets for group, names in NAMES.items() for name in names)


def _build_records(order: list[Arm], comparisons: list[Comparison]) -> list[dict[str, Any]]:
    """Return a record for each finished run, with the differences of its arm."""
    differences = {comparison.arm.name: comparison.differences for comparison in comparisons}
    records = []
    for arm in order:
        for run in arm.runs:
            record: dict[str, Any] = {"arm": arm.name, "variant": find_variant(run.config)}
            record |= {"seed": run.seed, "run": str(run.folder.path)}
            record |= {key: run.result.get(key) for key in ("tokens", "parameters", "memory_parameters")}
            record |= {"flops_per_token": arm.runs[0].flops_per_token}
            for column, (loss, perplexity) in read_losses(run).items():
                record |= {column: loss} | ({f"{column} perplexity": perplexity} if perplexity is not None else {})
            for column, difference in differences.get(arm.name, {}).items():
                names = (f"{column} difference", f"{column} low", f"{column} high")
                record |= dict(zip(names, difference[:3], strict=True))
            records.append(record)
    return records


def draw_differences(comparisons: list[Comparison], baseline: str) -> Any:
    """Draw the difference of each arm from the baseline with its interval, in training and in validation."""
    found = {c.arm.name: c.differences for c in comparisons if c.pairs}
    columns = [c for c in COLUMNS if any(c in differences for differences in found.values())]
    names = list(found)
    figure, axes = new_figure(5.2 + 0.08 * max(map(len, [baseline, *names])), 1.4 + 0.34 * len(names))
    for i, column in enumerate(columns):
        for row, name in enumerate(names):
            if column in found[name]:
                _draw_interval(axes, found[name][column], row + 0.16 * (i - (len(columns) - 1) / 2), i)
        axes.plot([], [], "os^D"[i], color=PALETTE[i], label=column)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.margins(y=0.12)
    axes.locator_params(axis="x", nbins=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"Loss minus that of {baseline} (nats per token)")
    axes.set_title("95 % intervals; hollow: one seed, chunks only", fontsize=8)
    if columns:
        axes.legend(loc="best", fontsize=8)
    return figure


def _draw_interval(axes: Any, difference: Difference, y: float, i: int) -> None:
    if difference.low is not None:
        axes.plot([difference.low, difference.high], [y, y], color=PALETTE[i], linewidth=1.4)
    face = "white" if difference.seeds < 2 else PALETTE[i]
    axes.plot(difference.mean, y, "os^D"[i], color=PALETTE[i], markerfacecolor=face, markersize=5)
