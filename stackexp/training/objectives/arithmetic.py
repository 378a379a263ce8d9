"""The objective of arithmetic: continue a problem with its answer, and score the held-out problems."""

from pathlib import Path
from typing import Any

from stackexp.datamodules.arithmetic import HELD_OUT
from stackexp.evaluation.request import EvaluationRequest, Sets, describe_evaluation
from stackexp.files import write_hashed_json
from stackexp.modules.transduction import Arithmetic
from stackexp.tables import format_table
from stackexp.training.objectives import Objective, Session


class ArithmeticObjective(Objective):
    """Problems as text. A run ends with the accuracy of its last weights on the held-out problems."""

    final_stage = "validate"
    module_type = Arithmetic

    def describe_training(self) -> str:
        data = self.config.data
        steps = f"{self.config.trainer.max_steps:,} steps of {data.batch_size} problems of {data.operation}"
        return f"{steps}, {100 * data.held_out:.3g} % of the problems held out"

    def build_result(self, session: Session, sets: Sets) -> dict[str, Any]:
        accuracy = sets[HELD_OUT]["accuracy"]
        return _summarize(sets) | {"operation": self.config.data.operation, "held_out_accuracy": accuracy}

    def list_final_scores(self, result: dict[str, Any]) -> dict[str, float]:
        return {f"val/{key}/average": result["average"][key] for key in ("accuracy", "loss")}

    def format_result(self, session: Session, result: dict[str, Any]) -> str:
        return _format_scores(result["sets"])

    def report(self, request: EvaluationRequest, checkpoint: Path, sets: Sets) -> Path | None:
        """Print the scores, and write them as JSON."""
        print(f"{checkpoint}\n\n{_format_scores(sets)}")
        if request.output is None:
            return None
        write_hashed_json(request.output, describe_evaluation(request, checkpoint) | _summarize(sets))
        print(f"\nscores: {request.output}")
        return request.output


def _summarize(sets: Sets) -> dict[str, Any]:
    return {"sets": sets, "average": sets[HELD_OUT]}


def _format_scores(sets: Sets) -> str:
    rows = [
        [name, f"{scores['sequences']:,}", f"{scores['accuracy']:.4f}", f"{scores['loss']:.4f}"]
        for name, scores in sets.items()
    ]
    return format_table(rows, header=("set", "problems", "accuracy", "loss"), align="<>>>")
