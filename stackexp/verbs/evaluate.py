"""`stackexp validate` and `stackexp test`: the figures of a checkpoint on every named set."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl

import stackexp
from stackexp import runs
from stackexp.callbacks.evaluation import EvaluationRecord, PartialFigures
from stackexp.callbacks.tensorboard import write_scalars
from stackexp.config import compose, registry
from stackexp.config.compose import to_dict
from stackexp.config.schema import ExperimentConfig
from stackexp.errors import FolderBusy, RunError
from stackexp.modules import checkpoints
from stackexp.modules.language_modeling import LanguageModeling
from stackexp.modules.metrics import finite, group_averages, macro_average, set_tags
from stackexp.reports.tables import set_markdown, set_table
from stackexp.runs import RunFolder
from stackexp.verbs.processes import Processes, started
from stackexp.verbs.trainer import accelerator, build_trainer, interruptible

Stage = Literal["validate", "test"]
Sets = dict[str, dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What is asked: `run`, the folder whose config it is; `sets` instead of the config's; `out`, FILE.json.

    Without `out` the figures go to <run>/<stage>.json; those of another checkpoint than the newest, of other sets or
    with options that change figures beside it: <stage>-<checkpoint>-<sets>-<hash of what has no name>.json.
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
        """Where the figures go, as JSON; beside it as Markdown, and, set by set, while it goes on."""
        if self.out or not self.run:
            return self.out
        name, places = "+".join(item.partition("=")[0] for item in self.sets), any("=" in item for item in self.sets)
        parts = [Path(self.ckpt_path or "").stem, name.replace("/", "-") if len(name) < 80 else ""]
        if not self.own_options or places or len(name) >= 80:
            parts.append(_hash([_options(self.config), self.config_sets, self.sets])[:8])
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

    @cached_property
    def own_config(self) -> ExperimentConfig:
        return compose.load(self.run.config)

    @cached_property
    def own_options(self) -> bool:
        """Whether nothing that decides figures differs from the config of the run."""
        own = dataclasses.replace(self, config=self.own_config)
        return (_options(own.config), own.config_sets) == (_options(self.config), self.config_sets)


def run(
    stage: Stage,
    run: str | None,
    config: ExperimentConfig,
    ckpt_path: str | None,
    sets: list[str],
    out: str | None,
    overrides: list[str],
) -> int:
    """Evaluate a run's newest checkpoint, or `ckpt_path`, on the whole of every set of the config, or of `sets`.

    `config` is the run's with `overrides` on top, or any other. The figures go to `Evaluation.record` as each
    set is done; the same command after a kill does the rest.
    """
    folder, file = runs.at(run) if run else None, Path(out) if out else None
    return _evaluate(Evaluation(stage, config, folder, ckpt_path, tuple(sets), file, tuple(overrides)))


def _evaluate(asked: Evaluation) -> int:
    logging.basicConfig(format="%(message)s")
    config = asked.config
    with started(config.trainer, accelerator(config)) as processes:
        data = processes.together(lambda: _opened(asked))
        checkpoint = processes.agree(lambda: _checkpoint(asked))

        def evaluate(record: EvaluationRecord) -> Sets:
            module = LanguageModeling(config, weights=checkpoint)
            trainer = build_trainer(config, processes, [record])
            with interruptible():
                (trainer.validate if asked.stage == "validate" else trainer.test)(module, data, verbose=False)
            return module.set_metrics

        with resumable(asked.stage, config, data, processes, checkpoint, asked.record) as whole:
            sets = whole.figures(evaluate)
            if processes.first:
                print(f"{_about(asked, checkpoint)}\n\n{set_table(sets)}")
                if asked.record:
                    _write(asked, checkpoint, sets)
                    print(f"\nfigures: {asked.record}")
    return 0


def _data(asked: Evaluation) -> pl.LightningDataModule:
    data = registry.build("data", asked.config.data, seed=asked.config.seed)
    if asked.run and asked.run.tokenizer.is_file():
        data.tokenizer_file = asked.run.tokenizer
    if asked.sets:
        data.choose(asked.stage, list(asked.sets))
    if not data.set_names(asked.stage):
        section = "data.validation" if asked.stage == "validate" else "data.test"
        raise RunError(
            f"{section}: no sets to {asked.stage} on; name some in the config's data section, or with --sets"
        )
    return data


def _opened(asked: Evaluation) -> pl.LightningDataModule:
    data = _data(asked)
    data.prepare_data()
    data.setup(asked.stage)
    return data


def _checkpoint(asked: Evaluation) -> Path:
    return checkpoints.choose(asked.run, asked.ckpt_path) if asked.run else Path(asked.ckpt_path)


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
    names, keys = data.set_names(stage), _keys(stage, config, data, processes, checkpoint)
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


def _keys(
    stage: Stage, settings: ExperimentConfig, data: pl.LightningDataModule, processes: Processes, checkpoint: Path
) -> dict[str, str]:
    """For each set a hash of what its figures come from: checkpoint, what the set holds, model, chunks, precision."""
    table = "" if data.token_bytes is None else hashlib.sha256(data.token_bytes.tobytes()).hexdigest()
    common = [*_options(settings), stackexp.__version__, table, processes.agree(lambda: _identity(checkpoint))]
    return {opened.name: _hash([*common, opened.name, opened.identity]) for opened in data.sets(stage)}


def _options(settings: ExperimentConfig) -> list:
    """What decides a set's figures besides the checkpoint and what the set holds."""
    config = to_dict(settings)
    data = config["data"]
    return [config["model"], config["trainer"]["precision"], data["context_length"], data["keep_remainder"]]


