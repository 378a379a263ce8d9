"""Score benchmarks with lm-eval's tasks, prompts, metrics and cache, for `evaluate` and during training."""

import contextlib
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM

import stackexp
from stackexp import runs
from stackexp.config.compose import load_config
from stackexp.errors import ConfigError, RunError, first_line
from stackexp.evaluation.benchmarks.models import (
    RunModel,
    count_scored_bytes,
    limit_new_tokens,
    load_hugging_face_model,
)
from stackexp.evaluation.benchmarks.results import (
    FILE,
    BenchmarkEvaluation,
    TaskScores,
    add_evaluation,
    compute_mean,
    compute_ratio,
    format_tasks,
)
from stackexp.evaluation.benchmarks.tasks import TaskLoader, check_installed
from stackexp.evaluation.loading import load_run
from stackexp.evaluation.request import identify_checkpoint, list_figure_options
from stackexp.files import hash_values, hold_lock, read_json, try_lock
from stackexp.models import checkpoints
from stackexp.runs import DATE_FORMAT
from stackexp.terminal import open_bar, wrap_text
from stackexp.training.trainer import find_device_type

METRICS = ("acc_norm", "acc", "exact_match")  # the first that a task has is its accuracy
FEWSHOT_SEED = 1234  # lm-eval's default


@dataclass(frozen=True)
class BenchmarkOptions:
    """The options of `evaluate`."""

    tasks: Sequence[str]
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 16
    datasets: Path | None = None
    exclude_long: bool = False
    out: Path | None = None


@dataclass(frozen=True)
class BenchmarkModel:
    """A model to evaluate: how to load it as lm-eval's LM, and what identifies it."""

    load: Callable[[Callable[[int, int], None]], Any]
    checkpoint: Path
    identity: list[Any]
    step: int | None = None
    tokens: int | None = None
    output: Path | None = None


def open_run_model(run: str, ckpt_path: str | None, batch_size: int) -> BenchmarkModel:
    """Return the model of a run at a checkpoint, by default the newest."""
    folder = runs.open_run(run)
    config = load_config(folder.config)
    if config.data.objective != "language_modeling":
        raise RunError(f"{run}: trained on {config.data.kind}, not on text; benchmarks require a language model")
    checkpoint = checkpoints.find_checkpoint(folder, ckpt_path)
    step = checkpoints.load_state(checkpoint)["global_step"] if checkpoints.is_folder(checkpoint) else None

    def load(after_batch: Callable[[int, int], None]) -> RunModel:
        loaded = load_run(run, checkpoint)
        if loaded.tokenizer is None:
            raise RunError(f"{run}: the tokenizer of the training data is unknown; benchmarks require it")
        model: Any = loaded.model.to(find_device_type(config))
        options: dict[str, Any] = {"batch_size": batch_size, "precision": config.trainer.precision}
        return RunModel(model, loaded.tokenizer, config.data.context_length, after_batch=after_batch, **options)

    tokens = None if step is None else step * config.data.global_batch_tokens
    identity = [identify_checkpoint(checkpoint), list_figure_options(config)]
    return BenchmarkModel(load, checkpoint, identity, step, tokens, folder.path / FILE)


def open_hugging_face_model(folder: Path, batch_size: int, trust_remote_code: bool = False) -> BenchmarkModel:
    """Return the model of a Hugging Face folder, evaluated by lm-eval's own class.

    `trust_remote_code` lets it run Python code in the folder, such as that of an exported stack. Raises RunError if the
    folder is damaged, or contains code that is not permitted to run.
    """
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise RunError(f"{folder / 'config.json'}: not an object; download the file again")
    if not (folder / "tokenizer.json").is_file():
        raise RunError(f"{folder}: no tokenizer.json; copy that of the model into it")
    if "auto_map" in config and not trust_remote_code:
        raise RunError(f"{folder}: contains the code of its model; read it, then add --trust-remote-code")
    check_installed("transformers", "accelerate")
    found = [file for file in sorted(folder.iterdir()) if file.is_file() and not file.name.startswith(".")]
    files = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in found]
    return BenchmarkModel(lambda _: load_hugging_face_model(folder, batch_size, trust_remote_code), folder, files)


