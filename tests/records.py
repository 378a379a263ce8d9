"""Read the logs of a run, to compare them with those of another run."""

from pathlib import Path

import pytest

from stackexp.runs import RunFolder

CLOCK_TAGS = ("time", "train/tokens_per_second", "train/flops_per_second")


def only_run(root: Path, name: str = "tiny") -> RunFolder:
    """Return the only run folder of a name below a `logging.root`."""
    (path,) = root.glob(f"{name}/*")
    return RunFolder(path)


def has_checkpoint(root: Path) -> bool:
    """Return True if a run below a `logging.root` has a checkpoint."""
    return any(RunFolder(path).list_checkpoints() for path in root.glob("tiny/*"))


def losses(run: RunFolder) -> dict[int, float]:
    """Return the training loss by step."""
    return {line["step"]: line["train/loss"] for line in run.read_metrics() if "train/loss" in line}


def record(run: RunFolder) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl without what depends on the clock."""
    return [{tag: value for tag, value in line.items() if tag not in CLOCK_TAGS} for line in run.read_metrics()]


def assert_close(run: RunFolder, reference: RunFolder, tolerance: float = 1e-5) -> None:
    """Compare losses, gradient norms, probes and validations of two runs up to an absolute tolerance."""
    for ours, theirs in zip(record(run), record(reference), strict=True):
        assert ours.keys() == theirs.keys(), (run.path, ours["step"])
        for tag, value in theirs.items():
            assert ours[tag] == pytest.approx(value, abs=tolerance, rel=0), (run.path, ours["step"], tag)
