"""The DataFrame of runs that `load_runs` returns: one row per run folder.

Everything that lists or compares runs reads it. Its columns, empty (NaN) where a run has no value:

path, arm                    the folder; its name without id, seed and hash, which all seeds of a trial share
state, problem               finished, running, unfinished or damaged; why it is damaged
step, max_steps, tokens      progress
train_loss                   mean over the last 20 steps; every loss is in nats per token
best_loss                    lowest mean validation loss; the final evaluation counts unless data.eval_sequences is set
bytes, last_change           size on disk; seconds since 1970
platform                     device and torch version of the first session
<key of an option>           each option in config.yaml, such as seed and model.hidden_size; None for null
<key of result.json>         such as parameters, memory_parameters, score_41_500, seconds (of all sessions)
val/<set>/<score>            loss, perplexity and bits_per_byte of the final weights on a set, and its scored tokens
val/average/<score>          their means over the sets of the run
bigrams/<set>/<score>        loss and perplexity of bigram counts of the training tokens, bigrams/average included
ema/<set>/<score>            as val/, of the moving average of the weights, ema/average included
"""

import contextlib
import json
import math
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stackexp.config.affects import changes_scores, find_changed_keys
from stackexp.config.layers import read_overrides
from stackexp.errors import ConfigError, RunError
from stackexp.files import open_regular, read_hashed_json
from stackexp.metric_tags import AVERAGE_LOSS, AVERAGED_STEPS, TRAIN_LOSS
from stackexp.runs import RunFolder, is_metrics

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]
"""The values of a run without the empty ones: {column: value}."""
STATES = ("finished", "running", "unfinished", "damaged")
_EMPTY = object()
SUMMARY = (
    *("path", "arm", "state", "problem", "step", "max_steps", "tokens", "train_loss", "best_loss"),
    *("bytes", "last_change", "platform"),
)
"""The columns that the DataFrame always has. Options, values of result.json and scores follow."""
OLMO_GROUPS = ("v2/", "v3/")
SCORES = ("loss", "perplexity", "bits_per_byte")
RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
DATE = r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])"
TRIAL_NAME = re.compile(rf"(.*)-(?!{DATE}$)[0-9a-f]{{8}}")
"""The name of a trial ends in a hash; one in 50,000 looks like a date and is not removed."""
SEED = re.compile(r"(?:^|-)(?:shuffle_)?seed=\d+(?=-|$)")
SCORE_KINDS = ("val/", "bigrams/", "ema/")
SCORE_COLUMN = re.compile(r"(val|bigrams|ema)/(.+)/([a-z_]+)")


def load_runs(paths: Path | str | Iterable[Path | str]) -> "pd.DataFrame":
    """Return a DataFrame of all runs at or below `paths`, sorted below each path.

    A damaged run has the state "damaged", a problem, and the values that could be read. Raises RunError for a path that
    does not exist.
    """
    import pandas as pd

    rows = read_rows(paths)
    return pd.DataFrame({key: _build_column([row.get(key, _EMPTY) for row in rows]) for key in _list_columns(rows)})


def read_rows(paths: Path | str | Iterable[Path | str]) -> list[Row]:
    """Return the rows of `load_runs` as dictionaries without empty values. A null option is not empty, but None."""
    rows = [read_run(folder) for folder in find_runs([paths] if isinstance(paths, Path | str) else paths)]
    columns = _list_columns(rows)
    nan = math.nan  # the only value that differs from itself
    return [{key: value for key in columns if (value := row.get(key, nan)) == value} for row in rows]


def _list_columns(rows: Iterable[Row]) -> list[str]:
    """Return the columns of the DataFrame: the summary, then options, values of result.json, and scores."""
    rest = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in SUMMARY]
    rest.sort(key=lambda key: (key.startswith(SCORE_KINDS), not is_option(key)))
    return [*SUMMARY, *rest]


