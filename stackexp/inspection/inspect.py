"""Record the stacks of a run on text or strings, and measure interventions on them, for `inspect`."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stackexp.config.data import DataConfig
from stackexp.data.evaluation_sets import EvaluationSet
from stackexp.data.token_files import Chunks
from stackexp.datamodules.arithmetic import check_symbols
from stackexp.datamodules.base import ExperimentData
from stackexp.datamodules.formal_language import LengthSet, build_batch
from stackexp.errors import ConfigError, SetNameError
from stackexp.evaluation.evaluate import open_data
from stackexp.evaluation.loading import LoadedRun, load_run
from stackexp.evaluation.request import EvaluationRequest
from stackexp.files import write_atomically
from stackexp.inspection.interventions import TokenBatch, check_heads, format_changes, measure_interventions
from stackexp.inspection.page import StackMeans, draw_maps, format_means, format_page
from stackexp.models.checkpoints import load_state
from stackexp.models.memories.stack import compute_action_spread
from stackexp.models.stack_recording import ACTIONS, Recording, find_recorded, record_stacks
from stackexp.reports.figures import save_figure
from stackexp.tasks import TASKS
from stackexp.training.tensorboard import write_image

STRINGS = 64
MAX_LENGTH = 2**16


def run(
    run: str,
    ckpt_path: str | None,
    text: str | None,
    set_name: str | None,
    task: str | None,
    num_chunks: int,
    heads: bool,
    out: str | None,
) -> int:
    """Print what the stacks of a run do on a text, a set or a formal language; write figures, maps and a page.

    TensorBoard shows the maps under Images, as the run <run>/inspect.
    """
    loaded = load_run(run, ckpt_path)
    find_recorded(loaded.model)  # fails for models without a stack, before anything is written
    if heads:
        check_heads(loaded.model)
    if text is not None:
        inputs = open_text(loaded, text)
    else:
        inputs = open_task(loaded, task or "") if set_name is None else open_set(loaded, set_name, num_chunks)
    folder = Path(out) if out else loaded.folder.path / "inspect" / inputs.name
    folder.mkdir(parents=True, exist_ok=True)

    stacks, first = record(loaded, inputs)
    results: dict[str, Any] = {
        "checkpoint": str(loaded.checkpoint),
        "material": inputs.title,
        "stacks": [
            {"layer": stack.layer, "site": stack.site} | {name: v.tolist() for name, v in stack.values.items()}
            for stack in stacks
        ],
    }
    print(f"{loaded.checkpoint}, {inputs.title}\n\n{format_means(stacks)}")
    save_figure(draw_maps(stacks), folder / "stacks.png")
    if loaded.config.logging.tensorboard:
        step = load_state(loaded.checkpoint)["global_step"] if loaded.checkpoint.is_dir() else 0
        events, png = Path(out) if out else folder.parent, (folder / "stacks.png").read_bytes()
        write_image(events, f"inspect.{inputs.name}", f"inspect/{inputs.title}", png, step)
    write_atomically(folder / "tokens.html", format_page(inputs.title, inputs.labels, first))
    if sum(len(batch["tokens"]) for batch in inputs.batches) > 1:
        changes = measure_interventions(loaded.model, inputs.batches, heads)
        results["interventions"] = changes
        print(f"\n{format_changes(changes)}")
    elif text is None:
        print("\nno interventions: an interval requires at least two sequences; use a larger set")
    write_atomically(folder / "inspect.json", json.dumps(results, indent=2))
    print(f"\nmaps:    {folder / 'stacks.png'}\ntokens:  {folder / 'tokens.html'}\nvalues:  {folder / 'inspect.json'}")
    return 0


@torch.no_grad()
def record(loaded: LoadedRun, inputs: "InspectionInput") -> tuple[list[StackMeans], list[Recording]]:
    """Return the means of every stack over all tokens, and the recordings of the first sequence."""
    values: list[list[dict[str, Tensor]]] = []
    with record_stacks(loaded.model) as recordings:
        for batch in inputs.batches:
            loaded.model(batch["tokens"])
            values.append([recording.values for recording in recordings])
    stacks = [
        StackMeans(recording.layer, recording.site, average_values([batch[i] for batch in values]))
        for i, recording in enumerate(recordings)
    ]
    first = [
        replace(recording, values={name: value[:1] for name, value in values[0][i].items()})
        for i, recording in enumerate(recordings)
    ]
    return stacks, first


def average_values(values: list[dict[str, Tensor]]) -> dict[str, np.ndarray]:
    """Return the means of recorded values {name: [B, T, H]} of several batches: {name: [H]}.

    If all actions are recorded, adds action_spread, their standard deviation over the tokens of a sequence.
    """
    means = {name: torch.cat([v[name].flatten(0, 1) for v in values]).mean(0).numpy() for name in values[0]}
    if not means.keys() >= set(ACTIONS):
        return means
    spreads = [compute_action_spread(torch.stack([v[name] for name in ACTIONS], -1)) for v in values]
    return means | {"action_spread": torch.cat(spreads).mean(0).numpy()}


# What to run through the model


@dataclass
class InspectionInput:
    """Batches of sequences, with a title, a name for files, and a label for each token of the first sequence."""

    title: str
    name: str
    batches: list[TokenBatch]
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
    """Open all validation sets of the run, or the one of --set. Their chunks include the remainder."""
    config = run.config
    if isinstance(config.data, DataConfig):
        config = replace(config, data=replace(config.data, score_remainder=True))
    try:
        return open_data(EvaluationRequest("validate", config, run.folder, sets=() if name is None else (name,)))
    except SetNameError as error:
        error.option = "--set"
        raise


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
    labels = _label_tokens(run, batches[0]["tokens"][0].tolist())
    return InspectionInput(dataset.name, f"set-{dataset.name.replace('/', '-')}", batches, labels)


def _remove_padding(batch: TokenBatch) -> list[TokenBatch]:
    """Return the sequences of a batch without padding: one batch for each length, the longest first."""
    is_sequence = batch["index"] >= 0
    kept: TokenBatch = {key: batch[key][is_sequence] for key in ("tokens", "length", "targets") if key in batch}
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
