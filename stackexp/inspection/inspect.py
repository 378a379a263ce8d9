"""Record the stacks of a run on text or strings, and measure interventions on them, for `inspect`."""

import hashlib
import html
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stackexp.config.data import DataConfig
from stackexp.data.evaluation_sets import EvaluationSet
from stackexp.data.token_files import Chunks
from stackexp.data.tokenizer import encode_text
from stackexp.datamodules.arithmetic import check_symbols
from stackexp.datamodules.base import ExperimentData
from stackexp.datamodules.formal_language import LengthSet, build_string_batch
from stackexp.errors import ConfigError, SetNameError
from stackexp.evaluation.evaluate import open_data
from stackexp.evaluation.loading import LoadedRun, load_run
from stackexp.evaluation.request import EvaluationRequest
from stackexp.files import write_atomically, write_json
from stackexp.inspection.interventions import TokenBatch, check_heads, format_changes, measure_interventions
from stackexp.models.checkpoints import is_folder, load_state
from stackexp.models.memories.stack import compute_action_spread
from stackexp.models.stack_recording import ACTIONS, Recording, find_recorded, record_memories
from stackexp.reports.report import new_figure, save_figure
from stackexp.tables import format_table
from stackexp.tasks import TASKS
from stackexp.training.loggers import write_image

STRINGS = 64
MAX_LENGTH = 2**16
MAX_PAGE_TOKENS = 256
MAP_COLUMNS = 5
SHARES = (*ACTIONS, "read_sharpness")  # measurements from 0 to 1


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
    if "tensorboard" in loaded.config.logging.loggers:
        step = load_state(loaded.checkpoint)["global_step"] if is_folder(loaded.checkpoint) else 0
        events, png = Path(out) if out else folder.parent, (folder / "stacks.png").read_bytes()
        write_image(events, f"inspect.{inputs.name}", f"inspect/{inputs.title}", png, step)
    write_atomically(folder / "tokens.html", format_page(inputs.title, inputs.labels, first))
    if sum(len(batch["tokens"]) for batch in inputs.batches) > 1:
        changes = measure_interventions(loaded.model, inputs.batches, heads)
        results["interventions"] = changes
        print(f"\n{format_changes(changes)}")
    elif text is None:
        print("\nno interventions: an interval requires at least two sequences; use a larger set")
    write_json(folder / "inspect.json", results)
    print(f"\nmaps:    {folder / 'stacks.png'}\ntokens:  {folder / 'tokens.html'}\nvalues:  {folder / 'inspect.json'}")
    return 0


@torch.no_grad()
def record(loaded: LoadedRun, inputs: "InspectionInput") -> tuple[list[Recording], list[Recording]]:
    """Return the means of every stack over all tokens, {name: [H]}, and the recordings of the first sequence."""
    values: list[list[dict[str, Tensor]]] = []
    with record_memories(loaded.model) as recordings:
        for batch in inputs.batches:
            loaded.model(batch["tokens"])
            values.append([recording.values for recording in recordings])
    stacks = [
        replace(recording, values=average_values([batch[i] for batch in values]))
        for i, recording in enumerate(recordings)
    ]
    first = [
        replace(recording, values={name: value[:1] for name, value in values[0][i].items()})
        for i, recording in enumerate(recordings)
    ]
    return stacks, first


