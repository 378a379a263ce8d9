"""What an evaluation is asked for, where its figures go, and how it goes on after a kill."""

import contextlib
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl

import stackexp
from stackexp.config import compose
from stackexp.config.compose import to_dict
from stackexp.config.experiment import ExperimentConfig
from stackexp.errors import FolderBusy, RunError
from stackexp.evaluation.progress import EvaluationRecord, PartialFigures
from stackexp.models import checkpoints
from stackexp.runs import RunFolder
from stackexp.training.processes import Processes

Stage = Literal["validate", "test"]
Sets = dict[str, dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What is asked: `run`, the folder whose config it is; `sets` instead of the config's; `out`, FILE.json.

    Without `out` the figures go to <run>/<stage>.json; those of a checkpoint that was asked for, of other sets or
    with options that change figures beside it: <stage>-<checkpoint>-<sets>-<hash of what has no name>.json. A test of
    formal languages that is less thorough than the one there: test-to-<longest>-every-<stride>-of-<strings>.json.
    """

    stage: Stage
    config: ExperimentConfig
    run: RunFolder | None = None
    ckpt_path: str | None = None
    sets: tuple[str, ...] = ()
    out: Path | None = None
    overrides: tuple[str, ...] = ()

    @cached_property
    def record(self) -> Path | None:
        """Where the figures go, as JSON; beside it, those of language as Markdown and, while it goes on, set by set."""
        if self.out or not self.run:
            return self.out
        name, places = "+".join(item.partition("=")[0] for item in self.sets), any("=" in item for item in self.sets)
        parts = [Path(self.ckpt_path or "").stem, name.replace("/", "-") if len(name) < 80 else ""]
        if not self.own_options or places or len(name) >= 80:
            parts.append(digest([options(self.config), self.config_sets, self.sets])[:8])
        return self.run.path / ("-".join([self.stage, *filter(None, parts)]) + ".json")

    @property
    def config_sets(self) -> dict[str, str]:
        """The places that the config names for this stage."""
        return getattr(self.config.data, "validation" if self.stage == "validate" else "test", {})

    @property
    def has_tags(self) -> bool:
        """Whether TensorBoard has the figures: not those of other options, other places or parts of groups."""
        if self.out or not self.run or not self.config.logging.tensorboard:
            return False
        return self.own_options and not any("=" in item or "/" in item for item in self.sets)

    @contextlib.contextmanager
    def event_folder(self) -> Iterator[Path]:
        """Where TensorBoard's files go: into the run's folder, unless a run goes on in it, whose file TensorBoard
        would read no more. Then into <run>/<stage>."""
        with contextlib.ExitStack() as stack:
            folder = self.run.path
            try:
                stack.enter_context(self.run.lock())
            except FolderBusy:
                folder = folder / self.stage
            yield folder

    @cached_property
    def own_config(self) -> ExperimentConfig:
        return compose.load(self.run.config)

    @cached_property
    def own_options(self) -> bool:
        """Whether nothing that decides figures differs from the config of the run."""
        own = dataclasses.replace(self, config=self.own_config)
        return (options(own.config), own.config_sets) == (options(self.config), self.config_sets)


@dataclasses.dataclass
class Resumable:
    """An evaluation of whole sets, some of which may have been done before a kill."""

    names: list[str]
    done: Sets
    record: EvaluationRecord

    def figures(self, evaluate: Callable[[EvaluationRecord], Sets]) -> Sets:
        """Of all sets; `evaluate` is for those that are not done, in a trainer that has the callback."""
        if len(self.done) < len(self.names):
            self.done |= evaluate(self.record)
        return {name: self.done[name] for name in self.names}


@contextlib.contextmanager
def resumable(
    stage: Stage,
    config: ExperimentConfig,
    data: pl.LightningDataModule,
    processes: Processes,
    checkpoint: Path,
    record: Path | None,
) -> Iterator[Resumable]:
    """Keeps figures set by set beside the file `record` until the context is left, when they are recorded elsewhere."""
    data.setup(stage)
    names, keys = data.set_names(stage), keys_of(stage, config, data, processes, checkpoint)
    partial = PartialFigures(record.with_suffix(".partial.jsonl")) if record else None
    done = processes.agree(lambda: partial.begin(keys)) if partial else {}
    if done and processes.first:
        line = f"{partial.path}: {len(done)} of {len(names)} sets were done before"
        print(line, file=sys.stderr, flush=True)
    data.leave_out = frozenset(done)
    yield Resumable(names, done, EvaluationRecord(partial, keys, config.logging.progress_bar))
    data.leave_out = frozenset()
    if partial and processes.first:
        partial.forget(keys)


def keys_of(
    stage: Stage, settings: ExperimentConfig, data: pl.LightningDataModule, processes: Processes, checkpoint: Path
) -> dict[str, str]:
    """For each set a hash of what its figures come from: checkpoint, what the set holds, model, chunks, precision."""
    table = "" if data.token_bytes is None else hashlib.sha256(data.token_bytes.tobytes()).hexdigest()
    common = [*options(settings), stackexp.__version__, table, processes.agree(lambda: _identity(checkpoint))]
    return {opened.name: digest([*common, opened.name, opened.identity]) for opened in data.sets(stage)}


def options(settings: ExperimentConfig) -> list:
    """What decides a set's figures besides the checkpoint and what the set holds."""
    config = to_dict(settings)
    of_sets = [config["data"][key] for key in ("context_length", "keep_remainder", "task") if key in config["data"]]
    return [config["model"], config["trainer"]["precision"], *of_sets]


def digest(things: list) -> str:
    return hashlib.sha256(json.dumps(things).encode()).hexdigest()


def _identity(checkpoint: Path) -> list:
    """What tells a checkpoint from every other: its files' sizes and times, and the step and more in state.pt."""
    if not checkpoint.exists():
        raise RunError(f"{checkpoint}: no such checkpoint; give a folder in a run's checkpoints/, `last` or `best`")
    files = sorted(checkpoint.rglob("*")) if checkpoint.is_dir() else [checkpoint]
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    state = checkpoint / checkpoints.STATE
    return [*stats, hashlib.sha256(state.read_bytes()).hexdigest() if state.is_file() else None]