def _hash(things: list) -> str:
    return hashlib.sha256(json.dumps(things).encode()).hexdigest()


def _identity(checkpoint: Path) -> list:
    """What tells a checkpoint from every other: its files' sizes and times, and the step and more in state.pt."""
    if not checkpoint.exists():
        raise RunError(f"{checkpoint}: no such checkpoint; give a folder in a run's checkpoints/, `last` or `best`")
    files = sorted(checkpoint.rglob("*")) if checkpoint.is_dir() else [checkpoint]
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    state = checkpoint / checkpoints.STATE
    return [*stats, hashlib.sha256(state.read_bytes()).hexdigest() if state.is_file() else None]


def _write(asked: Evaluation, checkpoint: Path, sets: Sets) -> None:
    step = checkpoints.read(checkpoint)["global_step"] if checkpoint.is_dir() else None
    record = {
        "checkpoint": str(checkpoint),
        "step": step,
        "overrides": list(asked.overrides),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "context_length": asked.config.data.context_length,
        "keep_remainder": asked.config.data.keep_remainder,
        "sets": sets,
        "average": macro_average(sets),
        "groups": group_averages(sets),
    }
    runs.write_atomically(asked.record, json.dumps(finite(record), indent=2))
    table = f"{_about(asked, checkpoint)}\n\n{set_markdown(sets)}"
    runs.write_atomically(asked.record.with_suffix(".md"), table)
    if asked.has_tags and step is not None:
        _write_scalars(asked, step, sets)


def _about(asked: Evaluation, checkpoint: Path) -> str:
    """What the figures depend on besides the model."""
    scored = "every token scored" if asked.config.data.keep_remainder else "what is left at a set's end dropped"
    return f"{checkpoint}, chunks of {asked.config.data.context_length:,} tokens, {scored}"


def _write_scalars(asked: Evaluation, step: int, sets: Sets) -> None:
    """At the checkpoint's step `v2/<set>`, `v2/average/...` and, of other sets, `validation/<figure>/<set>`.

    `whole/<figure>/<set>` where the fit's own are over a part of each set; `test/...` of test. Each group, and each set
    of none, has an event file that takes the place of its last. What the fit itself has recorded is left to it. In the
    run's folder, unless a run goes on in it: TensorBoard would read its file no more. Then in <run>/<stage>.
    """
    fitted = "validation" if asked.own_config.data.eval_sequences is None else "whole"
    prefix, lead = (fitted, "") if asked.stage == "validate" else ("test", None)
    recorded = {tag for line in asked.run.read_metrics() if line["step"] == step for tag in line}
    parts = {"average": {}} if asked.sets else {"average": sets}
    for name, figures in sets.items():
        parts.setdefault(f"set.{name.split('/')[0]}", {})[name] = figures
    with contextlib.ExitStack() as stack:
        folder = asked.run.path
        try:
            stack.enter_context(asked.run.lock())
        except FolderBusy:
            folder = folder / asked.stage
        for what, part in parts.items():
            tags = set_tags(prefix, part, lead)
            tags = {
                t: v for t, v in tags.items() if t.endswith("/average") == (what == "average") and t not in recorded
            }
            if tags:
                write_scalars(folder, tags, step, f"{asked.stage}.{what}")