def average_values(values: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the means of recorded values {name: [B, T, H]} of several batches: {name: [H]}.

    If all actions are recorded, adds action_spread, their standard deviation over the tokens of a sequence.
    """
    means = {name: torch.cat([v[name].flatten(0, 1) for v in values]).mean(0) for name in values[0]}
    if not means.keys() >= set(ACTIONS):
        return means
    spreads = [compute_action_spread(torch.stack([v[name] for name in ACTIONS], -1)) for v in values]
    return means | {"action_spread": torch.cat(spreads).mean(0)}


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
    ids = encode_text(run.tokenizer, text)[: run.config.data.context_length]
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
        request = EvaluationRequest("validate", config, run.folder, sets=() if name is None else (name,))
        return open_data(request, run.checkpoint)
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
    batches = load_batches(run, data, dataset)
    labels = _label_tokens(run, batches[0]["tokens"][0].tolist())
    return InspectionInput(dataset.name, f"set-{dataset.name.replace('/', '-')}", batches, labels)


def load_batches(run: LoadedRun, data: ExperimentData, dataset: Any) -> list[TokenBatch]:
    """Return the sequences of an opened set without padding."""
    if isinstance(dataset, EvaluationSet):
        whole = Chunks(dataset.chunks.tokens, dataset.chunks.context_length, run.config.data.score_remainder)
        dataset = replace(dataset, chunks=whole) if len(whole) > 1 else dataset
    loader = data.build_eval_loader(dataset, rank=0, world_size=1)
    return [part for batch in loader for part in _remove_padding(batch)]


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
    batch = build_string_batch(strings.sample(), strings.task)
    symbols = strings.task.symbols
    labels = [symbols[token] if token < len(symbols) else "_" for token in batch["tokens"][0].tolist()]
    return InspectionInput(f"{name}, {strings.length} symbols", f"task-{name}-{strings.length}", [batch], labels)


def _label_tokens(run: LoadedRun, ids: list[int]) -> list[str]:
    assert run.tokenizer is not None
    return [run.tokenizer.decode([token], skip_special_tokens=False) for token in ids]


# Output


def format_means(stacks: list[Recording]) -> str:
    """Return a table with a row for each stack: means over tokens and heads."""
    names = list(stacks[0].values)
    rows = [[str(s.layer), s.site, *(f"{s.values[name].mean():.3f}" for name in names)] for s in stacks]
    return format_table(rows, header=["layer", "site", *names], align="><" + ">" * len(names))


def draw_maps(stacks: list[Recording]) -> Any:
    """Draw a map of each measurement: a row for each stack, a column for each head, means over tokens."""
    from matplotlib.ticker import FixedLocator

    labels = [_name_stack(stack).removeprefix("layer ") for stack in stacks]
    names = list(stacks[0].values)
    rows = -(-len(names) // MAP_COLUMNS)
    figure, panels = new_figure(14, 2.4 * rows, rows, MAP_COLUMNS, sharey=True, squeeze=False)
    for panel, name in zip(panels.flat, names, strict=False):
        values = torch.stack([stack.values[name] for stack in stacks]).numpy()  # [stacks, H]
        largest = 1.0 if name in SHARES and values.max() <= 1 else values.max() or 1.0  # a plugin's push may be a norm
        smallest = min(0.0, values.min())  # a plugin may report negative values
        image = panel.imshow(values, aspect="auto", vmin=smallest, vmax=largest, cmap="cividis", origin="lower")
        panel.set(title=name.replace("_", "-" if name == "no_op" else " "), xlabel="head")
        panel.set_xticks(range(values.shape[1]))
        panel.grid(visible=False)
        figure.colorbar(image, ax=panel)
    for panel in panels[:, 0]:
        panel.set_ylabel("layer")
        panel.yaxis.set_major_locator(FixedLocator(range(len(stacks)), nbins=8))
        panel.yaxis.set_major_formatter(lambda y, _: labels[round(y)] if 0 <= round(y) < len(labels) else "")
    for panel in panels.flat[len(names) :]:
        panel.set_visible(False)
    return figure


def _name_stack(stack: Recording) -> str:
    return f"layer {stack.layer}" + (f", {stack.site}" if stack.site != "after_block" else "")


def format_page(title: str, labels: list[str], recordings: list[Recording]) -> str:
    """Return a self-contained HTML page that shows what each stack pushes, pops and reads at each token.

    The tokens are the first MAX_PAGE_TOKENS `labels` of the first sequence of the recordings.
    """
    labels = labels[:MAX_PAGE_TOKENS]
    heads = max(value.shape[2] for recording in recordings for value in recording.values.values())
    stacks = [
        {
            "name": _name_stack(recording),
            "values": {
                name: [[round(x, 4) for x in row] for row in value.expand(-1, -1, heads)[0, : len(labels)].tolist()]
                for name, value in recording.values.items()
            },
        }
        for recording in recordings
    ]
    data = json.dumps(
        {
            "tokens": labels,
            "stacks": stacks,
            "titles": recordings[0].meanings,
            "shares": SHARES,
            "actions": [name for name in ACTIONS if name in recordings[0].values],
        }
    )
    values = {"DATA": data.replace("<", "\\u003c"), "TITLE": html.escape(title)}  # no tag can begin inside the script
    return re.sub(r"\{(DATA|TITLE)\}", lambda match: values[match[1]], PAGE)


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Stacks: {TITLE}</title>
<style>
body { font: 14px system-ui, sans-serif; margin: 24px; max-width: 1100px; color: #222 }
#text span { white-space: pre-wrap; padding: 2px 0; cursor: pointer; border-radius: 2px }
#text span.chosen { outline: 2px solid #d55e00 }
#text { line-height: 1.9; font-family: ui-monospace, monospace; margin: 16px 0; border: 1px solid #ddd; padding: 12px }
select { font: inherit; margin-right: 16px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: 3px 10px; text-align: right; border-bottom: 1px solid #eee; vertical-align: bottom }
td { white-space: nowrap }
.bar { display: inline-block; height: 10px }
.push { background: #0072b2 } .pop { background: #d55e00 } .no_op { background: #bbb }
</style>
<h1>Stacks: {TITLE}</h1>
<p>Color each token by <select id="measure"></select> of <select id="stack"></select> <select id="head"></select>
Click a token to see every stack at that token.</p>
<p id="legend"></p><div id="text"></div><div id="detail"></div>
<script>
const data = {DATA};
const byId = id => document.getElementById(id);
const option = (select, value, text) => select.add(new Option(text, value));
Object.entries(data.titles).forEach(([name, title]) => option(byId("measure"), name, title));
data.stacks.forEach((stack, i) => option(byId("stack"), i, stack.name));
Object.values(data.stacks[0].values)[0][0].forEach((_, i) => option(byId("head"), i, "head " + i));
option(byId("head"), "mean", "mean of the heads");
let chosen = 0;

function valueAt(stack, name, token, head) {
  const row = data.stacks[stack].values[name][token];
  return head === "mean" ? row.reduce((a, b) => a + b) / row.length : row[head];
}
function color(fraction) {  // white to blue, readable without color vision
  const mix = (a, b) => Math.round(a + (b - a) * fraction);
  return `rgb(${mix(255, 0)}, ${mix(255, 114)}, ${mix(255, 178)})`;
}
function draw() {
  const [name, stack, head] = [byId("measure").value, byId("stack").value, byId("head").value];
  const values = data.tokens.map((_, t) => valueAt(stack, name, t, head));
  const found = Math.max(...values, 1e-9), largest = data.shares.includes(name) && found <= 1 ? 1 : found;
  byId("legend").textContent = `white: 0, blue: ${largest.toPrecision(3)}`;
  byId("text").replaceChildren(...data.tokens.map((token, t) => {
    const span = document.createElement("span");
    const fraction = values[t] / largest;
    span.textContent = token || "\\u25a1";
    span.style.background = color(fraction);
    span.style.color = fraction > 0.6 ? "white" : "";
    span.title = `${t}: ${values[t].toPrecision(3)}`;
    span.className = t === chosen ? "chosen" : "";
    span.onclick = () => { chosen = t; draw(); };
    return span;
  }));
  drawDetail();
}
function drawDetail() {
  const names = Object.keys(data.titles).filter(name => !data.actions.includes(name));
  const rows = data.stacks.flatMap((stack, i) => Object.values(stack.values)[0][chosen].map((_, head) => {
    const at = name => stack.values[name][chosen][head];
    const bar = data.actions.map(name =>
      `<span class="bar ${name}" style="width:${60 * at(name)}px" title="${name} ${at(name)}"></span>`).join("");
    return `<tr><td>${stack.name}</td><td>${head}</td><td style="text-align:left">${bar}</td>` +
      names.map(name => `<td>${at(name)}</td>`).join("") + "</tr>";
  }));
  byId("detail").innerHTML = `<h2>Token ${chosen}</h2><table><tr><th>stack</th><th>head</th>` +
    `<th style="text-align:left">push, pop, no-op</th>` +
    names.map(name => `<th title="${data.titles[name]}">${name.replace("_", " ")}</th>`).join("") +
    `</tr>${rows.join("")}</table>`;
}
["measure", "stack", "head"].forEach(id => byId(id).onchange = draw);
draw();
</script></html>
"""
