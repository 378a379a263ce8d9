"""TensorBoard's copy of metrics.jsonl, and the event files of evaluations."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams, scalar

from stackexp.config.model import SYMBOLS

EVALUATION = ".evaluation"  # suffix of the event files of `validate` and `test`, which a resumed run keeps
NOT_TAGS = ("step", "tokens", "time")

CHARTS = {
    "Training": {
        "loss": ["loss/train$", "validation/loss/.*"],
        "loss by tokens": ["loss/train_by_tokens"],
        "gradient norm": ["optimizer/grad_norm"],
        "learning rate": ["optimizer/lr"],
        "tokens per second": ["throughput/tokens_per_second"],
    },
    "Validation": {
        "loss": ["(validation|whole)/loss/.*"],
        "perplexity": ["(validation|whole)/perplexity/.*"],
        "bits per byte": ["(validation|whole)/bits_per_byte/.*"],
    },
    **{
        group.upper(): {
            "loss": [f"(sample/)?{group}/[^/]*$", f"(sample/)?{group}/average/loss"],
            "mean perplexity": [f"(sample/)?{group}/average/(perplexity|exp_mean_loss)"],
        }
        for group in ("v2", "v3")
    },
    "Formal languages": {
        "accuracy by length": ["length/accuracy"],
        "accuracy": ["accuracy/train", "validation/accuracy/average"],
        "longest training string": ["data/max_length"],
    },
    "Memory by layer": {
        "push probability": ["memory/push/.*"],
        "pop probability": ["memory/pop/.*"],
        "no-op probability": ["memory/no_op/.*"],
        "action entropy (nats)": ["memory/entropy/.*"],
        "occupancy (sum of M)": ["memory/occupancy/.*"],
        "read share of the residual": ["memory/read_share/.*"],
    },
}

OBJECTIVE_OF_GROUP = {"Validation": "language_modeling", "V2": "language_modeling", "V3": "language_modeling"}
OBJECTIVE_OF_GROUP |= {"Formal languages": "transduction"}  # groups that are empty in runs of the other objective


def _ignore_disk_errors(failure: threading.ExceptHookArgs) -> None:
    """Print no traceback for an OSError of the writer's thread: it is raised again in the main thread."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


threading.excepthook = _ignore_disk_errors


class TensorBoardCopy:
    """Event files in `folder` for the run of an objective; replaces earlier ones by `lines` of metrics.jsonl."""

    def __init__(self, folder: Path, lines: list[dict[str, Any]], objective: str):
        for old in folder.glob("events.out.tfevents.*"):
            if not old.name.endswith(EVALUATION):
                old.unlink()
        self._writer = SummaryWriter(folder)
        self._writer.add_custom_scalars(
            {
                group: {title: ["Multiline", tags] for title, tags in charts.items()}
                for group, charts in CHARTS.items()
                if OBJECTIVE_OF_GROUP.get(group, objective) == objective
            }
        )
        for line in lines:
            self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        """Write one line of metrics.jsonl: each tag by step, and the training loss by tokens too."""
        tags = {tag: value for tag, value in line.items() if tag not in NOT_TAGS and value is not None}
        values = [value for tag in tags for value in scalar(tag, tags[tag]).value]
        # One event for all tags: passing an event to the writer's thread takes longer than making it.
        file_writer: Any = self._writer.file_writer
        file_writer.add_summary(Summary(value=values), line["step"], walltime=line["time"])
        if "loss/train" in line:
            self._writer.add_scalar("loss/train_by_tokens", line["loss/train"], line["tokens"], walltime=line["time"])

    def finish(self, hyperparameters: dict[str, Any], figures: dict[str, float], step: int) -> None:
        """Write the hyperparameters and final figures for the HParams tab, and close the file.

        The tab sorts hyperparameters by name and shows the first few, so the paper's capital letters come first.
        """
        values = {SYMBOLS.get(key, key): _to_scalar(value) for key, value in hyperparameters.items()}
        file_writer: Any = self._writer.file_writer
        for summary in hparams(values, figures):
            file_writer.add_summary(summary)
        for tag, value in figures.items():
            self._writer.add_scalar(tag, value, step)
        self.close()

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        self._writer.close()


def write_scalars(folder: Path, tags: dict[str, float], step: int, name: str) -> None:
    """Write an evaluation of the checkpoint of `step`; replaces the event file of the same name and step."""
    with _replace_events(folder, f".{quote(name, safe='')}.{step}{EVALUATION}") as writer:
        for tag, value in tags.items():
            writer.add_scalar(tag, value, step)


def write_curve(folder: Path, tag: str, points: dict[int, float], name: str) -> None:
    """Write a curve over something other than steps, such as lengths; replaces the event file of the same name."""
    with _replace_events(folder, f".{quote(name, safe='')}{EVALUATION}") as writer:
        for x, value in sorted(points.items()):
            writer.add_scalar(tag, value, x)


@contextlib.contextmanager
def _replace_events(folder: Path, suffix: str) -> Iterator[SummaryWriter]:
    """Open an event file whose name ends in `suffix`, and delete the earlier ones once it is complete."""
    before = list(folder.glob(f"events.out.tfevents.*{suffix}"))
    with SummaryWriter(folder, filename_suffix=suffix) as writer:
        yield writer
    for path in before:
        path.unlink()


def _to_scalar(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)
