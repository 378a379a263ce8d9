"""Runs side by side, from their folders alone: a table of final figures and a picture of the loss curves."""

import json
from pathlib import Path
from typing import Any

from stackexp.config.yaml_files import flatten, read_file
from stackexp.data import hash_log
from stackexp.errors import RunError
from stackexp.runs import RunFolder

EVALUATED = ("data.validation_", "data.eval_")  # options of formal languages that training does not see


def check_same_data(runs: list[RunFolder]) -> list[str]:
    """Raise RunError, with the first step on record that differs, if two runs were not trained on the same data.

    Each run is compared with all before it that have a record. What could not be compared is told in lines. Strings of
    formal languages are a function of the config: of those the first option that differs is told.
    """
    untold, before, drawn = [], {}, {}
    for run in runs:
        if strings := _strings(run):
            for other, theirs in drawn.items():
                _check_same_strings(run, strings, other, theirs)
            drawn[run] = strings
            continue
        hashes = hash_log.read_hashes(run.path)
        if not hashes:
            untold.append(f"{run.path}: no record of its data ({hash_log.FILE_NAME}); not compared by it")
            continue
        for other, theirs in before.items():
            common = sorted(hashes.keys() & theirs.keys())
            differing = next((step for step in common if hashes[step] != theirs[step]), None)
            if differing is not None:
                raise RunError(
                    f"{run.path}: trained on other data than {other.path}, first seen at step {differing}; "
                    "give --different-data to compare them all the same"
                )
            if not common:
                untold.append(f"{run.path}: no step in common with {other.path} in their records of the data")
        before[run] = hashes
    if drawn and before:
        raise RunError(
            f"{next(iter(before)).path}: trained on tokens, but {next(iter(drawn)).path} on a formal language"
        )
    return untold


def _strings(run: RunFolder) -> dict[str, Any]:
    """Full key -> value of all that a run's strings of a formal language are drawn from; {} of tokens."""
    config = flatten(read_file(run.config)[1]) if run.config.is_file() else {}
    if config.get("data.kind") != "formal_language":
        return {}
    keys = [key for key in config if key.startswith("data.") and not key.startswith(EVALUATED)]
    return {key: config.get(key) for key in ("data.task", "seed", *keys)}


def _check_same_strings(run: RunFolder, ours: dict[str, Any], other: RunFolder, theirs: dict[str, Any]) -> None:
    for key in dict.fromkeys([*ours, *theirs]):
        if ours.get(key) != theirs.get(key):
            raise RunError(
                f"{run.path}: trained on other data than {other.path}: {key} is {ours.get(key)}, not "
                f"{theirs.get(key)}; give --different-data to compare them all the same"
            )


def markdown(runs: list[RunFolder]) -> str:
    """One row per finished run: parameters, training loss, loss and perplexity of every set, and their averages.

    Runs on formal languages have their task and their scores instead of sets.
    """
    results = {run: json.loads(run.result.read_text()) for run in runs if run.finished}
    names, of_sets = labels(runs), [result for result in results.values() if "sets" in result]
    sets = list(dict.fromkeys(name for result in of_sets for name in result["sets"]))
    scores = list(
        dict.fromkeys(key for r in results.values() for key in r if key == "task" or key.startswith("score_"))
    )
    header = ["run", "parameters", "in the memory", "training loss", *scores]
    header += [*sets, "average", "bits/byte"] if of_sets else []
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for run, result in results.items():
        cells = [
            names[run],
            f"{result['parameters']:,}",
            f"{result['memory_parameters']:,}",
            f"{result['train_loss']['last_20_steps']:.3f}",
            *(_score(result.get(key, "")) for key in scores),
            *(_set_cells(result, sets) if of_sets else []),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _score(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3f}"


def _set_cells(result: dict[str, Any], sets: list[str]) -> list[str]:
    """Of a run on tokens: loss and perplexity of each set and of their average, bits per byte; else nothing."""
    if "sets" not in result:
        return [""] * (len(sets) + 2)
    figures = [result["sets"].get(name) for name in sets] + [result["average"]]
    cells = [f"{f['loss']:.3f} / {f['perplexity'] or float('inf'):.1f}" if f else "" for f in figures]
    return [*cells, f"{result['average'].get('bits_per_byte', float('nan')):.3f}"]


def labels(runs: list[RunFolder]) -> dict[RunFolder, str]:
    """The runs' names, with their ids where a name stands for several."""
    names = [run.path.resolve().parent.name for run in runs]
    ids = [run.path.resolve().name for run in runs]
    return {
        run: name if names.count(name) == 1 else f"{name}/{id_}"
        for run, name, id_ in zip(runs, names, ids, strict=True)
    }


def draw_losses(runs: list[RunFolder], path: Path) -> None:
    """Training loss (moving average over 10 steps) and mean validation loss against tokens, one colour a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    names = labels(runs)
    for run in runs:
        lines = list(run.read_metrics())
        train = [(line["tokens"], line["loss/train"]) for line in lines if "loss/train" in line]
        means = [sum(loss for _, loss in train[max(0, i - 9) : i + 1]) / min(i + 1, 10) for i in range(len(train))]
        (curve,) = axes.plot([tokens for tokens, _ in train], means, label=f"{names[run]}, training")
        points = [(x["tokens"], x["validation/loss/average"]) for x in lines if "validation/loss/average" in x]
        if points:
            label = f"{names[run]}, mean of the validation sets"
            axes.plot(*zip(*points, strict=True), "o--", color=curve.get_color(), label=label)
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
