"""The objective of formal languages: predict the answer to a string, and test on longer strings."""

import logging
from pathlib import Path
from typing import Any

from stackexp.config.affects import flatten_config
from stackexp.config.data import get_model_label
from stackexp.errors import RunError
from stackexp.evaluation.accuracy import compute_scores, format_accuracy, get_ranges, parse_accuracy
from stackexp.evaluation.request import EvaluationRequest, Sets, describe_evaluation
from stackexp.files import read_hashed_json, write_hashed_json
from stackexp.models import checkpoints
from stackexp.modules.transduction import Transduction, average_lengths
from stackexp.runs import RunFolder
from stackexp.tasks import TASKS
from stackexp.training.loggers import write_points
from stackexp.training.objectives import Objective, Session, average_last

log = logging.getLogger(__name__)


class FormalLanguageObjective(Objective):
    """Strings of a formal language. A run ends with the accuracy of its best checkpoint at every test length."""

    final_stage = "test"
    module_type = Transduction

    def warn_about_limits(self, stage: str) -> None:
        """Warn if the stack has too few slots for the longest strings of a stage; "fit" includes training strings."""
        data, memory = self.config.data, getattr(self.config.model, "memory", None) or self.config.model
        has_slots = hasattr(memory, "num_slots") and hasattr(memory, "eval_num_slots")
        if not has_slots or getattr(self.config.model, "memory_axis", "time") == "depth":
            return
        section = "model" if memory is self.config.model else "model.memory"
        longest = data.validation_max_length if stage == "validate" else data.eval_max_length
        checks = [(f"{section}.eval_num_slots", memory.eval_num_slots or memory.num_slots, longest)]
        if stage == "fit":
            checks.insert(0, (f"{section}.num_slots", memory.num_slots, data.max_length))
        for key, slots, length in checks:
            required = TASKS[data.task].required_slots(length)
            if required is not None and slots < required:
                problem = f"{slots} slots are too few for {data.task} at length {length}, which requires {required}"
                log.warning("%s: %s; set %s=%d", key, problem, key, required)

    def describe_training(self) -> str:
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
        """Load the best checkpoint, and validate it unless the last validation was of that checkpoint."""
        checkpoint = super().load_final_checkpoint(session)
        step, last_step, module = int(checkpoint.name), session.trainer.global_step, session.module
        if step != last_step:
            checkpoints.load_weights(module.model, checkpoint)
        if step != last_step or module.set_metrics_step != last_step:
            session.trainer.validate(module, session.data, verbose=False)
        self._tested_step, self._validation = step, _summarize_validation(module.set_metrics)
        return checkpoint

    def build_result(self, session: Session, sets: Sets) -> dict[str, Any]:
        """Return accuracies and scores of the tested checkpoint."""
        accuracies = [line["train/accuracy"] for line in session.folder.read_metrics() if "train/accuracy" in line]
        result = {"train_accuracy": average_last(accuracies), "tested_step": self._tested_step}
        return result | self._validation | self._summarize_test(sets)

    def list_score_tags(self, set_names: list[str]) -> list[str]:
        """Return the tags of validations, and those of the final test."""
        scores = [f"test/score_{first}_{end}" for first, end in get_ranges(self.config.data)]
        return [*super().list_score_tags(set_names), *scores]

    def list_final_scores(self, result: dict[str, Any]) -> dict[str, float]:
        """Return the scores, and the validation accuracy of the tested checkpoint."""
        keys = [key for key in result if key.startswith("score_") or key == "validation_accuracy"]
        return {f"test/{key}": result[key] for key in keys}

    def write_events(self, folder: RunFolder, result: dict[str, Any]) -> None:
        """Write the scores, and the accuracy by length as a curve."""
        step = result["steps"]
        points = [(tag, value, step) for tag, value in self.list_final_scores(result).items()]
        write_points(folder.path, f"test.scores.{step}", points)
        _write_accuracy(folder.path, result)

    def format_result(self, session: Session, result: dict[str, Any]) -> str:
        """Return the accuracy by length as a table."""
        tested = f"tested checkpoint: step {result['tested_step']:,}"
        return f"{tested}, validation accuracy {result['validation_accuracy']:.3f}\n\n{self._format_accuracy(result)}"

    def report(self, request: EvaluationRequest, checkpoint: Path, sets: Sets) -> Path | None:
        """Print the accuracy by length and write it as JSON. A test also writes a curve for TensorBoard."""
        record = describe_evaluation(request, checkpoint)
        print(f"{checkpoint}\n")
        if request.stage == "test":
            record |= self._summarize_test(sets)
            print(self._format_accuracy(record))
        else:
            record |= self._summarize_lengths(sets) | _summarize_validation(sets)
            record["sequences_per_length"] = self.config.data.validation_sequences
            for length, value in parse_accuracy(record).items():
                print(f"length {length:4d}  accuracy {value:.4f}")
            print(f"mean         accuracy {record['validation_accuracy']:.4f}  loss {record['validation_loss']:.4f}")
        if request.output is None:
            return None
        path = _choose_path(request, request.output, record)
        write_hashed_json(path, record)
        is_main_test = request.stage == "test" and request.ckpt_path is None and path == request.output
        if is_main_test and request.should_write_events:
            request.write_events(lambda run: _write_accuracy(run, record))
        print(f"\nscores: {path}")
        return path

    def _format_accuracy(self, record: dict[str, Any]) -> str:
        text = format_accuracy(self.config.data, {record["model"]: parse_accuracy(record)})
        if excess := record.get("loss_above_entropy"):
            shown = ", ".join(f"{value:.3f} at {length}" for length, value in excess.items())
            text += f"\n\nloss above the entropy of the source, nats per symbol: {shown}"
        return text

    def _summarize_lengths(self, sets: Sets) -> dict[str, Any]:
        accuracy = {str(int(name.removeprefix("length_"))): figures["accuracy"] for name, figures in sets.items()}
        record = {
            "task": self.config.data.task,
            "model": get_model_label(flatten_config(self.config)),
            "accuracy": accuracy,
        }
        if entropy := TASKS[self.config.data.task].entropy:
            longest, losses = self.config.data.max_length, (figures["loss"] for figures in sets.values())
            excess = {n: loss - entropy(int(n), longest) for n, loss in zip(accuracy, losses, strict=True)}
            record["loss_above_entropy"] = excess
        return record

    def _summarize_test(self, sets: Sets) -> dict[str, Any]:
        record, data = self._summarize_lengths(sets), self.config.data
        manner = {"sequences_per_length": data.eval_sequences, "length_stride": data.eval_length_stride}
        return record | compute_scores(data, parse_accuracy(record)) | manner


