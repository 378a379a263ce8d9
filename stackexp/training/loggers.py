"""Build, open, resume and close the Lightning loggers of a run, given by name or as `module:Class`.

TensorBoard and CSV files are written again from metrics.jsonl when a run resumes. W&B and MLflow continue the same run,
whose id is in the run folder, after the last step that they have received.

`RunTensorBoard` adds charts and heat maps to Lightning's logger; evaluations write event files of their own.
"""

import contextlib
import importlib.util
import os
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams, scalar

from stackexp.config.affects import flatten_config
from stackexp.config.experiment import LOGGERS, ExperimentConfig
from stackexp.config.model import PAPER_SYMBOLS
from stackexp.config.registry import build_class
from stackexp.errors import ConfigError
from stackexp.files import hash_values, read_json, write_atomically, write_json
from stackexp.metric_tags import AVERAGE_LOSS, TRAIN_LOSS
from stackexp.runs import RunFolder

EVALUATION = ".evaluation"  # suffix of the event files of `validate` and `test`, which a resumed run keeps
HPARAM_NAMES = PAPER_SYMBOLS | {"model.memory.kind": "Memory"}
NOT_TAGS = ("step", "tokens", "time")
FINAL_LOSS = "train/final_loss"
HEAT_MAP_SECONDS = 60  # at least, between two drawings
MAX_COLUMNS = 400
TITLES = {  # measurement -> title, and the end of its color scale; None: the largest value
    "push": ("push probability", 1.0),
    "pop": ("pop probability", 1.0),
    "no_op": ("no-op probability", 1.0),
    "entropy": ("action entropy (nats)", np.log(3)),
    "occupancy": ("occupancy (sum of M)", None),
    "read_share": ("read share of the residual", None),
}


def build_loggers(config: ExperimentConfig, run: RunFolder) -> list[Logger]:
    """Build the loggers of `logging.loggers`; nothing is written yet.

    Raises ConfigError if a library is missing, or a user's class cannot be built.
    """
    return [_build_logger(entry, config, run) for entry in config.logging.loggers]


def _build_logger(entry: Any, config: ExperimentConfig, run: RunFolder) -> Logger:
    if entry not in LOGGERS:
        logger = build_class("logging.loggers", entry, Logger)
        logger.stackexp_entry = hash_values(entry)[:8]
        return logger
    if entry == "tensorboard":
        return RunTensorBoard(run.path)
    if entry == "csv":
        return CSVLogger(run.path, name="csv", version="")
    spec = importlib.util.find_spec(entry)
    if spec is None or spec.origin is None:  # a folder of this name is not the library
        raise ConfigError(f"logging.loggers: {entry}: not installed; run pip install 'stackexp[{entry}]'")
    path = run.path / f"logger.{entry}"
    run_id = path.read_text(encoding="utf-8") if path.exists() else None
    if entry == "mlflow":
        import mlflow

        uri = mlflow.get_tracking_uri()
        return MLFlowLogger(config.name, run_name=run.path.name, run_id=run_id, tracking_uri=uri, save_dir=None)
    import wandb

    return WandbLogger(
        name=run.path.name,
        save_dir=run.path,
        id=run_id,
        project=os.environ.get("WANDB_PROJECT", "stackexp"),
        group=config.name,
        settings=wandb.Settings(console="off", quiet=True),
    )


def open_logger(logger: Logger, config: ExperimentConfig, run: RunFolder) -> None:
    """Open a logger, which may need a network, and log the options of a new run. Call it on rank 0 only."""
    if isinstance(logger, CSVLogger) and Path(logger.log_dir) == run.path / "csv":  # never a folder of the user
        shutil.rmtree(logger.log_dir, ignore_errors=True)
    is_new = not _get_sent_file(logger, run).exists()
    for cls, name in ((WandbLogger, "wandb"), (MLFlowLogger, "mlflow")):
        if isinstance(logger, cls):
            path = run.path / f"logger.{name}"
            is_new = not path.exists()
            write_atomically(path, str(logger.version if name == "mlflow" else logger.experiment.id))
    is_local = isinstance(logger, RunTensorBoard | CSVLogger)  # in the run folder, which has config.yaml
    if is_new and not is_local:
        logger.log_hyperparams(flatten_config(config))
    _ = logger.experiment if hasattr(logger, "experiment") else None


