"""Measure the loss at each position, up to four times the training context, for `validate --by_position`."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stackexp.data.token_files import Chunks
from stackexp.datamodules.pretraining import build_perplexity_loader
from stackexp.errors import ConfigError, RunError
from stackexp.evaluation.evaluate import open_data
from stackexp.evaluation.generation import inference_mode
from stackexp.evaluation.request import EvaluationRequest, describe_evaluation
from stackexp.files import write_json
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


@dataclass(frozen=True)
class PositionLosses:
    """The mean loss in nats of the token at each position of a set's sequences: [T - 1] for positions 1 to T - 1."""

    name: str
    num_sequences: int
    losses: np.ndarray

    def average(self, first: int, end: int) -> float:
        """Return the mean over positions `first` to `end - 1`."""
        return float(self.losses[max(first, 1) - 1 : end - 1].mean())


def score_by_position(request: EvaluationRequest) -> tuple[int, list[PositionLosses]]:
    """Score each set, print the table, write the figures, and return the training context and the losses.

    A sequence is FACTOR x context consecutive tokens of a set, across document borders as in training. Sets that do
    not fill one sequence are skipped. Raises RunError if that leaves none, ConfigError for runs without text.
    """
    config = request.config
    if config.data.objective != "language_modeling":
        raise ConfigError(f"--by_position: requires a run on text, found data.kind {config.data.kind}")
    assert request.run is not None
    context = config.data.context_length
    config.trainer.strategy = "single"  # the whole model on one device
    opened = open_data(request).sets(request.stage)
    sequences = {dataset.name: Chunks(dataset.chunks.tokens, FACTOR * context, False) for dataset in opened}
    skipped = [name for name, chunks in sequences.items() if not len(chunks)]
    if len(skipped) == len(sequences):
        raise RunError(
            f"--by_position: no set has {FACTOR * context:,} tokens ({FACTOR} x data.context_length); name longer sets"
        )
    checkpoint = checkpoints.find_checkpoint(request.run, request.ckpt_path)
    model = build_objective(config).build_module(weights=checkpoint).to(find_device_type(config)).model
    scored = [_score_set(model, name, chunks, config) for name, chunks in sequences.items() if len(chunks)]
    print(f"{wrap_text(f'{checkpoint}, loss by position, trained on {context:,} tokens')}\n")
    print(_format_table(scored, context))
    if skipped:
        print(f"\nskipped, shorter than {FACTOR * context:,} tokens: {', '.join(skipped)}")
    output = get_output(request)
    write_json(output, describe_evaluation(request, checkpoint) | _summarize(scored, context))
    print(f"\nscores: {output}")
    return context, scored


def get_output(request: EvaluationRequest) -> Path:
    """Return the JSON file: `request.out`, or by default `request.output` with "by_position" in place of the stage."""
    assert request.output is not None
    return request.out or request.output.with_name(request.output.name.replace(request.stage, "by_position", 1))


def _score_set(model: Any, name: str, chunks: Chunks, config: Any) -> PositionLosses:
    criterion = NextTokenLoss.from_config(config.trainer)
    device = next(model.parameters()).device
    loader = build_perplexity_loader(chunks, max(1, config.data.eval_batch_size // FACTOR), None, 0, 1)
    total = np.zeros(FACTOR * config.data.context_length - 1)
    with inference_mode(model, config.trainer.precision):
        for batch in open_bar(loader, desc=name, unit="batch"):
            tokens = batch["tokens"][batch["index"] >= 0].to(device)
            output = model(tokens, return_hidden=criterion.needs_hidden)
            total += criterion.compute_token_losses(model, output, tokens).double().sum(0).cpu().numpy()
    return PositionLosses(name, len(chunks), total / len(chunks))


def list_ranges(context: int) -> list[tuple[int, int]]:
    """Return the position ranges (first, end) of the table: the token at position p has p tokens before it."""
    edges = [round(edge * context) for edge in EDGES]
    pairs = itertools.pairwise(edges)
    return [(max(first, 1), end) for first, end in pairs if end > max(first, 1)]


def _format_table(scored: list[PositionLosses], context: int) -> str:
    ranges = list_ranges(context)
    values = [[losses.average(*part) for part in ranges] for losses in scored]
    rows: list[Any] = [
        [losses.name, *(f"{value:.3f}" for value in row)] for losses, row in zip(scored, values, strict=True)
    ]
    if len(scored) > 1:
        rows += [RULE, ["average of sets", *(f"{value:.3f}" for value in np.mean(values, 0))]]
    header = ["set", *(f"{first}-{end - 1}" for first, end in ranges)]
    return format_table(rows, header=header, align="<" + ">" * len(ranges))


def _summarize(scored: list[PositionLosses], context: int) -> dict[str, Any]:
    sets = {
        losses.name: {
            "sequences": losses.num_sequences,
            "ranges": {f"{first}-{end - 1}": losses.average(first, end) for first, end in list_ranges(context)},
            "losses": [round(float(loss), 6) for loss in losses.losses],
        }
        for losses in scored
    }
    return {"context_length": context, "evaluated_length": FACTOR * context, "sets": sets}
