"""Options of the benchmarks during training."""

from dataclasses import dataclass
from typing import Optional

from stackexp.config.fields import Errors, option


@dataclass
class EvaluationConfig:
    """Benchmarks that `fit` scores every few steps; see docs/benchmarks.md. Requires stackexp[eval]."""

    tasks: list[str] = option([], affects="evaluation")
    """Tasks, groups or tags of lm-eval, such as smollm2_piqa; empty scores none."""
    interval: int = option(1000, min=1, affects="evaluation")
    """Steps between two evaluations of the tasks."""
    limit: Optional[int] = option(None, min=1, affects="evaluation")
    """Score only the first documents of each task, this many; null scores all."""
    batch_size: int = option(16, min=1, affects="execution")
    """Sequences per device and forward pass of the tasks."""
    datasets: Optional[str] = option(None, affects="location")
    """Folder of local datasets, <task>/<split>.jsonl; null downloads them."""

    def find_errors(self) -> Errors:
        """Yield the errors that involve several options."""
        if self.datasets is not None and not self.tasks:
            yield "datasets", "requires tasks; name some in evaluation.tasks"