def score_benchmarks(model: BenchmarkModel, options: BenchmarkOptions) -> None:
    """Score the model on every task, then print the scores and write them.

    lm-eval caches each response next to the output until the scores are written, so after a kill the same command
    computes only the remaining ones.
    """
    loader = TaskLoader(options.datasets, options.num_fewshot)
    tasks = [loader.load(name) for name in loader.expand(options.tasks)]
    output = options.out or model.output
    scored: dict[str, TaskScores] = {}
    with open_bar(total=len(tasks), unit="task") as bar:
        lm = model.load(lambda done, total: bar.set_postfix_str(f"batch {done}/{total}"))
        with _open_cache(lm, output, model.identity) as cached:
            for task in tasks:
                bar.set_description(task.task_name)
                scored[task.task_name] = score_task(cached, task, options.limit, options.exclude_long)
                bar.update()
            _report(model, options, scored, output)


@contextlib.contextmanager
def _open_cache(lm: Any, output: Path | None, identity: list[Any]) -> Iterator[Any]:
    """Yield the model with lm-eval's cache of responses next to `output`, which is deleted at the end, unless killed.

    lm-eval looks up a response by its request only, so the file name identifies the model and the versions. Several
    commands may share the file; the last one deletes it.
    """
    if output is None:
        yield lm
        return
    key = hash_values([identity, stackexp.__version__, lm_eval.__version__])[:16]
    path = output.with_name(f".{output.stem}-{key}.responses.db")
    lock = path.with_suffix(".lock")
    with hold_lock(lock, f"{path}", shared=True):
        cached = CachingLM(lm, str(path))
        try:
            yield cached
        except KeyboardInterrupt:
            raise KeyboardInterrupt("rerun the command to score the rest") from None
        finally:
            cached.dbdict.close()
    if last := try_lock(lock):
        with last:
            path.unlink(missing_ok=True)


def _report(
    model: BenchmarkModel, options: BenchmarkOptions, scored: dict[str, TaskScores], output: Path | None
) -> None:
    amount = "all documents" if options.limit is None else f"the first {options.limit} documents of each task"
    print(f"{wrap_text(f'{model.checkpoint}, {amount}, mean ± standard error')}\n\n{format_tasks(scored)}")
    for name, scores in scored.items():
        if scores.num_cut:
            cut = f"{scores.num_cut:,} of {scores.num_documents:,} documents do not fit into the model's context"
            print(wrap_text(f"note: {name}: {cut}; the first tokens of their prompts are cut off (--exclude_long)"))
        if scores.num_excluded:
            excluded = f"{scores.num_excluded:,} documents do not fit into the model's context"
            print(wrap_text(f"note: {name}: {excluded} and are not in the scores"))
    if output is None:
        return
    evaluation = BenchmarkEvaluation(
        checkpoint=str(model.checkpoint),
        step=model.step,
        tokens=model.tokens,
        time=time.strftime(DATE_FORMAT),
        limit=options.limit,
        num_fewshot=options.num_fewshot,
        lm_eval=lm_eval.__version__,
        tasks=scored,
        model=hash_values(model.identity),
        exclude_long=options.exclude_long,
    )
    add_evaluation(output, evaluation)
    print(f"\nscores: {output}")


# Score a task


def score_task(lm: Any, task: Any, limit: int | None = None, exclude_long: bool = False) -> TaskScores:
    """Score a language model on the first `limit` documents of a task, or on all.

    lm-eval writes the prompts and computes the metric of each document. This calls `lm_eval.evaluate`;
    `simple_evaluate` around it takes seconds to describe the machine, and seeds global random numbers. `exclude_long`
    leaves out the documents that do not fit into the model's context.

    Raises ConfigError for a task that measures neither accuracy nor likelihood, and RunError for a document that the
    task cannot read.
    """
    name = task.task_name
    _check_documents(task, limit)
    task.set_fewshot_seed(FEWSHOT_SEED)  # the same prompts at every call
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
        output = lm_eval.evaluate(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=0, log_samples=True)
    samples = [s for s in output["samples"][name] if s["filter"] == output["samples"][name][0]["filter"]]
    metric = next((key for key in METRICS if key in samples[0]["metrics"]), None)
    if metric is None and task.OUTPUT_TYPE != "loglikelihood_rolling":
        raise ConfigError(f"{name}: measures {', '.join(samples[0]['metrics'])}; supported are {', '.join(METRICS)}")
    fitting = [sample for sample in samples if not _is_cut(lm, task, sample)]
    kept = fitting if exclude_long else samples
    if not kept:
        raise RunError(f"{name}: no document fits into the model's context of {lm.max_length:,} tokens; choose another")
    accuracy = compute_mean([float(sample[metric]) for sample in kept]) if metric else (None, None)
    answers = _measure_answers(lm, task, kept)
    bits = compute_ratio([-nats / math.log(2) for nats, _ in answers], [float(size) for _, size in answers])
    is_choice = task.OUTPUT_TYPE == "multiple_choice"
    guesses = [1 / len(task.doc_to_choice(sample["doc"])) for sample in kept] if is_choice else [0.0]
    return TaskScores(
        accuracy=accuracy[0],
        accuracy_stderr=accuracy[1],
        bits_per_byte=bits[0],
        bits_per_byte_stderr=bits[1],
        random_guess=compute_mean(guesses)[0] if metric else None,
        metric=metric,
        num_documents=len(kept),
        num_fewshot=task.get_config("num_fewshot"),
        num_cut=0 if exclude_long else len(samples) - len(fitting),
        num_excluded=len(samples) - len(kept),
    )