@dataclass(frozen=True)
class SentLines:
    """The lines that a logger has received: all before `step`, and those of `step` with `tags`."""

    step: int = 0
    tags: frozenset[str] = frozenset()

    def includes(self, line: dict[str, Any]) -> bool:
        """Return True if the logger has received a line, which a resumed run may repeat with slightly other tags."""
        return line["step"] < self.step or (line["step"] == self.step and not self.tags.isdisjoint(line))


def find_sent_lines(logger: Logger, run: RunFolder) -> SentLines:
    """Return the lines that earlier sessions have sent to an open logger.

    The run folder must still have the lines that are newer than the checkpoint from which the run resumes.
    """
    if isinstance(logger, RunTensorBoard | CSVLogger):
        return SentLines()  # their files are written again
    if isinstance(logger, WandbLogger):  # 0 offline: each offline session logs all lines
        step = logger.experiment.summary.get("trainer/global_step", 0)
    elif isinstance(logger, MLFlowLogger):
        step = max((point.step for point in _read_points(logger, TRAIN_LOSS)), default=0)
    else:
        step = max((line["step"] for line in run.read_metrics()), default=0)
    lines = [_select_tags(line) for line in run.read_metrics() if line["step"] == step]
    sent = SentLines(step, frozenset(tag for tags in lines if _has_received(logger, step, tags) for tag in tags))
    if not isinstance(logger, WandbLogger | MLFlowLogger):  # an earlier session may have sent more, and been repeated
        file = _get_sent_file(logger, run)
        earlier: dict[str, Any] = read_json(file) if file.exists() else {"step": 0, "tags": []}
        known = SentLines(earlier["step"], frozenset(earlier["tags"]))
        sent = max(known, sent, key=lambda sent: (sent.step, len(sent.tags)))
        write_json(file, {"step": sent.step, "tags": sorted(sent.tags)})
    return sent


def _get_sent_file(logger: Logger, run: RunFolder) -> Path:
    """Return the file with the newest lines that a logger of the user has received, one file for each entry."""
    return run.path / f"logger.{type(logger).__name__}-{getattr(logger, 'stackexp_entry', '')}.json"


def _has_received(logger: Logger, step: int, tags: dict[str, float]) -> bool:
    """Return True if a logger, whose newest step is `step`, has the values of a line of this step.

    A kill may have been between two lines of a step. Loggers of the user are assumed to have received both.
    """
    if isinstance(logger, WandbLogger):
        return all(logger.experiment.summary.get(tag) == value for tag, value in tags.items())
    if isinstance(logger, MLFlowLogger):
        return any(point.step == step for tag in tags for point in _read_points(logger, tag))
    return True


def _read_points(logger: MLFlowLogger, tag: str) -> list[Any]:
    return logger.experiment.get_metric_history(logger.run_id, tag)


def _select_tags(line: dict[str, Any]) -> dict[str, float]:
    return {tag: value for tag, value in line.items() if tag not in NOT_TAGS and value is not None}


def send_line(logger: Logger, line: dict[str, Any]) -> None:
    """Send a line of metrics.jsonl to a logger."""
    if isinstance(logger, RunTensorBoard):
        logger.log_line(line)
    else:
        metrics = {tag: value for tag, value in line.items() if tag not in ("step", "time") and value is not None}
        logger.log_metrics(metrics, step=line["step"])


def close_logger(logger: Logger, is_finished: bool) -> None:
    """Wait until everything is sent, and mark the run as finished or failed."""
    if isinstance(logger, WandbLogger):
        logger.experiment.finish(exit_code=0 if is_finished else 1)
    elif isinstance(logger, RunTensorBoard):
        logger.close()
    else:
        logger.finalize("success" if is_finished else "failed")


# TensorBoard

Layout = dict[str, dict[str, list[str]]]  # group -> title of a chart -> regular expressions of its tags

