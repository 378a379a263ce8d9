"""Figures of named sets of text: a table, a JSON record, a Markdown table, and TensorBoard events."""

import json
from pathlib import Path
from typing import Any

from stackexp.config.experiment import ExperimentConfig
from stackexp.evaluation.request import EvaluationRequest, Sets, describe_evaluation
from stackexp.evaluation.score_tables import format_scores
from stackexp.files import write_atomically
from stackexp.modules.scores import average_groups, average_scores, replace_non_finite, tag_scores
from stackexp.training.tensorboard import write_scalars


def report(request: EvaluationRequest, checkpoint: Path, sets: Sets) -> None:
    """Print the table of the sets; with an output file, write the figures as JSON, Markdown and TensorBoard events."""
    title = _describe_chunks(request.config, checkpoint)
    print(f"{title}\n\n{format_scores(sets)}")
    if request.output is None:
        return
    record = describe_evaluation(request, checkpoint) | {
        "context_length": request.config.data.context_length,
        "keep_remainder": request.config.data.score_remainder,
        "sets": sets,
        "average": average_scores(sets),
        "groups": average_groups(sets),
    }
    write_atomically(request.output, json.dumps(replace_non_finite(record), indent=2))
    write_atomically(request.output.with_suffix(".md"), f"{title}\n\n{format_scores(sets, style='markdown')}")
    if request.should_write_events and record["step"] is not None:
        _write_events(request, record["step"], sets)
    print(f"\nfigures: {request.output}")


def _describe_chunks(config: ExperimentConfig, checkpoint: Path) -> str:
    rest = "every token scored" if config.data.score_remainder else "the incomplete last chunk of a set dropped"
    return f"{checkpoint}, chunks of {config.data.context_length:,} tokens, {rest}"


def _write_events(request: EvaluationRequest, step: int, sets: Sets) -> None:
    """Write the figures at the checkpoint's step, with the tags of the training run.

    Sets of a group get `v2/<set>` and `v2/average/<figure>`; other sets get `validation/<figure>/<set>`, or
    `whole/<figure>/<set>` where training validates on a sample of each set. `test` writes `test/...`. Each group, and
    each set without a group, has a separate event file, which replaces the previous one. Tags that training has
    logged at this step are skipped.
    """
    assert request.run is not None
    validation = "validation" if request.run_config.data.eval_sequences is None else "whole"
    prefix, lead = (validation, "") if request.stage == "validate" else ("test", None)
    logged = {tag for line in request.run.read_metrics() if line["step"] == step for tag in line}
    files: dict[str, dict[str, Any]] = {"average": {} if request.sets else sets}
    for name, figures in sets.items():
        files.setdefault(f"set.{name.split('/')[0]}", {})[name] = figures
    with request.open_event_folder() as folder:
        for file, members in files.items():
            tags = {
                tag: value
                for tag, value in tag_scores(prefix, members, lead).items()
                if tag.endswith("/average") == (file == "average") and tag not in logged
            }
            if tags:
                write_scalars(folder, tags, step, f"{request.stage}.{file}")
