"""Figures of named sets of text: a table, a JSON record, a Markdown table, and TensorBoard events."""

import json
from collections.abc import Collection
from pathlib import Path

from stackexp.config.experiment import ExperimentConfig
from stackexp.evaluation.request import EvaluationRequest, Sets, Stage, describe_evaluation
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
    if request.run and request.should_write_events and record["step"] is not None:
        prefix = choose_prefix(request.stage, request.run_config)
        skip = request.run.find_logged_tags(record["step"])
        if request.sets:
            skip |= {tag for tag in tag_scores(prefix, sets) if tag.endswith("/average")}  # a mean over other sets
        with request.open_event_folder() as folder:
            write_events(folder, request.stage, prefix, record["step"], sets, skip)
    print(f"\nfigures: {request.output}")


def _describe_chunks(config: ExperimentConfig, checkpoint: Path) -> str:
    rest = "every token scored" if config.data.score_remainder else "the incomplete last chunk of a set dropped"
    return f"{checkpoint}, chunks of {config.data.context_length:,} tokens, {rest}"


def choose_prefix(stage: Stage, config: ExperimentConfig) -> str:
    """Return the prefix of the tags of whole sets, for a run with this config; see `stackexp.metric_tags`."""
    if stage == "test":
        return "test"
    return "val" if config.data.eval_sequences is None else "val/whole"


def write_events(folder: Path, stage: Stage, prefix: str, step: int, sets: Sets, skip: Collection[str] = ()) -> None:
    """Write the scores of whole sets at the checkpoint's step to event files in `folder`, except the tags in `skip`.

    Each group, each set without a group, and the average has a separate event file, which replaces the previous one.
    """
    files: dict[str, Sets] = {"average": sets}
    for name, scores in sets.items():
        files.setdefault(f"set.{name.split('/')[0]}", {})[name] = scores
    for file, members in files.items():
        tags = {
            tag: value
            for tag, value in tag_scores(prefix, members).items()
            if tag.endswith("/average") == (file == "average") and tag not in skip
        }
        if tags:
            write_scalars(folder, tags, step, f"{stage}.{file}")
