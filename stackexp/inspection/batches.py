"""The sequences that `inspect` runs through the model, and their loss."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stackexp.config.data import DataConfig
from stackexp.data.evaluation_sets import EvaluationSet
from stackexp.data.token_files import Chunks
from stackexp.datamodules.arithmetic import check_symbols
from stackexp.datamodules.base import ExperimentData
from stackexp.datamodules.formal_language import LengthSet, build_batch
from stackexp.errors import ConfigError, RunError
from stackexp.evaluation.evaluate import open_data
from stackexp.evaluation.loading import LoadedRun
from stackexp.evaluation.request import EvaluationRequest
from stackexp.models.memories.stack import compute_action_spread
from stackexp.tasks import TASKS

Batch = dict[str, Any]
STRINGS = 64
MAX_LENGTH = 2**16


@dataclass
class InspectionInput:
    """Batches of sequences, with a title, a name for files, and a label for each token of the first sequence."""

    title: str
    name: str
    batches: list[Batch]
    labels: list[str]


def open_text(run: LoadedRun, text: str) -> InspectionInput:
    """Return one sequence: the first tokens of a text, up to the context length.

    Raises ConfigError if the model is not one of text, or the text has fewer than two tokens or an unknown symbol.
    """
    if run.tokenizer is None:
        raise ConfigError("inspect: --text requires a model of text; use --task for one of formal languages")
    if run.config.data.objective == "arithmetic":
        check_symbols("inspect: --text", text)
    ids = run.tokenizer.encode(text).ids[: run.config.data.context_length]
    if len(ids) < 2:
        raise ConfigError("inspect: --text has fewer than two tokens; give a longer text")
    batch = {"tokens": torch.tensor([ids]), "length": torch.tensor([len(ids)])}
    name = f"text-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return InspectionInput("text", name, [batch], _label_tokens(run, ids))


def open_run_data(run: LoadedRun, name: str | None) -> ExperimentData:
    """Open all validation sets of the run, or the one of --set. Their chunks include the remainder.

    The errors name --set instead of --sets.
    """
    config = run.config
    if isinstance(config.data, DataConfig):
        config = replace(config, data=replace(config.data, score_remainder=True))
    try:
        return open_data(EvaluationRequest("validate", config, run.folder, sets=() if name is None else (name,)))
    except (ConfigError, RunError) as error:
        raise type(error)(str(error).replace("--sets", "--set")) from None


def open_set(run: LoadedRun, name: str, num_chunks: int) -> InspectionInput:
    """Return evenly spaced chunks of a validation set of the run, or of NAME=PATH.

    A set with fewer than two whole chunks includes its remainder, as a shorter sequence.

    Raises ConfigError if the model is not one of text, the run has no such set, or the name is that of a group.
    """
    if run.tokenizer is None:
        raise ConfigError("inspect: --set requires a model of text; use --task for one of formal languages")
    data = open_run_data(run, name)
    data.eval_limit = num_chunks
    dataset, *others = data.sets("validate")
    if others:
        remedy = "give the path of one file" if "=" in name else f"name one, such as {dataset.name}"
        raise ConfigError(f"inspect: --set {name}: a group of {1 + len(others)} sets; {remedy}")
    if isinstance(dataset, EvaluationSet):
        whole = Chunks(dataset.chunks.tokens, dataset.chunks.context_length, run.config.data.score_remainder)
        dataset = replace(dataset, chunks=whole) if len(whole) > 1 else dataset
    loader = data.build_eval_loader(dataset, rank=0, world_size=1)
    batches = [part for batch in loader for part in _remove_padding(batch)]
    return InspectionInput(
        dataset.name,
        f"set-{dataset.name.replace('/', '-')}",
        batches,
        _label_tokens(run, batches[0]["tokens"][0].tolist()),
    )


def _remove_padding(batch: Batch) -> list[Batch]:
    """Return the sequences of a batch without padding: one batch for each length, the longest first."""
    is_sequence = batch["index"] >= 0
    kept: Batch = {key: batch[key][is_sequence] for key in ("tokens", "length", "targets") if key in batch}
    if "length" not in kept:
        return [kept]
    parts = [(length, kept["length"] == length) for length in kept["length"].unique().flip(0)]
    return [{"tokens": kept["tokens"][rows, :length], "length": kept["length"][rows]} for length, rows in parts]


def open_task(run: LoadedRun, name: str) -> InspectionInput:
    """Return strings of a formal language, NAME or NAME:LENGTH. The default is the maximal training length.

    Raises ConfigError if the run was not trained on this language, or it has no strings of this length.
    """
    name, _, length = name.partition(":")
    known = getattr(run.config.data, "task", None)
    if known is None:
        raise ConfigError("inspect: --task requires a model of a formal language; use --text or --set")
    if name != known:
        raise ConfigError(f"inspect: --task {name}: the run was trained on {known}; use --task {known}")
    shortest = TASKS[name].min_length
    if length and not (length.isascii() and length.isdigit() and shortest <= int(length) <= MAX_LENGTH):
        raise ConfigError(f"inspect: --task {name}:{length}: the length must be from {shortest} to {MAX_LENGTH}")
    strings = LengthSet(TASKS[name], "validate", int(length or run.config.data.max_length), STRINGS)
    batch = build_batch(strings.sample(), strings.task)
    labels = [str(token) if token < strings.task.num_symbols else "_" for token in batch["tokens"][0].tolist()]
    return InspectionInput(f"{name}, {strings.length} symbols", f"task-{name}-{strings.length}", [batch], labels)


def _label_tokens(run: LoadedRun, ids: list[int]) -> list[str]:
    assert run.tokenizer is not None
    return [run.tokenizer.decode([token], skip_special_tokens=False) for token in ids]


@torch.no_grad()
def compute_losses(model: nn.Module, batches: Iterable[Batch]) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss in nats and the number of predictions of each sequence, float64 [N]."""
    losses, counts = [], []
    for batch in batches:
        tokens = batch["tokens"]
        if "targets" in batch:
            targets, is_counted = batch["targets"], torch.ones_like(batch["targets"], dtype=torch.bool)
            logits = model(tokens).logits[:, -targets.shape[1] :]
        else:
            targets, logits = tokens[:, 1:], model(tokens).logits[:, :-1]
            is_counted = torch.arange(1, tokens.shape[1]) < batch["length"][:, None]
        nats = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").double()
        losses.append(nats.where(is_counted, 0.0).sum(1))
        counts.append(is_counted.double().sum(1))
    return torch.cat(losses).numpy(), torch.cat(counts).numpy()


def average_values(values: list[dict[str, Tensor]]) -> dict[str, np.ndarray]:
    """Return the means of recorded values {name: [B, T, H]} of several batches: {name: [H]}.

    Adds action_spread, the standard deviation of the actions over the tokens of a sequence.
    """
    means = {name: torch.cat([v[name].flatten(0, 1) for v in values]).mean(0).numpy() for name in values[0]}
    spreads = [compute_action_spread(torch.stack([v[name] for name in ("push", "pop", "no_op")], -1)) for v in values]
    return means | {"action_spread": torch.cat(spreads).mean(0).numpy()}
