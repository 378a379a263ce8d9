"""Figures of an unfinished evaluation, saved set by set, so that a kill loses none of the scored sets."""

import hashlib
from pathlib import Path

import stackexp
from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import RunError
from stackexp.evaluation.request import DataModule, Sets, Stage, hash_values, list_figure_options
from stackexp.files import append_json_line, read_json_lines, write_json_lines
from stackexp.models import checkpoints
from stackexp.training.processes import Processes


class PartialResults:
    """The scored sets of an evaluation in a JSON Lines file: {"key": ..., "set": name, "figures": {...}}.

    `keys` maps each set to a hash of everything its figures depend on, so several evaluations can share a file. Without
    a path nothing is saved.
    """

    def __init__(self, path: Path | None, keys: dict[str, str]):
        self.path, self._keys = path, keys

    def load(self) -> Sets:
        """Return the figures of the scored sets. Raises OSError if the file could not be written later."""
        if self.path is None:
            return {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        open(self.path, "ab").close()
        if not self.path.stat().st_size:
            self.path.unlink()
        scored = {line["key"]: line["figures"] for line in self._read_lines()}
        return {name: scored[key] for name, key in self._keys.items() if key in scored}

    def add(self, name: str, figures: dict[str, float]) -> None:
        """Save the figures of a set; they are on disk on return."""
        if self.path is not None:
            append_json_line(self.path, {"key": self._keys[name], "set": name, "figures": figures}, sync=True)

    def delete(self) -> None:
        """Delete this evaluation's lines, and the file if no other evaluation has lines in it."""
        if self.path is None:
            return
        kept = [line for line in self._read_lines() if line["key"] not in self._keys.values()]
        if kept:
            write_json_lines(self.path, kept)
        else:
            self.path.unlink(missing_ok=True)

    def _read_lines(self) -> list[dict]:
        return list(read_json_lines(self.path, skip_damaged=True)) if self.path else []


def compute_keys(
    stage: Stage, config: ExperimentConfig, data: DataModule, processes: Processes, checkpoint: Path
) -> dict[str, str]:
    """Return for each set a hash of the checkpoint, the set's contents, and the options that change its figures."""
    table = "" if data.token_bytes is None else hashlib.sha256(data.token_bytes.tobytes()).hexdigest()
    identity = processes.agree(lambda: _identify(checkpoint))
    common = [*list_figure_options(config), stackexp.__version__, table, identity]
    return {opened.name: hash_values([*common, opened.name, opened.identity]) for opened in data.sets(stage)}


def _identify(checkpoint: Path) -> list:
    """Return the sizes and times of a checkpoint's files, and a hash of its state. Raises RunError if it is missing."""
    if not checkpoint.exists():
        raise RunError(f"{checkpoint}: no such checkpoint; give a folder in a run's checkpoints/, `last` or `best`")
    files = sorted(checkpoint.rglob("*")) if checkpoint.is_dir() else [checkpoint]
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    state = checkpoint / checkpoints.STATE
    return [*stats, hashlib.sha256(state.read_bytes()).hexdigest() if state.is_file() else None]
