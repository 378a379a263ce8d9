"""Reading the record of a run, to compare it with another's."""

from pathlib import Path

import pytest

from stackexp.runs import RunFolder

CLOCK = ("time", "throughput/tokens_per_second", "throughput/flops_per_second")


def only_run(root: Path, name: str = "tiny") -> RunFolder:
    """The run folder below a `logging.root`, which must be the only one of its name."""
    (path,) = root.glob(f"{name}/*")
    return RunFolder(path)


def losses(run: RunFolder) -> dict[int, float]:
    return {line["step"]: line["loss/train"] for line in run.read_metrics() if "loss/train" in line}


def record(run: RunFolder) -> list[dict[str, float]]:
    """Every line of metrics.jsonl, less what depends on the clock."""
    return [{tag: value for tag, value in line.items() if tag not in CLOCK} for line in run.read_metrics()]


def assert_close(run: RunFolder, reference: RunFolder, tolerance: float = 1e-5) -> None:
    """Losses, gradient norms, probes and validations of both runs differ by `tolerance` at most."""
    lines = record(run), record(reference)
    for ours, theirs in zip(*lines, strict=True):
        assert ours.keys() == theirs.keys(), (run.path, ours["step"])
        for tag, value in theirs.items():
            assert ours[tag] == pytest.approx(value, abs=tolerance, rel=0), (run.path, ours["step"], tag)
