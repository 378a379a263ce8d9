"""Formal languages in the verbs: every length tested, and accuracy against length as scores, table and picture."""

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from stackexp import runs
from stackexp.config.compose import to_dict
from stackexp.config.experiment import ExperimentConfig
from stackexp.config.formal_language import model_label
from stackexp.config.yaml_files import flatten
from stackexp.datamodules.formal_language import warn_of_slots
from stackexp.evaluation.progress import EvaluationRecord
from stackexp.evaluation.requests import Evaluation, Sets, resumable
from stackexp.models import checkpoints
from stackexp.modules.transduction import average
from stackexp.reports.formal.accuracy import accuracy_plot, accuracy_table, scores
from stackexp.runs import RunFolder
from stackexp.training.callbacks.tensorboard import write_curve
from stackexp.training.session import Session, hyperparameters

HYPERPARAMETERS = ("model.", "data.", "optimizer.", "schedule.", "seed", "trainer.max_steps")
NOT_HYPERPARAMETERS = ("data.validation_", "data.eval_")
CURVE = "length/accuracy"


def begin(config: ExperimentConfig, stage: str) -> None:
    warn_of_slots(config, stage)


def trains_on(config: ExperimentConfig) -> str:
    data = config.data
    text = f"{config.trainer.max_steps:,} steps of {data.batch_size} strings of {data.task}, lengths up to "
    share = f", the longest in {data.longest_fraction:.0%} of the batches" if data.longest_fraction else ""
    if not data.curriculum_steps:
        return f"{text}{data.max_length}{share}"
    return f"{text}{data.curriculum_start}, growing to {data.max_length} over {data.curriculum_steps:,} steps{share}"


def callbacks(config: ExperimentConfig, folder: RunFolder) -> list[pl.Callback]:
    """None: the data are a function of seed and step, so there is nothing to record of them."""
    return []


def label(config: ExperimentConfig) -> str:
    return model_label(flatten(to_dict(config)))


def checkpoint_of(run: RunFolder) -> Path:
    """What is tested: the best by validation. A task once solved gives hardly a gradient, and what Adam makes of
    that may undo it."""
    return checkpoints.choose(run, "best" if run.best_checkpoint() else "last")


def finish(session: Session) -> None:
    """The best checkpoint on every length of the test; result.json last."""
    config, module, data, trainer = session.config, session.module, session.data, session.trainer
    checkpoint = session.processes.agree(lambda: checkpoint_of(session.folder))
    step, last = int(checkpoint.name), config.trainer.max_steps
    if step != last:
        checkpoints.load_weights(module.model, checkpoint)
    if step != last or module.set_metrics_step != last:
        trainer.validate(module, data, verbose=False)
    validated = {"tested_step": step} | average(module.set_metrics)

    def evaluate(record: EvaluationRecord) -> Sets:
        trainer.callbacks.append(record)
        trainer.test(module, data, verbose=False)
        return module.set_metrics

    with resumable("test", config, data, session.processes, checkpoint, session.folder.path / "test.json") as whole:
        sets = whole.figures(evaluate)
        if session.processes.first:
            _finish(session, tested(config, sets), validated)


def tested(config: ExperimentConfig, sets: Sets) -> dict[str, Any]:
    """What a test has to tell, under the keys of result.json."""
    accuracy = accuracy_of(sets)
    return {
        "task": config.data.task,
        "model": label(config),
        "accuracy": {str(length): value for length, value in accuracy.items()},
        **scores(config.data, accuracy),
        "sequences_per_length": config.data.eval_sequences,
        "length_stride": config.data.eval_length_stride,
    }


def accuracy_of(sets: Sets) -> dict[int, float]:
    """{length_041: figures} -> {41: accuracy}."""
    return {int(name.removeprefix("length_")): figures["accuracy"] for name, figures in sets.items()}


