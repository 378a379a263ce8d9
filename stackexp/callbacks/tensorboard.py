"""TensorBoard's copy of metrics.jsonl. A resumed run deletes the copy and makes it anew from the lines kept."""

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

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
        "loss": ["validation/loss/.*"],
        "perplexity": ["validation/perplexity/.*"],
        "bits per byte": ["validation/bits_per_byte/.*"],
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


class TensorBoardCopy:
    """Event files in `folder`, beginning with the lines of an earlier session."""

    def __init__(self, folder: Path, lines: list[dict[str, Any]]):
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = SummaryWriter(folder)
        self._writer.add_custom_scalars(
            {group: {title: ["Multiline", tags] for title, tags in charts.items()} for group, charts in CHARTS.items()}
        )
        for line in lines:
            self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl: each tag against the step, the training loss against the tokens too."""
        for tag, value in line.items():
            if tag not in NOT_TAGS:
                self._writer.add_scalar(tag, value, line["step"], walltime=line["time"])
        if "loss/train" in line:
            self._writer.add_scalar("loss/train_by_tokens", line["loss/train"], line["tokens"], walltime=line["time"])

    def finish(self, config: dict[str, Any], figures: dict[str, float], step: int) -> None:
        """The hyperparameters beside the final figures, once, for the HParams tab."""
        for summary in hparams({key: _scalar(value) for key, value in config.items()}, figures):
            self._writer.file_writer.add_summary(summary)
        for tag, value in figures.items():
            self._writer.add_scalar(tag, value, step)
        self.close()

    def close(self) -> None:
        self._writer.close()


def _scalar(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)
