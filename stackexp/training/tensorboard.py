"""TensorBoard's copy of metrics.jsonl, and the event files of evaluations."""

import contextlib
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams, scalar

from stackexp.config.model import SYMBOLS
from stackexp.metric_tags import TRAIN_LOSS
from stackexp.training.heat_map import HeatMaps

EVALUATION = ".evaluation"  # suffix of the event files of `validate` and `test`, which a resumed run keeps
HPARAM_NAMES = SYMBOLS | {"model.memory.kind": "Memory"}
NOT_TAGS = ("step", "tokens", "time")
HEAT_MAP_SECONDS = 60  # at least, between two drawings

Layout = dict[str, dict[str, list[str]]]  # group -> title of a chart -> regular expressions of its tags

TRAINING = {
    "loss": ["train/loss$", r"val/loss/[^/]*$"],
    "loss by tokens": ["train/loss_by_tokens"],
    "gradient norm": ["train/grad_norm"],
    "learning rate": ["train/lr"],
    "tokens per second": ["train/tokens_per_second"],
}
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
    """Suppress the traceback of an OSError in the writer's thread, because the main thread raises it again."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


threading.excepthook = _ignore_disk_errors


class TensorBoardCopy:
    """The event files of a run in `folder`. Existing ones are replaced by `lines` of metrics.jsonl.

    The event files of evaluations, which end in .evaluation, are kept. The Text tab shows `texts` by name, the Images
    tab heat maps of the memory.
    """

    def __init__(self, folder: Path, lines: list[dict[str, Any]], layout: Layout, texts: dict[str, str] | None = None):
        for old in folder.glob("events.out.tfevents.*"):
            if not old.name.endswith(EVALUATION):
                old.unlink()
        self._writer = SummaryWriter(folder)
        self._writer.add_custom_scalars(
            {group: {title: ["Multiline", tags] for title, tags in charts.items()} for group, charts in layout.items()}
        )
        self._heat_maps, self._drawn_at = HeatMaps(), time.monotonic()
        for name, text in (texts or {}).items():
            self.write_text(name, text)
        for line in lines:
            self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        """Write one line of metrics.jsonl: each tag by step, and the training loss also by tokens."""
        tags = {tag: value for tag, value in line.items() if tag not in NOT_TAGS and value is not None}
        values = [value for tag in tags for value in scalar(tag, tags[tag]).value]
        # One event for all tags: passing an event to the writer's thread takes longer than making it.
        self._add(values, line["step"], line["time"])
        if TRAIN_LOSS in line:
            self._writer.add_scalar("train/loss_by_tokens", line[TRAIN_LOSS], line["tokens"], walltime=line["time"])
        if self._heat_maps.add(line) and time.monotonic() - self._drawn_at > HEAT_MAP_SECONDS:
            self._write_heat_maps(line["step"])

    def write_text(self, name: str, text: str) -> None:
        """Write preformatted text for the Text tab."""
        self._writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()))  # Markdown's code block

    def finish(self, hyperparameters: dict[str, Any], scores: Collection[str], train_loss: float, step: int) -> None:
        """Write the hyperparameters and the final training loss, and close the file.

        The HParams tab shows `scores` (scalar tags) next to the hyperparameters. It sorts the hyperparameters by name
        and shows only the first few. Capital letters sort first, as in most of HPARAM_NAMES.
        """
        values = {
            HPARAM_NAMES.get(key, key): value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in hyperparameters.items()
        }
        for summary in hparams(values, dict.fromkeys(["train/final_loss", *scores], 0.0)):
            self._add(summary.value)
        self._writer.add_scalar("train/final_loss", train_loss, step)
        if self._heat_maps:
            self._write_heat_maps(step)
        self.close()

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        self._writer.close()

    def _write_heat_maps(self, step: int) -> None:
        for name, png in self._heat_maps.draw():
            self._add([_build_image(f"memory/heat_map/{name}", png)], step)
        self._drawn_at = time.monotonic()

    def _add(self, values: Any, step: int | None = None, walltime: float | None = None) -> None:
        file_writer: Any = self._writer.file_writer
        file_writer.add_summary(Summary(value=values), step, walltime=walltime)


def write_points(folder: Path, name: str, points: Iterable[tuple[str, float, int]]) -> None:
    """Write points (tag, value, step) of an evaluation; the complete file replaces the one of the same name."""
    with _replace_events(folder, name) as writer:
        for point in points:
            writer.add_scalar(*point)


def write_image(folder: Path, name: str, tag: str, png: bytes, step: int) -> None:
    """Write a picture; the complete file replaces the one of the same name."""
    with _replace_events(folder, name) as writer:
        file_writer: Any = writer.file_writer
        file_writer.add_summary(Summary(value=[_build_image(tag, png)]), step)


def _build_image(tag: str, png: bytes) -> Any:
    return Summary.Value(tag=tag, image=Summary.Image(encoded_image_string=png))


@contextlib.contextmanager
def _replace_events(folder: Path, name: str) -> Iterator[SummaryWriter]:
    suffix = f".{quote(name, safe='')}{EVALUATION}"
    before = list(folder.glob(f"events.out.tfevents.*{suffix}"))
    with SummaryWriter(folder, filename_suffix=suffix) as writer:
        yield writer
    for path in before:
        path.unlink()