def _finish(session: Session, test: dict[str, Any], validated: dict[str, float]) -> None:
    config, module, folder = session.config, session.module, session.folder
    seconds = time.perf_counter() - session.started_at
    lines = [line for line in folder.read_metrics() if "loss/train" in line]
    losses, accuracies = ([line[tag] for line in lines] for tag in ("loss/train", "accuracy/train"))
    result = {
        "steps": config.trainer.max_steps,
        "tokens": lines[-1]["tokens"],
        "parameters": module.model.num_parameters(),
        "memory_parameters": module.model.num_parameters(memory=True),
        "train_loss": {"first": losses[0], "last_20_steps": sum(losses[-20:]) / len(losses[-20:])},
        "train_accuracy": sum(accuracies[-20:]) / len(accuracies[-20:]),
        "tested_step": validated["tested_step"],
        "validation_accuracy": validated["accuracy"],
        "validation_loss": validated["loss"],
        **test,
        "seconds_of_last_session": round(seconds, 1),
    }
    figures = {f"final/{key}": value for key, value in test.items() if key.startswith("score_")}
    figures["final/validation_accuracy"] = validated["accuracy"]
    figures["final/loss/train"] = result["train_loss"]["last_20_steps"]
    chosen = hyperparameters(config, HYPERPARAMETERS, NOT_HYPERPARAMETERS)
    session.record.finish(chosen, figures, config.trainer.max_steps)
    if config.logging.tensorboard:
        write_curve(folder.path, CURVE, accuracy_in(test), "test.lengths")
    runs.write_atomically(folder.result, json.dumps(result, indent=2))
    shown = _shown(config, {test["model"]: accuracy_in(test)})
    best = f"{validated['accuracy']:.3f} on the lengths of the validation at step {validated['tested_step']:,}"
    print(
        f"\ntraining loss {losses[0]:.3f} at the first step, {result['train_loss']['last_20_steps']:.3f} over the last "
        f"20; accuracy {best}, which is tested; {seconds:.0f} s\n\n{shown}\n\n"
        f"run folder: {folder.path}\ncurves:     tensorboard --logdir {config.logging.root}",
        flush=True,
    )


def accuracy_in(record: dict[str, Any]) -> dict[int, float]:
    """Of a result.json or test.json, by length."""
    return {int(length): value for length, value in record["accuracy"].items()}


def _shown(config: ExperimentConfig, curves: dict[str, dict[int, float]]) -> str:
    title = f"{config.data.task}, {config.data.eval_sequences} strings of each length tested"
    table = accuracy_table(curves, config.data)
    return f"{title}\n\n{table}\n\n{accuracy_plot(curves, config.data.max_length)}"


def side_by_side(config: ExperimentConfig, folders: dict[str, RunFolder]) -> str:
    own = label(config) if label(config) not in folders else f"{label(config)} ({config.name})"
    results = {name or own: json.loads(run.result.read_text()) for name, run in folders.items()}
    return _shown(config, {name: accuracy_in(result) for name, result in results.items()})


def report(asked: Evaluation, checkpoint: Path, sets: Sets) -> None:
    """Of `test`: scores, table and picture, and test.json with the keys of result.json; of `validate`: its lengths."""
    config, step = asked.config, checkpoints.read(checkpoint)["global_step"] if checkpoint.is_dir() else None
    record = {"checkpoint": str(checkpoint), "step": step, "overrides": list(asked.overrides)}
    record |= {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    print(f"{checkpoint}\n")
    if asked.stage == "test":
        record |= tested(config, sets)
        print(_shown(config, {record["model"]: accuracy_in(record)}))
    else:
        accuracy, mean = accuracy_of(sets), average(sets)
        record |= {"task": config.data.task, "model": label(config)}
        record |= {"accuracy": {str(length): value for length, value in accuracy.items()}}
        record |= {"validation_accuracy": mean["accuracy"], "validation_loss": mean["loss"]}
        record |= {"sequences_per_length": config.data.validation_sequences}
        print("\n".join(f"length {length:4d}  accuracy {value:.4f}" for length, value in accuracy.items()))
        print(f"mean         accuracy {mean['accuracy']:.4f}  loss {mean['loss']:.4f}")
    if asked.record:
        path = _place(asked, record)
        runs.write_atomically(path, json.dumps(record, indent=2))
        if asked.stage == "test" and asked.ckpt_path is None and asked.has_tags and path == asked.record:
            with asked.event_folder() as folder:  # in the place of the fit's own
                write_curve(folder, CURVE, accuracy_of(sets), "test.lengths")
        print(f"\nfigures: {path}")


def _place(asked: Evaluation, record: dict[str, Any]) -> Path:
    """Where the figures go: in the place of a test of the same checkpoint only if they are of no fewer strings of any
    length."""
    path = asked.record
    if asked.out or asked.stage != "test" or not path.exists():
        return path
    before, key = json.loads(path.read_text()), "sequences_per_length"
    whole = before["accuracy"].keys() <= record["accuracy"].keys() and before[key] <= record[key]
    if whole or before["checkpoint"] != record["checkpoint"]:
        return path
    manner = f"to-{max(accuracy_in(record))}-every-{record['length_stride']}-of-{record[key]}"
    return path.with_name(f"{path.stem}-{manner}.json")
