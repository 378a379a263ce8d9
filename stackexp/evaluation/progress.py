"""What an evaluation has so far: written down after each set, so that a kill loses no other; told as it goes on."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from tqdm import tqdm

from stackexp.files import write_atomically

QUIET_SECONDS = 10  # an evaluation shorter than this says nothing before its table
MANY = 40  # sets of which not every one has a line


class PartialFigures:
    """The figures of sets done, a line each in a file: {"key": what they depend on, "set": name, "figures": ...}.

    A key stands for checkpoint, set and everything else that decides figures, so those of another never come in.
    """

    def __init__(self, path: Path):
        self.path = path

    def begin(self, keys: dict[str, str]) -> dict[str, dict[str, float]]:
        """`read`, once it is sure that the file can be written: better now than after the first set."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        open(self.path, "ab").close()
        if not self.path.stat().st_size:
            self.path.unlink()
        return self.read(keys)

    def read(self, keys: dict[str, str]) -> dict[str, dict[str, float]]:
        """The figures of those of the sets {name: key} that are done."""
        done = {line["key"]: line["figures"] for line in self._lines()}
        return {name: done[key] for name, key in keys.items() if key in done}

    def add(self, key: str, name: str, figures: dict[str, float]) -> None:
        """One write, on the disk when it returns: other processes may add to the same file.

        The first line feed parts it from a line that a kill has cut off.
        """
        line = "\n" + json.dumps({"key": key, "set": name, "figures": figures}) + "\n"
        with open(self.path, "ab", buffering=0) as file:
            file.write(line.encode())
            os.fsync(file.fileno())

    def forget(self, keys: dict[str, str]) -> None:
        """Leave the lines of other evaluations only, and no file without lines."""
        kept = [line for line in self._lines() if line["key"] not in keys.values()]
        if kept:
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        else:
            self.path.unlink(missing_ok=True)

    def _lines(self) -> list[dict[str, Any]]:
        """A line cut off by a kill left out."""
        lines = []
        for line in self.path.read_bytes().splitlines() if self.path.exists() else []:
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
        return lines


class EvaluationRecord(pl.Callback):
    """On the first process: adds each set to `partial` once it is done, and says on standard error how far it is.

    A bar in a terminal; elsewhere a line a set, where the whole takes longer than QUIET_SECONDS; of MANY sets or more
    only one in so many seconds.
    """

    def __init__(self, partial: PartialFigures | None, keys: dict[str, str], progress: bool):
        self._partial, self._keys, self._progress = partial, keys, progress
        self._recorded: set[str] = set()
        self._bar: tqdm | None = None

    def _start(self, trainer: pl.Trainer, batches: list[int]) -> None:
        self._started, self._sets = time.monotonic(), len(batches)
        self._told, self._pause = 0.0, QUIET_SECONDS if self._sets >= MANY else 0
        if self._progress and trainer.is_global_zero and sys.stderr.isatty():
            self._bar = tqdm(total=sum(batches), unit="batch", file=sys.stderr, dynamic_ncols=True)

    def _advance(self, trainer: pl.Trainer, module: pl.LightningModule, name: str) -> None:
        if not trainer.is_global_zero:
            return
        if self._bar is not None:
            self._bar.set_description(name, refresh=False)
            self._bar.update()
        for done in module.set_metrics.keys() - self._recorded:
            self._recorded.add(done)
            if self._partial:
                self._partial.add(self._keys[done], done, module.set_metrics[done])
            self._tell(done, module.set_metrics[done])

    def _tell(self, name: str, figures: dict[str, float]) -> None:
        seconds = time.monotonic() - self._started
        if self._progress and self._bar is None and seconds > max(QUIET_SECONDS, self._told + self._pause):
            self._told = seconds
            count, figure = f"{len(self._recorded)}/{self._sets}", "accuracy" if "accuracy" in figures else "loss"
            print(f"{count} {name}: {figure} {figures[figure]:.4f}, {seconds:.0f} s", file=sys.stderr, flush=True)

    def _end(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._start(trainer, trainer.num_val_batches)

    def on_test_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._start(trainer, trainer.num_test_batches)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, _o: Any, _b: Any, _i: int, dataloader_idx: int = 0
    ) -> None:
        self._advance(trainer, module, trainer.datamodule.set_names("validate")[dataloader_idx])

    def on_test_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, _o: Any, _b: Any, _i: int, dataloader_idx: int = 0
    ) -> None:
        self._advance(trainer, module, trainer.datamodule.set_names("test")[dataloader_idx])

    on_validation_end = on_test_end = on_exception = _end
