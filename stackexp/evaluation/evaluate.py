"""Score a checkpoint on every named set, for `validate` and `test`."""

import contextlib
import hashlib
import sys
from pathlib import Path

from tokenizers import Tokenizer

from stackexp.config import registry
from stackexp.datamodules.base import ExperimentData
from stackexp.errors import RunError, StoppedError
from stackexp.evaluation.request import EvaluationRequest, ResumableEvaluation
from stackexp.models import checkpoints
from stackexp.models.warm_start import warn_about_options
from stackexp.runs import read_manifest, split_path
from stackexp.terminal import set_up_log
from stackexp.training.callbacks.steps import StepRequests
from stackexp.training.objectives import Objective, build_objective
from stackexp.training.processes import start_processes
from stackexp.training.signals import StopRequest
from stackexp.training.trainer import build_trainer, find_device_type


def evaluate(request: EvaluationRequest) -> None:
    """Score the requested sets, then print and write the scores.

    Each set is saved after it is scored, so after a kill the same command scores only the remaining sets.
    """
    set_up_log()
    config = request.config
    objective = build_objective(config)
    with start_processes(config.trainer, find_device_type(config)) as processes:
        checkpoint = processes.run_on_first(lambda: _find_checkpoint(request, objective))
        data = processes.run_on_all(lambda: open_data(request, checkpoint))
        if processes.is_first:
            objective.warn_about_limits(request.stage)
        evaluation = ResumableEvaluation(request.stage, config, data, processes, checkpoint, request.output)
        module = objective.build_module(weights=checkpoint)
        if processes.is_first:
            warn_about_options(checkpoint, config)
        stop = StopRequest(None, config.trainer.stop_grace_seconds)
        trainer = build_trainer(config, processes, [StepRequests(stop)])
        try:
            with stop.handle_interrupts():
                evaluation.run(trainer, module)
        except StoppedError as error:
            raise type(error)(f"{error}; rerun the command to score the remaining sets") from None
        if processes.is_first:
            with contextlib.redirect_stdout(sys.stderr) if request.as_json else contextlib.nullcontext():
                written = objective.report(request, checkpoint, evaluation.sets)
            if request.as_json and written:
                print(written.read_text())
            evaluation.delete_partial_results()


def open_data(request: EvaluationRequest, checkpoint: Path | None = None) -> ExperimentData:
    """Open the requested sets.

    Raises RunError if there are none, if the run's tokenizer has changed, or if a checkpoint without its run was
    trained with another tokenizer than that of the data.
    """
    data = registry.build("data", request.config.data, seed=request.config.seed)
    if request.run:
        data.tokenizer_file = request.run.find_tokenizer(checkpoint)
    if request.sets:
        data.select_sets(request.stage, list(request.sets))
    if not data.list_set_names(request.stage):
        section = "data.validation" if request.stage == "validate" else "data.test"
        raise RunError(f"{section}: no sets to {request.stage} on; name some in the config, or with --sets")
    data.prepare_data()
    data.setup(request.stage)
    if request.run is None and checkpoint is not None and data.tokenizer is not None:
        _check_tokenizer(checkpoint, data.tokenizer)
    return data


def _check_tokenizer(checkpoint: Path, tokenizer: Tokenizer) -> None:
    folder, _ = split_path(checkpoint)
    recorded = read_manifest(folder)["tokenizer"] if folder.is_dir() else None
    if recorded and recorded != hashlib.sha256(tokenizer.to_str(pretty=True).encode()).hexdigest():
        raise RunError(
            f"{checkpoint}: trained with another tokenizer than that of data.path; give --run, or data.path of its "
            "training data"
        )


def _find_checkpoint(request: EvaluationRequest, objective: Objective) -> Path:
    if request.run is None:
        return Path(request.ckpt_path or "")
    if request.ckpt_path:
        return checkpoints.find_checkpoint(request.run, request.ckpt_path)
    return objective.choose_checkpoint(request.run)
