"""The objective of formal languages: answers to strings, tested on strings longer than those in training."""

from pathlib import Path
from typing import Any

from stackexp.evaluation import formal_languages
from stackexp.evaluation.accuracy import format_curves, parse_accuracy
from stackexp.evaluation.request import EvaluationRequest, Sets
from stackexp.models import checkpoints
from stackexp.modules.transduction import Transduction, average_lengths
from stackexp.runs import RunFolder
from stackexp.training.objectives.base import Objective, Session, mean_of_last
from stackexp.training.objectives.stack_capacity import warn_about_small_stack
from stackexp.training.tensorboard import write_curve, write_scalars


class FormalLanguageObjective(Objective):
    """Strings of a formal language. A run ends with the accuracy of its best checkpoint at every test length."""

    final_stage = "test"

    def build_module(self, weights: Path | None = None) -> Transduction:
        """Build the module for strings and their answers."""
        return Transduction(self.config, weights)

    def warn_about_limits(self, stage: str) -> None:
        """Log stacks that are too small for the longest strings."""
        warn_about_small_stack(self.config, stage)

    def describe_training(self) -> str:
        """Return steps, task and lengths."""
        data = self.config.data
        text = f"{self.config.trainer.max_steps:,} steps of {data.batch_size} strings of {data.task}, lengths up to "
        share = f", the longest in {data.longest_fraction:.0%} of the batches" if data.longest_fraction else ""
        if not data.curriculum_steps:
            return f"{text}{data.max_length}{share}"
        growth = f"{data.curriculum_start}, growing to {data.max_length} over {data.curriculum_steps:,} steps"
        return f"{text}{growth}{share}"

    def choose_checkpoint(self, run: RunFolder) -> Path:
        """Return the best checkpoint by validation loss, or the newest.

        Once a task is solved the gradient almost vanishes, and Adam's updates may undo the solution.
        """
        return checkpoints.find_checkpoint(run, "best" if run.best_checkpoint() else "last")

    def load_final_checkpoint(self, session: Session) -> Path:
        """Load the best checkpoint, and validate it unless the last validation has done so."""
        checkpoint = super().load_final_checkpoint(session)
        step, last_step, module = int(checkpoint.name), self.config.trainer.max_steps, session.module
        if step != last_step:
            checkpoints.load_weights(module.model, checkpoint)
        if step != last_step or module.set_metrics_step != last_step:
            session.trainer.validate(module, session.data, verbose=False)
        self._validation = {"tested_step": step} | average_lengths(module.set_metrics)
        return checkpoint

    def build_result(self, session: Session, sets: Sets) -> dict[str, Any]:
        """Return accuracies and scores of the tested checkpoint."""
        accuracies = [line["train/accuracy"] for line in session.folder.read_metrics() if "train/accuracy" in line]
        return {
            "train_accuracy": mean_of_last(accuracies),
            "tested_step": self._validation["tested_step"],
            "validation_accuracy": self._validation["accuracy"],
            "validation_loss": self._validation["loss"],
            **formal_languages.summarize_test(self.config, sets),
        }

    def list_final_figures(self, result: dict[str, Any]) -> dict[str, float]:
        """Return the scores, and the validation accuracy of the tested checkpoint."""
        keys = [key for key in result if key.startswith("score_") or key == "validation_accuracy"]
        return {f"test/{key}": result[key] for key in keys}

    def write_events(self, folder: RunFolder, result: dict[str, Any]) -> None:
        """Write the scores, and the accuracy by length as a curve."""
        write_scalars(folder.path, self.list_final_figures(result), result["steps"], "test.scores")
        write_curve(folder.path, formal_languages.CURVE, parse_accuracy(result), formal_languages.CURVE_FILE)

    def format_result(self, session: Session, result: dict[str, Any]) -> str:
        """Return the accuracy by length as a table and a plot."""
        tested = f"tested checkpoint: step {result['tested_step']:,}"
        accuracy = f"validation accuracy {result['validation_accuracy']:.3f}"
        curves = {result["model"]: parse_accuracy(result)}
        return f"{tested}, {accuracy}\n\n{format_curves(self.config.data, curves)}"

    def report(self, request: EvaluationRequest, checkpoint: Path, sets: Sets) -> None:
        """Report the accuracy by length."""
        formal_languages.report(request, checkpoint, sets)