TRAINING = {
    "loss": ["train/loss$", r"val/loss/[^/]*$"],
    "loss by tokens": ["loss/train_by_tokens"],
    "gradient norm": ["train/grad_norm"],
    "learning rate": ["train/lr"],
    "tokens per second": ["train/tokens_per_second"],
}
FIRST_TAGS = {TRAIN_LOSS: "loss/train", AVERAGE_LOSS: "loss/validation"}
"""Tags that TensorBoard shows again as the first group of its first tab, which sorts groups by name."""
VALIDATION = {
    "loss": [r"val/(whole/)?loss/.*"],
    "perplexity": [r"val/(whole/)?perplexity/.*"],
    "bits per byte": [r"val/(whole/)?bits_per_byte/.*"],
}
FORMAL_LANGUAGES = {
    "accuracy by length": ["test/accuracy_by_length"],
    "accuracy": ["train/accuracy", "val/accuracy/average"],
    "longest training string": ["train/max_length"],
}
ARITHMETIC = {
    "accuracy": ["train/accuracy", "val/accuracy/average"],
    "held-out loss": ["val/loss/average"],
}


def build_layout(objective: str, set_names: Collection[str]) -> Layout:
    """Return the charts of the Custom Scalars tab that are not empty for this objective and these sets.

    The tab draws all curves of a run in one color, so heat maps compare the layers instead.
    """
    layout: Layout = {"Training": TRAINING}
    if objective == "transduction":
        layout["Formal languages"] = FORMAL_LANGUAGES
    elif objective == "arithmetic":
        layout["Arithmetic"] = ARITHMETIC
    elif set_names:
        layout["Validation"] = VALIDATION
    for group in sorted({name.split("/")[0] for name in set_names if "/" in name}):
        layout[group.upper()] = {
            "loss": [f"val/(whole/)?{group}/[^/]*$", f"val/(whole/)?{group}/average/loss"],
            "mean perplexity": [f"val/(whole/)?{group}/average/(perplexity|exp_mean_loss)"],
        }
    return layout


def _ignore_disk_errors(failure: threading.ExceptHookArgs) -> None:
    """Suppress the traceback of an OSError in TensorBoard's thread, because the main thread raises it again."""
    is_writer = type(failure.thread).__module__.startswith("tensorboard.")
    if not (is_writer and isinstance(failure.exc_value, OSError)):
        threading.__excepthook__(failure)


threading.excepthook = _ignore_disk_errors


class RunTensorBoard(TensorBoardLogger):
    """Lightning's TensorBoard logger in a run folder, with the charts, heat maps and HParams that it lacks.

    Opening it deletes the event files of earlier sessions, because the lines of metrics.jsonl are sent again. The event
    files of evaluations, which end in .evaluation, are kept.
    """

    def __init__(self, folder: Path):
        super().__init__(folder, name="", version="")
        self._folder, self._heat_maps, self._drawn_at = folder, HeatMaps(), time.monotonic()

    @property
    def experiment(self) -> Any:
        """Return the writer, opened at the first use."""
        if self._experiment is None and rank_zero_only.rank == 0:
            for old in self._folder.glob("events.out.tfevents.*"):
                if not old.name.endswith(EVALUATION):
                    old.unlink()
        return super().experiment

    def start(
        self, layout: Layout, texts: dict[str, str], hyperparameters: dict[str, Any], tags: Collection[str]
    ) -> None:
        """Write the charts, the texts of the Text tab and the hyperparameters.

        The HParams tab shows the newest values of `tags` next to the hyperparameters. It sorts the hyperparameters by
        name and shows only the first few. Capital letters sort first, as in most of HPARAM_NAMES.
        """
        charts = {
            group: {title: ["Multiline", tags] for title, tags in charts.items()} for group, charts in layout.items()
        }
        self.experiment.add_custom_scalars(charts)
        for name, text in texts.items():
            self.log_text(name, text)
        values = {
            HPARAM_NAMES.get(key, key): value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in hyperparameters.items()
        }
        for summary in hparams(values, dict.fromkeys(tags, 0.0)):
            self._add(summary.value)

    def log_line(self, line: dict[str, Any]) -> None:
        """Write one line of metrics.jsonl: tags by step, losses again in the group `loss`, training loss by tokens."""
        tags = _select_tags(line)
        tags |= {first: tags[tag] for tag, first in FIRST_TAGS.items() if tag in tags}
        values = [value for tag in tags for value in scalar(tag, tags[tag]).value]
        # One event for all tags: passing an event to the writer's thread takes longer than making it.
        self._add(values, line["step"], line["time"])
        if TRAIN_LOSS in line:
            self.experiment.add_scalar("loss/train_by_tokens", line[TRAIN_LOSS], line["tokens"], walltime=line["time"])
        if self._heat_maps.add(line) and time.monotonic() - self._drawn_at > HEAT_MAP_SECONDS:
            self._write_heat_maps(line["step"])

    def log_text(self, name: str, text: str) -> None:
        """Write preformatted text for the Text tab."""
        self.experiment.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()))  # Markdown's code block

    def finish(self, train_loss: float, step: int) -> None:
        """Write the final training loss and the last heat maps."""
        self.experiment.add_scalar(FINAL_LOSS, train_loss, step)
        if self._heat_maps:
            self._write_heat_maps(step)

    def save(self) -> None:
        """Flush the file. Lightning's logger would also write hparams.yaml; the run folder has config.yaml."""
        self.experiment.flush()

    def finalize(self, status: str) -> None:
        """Flush the file, which stays open after the fit for the final scores."""
        self.save()

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        self.experiment.close()

    def _write_heat_maps(self, step: int) -> None:
        for name, figure in self._heat_maps.draw():
            self.experiment.add_figure(f"memory/heat_map/{name}", figure, step, close=False)
        self._drawn_at = time.monotonic()

    def _add(self, values: Any, step: int | None = None, walltime: float | None = None) -> None:
        self.experiment.file_writer.add_summary(Summary(value=values), step, walltime=walltime)