def _check_documents(task: Any, limit: int | None) -> None:
    """Raise RunError for a document without a prompt or a right answer, before the model runs."""
    for number, document in task.doc_iterator(limit=limit):
        try:
            task.doc_to_text(document)
            _find_answer(task, document) if task.OUTPUT_TYPE == "multiple_choice" else task.doc_to_target(document)
        except Exception as error:  # the task's templates and functions raise many kinds
            reason = f"cannot read document {number} ({first_line(error)})"
            raise RunError(f"{task.task_name}: {reason}; correct its fields") from None


def _measure_answers(lm: Any, task: Any, samples: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """Return log-likelihood in nats and UTF-8 bytes of the right answer to each document.

    Of several right answers, the first counts. Generation tasks need one more pass, which scores the right answers.
    """
    if task.OUTPUT_TYPE == "generate_until":
        pairs = [(sample["arguments"][0][0], _write_target(task, sample)) for sample in samples]
        requests = [
            Instance("loglikelihood", {}, pair, 0, (task.task_name, sample["doc_id"], 1))
            for pair, sample in zip(pairs, samples, strict=True)
        ]
        with contextlib.redirect_stderr(io.StringIO()):
            scores = [score for score, _ in lm.loglikelihood(requests)]
        return [(score, count_scored_bytes(*pair)) for score, pair in zip(scores, pairs, strict=True)]
    measured = []
    for sample in samples:
        number = _find_answer(task, sample["doc"]) if task.OUTPUT_TYPE == "multiple_choice" else 0
        response = sample["filtered_resps"][number]
        score = response[0] if isinstance(response, tuple | list) else response
        measured.append((score, count_scored_bytes(*sample["arguments"][number])))
    return measured


def _is_cut(lm: Any, task: Any, sample: dict[str, Any]) -> bool:
    """Return True if a prompt of this document and its answer do not fit into the model's context."""
    if task.OUTPUT_TYPE == "loglikelihood_rolling":  # scored in windows
        return False
    if task.OUTPUT_TYPE == "generate_until":
        prompt, options = sample["arguments"][0]
        if _exceeds(lm, prompt, lm.max_length - limit_new_tokens(options, lm.max_length)):
            return True
        texts = [prompt + _write_target(task, sample)]
    else:
        texts = [prompt + answer for prompt, answer in sample["arguments"]]
    return any(_exceeds(lm, text, lm.max_length + 1) for text in texts)  # the last token is not an input


def _exceeds(lm: Any, text: str, longest: int) -> bool:
    return len(text.encode()) > longest and len(lm.tok_encode(text)) > longest


def _write_target(task: Any, sample: dict[str, Any]) -> str:
    target = sample["target"]
    return task.config.target_delimiter + str(target[0] if isinstance(target, list) else target)


def _find_answer(task: Any, document: dict[str, Any]) -> int:
    """Return the number of the right choice. Raises ValueError if there is none."""
    answer = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    answer, choices = answer[0] if isinstance(answer, list) else answer, task.doc_to_choice(document)
    number = answer if isinstance(answer, int) else choices.index(answer) if answer in choices else None
    if number is None or not 0 <= number < len(choices):
        raise ValueError(f"the right answer is {answer!r}, not one of {len(choices)} choices")
    return number
