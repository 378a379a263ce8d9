"""Measure the loss at each position, up to four times the training context, for `validate --by_position`."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from stackexp.data.token_files import Chunks
from stackexp.datamodules.pretraining import build_perplexity_loader
from stackexp.errors import ConfigError, RunError
from stackexp.evaluation.evaluate import open_data
from stackexp.evaluation.generation import inference_mode
from stackexp.evaluation.request import EvaluationRequest, describe_evaluation
from stackexp.files import write_hashed_json
from stackexp.models import checkpoints
from stackexp.models.cross_entropy import NextTokenLoss
from stackexp.tables import RULE, format_table
from stackexp.terminal import open_bar, wrap_text
from stackexp.training.objectives import build_objective
from stackexp.training.trainer import find_device_type

FACTOR = 4
"""Sequences have this many times the training context."""
EDGES = (0, 0.25, 0.5, 1, 2, 3, FACTOR)
"""Borders of the ranges in the table, in training contexts."""


def score_by_position(request: EvaluationRequest) -> tuple[int, dict[str, np.ndarray]]:
    """Score each set, print the table and write the figures.

    A sequence is FACTOR x context consecutive tokens of a set, across document borders as in training. At most
    `data.max_chunks` sequences of a set are scored. Sets that do not fill one sequence are skipped.

    Returns:
        The training context, and for each set the mean loss in nats [T - 1] at the positions 1 to T - 1.

    Raises:
        RunError: No set fills one sequence.
        ConfigError: The run is not on text.
    """
    config = request.config
    if config.data.objective != "language_modeling":
        raise ConfigError(f"--by_position: requires a run on text, found data.kind {config.data.kind}")
    assert request.run is not None
    context = config.data.context_length
    config.trainer.strategy = "single"  # the whole model on one device
    checkpoint = checkpoints.find_checkpoint(request.run, request.ckpt_path)
    opened = open_data(request, checkpoint).sets(request.stage)
    length, limit = FACTOR * context, config.data.max_chunks
    sequences = {dataset.name: Chunks(dataset.chunks.tokens, length, False, limit) for dataset in opened}
    skipped = [name for name, chunks in sequences.items() if not len(chunks)]
    if len(skipped) == len(sequences):
        raise RunError(
            f"--by_position: no set has {length:,} tokens ({FACTOR} x data.context_length); name longer sets"
        )
    model = build_objective(config).build_module(weights=checkpoint).to(find_device_type(config)).model
    losses = {name: _score_set(model, name, chunks, config) for name, chunks in sequences.items() if len(chunks)}
    averages = {name: _average_ranges(values, context) for name, values in losses.items()}
    print(f"{wrap_text(f'{checkpoint}, loss by position, trained on {context:,} tokens')}\n")
    print(_format_table(averages))
    if skipped:
        print(f"\nskipped, shorter than {length:,} tokens: {', '.join(skipped)}")
    record = describe_evaluation(request, checkpoint)
    record |= {"context_length": context, "evaluated_length": length}
    record["sets"] = {
        name: {
            "sequences": len(sequences[name]),
            "ranges": averages[name],
            "losses": [round(loss, 6) for loss in values.tolist()],
        }
        for name, values in losses.items()
    }
    output = get_output(request)
    write_hashed_json(output, record)
    print(f"\nscores: {output}")
    return context, losses


def get_output(request: EvaluationRequest) -> Path:
    """Return the JSON file: `request.out`, or by default `request.output` with "by_position" in place of the stage."""
    assert request.output is not None
    return request.out or request.output.with_name(request.output.name.replace(request.stage, "by_position", 1))


def _score_set(model: Any, name: str, chunks: Chunks, config: Any) -> np.ndarray:
    criterion = NextTokenLoss.from_config(config.trainer)
    device = next(model.parameters()).device
    loader = build_perplexity_loader(chunks, max(1, config.data.eval_batch_size // FACTOR), None, 0, 1)
    total = np.zeros(FACTOR * config.data.context_length - 1)
    with inference_mode(model, config.trainer.precision):
        for batch in open_bar(loader, desc=name, unit="batch"):
            tokens = batch["tokens"][batch["index"] >= 0].to(device)
            output = model(tokens, return_hidden=criterion.needs_hidden)
            total += criterion.compute_token_losses(model, output, tokens).double().sum(0).cpu().numpy()
    return total / len(chunks)


def _average_ranges(losses: np.ndarray, context: int) -> dict[str, float]:
    """Return the mean loss in each range of positions, such as `1-63`; position p has p tokens before it."""
    edges = [max(1, round(edge * context)) for edge in EDGES]
    pairs = [(first, end) for first, end in itertools.pairwise(edges) if end > first]
    return {f"{first}-{end - 1}": float(losses[first - 1 : end - 1].mean()) for first, end in pairs}


def _format_table(averages: dict[str, dict[str, float]]) -> str:
    rows: list[Any] = [[name, *(f"{value:.3f}" for value in ranges.values())] for name, ranges in averages.items()]
    if len(rows) > 1:
        means = np.mean([list(ranges.values()) for ranges in averages.values()], 0)
        rows += [RULE, ["average of sets", *(f"{value:.3f}" for value in means)]]
    header = ["set", *next(iter(averages.values()))]
    return format_table(rows, header=header, align="<" + ">" * (len(header) - 1))
