"""Figures of formal languages: accuracy by length, as scores, a table, a curve and a JSON record."""

import json
from pathlib import Path
from typing import Any

from stackexp.config.affects import flatten_config
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.formal_language import model_label
from stackexp.evaluation.accuracy import compute_scores, format_curves, parse_accuracy
from stackexp.evaluation.request import EvaluationRequest, Sets, describe_evaluation
from stackexp.files import read_json, write_atomically
from stackexp.modules.transduction import average_lengths
from stackexp.training.tensorboard import write_curve

CURVE = "test/accuracy_by_length"  # the TensorBoard tag
CURVE_FILE = "test.lengths"  # names the event file, so that a later test replaces it


def summarize_test(config: ExperimentConfig, sets: Sets) -> dict[str, Any]:
    """Return the figures of a test, with the keys of result.json."""
    accuracy = _collect_accuracy(sets)
    return {
        **_summarize_lengths(config, accuracy),
        **compute_scores(config.data, accuracy),
        "sequences_per_length": config.data.eval_sequences,
        "length_stride": config.data.eval_length_stride,
    }


def _summarize_validation(config: ExperimentConfig, sets: Sets) -> dict[str, Any]:
    mean = average_lengths(sets)
    return {
        **_summarize_lengths(config, _collect_accuracy(sets)),
        "validation_accuracy": mean["accuracy"],
        "validation_loss": mean["loss"],
        "sequences_per_length": config.data.validation_sequences,
    }


def _summarize_lengths(config: ExperimentConfig, accuracy: dict[int, float]) -> dict[str, Any]:
    return {
        "task": config.data.task,
        "model": model_label(flatten_config(config)),
        "accuracy": {str(length): value for length, value in accuracy.items()},
    }


def _collect_accuracy(sets: Sets) -> dict[int, float]:
    """Return {41: accuracy} for {length_041: figures}."""
    return {int(name.removeprefix("length_")): figures["accuracy"] for name, figures in sets.items()}


def report(request: EvaluationRequest, checkpoint: Path, sets: Sets) -> None:
    """Print the accuracy by length, and write it as JSON; a test also as a curve for TensorBoard."""
    config, record = request.config, describe_evaluation(request, checkpoint)
    print(f"{checkpoint}\n")
    if request.stage == "test":
        record |= summarize_test(config, sets)
        print(format_curves(config.data, {record["model"]: parse_accuracy(record)}))
    else:
        record |= _summarize_validation(config, sets)
        for length, value in parse_accuracy(record).items():
            print(f"length {length:4d}  accuracy {value:.4f}")
        print(f"mean         accuracy {record['validation_accuracy']:.4f}  loss {record['validation_loss']:.4f}")
    if request.output is None:
        return
    path = _choose_path(request, request.output, record)
    write_atomically(path, json.dumps(record, indent=2))
    is_main_test = request.stage == "test" and request.ckpt_path is None and path == request.output
    if is_main_test and request.should_write_events:
        with request.open_event_folder() as folder:
            write_curve(folder, CURVE, parse_accuracy(record), CURVE_FILE)
    print(f"\nfigures: {path}")


def _choose_path(request: EvaluationRequest, path: Path, record: dict[str, Any]) -> Path:
    """Return `path`, or a separate name for a test with fewer lengths or strings than the existing one.

    The name is test-to-<longest>-every-<stride>-of-<strings>.json. A test of another checkpoint is replaced.
    """
    if request.out or request.stage != "test" or not path.exists():
        return path
    previous, key = read_json(path), "sequences_per_length"
    is_as_thorough = previous["accuracy"].keys() <= record["accuracy"].keys() and previous[key] <= record[key]
    if is_as_thorough or previous["checkpoint"] != record["checkpoint"]:
        return path
    manner = f"to-{max(parse_accuracy(record))}-every-{record['length_stride']}-of-{record[key]}"
    return path.with_name(f"{path.stem}-{manner}.json")
