"""Compare runs from their folders alone: a table of final scores, and a plot of the losses."""

import json
import math
import re
from pathlib import Path
from typing import Any

from stackexp.config.affects import select_options
from stackexp.data import hash_log
from stackexp.errors import RunError
from stackexp.metric_tags import AVERAGE_LOSS, TRAIN_LOSS
from stackexp.reports.figures import abbreviate_thousands, label_curves, new_figure, save_figure, smooth_losses
from stackexp.reports.summaries import format_loss, summarize
from stackexp.runs import RunFolder
from stackexp.tables import ABSENT, Style, format_table

GENERATED_DATA = ("formal_language", "arithmetic")
"""The kinds of data that the config alone determines."""
TRIAL_ID = re.compile(r"-[0-9a-f]{8}$")
SMOOTHED_STEPS = 10
"""Training losses are plotted as moving averages over this many steps."""


def check_same_data(runs: list[RunFolder]) -> list[str]:
    """Raise RunError if two runs were trained on different data, and return warnings about what was not compared.

    Runs on tokens are compared by the hashes that they recorded of their batches. Formal languages and arithmetic are
    generated from the config, so those runs are compared by the options of the dataset.
    """
    warnings: list[str] = []
    records: dict[RunFolder, tuple[bool, dict[Any, Any]]] = {}
    for run in runs:
        options = _read_dataset_options(run)
        record: dict[Any, Any] = options or _read_hashes(run)
        if not record:
            has_log = (run.path / hash_log.FILE_NAME).exists()
            reason = "it has recorded none yet" if has_log else "it has no record of them"
            warnings.append(f"{run.path}: its data are not compared; {reason} ({hash_log.FILE_NAME})")
            continue
        for other, (is_formal, other_record) in records.items():
            if is_formal != bool(options):
                tokens, formal = (run, other) if is_formal else (other, run)
                raise RunError(f"{tokens.path}: trained on text, but {formal.path} on generated data")
            keys = (
                list(dict.fromkeys([*record, *other_record]))
                if options
                else sorted(record.keys() & other_record.keys())
            )
            different = [key for key in keys if record.get(key) != other_record.get(key)]
            if different:
                key = different[0]
                found = f"{key} is {record.get(key)}, not {other_record.get(key)}"
                raise RunError(
                    f"{run.path}: trained on other data than {other.path} "
                    f"({found if options else f'they differ at step {key}'}); compare them anyway with --different-data"
                )
            if not keys:
                warnings.append(f"{run.path}: its data are not compared with {other.path}; they share no recorded step")
        records[run] = bool(options), record
    return warnings


def explain_other_data(base: RunFolder, run: RunFolder) -> str:
    """Return why the training data of two runs differ or were not compared, or an empty string."""
    try:
        return "; ".join(check_same_data([base, run]))
    except RunError as error:
        return str(error).partition("; compare them anyway")[0]


def _read_hashes(run: RunFolder) -> dict[int, str]:
    try:
        return hash_log.read_hashes(run.path)
    except (KeyError, TypeError) as error:
        raise RunError(f"{run.path / hash_log.FILE_NAME}: a line has no {error}; delete the line") from None


def _read_dataset_options(run: RunFolder) -> dict[str, Any]:
    """Return key -> value of the options that determine a run's training strings; empty for runs on tokens."""
    config = run.read_options() if run.config.is_file() else {}
    if config.get("data.kind") not in GENERATED_DATA:
        return {}
    options = {key: value for key, value in select_options(config, ["training"]).items() if key.startswith("data.")}
    return {"data.task": config.get("data.task"), "seed": config.get("seed"), **options}


