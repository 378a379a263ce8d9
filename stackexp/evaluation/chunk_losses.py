"""The loss of every chunk of a scored set, in <evaluation>.chunks/<set>.npy, for paired intervals in reports."""

import math
from pathlib import Path

import numpy as np

from stackexp.errors import RunError
from stackexp.files import open_atomically


def write_chunk_losses(output: Path, name: str, sums: np.ndarray) -> None:
    """Write the losses of a set next to the scores in `output`.

    Args:
        output: The JSON file of the scores, such as RUN/validate.json.
        name: The set.
        sums: [2, N] Loss in nats and number of predictions of each chunk.
    """
    path = output.with_suffix(".chunks") / f"{name}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomically(path, "wb") as file:
        np.save(file, sums)


def read_chunk_losses(run: Path, name: str, loss: float) -> np.ndarray | None:
    """Return the losses [2, N] of a set whose mean is `loss`, from any evaluation of a run; None if there are none.

    Raises RunError for a damaged file.
    """
    paths = (folder / f"{name}.npy" for folder in sorted(run.glob("validate*.chunks")))
    for path in filter(Path.is_file, paths):
        try:
            sums = np.load(path, allow_pickle=False)
            found = math.fsum(sums[0]) / math.fsum(sums[1])
        except (OSError, ValueError, EOFError, IndexError, TypeError, ZeroDivisionError) as error:
            raise RunError(f"{path}: damaged ({error}); run `validate` again") from None
        if found == loss:  # otherwise the file is of another checkpoint
            return sums
    return None
