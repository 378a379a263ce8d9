"""Scores of named sets: their table, the loss of every chunk for paired intervals, and a baseline without a network."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from stackexp.config.experiment import ExperimentConfig
from stackexp.data.bigrams import BigramModel
from stackexp.errors import RunError
from stackexp.files import open_atomically
from stackexp.modules.scores import TOO_FEW_CHUNKS, Scores, average_groups, average_scores, compute_perplexity
from stackexp.tables import ABSENT, RULE, Style, format_table

MAX_BIGRAM_TOKENS = 50_000_000
"""Counting the tokens of longer runs would take minutes."""
_SCORE_HEADER = ("set", "chunks", "tokens", "loss", "95 % interval", "perplexity", "bits/byte")


def format_scores(sets: dict[str, Scores], style: Style = "terminal") -> str:
    """Return a table of the scores on each named set, the averages of each group, and the mean over all sets."""
    if not sets:
        return "no validation sets; name some in data.validation"
    rows, averages = [_score_row(name, [scores], scores) for name, scores in sets.items()], []
    for group, average in average_groups(sets).items():
        members = [scores for name, scores in sets.items() if name.startswith(f"{group}/")]
        averages.append(_score_row(f"{group}: means of {len(members)} set{'s' * (len(members) > 1)}", members, average))
        exp_mean_loss = _format_perplexity(average["exp_mean_loss"])
        averages.append([f"{group}: exp of the mean loss", *[""] * 4, exp_mean_loss, ""])
    if not averages or any("/" not in name for name in sets) or len(averages) > 2:
        averages.append(_score_row("average of sets", list(sets.values()), average_scores(sets)))
    return format_table([*rows, RULE, *averages], header=_SCORE_HEADER, align="<>>>>>>", style=style)


def _score_row(name: str, sets: list[Scores], scores: Scores) -> list[str]:
    instances, tokens = (sum(s.get(key, 0) for s in sets) for key in ("instances", "tokens"))
    interval = TOO_FEW_CHUNKS if "instances" in scores else ABSENT  # averages have neither
    if "loss_low" in scores:
        interval = f"{scores['loss_low']:.4f}-{scores['loss_high']:.4f}"
    bits = f"{scores['bits_per_byte']:.4f}" if "bits_per_byte" in scores else ABSENT
    perplexity = _format_perplexity(scores["perplexity"])
    return [name, f"{instances:,}", f"{tokens:,}", f"{scores['loss']:.4f}", interval, perplexity, bits]


def _format_perplexity(value: float) -> str:
    return f"{value:.2f}" if value < 1e6 else f"{value:.3g}"  # a diverged model would need three lines


# The losses of chunks, in <evaluation>.chunks/<set>.npy


def write_chunk_losses(output: Path, name: str, sums: np.ndarray) -> None:
    """Write the losses of a set next to the scores in `output`.

    Args:
        output: The JSON file of the scores, such as RUN/validate.json.
        name: The set.
        sums: [2, N] Loss in nats and number of predictions of each chunk.
    """
    path = output.with_suffix(".chunks") / f"{name}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomically(path, "wb") as file:
        np.save(file, sums)


def read_chunk_losses(run: Path, name: str, loss: float) -> np.ndarray | None:
    """Return the losses [2, N] of a set whose mean is `loss`, from any evaluation of a run; None if there are none.

    Raises RunError for a damaged file.
    """
    paths = (folder / f"{name}.npy" for folder in sorted(run.glob("*.chunks")))
    for path in filter(Path.is_file, paths):
        try:
            sums = np.load(path, allow_pickle=False)
            found = math.fsum(sums[0]) / math.fsum(sums[1])
        except (OSError, ValueError, EOFError, IndexError, TypeError, ZeroDivisionError) as error:
            raise RunError(f"{path}: damaged ({error}); run `validate` again") from None
        if found == loss:  # otherwise the file is of another checkpoint
            return sums
    return None


# Bigram counts


def score_bigrams(config: ExperimentConfig, data: Any, steps: int) -> dict[str, Scores]:
    """Return loss and perplexity of the data module's validation sets under bigram counts of the training tokens.

    Reads the batches of the first `steps` again. Returns {} for runs on more than MAX_BIGRAM_TOKENS tokens.
    """
    total_tokens = steps * config.data.global_batch_tokens
    if total_tokens > MAX_BIGRAM_TOKENS:
        return {}
    trainer = data.trainer
    try:
        data.trainer = SimpleNamespace(
            global_rank=0, world_size=1, num_devices=1, global_step=0, accumulate_grad_batches=1
        )
        epochs = itertools.chain.from_iterable(itertools.repeat(data.train_dataloader()))
        num_batches = total_tokens // (config.micro_batch_size * config.data.context_length)
        batches = (batch["tokens"].numpy() for batch in itertools.islice(epochs, num_batches))
        model = BigramModel(batches, config.data.vocab_size)
    finally:
        data.trainer = trainer
    scores = {}
    for dataset in data.sets("validate"):
        total, count = 0.0, 0
        for batch in data.build_eval_loader(dataset, 0, 1):
            for row, length in zip(batch["tokens"].numpy(), batch["length"].tolist(), strict=True):
                losses = model.compute_losses(row[:length])
                total, count = total + math.fsum(losses), count + len(losses)
        loss = total / count
        scores[dataset.name] = {"loss": loss, "perplexity": compute_perplexity(loss)}
    return scores