def _build_column(values: list[Any]) -> "pd.Series":
    """Return a column of nullable integers, of floats or of booleans if all its values are; otherwise of objects."""
    import pandas as pd

    kinds = set(map(type, values))
    if kinds == {object}:
        return pd.Series([math.nan] * len(values))
    dtype = "boolean" if kinds <= {bool, object} else "Int64" if kinds <= {int, object} else object
    if object in kinds:
        values = [math.nan if value is _EMPTY else value for value in values]
    with contextlib.suppress(OverflowError):  # an integer of 400 digits remains an object
        return pd.Series(values, dtype="float64" if kinds <= {float, int, object} and float in kinds else dtype)
    return pd.Series(values, dtype=object)


def is_option(column: str) -> bool:
    """Return True for the key of an option."""
    return column in ("name", "seed", "plugins") or ("." in column and not column.startswith(SCORE_KINDS))


def get_options(row: Row) -> dict[str, Any]:
    """Return the config of a run, {full key: value}."""
    return {key: value for key, value in row.items() if is_option(key)}


def get_scores(row: Row, kind: str = "val") -> dict[str, dict[str, float]]:
    """Return the scores of a run by set, {set: {score: value}}, or with `kind` "bigrams" those of bigram counts."""
    scores: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        if (match := SCORE_COLUMN.fullmatch(key)) and match[1] == kind and match[2] != "average":
            scores.setdefault(match[2], {})[match[3]] = value
    return scores


# Run folders


def find_runs(paths: Iterable[Path | str]) -> list[RunFolder]:
    """Return all run folders at or below these paths, each once, sorted below each path.

    A path with a config.yaml is a run folder. Raises RunError for a path that does not exist.
    """
    found: dict[Path, RunFolder] = {}
    for path in paths:
        if not Path(path).is_dir():
            raise RunError(f"{path}: no such folder; give run folders or folders of them")
        is_run = (Path(path) / "config.yaml").exists()
        for folder in [Path(path)] if is_run else sorted(_walk_runs(path)):
            found.setdefault(folder.resolve(), RunFolder(folder))
    return list(found.values())


def _walk_runs(root: Path | str) -> Iterator[Path]:
    """Yield the run folders below a folder, also those behind links, except links to its parents."""
    visited = set(Path(root).resolve().parents)
    for folder, folders, files in os.walk(root, followlinks=True):
        if (real := Path(folder).resolve()) in visited:
            folders.clear()
            continue
        visited.add(real)
        if "config.yaml" in files and ("environment.json" in files or ".stackexp" in files):
            folders.clear()
            yield Path(folder)


def read_start(row: Row) -> float:
    """Return the start of a run in seconds since 1970; 0 if it is not recorded."""
    start = RunFolder(Path(row["path"])).read_start()
    return start.timestamp() if start else 0.0


def name_arm(path: Path) -> str:
    """Return the name of a run without id, seed and hash: the trial's label, or the config's name."""
    path = path.resolve()
    trial = TRIAL_NAME.fullmatch(path.name)
    if RUN_ID.fullmatch(path.name):
        return path.parent.name
    return (SEED.sub("", trial[1]).strip("-") or path.parent.name) if trial else path.name


def name_runs(paths: Sequence[Path]) -> list[str]:
    """Return a unique name for each of these different run folders or .json files.

    It is the name of the arm, else of the folder or of the file without its suffix, else the path.
    """
    named = [path.with_suffix("") if path.suffix == ".json" else path for path in paths]
    choices = [(name_arm(name), name.name, str(path)) for name, path in zip(named, paths, strict=True)]
    counts = [Counter(names) for names in zip(*choices, strict=True)]
    return [next(n for n, count in zip(names, counts, strict=True) if count[n] == 1) for names in choices]


def list_tests(folder: RunFolder) -> list[Path]:
    """Return the files of `test` on the final checkpoint: test.json, and those with fewer lengths or strings."""
    return [*folder.path.glob("test.json"), *sorted(folder.path.glob("test-to-*.json"))]


