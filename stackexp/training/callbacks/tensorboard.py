"""TensorBoard's copy of metrics.jsonl. A resumed run deletes the copy and makes it anew from the lines kept."""

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

EVALUATION = ".evaluation"  # what the names of event files that `validate` and `test` wrote end in: they stay
NOT_TAGS = ("step", "tokens", "time")

CHARTS = {
    "Training": {
        "loss": ["loss/train$", "validation/loss/.*"],
        "loss against tokens": ["loss/train_by_tokens"],
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
            "averages of perplexity": [f"(sample/)?{group}/average/(perplexity|exp_mean_loss)"],
        }
        for group in ("v2", "v3")
    },
    "Formal languages": {
        "Accuracy against length": ["length/accuracy"],
        "accuracy": ["accuracy/train", "validation/accuracy/average"],
        "longest string of the curriculum": ["data/max_length"],
    },
    "Memory, by layer": {
        "push probability": ["memory/push/.*"],
        "pop probability": ["memory/pop/.*"],
        "no-op probability": ["memory/no_op/.*"],
        "action entropy (nats)": ["memory/entropy/.*"],
        "occupancy (sum of M)": ["memory/occupancy/.*"],
        "read's share of the residual": ["memory/read_share/.*"],
    },
}

OF_OBJECTIVE = {"Validation": "language_modeling", "V2": "language_modeling", "V3": "language_modeling"}
OF_OBJECTIVE |= {"Formal languages": "transduction"}
"""The groups that stay empty in runs of another objective."""


def _say_nothing_of_disks(failure: threading.ExceptHookArgs) -> None:
    """The writer's thread has its OSError raised again in the main thread, which tells of it in one line."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


threading.excepthook = _say_nothing_of_disks


class TensorBoardCopy:
    """Event files in `folder`, beginning with the lines of an earlier session; `objective`: of the run's data."""

    def __init__(self, folder: Path, lines: list[dict[str, Any]], objective: str):
        for old in folder.glob("events.out.tfevents.*"):
            if not old.name.endswith(EVALUATION):
                old.unlink()
        self._writer = SummaryWriter(folder)
        self._writer.add_custom_scalars(
            {
                group: {title: ["Multiline", tags] for title, tags in charts.items()}
                for group, charts in CHARTS.items()
                if OF_OBJECTIVE.get(group, objective) == objective
            }
        )
        for line in lines:
            self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl: each tag against the step, the training loss against the tokens too."""
        tags = {tag: value for tag, value in line.items() if tag not in NOT_TAGS and value is not None}
        values = [value for tag in tags for value in scalar(tag, tags[tag]).value]
        # One event for all of them: each is handed to a thread, which takes longer than what it is handed.
        self._writer.file_writer.add_summary(Summary(value=values), line["step"], walltime=line["time"])
        if "loss/train" in line:
            self._writer.add_scalar("loss/train_by_tokens", line["loss/train"], line["tokens"], walltime=line["time"])

    def finish(self, config: dict[str, Any], figures: dict[str, float], step: int) -> None:
        """The hyperparameters beside the final figures, once, for the HParams tab.

        The tab sorts them by name and shows the first few: the paper's capitals come before all others.
        """
        for summary in hparams({SYMBOLS.get(key, key): _scalar(value) for key, value in config.items()}, figures):
            self._writer.file_writer.add_summary(summary)
        for tag, value in figures.items():
            self._writer.add_scalar(tag, value, step)
        self.close()

    def close(self) -> None:
        self._writer.close()


def write_scalars(folder: Path, tags: dict[str, float], step: int, what: str) -> None:
    """Figures of an evaluation of the checkpoint of `step`, in an event file that takes the place of `what`'s last."""
    with _replacing(folder, f".{quote(what, safe='')}.{step}{EVALUATION}") as writer:
        for tag, value in tags.items():
            writer.add_scalar(tag, value, step)


def write_curve(folder: Path, tag: str, points: dict[int, float], what: str) -> None:
    """A figure against something else than the step, such as the length, in a file that takes the place of the last."""
    with _replacing(folder, f".{quote(what, safe='')}{EVALUATION}") as writer:
        for x, value in sorted(points.items()):
            writer.add_scalar(tag, value, x)


@contextlib.contextmanager
def _replacing(folder: Path, suffix: str) -> Iterator[SummaryWriter]:
    """A writer of a file whose name ends in `suffix`; the one of before goes when this one is whole."""
    before = list(folder.glob(f"events.out.tfevents.*{suffix}"))
    with SummaryWriter(folder, filename_suffix=suffix) as writer:
        yield writer
    for path in before:
        path.unlink()


def _scalar(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)