def format_runs(runs: list[RunFolder], style: Style = "terminal") -> str:
    """Return a table with one row per run: its state, steps and sizes, its training loss and its final scores.

    Runs on tokens have loss / perplexity on every set; runs on formal languages have their task and scores. Runs
    without a result have no scores. Small models get a last row: the scores of bigram counts of their training tokens.
    """
    results = {run: run.read_result().to_dict() if run.is_finished else {} for run in runs}
    names = name_runs(runs)
    has_sets = any("sets" in result for result in results.values())
    sets = list(dict.fromkeys(name for result in results.values() for name in result.get("sets", {})))
    named = ("task", "operation", "held_out_accuracy")
    formal = [key for result in results.values() for key in result if key in named or key.startswith("score_")]
    formal = list(dict.fromkeys(formal))
    header = ["run", "state", "steps", "tokens", "parameters", "in the memory", "training loss", *formal]
    header += [*sets, "average", "bits/byte"] if has_sets else []
    rows = []
    for run, result in results.items():
        summary = summarize(run)
        counts = (summary.step, summary.tokens, result.get("parameters"), result.get("memory_parameters"))
        progress = [summary.state.value, *(ABSENT if count is None else f"{count:,}" for count in counts)]
        scores = [_format_score(result.get(key, ABSENT)) for key in formal]
        set_scores = _format_sets(result, sets) if has_sets else []
        rows.append([names[run], *progress, format_loss(summary.train_loss), *scores, *set_scores])
    baselines = {json.dumps(result["bigrams"]): result for result in results.values() if "bigrams" in result}
    owners = {json.dumps(result.get("bigrams")): names[run] for run, result in reversed(results.items())}
    for key, result in baselines.items():  # one row for each corpus and number of tokens
        cells = [ABSENT, ABSENT, f"{result['tokens']:,}", *[ABSENT] * (3 + len(formal))]
        name = f"bigram counts (data of {owners[key]})" if len(baselines) > 1 else "bigram counts"
        rows.append([name, *cells, *_format_sets(result["bigrams"], sets)])
    return format_table(rows, header=header, align="<<" + ">" * (len(header) - 2), style=style)


def _format_score(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3f}"


def _format_sets(result: dict[str, Any], sets: list[str]) -> list[str]:
    """Return loss / perplexity of each set and of their average, and bits per byte, as far as there are figures."""
    if "sets" not in result:
        return [ABSENT] * (len(sets) + 2)
    scores = [result["sets"].get(name, {}) for name in sets] + [result["average"]]
    perplexities = [s["perplexity"] or math.inf if "perplexity" in s else None for s in scores]
    cells = [format_loss(s.get("loss"), perplexity) for s, perplexity in zip(scores, perplexities, strict=True)]
    bits = result["average"].get("bits_per_byte")
    return [*cells, ABSENT if bits is None else f"{bits:.3f}"]


def name_runs(runs: list[RunFolder]) -> dict[RunFolder, str]:
    """Return the names of the runs, with the id where names repeat; only the ids if all names are equal.

    A trial of a sweep has a name of its own, such as queue-seed=0-20010bb6.
    """
    paths = [run.path.resolve() for run in runs]
    names = [path.name if TRIAL_ID.search(path.name) else path.parent.name for path in paths]
    prefixes = {name: "" if len(set(names)) == 1 else f"{name}/" for name in names}
    return {
        run: name if names.count(name) == 1 else prefixes[name] + run.path.resolve().name
        for run, name in zip(runs, names, strict=True)
    }


def draw_losses(runs: list[RunFolder], path: Path) -> None:
    """Plot the training loss and the mean validation loss of each run against tokens, in one color per run."""
    if not any(run.metrics.exists() for run in runs):
        raise RunError(f"{runs[0].path}: no metrics.jsonl to draw, as in copies; give the runs themselves")
    figure, axes = new_figure(7, 4.2)
    names, curves = name_runs(runs), {}
    for run in runs:
        lines = [line for line in run.read_metrics() if "tokens" in line]
        train = [(line["tokens"], line[TRAIN_LOSS]) for line in lines if line.get(TRAIN_LOSS) is not None]
        means = smooth_losses([loss for _, loss in train], SMOOTHED_STEPS)
        (curve,) = axes.plot([tokens for tokens, _ in train], means)
        if train:
            curves[names[run]] = curve
        points = [(x["tokens"], x[AVERAGE_LOSS]) for x in lines if AVERAGE_LOSS in x]
        if points:
            axes.plot(*zip(*points, strict=True), "o--", color=curve.get_color())
    axes.set(xlabel="Tokens", ylabel="Loss (nats per token)")
    axes.plot([], [], color="black", label=f"training (centered mean of {SMOOTHED_STEPS} steps)")
    axes.plot([], [], "o--", color="black", label="validation (mean over sets)")
    axes.legend()
    abbreviate_thousands(axes.xaxis)
    label_curves(axes, curves)
    save_figure(figure, path)