def read_run(folder: RunFolder) -> Row:
    """Return the row of a run. Damage is reported in its state and problem, not raised."""
    row: Row = {"path": str(folder.path), "arm": name_arm(folder.path), "problem": "", "step": 0}
    sizes = list(_stat_files(folder.path))
    row |= {"bytes": sum(s.st_size for s in sizes), "last_change": max((s.st_mtime for s in sizes), default=0.0)}
    for read in (_read_config, _read_metrics, _read_result, _read_platform, _read_state):
        try:
            row |= read(folder, row)
        except (RunError, ConfigError, OSError) as error:
            row["problem"] = row["problem"] or str(error)
    return row | ({"state": "damaged"} if row["problem"] else {})


def _stat_files(folder: Path) -> Iterator[os.stat_result]:
    """Yield the properties of all files; a running training may delete some in the meantime."""
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                yield os.lstat(os.path.join(root, name))


def _read_config(folder: RunFolder, row: Row) -> Row:
    options = folder.read_options()
    required = {"seed": int, "trainer.max_steps": int, "plugins": list}
    if options.get("data.kind") == "formal_language":
        required |= {"data.max_length": int, "data.eval_max_length": int}
    for key, kind in required.items():
        if type(options.get(key)) is not kind:
            expected = "a list" if kind is list else "an integer"
            raise RunError(f"{folder.config}: {key}: expected {expected}, found {options.get(key)!r}; restore the file")
    return options | {"max_steps": options["trainer.max_steps"]}


def _read_state(folder: RunFolder, row: Row) -> Row:
    return {"state": "running" if folder.is_running else "finished" if folder.is_finished else "unfinished"}


def _read_platform(folder: RunFolder, row: Row) -> Row:
    session = next(iter(folder.read_sessions()), {})
    gpus, versions = session.get("gpus", []), session.get("versions", {})
    if not isinstance(gpus, list) or not isinstance(versions, dict):
        raise RunError(f"{folder.environment}: not a list of sessions; delete the file")
    device = "" if row.get("trainer.accelerator") == "cpu" else ", ".join(sorted(set(map(str, gpus))))
    return {"platform": f"{device or 'a CPU'} with torch {versions['torch']}"} if "torch" in versions else {}


# Progress and losses in metrics.jsonl


def _read_metrics(folder: RunFolder, row: Row) -> Row:
    """Read progress, the last training losses and the best validation loss, in bounded memory.

    Only lines with these values are parsed. Other lines are only checked to be complete.
    """
    last, best, changed_at = b"", math.inf, _find_changed_evaluation(folder, row)
    recent: deque[bytes] = deque(maxlen=AVERAGED_STEPS)
    training, validation = (f'"{tag}":'.encode() for tag in (TRAIN_LOSS, AVERAGE_LOSS))
    if not folder.metrics.exists():
        return {}
    with open_regular(folder.metrics, "rb") as file:
        for line in file:
            if not line.endswith(b"}\n"):
                if line.endswith(b"\n") and line.strip():  # neither blank nor the last line, cut off by a kill
                    _parse_metrics(folder.metrics, line)
                continue
            if training in line:
                recent.append(line)
            if validation in line:
                values = _parse_metrics(folder.metrics, line)
                loss = values.get(AVERAGE_LOSS)
                best = best if loss is None or values["step"] <= changed_at else min(best, loss)
            last = line
    if not last:
        return {}
    end = _parse_metrics(folder.metrics, last)
    losses = [_parse_metrics(folder.metrics, line)[TRAIN_LOSS] for line in recent]
    known = [loss for loss in losses if loss is not None]
    figures = {"step": end["step"], "tokens": end.get("tokens"), "best_loss": best if best < math.inf else None}
    return _drop_null(figures | {"train_loss": math.fsum(known) / len(known) if known else None})


def _find_changed_evaluation(folder: RunFolder, row: Row) -> int:
    """Return the step after which the evaluation has not changed; earlier losses may be on other data."""
    ours, earlier = get_options(row), folder.read_earlier_options().items()
    changed = [step for step, options in earlier if find_changed_keys(ours, options, ["evaluation"])]
    return max(changed, default=0)