def _summarize_validation(sets: Sets) -> dict[str, float]:
    return {f"validation_{key}": mean for key, mean in average_lengths(sets).items()}


def _write_accuracy(folder: Path, record: dict[str, Any]) -> None:
    points = [("test/accuracy_by_length", value, length) for length, value in sorted(parse_accuracy(record).items())]
    write_points(folder, "test.lengths", points)


def _choose_path(request: EvaluationRequest, path: Path, record: dict[str, Any]) -> Path:
    """Return `path`, or another name for a test with fewer lengths or strings than the test in `path`.

    That name is test-to-<longest>-every-<stride>-of-<strings>.json. A test of another step is replaced, and so is a
    damaged file.
    """
    if request.out or request.stage != "test" or not path.exists():
        return path
    key = "sequences_per_length"
    try:
        previous = read_hashed_json(path, "")
    except RunError:
        return path
    is_as_thorough = previous["accuracy"].keys() <= record["accuracy"].keys() and previous[key] <= record[key]
    is_of_another_step = previous["step"] != record["step"]
    if is_as_thorough or is_of_another_step:
        return path
    manner = f"to-{max(parse_accuracy(record))}-every-{record['length_stride']}-of-{record[key]}"
    return path.with_name(f"{path.stem}-{manner}.json")