def write_points(folder: Path, name: str, points: Iterable[tuple[str, float, int]]) -> None:
    """Write points (tag, value, step) of an evaluation; the complete file replaces the one of the same name."""
    with _replace_events(folder, name) as writer:
        for point in points:
            writer.add_scalar(*point)


def write_image(folder: Path, name: str, tag: str, png: bytes, step: int) -> None:
    """Write a picture; the complete file replaces the one of the same name."""
    with _replace_events(folder, name) as writer:
        file_writer: Any = writer.file_writer
        image = Summary.Value(tag=tag, image=Summary.Image(encoded_image_string=png))
        file_writer.add_summary(Summary(value=[image]), step)


@contextlib.contextmanager
def _replace_events(folder: Path, name: str) -> Iterator[SummaryWriter]:
    suffix = f".{quote(name, safe='')}{EVALUATION}"
    before = list(folder.glob(f"events.out.tfevents.*{suffix}"))
    with SummaryWriter(folder, filename_suffix=suffix) as writer:
        yield writer
    for path in before:
        path.unlink()


class HeatMaps:
    """Heat maps of the tags memory/<name>/layer_<number> in metrics.jsonl; empty if there are none."""

    def __init__(self) -> None:
        self._probes: dict[int, dict[str, list[float]]] = {}  # step -> measurement -> one value per memory

    def __len__(self) -> int:
        return len(self._probes)

    def add(self, line: dict[str, Any]) -> bool:
        """Add a line of metrics.jsonl. Returns False if its step was not probed."""
        probe: dict[str, list[float]] = {}
        for tag in sorted(tag for tag in line if tag.startswith("memory/")):
            value = line[tag]
            probe.setdefault(tag.split("/")[1], []).append(np.nan if value is None else value)
        if probe:
            self._probes[line["step"]] = probe
        return bool(probe)

    def draw(self) -> Iterator[tuple[str, Any]]:
        """Yield the name of each measurement and its heat map, a Figure. Long runs show evenly spaced probes."""
        steps = sorted(self._probes)
        steps = [steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(len(steps), MAX_COLUMNS))]
        for name in self._probes[steps[0]]:
            values = np.array([self._probes[step][name] for step in steps]).T  # [layers, steps]
            yield name, _draw_map(steps, values, *TITLES.get(name, (name, None)))


def _draw_map(steps: list[int], values: np.ndarray, title: str, largest: float | None) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.8, 3), layout="constrained")
    axes = figure.add_subplot()
    edges = [steps[0] - 0.5, *((a + b) / 2 for a, b in pairwise(steps)), steps[-1] + 0.5]
    mesh = axes.pcolormesh(edges, np.arange(len(values) + 1) - 0.5, values, vmin=0, vmax=largest)
    axes.set(title=title, xlabel="step", ylabel="memory")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(mesh, ax=axes)
    return figure