def _parse_metrics(path: Path, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not is_metrics(values):
        raise RunError(f"{path}: a line is damaged: {line[:60].decode(errors='replace').strip()}; delete the line")
    return values


def _drop_null(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not null. Files have null for values that are not finite."""
    return {key: value for key, value in values.items() if value is not None}


# Final scores in result.json and validate.json


def _read_result(folder: RunFolder, row: Row) -> Row:
    """Read the values of result.json, and the scores of later validations of the final weights."""
    if not folder.is_finished:
        return {}
    contents = folder.read_result().to_dict()
    average, bigrams, ema, training = (contents.pop(key, {}) for key in ("average", "bigrams", "ema", "train_loss"))
    sets = _merge_sets(folder, row, contents)
    named = {name: scores for name, scores in sets.items() if not name.startswith(OLMO_GROUPS)} or sets
    average = average or {key: _average(named, key) for key in SCORES}
    columns = _list_scores("val", sets | {"average": average})
    columns |= {f"val/{name}/tokens": scores["tokens"] for name, scores in sets.items() if scores.get("tokens")}
    for name, scores in (("bigrams", bigrams), ("ema", ema)):
        columns |= _list_scores(name, scores.get("sets", {}) | {"average": scores.get("average", {})})
    used = ("version", "sets", "groups", "steps", *(key for key in row if key != "tokens"))
    rest = {key: value for key, value in contents.items() if key not in used}
    progress = {"step": contents.get("steps"), "train_loss": training.get("last_20_steps")}
    final = columns.get("val/average/loss", contents.get("validation_loss"))
    if final is not None and ("best_loss" not in row or row.get("data.eval_sequences") is None):
        progress["best_loss"] = min(
            final, row.get("best_loss", math.inf)
        )  # a loss on whole sets is not comparable with losses on samples
    return _drop_null(rest | {"train_loss_first": training.get("first")} | progress) | columns


def _merge_sets(folder: RunFolder, row: Row, result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the scores of the final weights by set.

    Sets of a later validation, except V2 and V3, are included only if the run itself has none, because they would
    change its average. A set without a finite loss keeps its number of tokens; the run has diverged.
    """
    own = result.get("sets", {})
    later: dict[str, dict[str, Any]] = {}
    for record in read_validations(folder):
        if record.get("step") == result.get("steps") and has_run_options(record, row):
            later |= record["sets"]
    if any(not name.startswith(OLMO_GROUPS) for name in own):
        later = {name: scores for name, scores in later.items() if name.startswith(OLMO_GROUPS)}
    sets = later | own
    finite = {name for name, scores in sets.items() if scores.get("loss") is not None and math.isfinite(scores["loss"])}
    return {name: scores if name in finite else {"tokens": scores.get("tokens")} for name, scores in sets.items()}


def _average(sets: Mapping[str, Mapping[str, Any]], key: str) -> float | None:
    values = [scores[key] for scores in sets.values() if scores.get(key) is not None]
    return math.fsum(values) / len(values) if values and len(values) == len(sets) else None


def _list_scores(kind: str, sets: Mapping[str, Mapping[str, Any]]) -> Row:
    scores = {f"{kind}/{name}/{key}": figures.get(key) for name, figures in sets.items() for key in SCORES}
    return _drop_null(scores)


def read_validations(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the records of `validate` on checkpoints of the run, the newest last. Raises RunError for damage."""
    records = []
    for path in folder.path.glob("validate*.json"):
        record = read_evaluation(path)
        *parents, step = Path(record["checkpoint"]).parts  # .../RUN/checkpoints/STEP; in a copy of the run, only STEP
        if step.isdecimal() and parents[-2:] in ([], [folder.path.resolve().name, folder.checkpoints.name]):
            records.append(record | {"file": path.name})
    return sorted(records, key=lambda record: (record["time"], record["file"]))


def has_run_options(record: dict[str, Any], options: Row) -> bool:
    """Return True if no override of an evaluation changes the scores of a run with these options."""
    return not any(changes_scores(options, key) for key, *_ in read_overrides(record["overrides"]))


def read_evaluation(path: Path) -> dict[str, Any]:
    """Read a record that `validate` or `test` wrote. Raises RunError if it has changed since."""
    return {"sets": {}} | read_hashed_json(path, "move it elsewhere, or repeat `validate` or `test`")
