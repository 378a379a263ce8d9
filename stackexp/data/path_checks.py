"""Check that data paths exist. Imports no torch, so that a wrong path is reported at once."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from stackexp.config.data import DataConfig, ShardsConfig, explain_set_name
from stackexp.data import olmo
from stackexp.errors import RunError, SetNameError, suggest_name
from stackexp.runs import split_path

ENGLISH = Path("data/english")  # the folder in configs/data/english.yaml


class DataPaths(NamedTuple):
    """Paths of the training set and, by name, of the sets or folders of sets to evaluate on."""

    train: str | Path | None
    validation: Mapping[str, str | Path]
    test: Mapping[str, str | Path]


def check_paths(data: DataConfig, stage: str) -> None:
    """Raise RunError if a local path that a stage ("fit", "validate", "test") reads does not exist."""
    if not isinstance(data, ShardsConfig):
        return
    if stage == "fit":
        for source in data.streams.values() if data.streams else [data]:
            folder = Path(source.path or "")
            if not source.remote and not (folder / "corpus.json").is_file():
                raise RunError(explain_missing_dataset(folder, format_prepare_options(data)))
    for name, path in (data.test if stage == "test" else data.validation).items():
        if not Path(path).exists():
            raise RunError(explain_missing_set(name, Path(path)))


def check_weights(path: Path) -> None:
    """Raise RunError if `warm_start.weights` does not exist; <step>/ema is part of the checkpoint <step>."""
    if not split_path(path)[0].exists():
        raise RunError(
            f"warm_start.weights: {path}: no such file or folder; give a run, a checkpoint or a .safetensors file"
        )


def check_requested_sets(
    requests: Iterable[str], configured: Mapping[str, str | Path] | None, section: str
) -> dict[str, Path]:
    """Check the words of --sets, and return the paths of all sets that have a name.

    `configured` are the sets in the config; None if they are not known yet.

    Raises:
        SetNameError: A word is malformed, or names no set or group.
        RunError: The path of a set does not exist.
    """
    known = {version: olmo.DEFAULT_FOLDER / version for version in olmo.NAMES}
    known |= {name: Path(path) for name, path in (configured or {}).items()}
    for request in requests:
        name, equals, text = request.partition("=")
        group = name.split("/")[0]
        if not name or (equals and not text):
            raise SetNameError(f"expected names and NAME=PATH, separated by single commas, found {request!r}")
        if equals and (message := explain_set_name(name)):
            raise SetNameError(message)
        if not equals and configured is not None and group not in known:
            raise SetNameError(explain_unknown_set(name, list(known), section))
        path = Path(text or known.get(group, "."))
        if not path.exists():
            raise RunError(explain_missing_set(group, path))
    return known


def explain_unknown_set(name: str, known: Sequence[str], section: str) -> str:
    """Return the message for a name that names no set."""
    hint = suggest_name(name, known) or f"; available: {', '.join(known)}"
    example = f"NAME={name}" if Path(name).exists() else "NAME=PATH"
    return f"no set {name!r} in {section}{hint} (or give {example})"


def format_prepare_options(data: DataConfig) -> str:
    """Return the options of `data prepare` for a config."""
    return f"--vocab-size {data.vocab_size} --context-length {data.context_length}"


def explain_missing_dataset(folder: Path, options: str) -> str:
    """Return the message for a path without a prepared set; `options` are those of `data prepare`."""
    if folder == ENGLISH / "train" and not folder.exists():
        return f"{folder}: no such folder; build it with: python -m stackexp data english"
    is_set = any((folder / name).exists() for name in ("plan.json", "index.json"))
    if folder.is_file() or (folder.is_dir() and not is_set and any(folder.iterdir())):
        target = folder.with_name(f"{folder.stem if folder.is_file() else folder.name}-prepared")
        command = f"stackexp data prepare {folder} --to {target} {options}"
        return f"{folder}: not a prepared set; prepare it with: {command}, then set data.path={target}"
    state = "holds no finished set" if folder.is_dir() else "no such folder"
    return f"{folder}: {state}; make one with: stackexp data prepare SOURCE --to {folder} {options}"


def explain_missing_set(name: str, path: Path) -> str:
    """Return the message for an evaluation set whose path does not exist."""
    if name in olmo.NAMES:
        return f"{path}: no such folder; {suggest_fetch(name, path)}"
    command = f"python -m stackexp data prepare SOURCE --to {path} --tokenizer TOKENIZER.json"
    return f"{path}: no such file or folder for set {name}; correct the path or create it with: {command}"


def suggest_fetch(version: str, path: Path) -> str:
    """Return the commands that download OLMo's sets v2 or v3 to `path`."""
    original = olmo.DEFAULT_FOLDER / version
    command = f"fetch them with: python -m stackexp data fetch {version}"
    if path == original:
        return command
    retokenize = f"data retokenize {original} --to {path} --from GPT-NEOX-TOKENIZER.json --tokenizer TOKENIZER.json"
    return f"{command}; for another vocabulary then run: python -m stackexp {retokenize}"
