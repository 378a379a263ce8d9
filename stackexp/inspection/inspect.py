"""The engine of `inspect`: record the stacks of a run on text or strings, and measure interventions on them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stackexp.evaluation.loading import LoadedRun, load_run
from stackexp.files import write_atomically
from stackexp.inspection.batches import InspectionInput, average_values, compute_losses, open_set, open_task, open_text
from stackexp.inspection.interventions import check_heads, intervene, list_interventions
from stackexp.inspection.page import format_page
from stackexp.models.checkpoints import load_state
from stackexp.models.stack_recording import ACTIONS, MEASUREMENTS, Recording, find_stacks, record_stacks
from stackexp.modules.scores import bootstrap_interval
from stackexp.reports.figures import new_figure, save_figure
from stackexp.tables import format_table
from stackexp.training.tensorboard import write_image

MAX_PAGE_TOKENS = 256
MAP_COLUMNS = 5
MEANS = (*MEASUREMENTS, "action_spread")
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
    find_stacks(loaded.model)  # fails for models without a stack, before anything is written
    if heads:
        check_heads(loaded.model)
    if text is not None:
        inputs = open_text(loaded, text)
    else:
        inputs = open_task(loaded, task or "") if set_name is None else open_set(loaded, set_name, num_chunks)
    folder = Path(out) if out else loaded.folder.path / "inspect" / inputs.name
    folder.mkdir(parents=True, exist_ok=True)

    recordings, first = record(loaded, inputs)
    results: dict[str, Any] = {
        "checkpoint": str(loaded.checkpoint),
        "material": inputs.title,
        "stacks": [
            {"layer": r.layer, "site": r.site} | {name: v.tolist() for name, v in means.items()}
            for r, means in recordings
        ],
    }
    print(f"{loaded.checkpoint}, {inputs.title}\n\n{format_means(recordings)}")
    draw_maps(recordings, folder / "stacks.png")
    if loaded.config.logging.tensorboard:
        step = load_state(loaded.checkpoint)["global_step"] if loaded.checkpoint.is_dir() else 0
        events, png = Path(out) if out else folder.parent, (folder / "stacks.png").read_bytes()
        write_image(events, f"inspect.{inputs.name}", f"inspect/{inputs.title}", png, step)
    write_atomically(folder / "tokens.html", format_page(inputs, first, MAX_PAGE_TOKENS))
    if sum(len(batch["tokens"]) for batch in inputs.batches) > 1:
        changes = measure_interventions(loaded, inputs, heads)
        results["interventions"] = changes
        print(f"\n{format_changes(changes)}")
    elif text is None:
        print("\nno interventions: an interval requires at least two sequences; use a larger set")
    write_atomically(folder / "inspect.json", json.dumps(results, indent=2))
    print(f"\nmaps:    {folder / 'stacks.png'}\ntokens:  {folder / 'tokens.html'}\nvalues:  {folder / 'inspect.json'}")
    return 0


def record(
    loaded: LoadedRun, inputs: InspectionInput
) -> tuple[list[tuple[Recording, dict[str, np.ndarray]]], list[Recording]]:
    """Return every stack with its means over all tokens {name: [H]}, and the recordings of the first sequence."""
    values: list[list[dict[str, torch.Tensor]]] = []
    with record_stacks(loaded.model) as recordings:
        for batch in inputs.batches:
            loaded.model(batch["tokens"])
            values.append([recording.values for recording in recordings])
    first = [
        Recording(recording.layer, recording.site, {name: v[:1] for name, v in values[0][i].items()})
        for i, recording in enumerate(recordings)
    ]
    means = [average_values([batch[i] for batch in values]) for i in range(len(recordings))]
    return list(zip(recordings, means, strict=True)), first


def measure_interventions(loaded: LoadedRun, inputs: InspectionInput, heads: bool) -> list[dict[str, Any]]:
    """Return the change of the loss under each intervention, in nats, with the paired 95 % interval over sequences."""
    model = loaded.model
    tokens = [batch["tokens"] for batch in inputs.batches[:4]]
    with record_stacks(model) as recordings:
        model(torch.cat([rows for rows in tokens if rows.shape[1] == tokens[0].shape[1]]))
        interventions = list_interventions(model, recordings, heads)
    losses, counts = compute_losses(model, inputs.batches)
    changes = [{"intervention": "none", "loss": float(losses.sum() / counts.sum())}]
    for intervention in interventions:
        with intervene(model, intervention):
            changed, _ = compute_losses(model, inputs.batches)
        low, high = bootstrap_interval(changed - losses, counts)
        change = float((changed - losses).sum() / counts.sum())
        changes.append({"intervention": intervention.name, "change": change, "low": low, "high": high})
    return changes


def format_means(recordings: list[tuple[Recording, dict[str, np.ndarray]]]) -> str:
    """Return a table with a row for each stack: means over tokens and heads."""
    header = ["layer", "site", *MEANS]
    rows = [[str(r.layer), r.site, *(f"{means[name].mean():.3f}" for name in MEANS)] for r, means in recordings]
    return format_table(rows, header=header, align="><" + ">" * len(MEANS))


def format_changes(changes: list[dict[str, Any]]) -> str:
    """Return a table of the interventions; an asterisk marks an interval that excludes zero."""
    rows = []
    for change in changes[1:]:
        mark = "*" if change["low"] > 0 or change["high"] < 0 else ""
        interval = f"{change['low']:+z.4f} to {change['high']:+z.4f}"
        rows.append([change["intervention"], f"{change['change']:+z.4f}", interval, mark])
    header = ("intervention", "change of the loss", "95 % interval", "")
    return f"loss {changes[0]['loss']:.4f}\n\n{format_table(rows, header=header, align='<>><')}"


def draw_maps(recordings: list[tuple[Recording, dict[str, np.ndarray]]], path: Path) -> None:
    """Draw a map of each measurement: a row for each stack, a column for each head, means over tokens."""
    from matplotlib.ticker import MaxNLocator

    rows = -(-len(MEANS) // MAP_COLUMNS)
    figure, panels = new_figure(14, 2.4 * rows, rows, MAP_COLUMNS)
    for panel, name in zip(panels.flat, MEANS, strict=False):
        values = np.stack([means[name] for _, means in recordings])  # [stacks, H]
        largest = 1.0 if name in SHARES else values.max() or 1.0
        image = panel.imshow(values, aspect="auto", vmin=0, vmax=largest, cmap="cividis", origin="lower")
        panel.set(title=name.replace("_", "-" if name == "no_op" else " "), xlabel="head", ylabel="stack")
        panel.set_xticks(range(values.shape[1]))
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(visible=False)
        figure.colorbar(image, ax=panel)
    save_figure(figure, path)
