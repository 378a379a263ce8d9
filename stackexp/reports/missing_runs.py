"""Find the commands that fill the missing cells of a report."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from stackexp.errors import ConfigError
from stackexp.runs import RunFolder
from stackexp.sweeps.grid import expand
from stackexp.sweeps.sweep import COPY, list_shipped, load_sweep


def find_sweeps(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of sweeps at, above or below `paths`."""
    folders: dict[Path, None] = {}
    for path in paths:
        candidates = [path, path.parent, *(file.parent for file in sorted(path.rglob(COPY)))]
        folders |= {folder: None for folder in candidates if (folder / COPY).is_file()}
    return list(folders)


def find_namesakes(paths: Iterable[Path]) -> list[Path]:
    """Return the names of shipped sweeps that folders are named after, such as committed copies of their runs."""
    return [Path(path.name) for path in paths if path.name in list_shipped()]


def find_command(trial: str, sweeps: Sequence[Path], default: str) -> str:
    """Return the command that runs the trials with this label: of the first sweep that has them, or the default."""
    for folder in sweeps:
        if any(label == trial or label.startswith(f"{trial}-") for label in _list_labels(folder)):
            return build_sweep_command(folder)
    return default


def build_sweep_command(folder: Path) -> str:
    """Return the command of the sweep in a folder: by name if it is a shipped sweep in its default folder."""
    is_shipped = folder.name in list_shipped() and folder.resolve() == Path("runs", folder.name).resolve()
    return f"python -m stackexp sweep run {folder.name if is_shipped else shlex.quote(str(folder))}"


def build_fit_command(run: RunFolder, paths: Iterable[Path], *overrides: str) -> str:
    """Return the command that trains with the config of a run and these overrides, into the same folder of `paths`."""
    root = [f"logging.root={path}" for path in paths if path in run.path.parents][:1]
    return shlex.join(["python", "-m", "stackexp", "fit", "--config", str(run.config), *root, *overrides])


def describe_sweeps(sweeps: Sequence[Path]) -> list[str]:
    """Return a line for each sweep with unfinished trials, with the command that completes it."""
    lines = []
    for folder in sweeps:
        try:
            trials = load_sweep(str(folder)).trials
        except ConfigError:
            continue
        missing = sum(not trial.folder.is_finished for trial in trials)
        if missing:
            command = build_sweep_command(folder)
            lines.append(f"{folder}: {missing} of {len(trials)} trials are not finished: `{command}`")
    return lines


def _list_labels(folder: Path) -> list[str]:
    """Return the labels of a sweep's trials; none of a search, which chooses them later."""
    try:
        config = load_sweep(str(folder)).config
    except ConfigError:
        return []
    return [] if config.search else [label for label, _ in expand(config)]
