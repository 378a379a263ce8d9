"""Score a language model on a task of lm-eval."""

import contextlib
import io
import math
from typing import Any

from stackexp.errors import ConfigError
from stackexp.evaluation.benchmarks.batching import limit_new_tokens
from stackexp.evaluation.benchmarks.results import TaskScores, compute_mean, compute_ratio

METRICS = ("acc_norm", "acc", "exact_match")  # the first that a task has is its accuracy
FEWSHOT_SEED = 1234  # lm-eval's default


def score_task(lm: Any, task: Any, limit: int | None = None) -> TaskScores:
    """Score a language model on the first `limit` documents of a task, or on all.

    lm-eval writes the prompts and computes the metric of each document. Raises ConfigError for a task that measures
    neither accuracy nor likelihood.
    """
    from lm_eval.evaluator import evaluate

    task.set_fewshot_seed(FEWSHOT_SEED)  # the same prompts at every call
    name = task.task_name
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
        output = evaluate(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=0, log_samples=True)
    samples = output["samples"][name]
    samples = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    metric = next((key for key in METRICS if key in samples[0]["metrics"]), None)
    if metric is None and task.OUTPUT_TYPE != "loglikelihood_rolling":
        raise ConfigError(f"{name}: measures {', '.join(samples[0]['metrics'])}; supported are {', '.join(METRICS)}")
    accuracy = compute_mean([float(sample[metric]) for sample in samples]) if metric else (None, None)
    answers = measure_answers(lm, task, samples)
    bits = compute_ratio([-nats / math.log(2) for nats, _ in answers], [float(size) for _, size in answers])
    guesses = [1 / len(sample["arguments"]) for sample in samples]
    is_choice = task.OUTPUT_TYPE == "multiple_choice"
    return TaskScores(
        accuracy=accuracy[0],
        accuracy_stderr=accuracy[1],
        bits_per_byte=bits[0],
        bits_per_byte_stderr=bits[1],
        random_guess=compute_mean(guesses)[0] if is_choice else 0.0 if metric else None,
        metric=metric,
        num_documents=len(samples),
        num_fewshot=task.get_config("num_fewshot"),
        num_cut=sum(_is_cut(lm, task, sample) for sample in samples),
    )


def measure_answers(lm: Any, task: Any, samples: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """Return log-likelihood in nats and UTF-8 bytes of the right answer to each document.

    Of several right answers, the first counts. Generation tasks need one more pass, which scores the right answers.
    """
    if task.OUTPUT_TYPE == "generate_until":
        from lm_eval.api.instance import Instance

        pairs = [(sample["arguments"][0][0], _write_target(task, sample)) for sample in samples]
        requests = [Instance("loglikelihood", {}, pair, 0, (task.task_name, 0, 1)) for pair in pairs]
        with contextlib.redirect_stderr(io.StringIO()):
            scores = [score for score, _ in lm.loglikelihood(requests)]
        return [(score, len(answer.encode())) for score, (_, answer) in zip(scores, pairs, strict=True)]
    measured = []
    for sample in samples:
        number = _find_answer(task, sample) if task.OUTPUT_TYPE == "multiple_choice" else 0
        response = sample["filtered_resps"][number]
        score = response[0] if isinstance(response, tuple | list) else response
        measured.append((score, len(sample["arguments"][number][-1].encode())))
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


def _find_answer(task: Any, sample: dict[str, Any]) -> int:
    """Return the number of the right choice."""
    answer = task.doc_to_text(sample["doc"]) if task.multiple_input else sample["target"]
    answer = answer[0] if isinstance(answer, list) else answer
    return answer if isinstance(answer, int) else task.doc_to_choice(sample["doc"]).index(answer)
