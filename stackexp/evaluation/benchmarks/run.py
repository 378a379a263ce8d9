"""The engine of `evaluate`: score a run or a Hugging Face folder on tasks, one task after the other."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval

import stackexp
from stackexp.data.tokenizer import load_tokenizer
from stackexp.errors import RunError, first_line
from stackexp.evaluation.benchmarks.language_model import RunModel
from stackexp.evaluation.benchmarks.results import (
    FILE,
    Evaluation,
    TaskScores,
    add_evaluation,
    format_tasks,
)
from stackexp.evaluation.benchmarks.scoring import score_task
from stackexp.evaluation.benchmarks.tasks import TaskLoader, check_installed
from stackexp.evaluation.loading import open_text_run
from stackexp.evaluation.request import hash_values, list_figure_options
from stackexp.evaluation.resumable import PartialResults, identify_checkpoint
from stackexp.files import read_json
from stackexp.models import checkpoints
from stackexp.progress_bar import open_bar
from stackexp.terminal import wrap_text
from stackexp.training.objectives import build_objective
from stackexp.training.trainer import find_device_type


@dataclass(frozen=True)
class Options:
    """The options of `evaluate`."""

    tasks: Sequence[str]
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 16
    datasets: Path | None = None
    out: Path | None = None


@dataclass(frozen=True)
class Model:
    """A model to evaluate: how to load it as lm-eval's LM, and what identifies it."""

    load: Callable[[Callable[[int, int], None]], Any]
    checkpoint: Path
    identity: list[Any]
    step: int | None = None
    tokens: int | None = None
    output: Path | None = None


def open_run_model(run: str, ckpt_path: str | None, batch_size: int) -> Model:
    """Return the model of a run at a checkpoint, by default the newest."""
    folder, config = open_text_run(run)
    if config.data.objective != "language_modeling":
        raise RunError(f"{run}: trained on {config.data.kind}, not on text; benchmarks require a language model")
    checkpoint = checkpoints.find_checkpoint(folder, ckpt_path)
    step = checkpoints.load_state(checkpoint)["global_step"] if checkpoints.is_folder(checkpoint) else None

    def load(after_batch: Callable[[int, int], None]) -> RunModel:
        model = build_objective(config).build_module(weights=checkpoint).to(find_device_type(config)).model
        return RunModel(
            model,
            load_tokenizer(folder.find_tokenizer(checkpoint) or folder.tokenizer),
            config.data.context_length,
            batch_size=batch_size,
            precision=config.trainer.precision,
            after_batch=after_batch,
        )

    tokens = None if step is None else step * config.data.global_batch_tokens
    identity = [identify_checkpoint(checkpoint), list_figure_options(config)]
    return Model(load, checkpoint, identity, step, tokens, folder.path / FILE)


def open_hugging_face_model(folder: Path, batch_size: int, trust_remote_code: bool = False) -> Model:
    """Return the model of a Hugging Face folder, evaluated by lm-eval's own class.

    `trust_remote_code` lets it run Python code in the folder, such as that of an exported stack. Raises RunError if the
    folder is damaged, or contains code that must not run.
    """
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise RunError(f"{folder / 'config.json'}: not an object; download the file again")
    if not (folder / "tokenizer.json").is_file():
        raise RunError(f"{folder}: no tokenizer.json; put that of the model there")
    if "auto_map" in config and not trust_remote_code:
        raise RunError(f"{folder}: contains the code of its model; read it, then add --trust-remote-code")
    check_installed("transformers", "accelerate")

    def load(after_batch: Callable[[int, int], None]) -> Any:
        import torch

        from stackexp.evaluation.benchmarks.folder_model import FolderModel

        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            return FolderModel(str(folder), batch_size=batch_size, device=device, trust_remote_code=trust_remote_code)
        except Exception as error:  # whatever transformers or the code in the folder raises
            text = " ".join(str(error).split())[:300] or type(error).__name__
            raise RunError(f"{folder}: cannot load the model ({text}); check the folder") from None

    found = [file for file in sorted(folder.iterdir()) if not file.name.endswith(".partial.jsonl")]  # grows
    files = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in found]
    return Model(load, folder, files)


def evaluate(model: Model, options: Options) -> None:
    """Score the model on every task, then print the scores and write them.

    Each task is saved after it is scored, so after a kill the same command scores only the remaining tasks.
    """
    loader = TaskLoader(options.datasets, options.num_fewshot)
    names = loader.expand(options.tasks)
    output = options.out or model.output
    common = [model.identity, options.limit, options.num_fewshot, [stackexp.__version__, lm_eval.__version__]]
    keys = {name: hash_values([*common, loader.identify(name)]) for name in names}
    partial = PartialResults(output.with_suffix(".partial.jsonl") if output else None, keys)
    scored = {name: TaskScores(**figures) for name, figures in partial.load().items()}  # type: ignore[arg-type]
    tasks = {name: loader.load(name) for name in names if name not in scored}  # all datasets before the first score
    with open_bar(total=len(names), unit="task", initial=len(scored)) as bar:
        lm = model.load(lambda done, total: bar.set_postfix_str(f"batch {done}/{total}")) if tasks else None
        try:
            for name, task in tasks.items():
                bar.set_description(name)
                scored[name] = _score(lm, task, options.limit)
                partial.add(name, dataclasses.asdict(scored[name]))
                bar.update()
        except KeyboardInterrupt:
            saved = f"{len(scored)} of {len(names)} tasks scored"
            raise KeyboardInterrupt(f"{saved}; rerun the command to score the others") from None
    scored = {name: scored[name] for name in names}
    _report(model, options, scored, output)
    partial.delete()


def _score(lm: Any, task: Any, limit: int | None) -> TaskScores:
    try:
        return score_task(lm, task, limit)
    except AssertionError as error:  # lm-eval's checks of the model and the prompts
        raise RunError(f"{task.task_name}: {first_line(error)}; choose other tasks or --num_fewshot") from None


def _report(model: Model, options: Options, scored: dict[str, TaskScores], output: Path | None) -> None:
    """Print the table, and add the scores to the output file."""
    amount = "all documents" if options.limit is None else f"the first {options.limit} documents of each task"
    print(f"{wrap_text(f'{model.checkpoint}, {amount}, mean ± standard error')}\n\n{format_tasks(scored)}")
    for name, scores in scored.items():
        if scores.num_cut:
            cut = f"{scores.num_cut:,} of {scores.num_documents:,} documents do not fit into the model's context"
            print(wrap_text(f"note: {name}: {cut}; the first tokens of their prompts are cut off"))
    if output is None:
        return
    evaluation = Evaluation(
        checkpoint=str(model.checkpoint),
        step=model.step,
        tokens=model.tokens,
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        lm_eval=lm_eval.__version__,
        tasks=scored,
        model=hash_values(model.identity),
    )
    add_evaluation(output, evaluation)
    print(f"\nscores: {output}")
