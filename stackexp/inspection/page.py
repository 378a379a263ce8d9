"""Show recorded stacks: means as a table and as maps, and an HTML page of every token."""

import html
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from stackexp.models.stack_recording import ACTIONS, Recording
from stackexp.reports.figures import new_figure
from stackexp.tables import format_table

MAX_PAGE_TOKENS = 256
MAP_COLUMNS = 5
SHARES = (*ACTIONS, "read_sharpness")  # measurements from 0 to 1


@dataclass(frozen=True)
class StackMeans:
    """The means of the measurements of one stack over all tokens: {name: [H]}."""

    layer: int
    site: str
    values: dict[str, np.ndarray]


def format_means(stacks: list[StackMeans]) -> str:
    """Return a table with a row for each stack: means over tokens and heads."""
    names = list(stacks[0].values)
    rows = [[str(s.layer), s.site, *(f"{s.values[name].mean():.3f}" for name in names)] for s in stacks]
    return format_table(rows, header=["layer", "site", *names], align="><" + ">" * len(names))


def draw_maps(stacks: list[StackMeans]) -> Any:
    """Draw a map of each measurement: a row for each stack, a column for each head, means over tokens."""
    from matplotlib.ticker import FixedLocator

    labels = [_name_stack(stack).removeprefix("layer ") for stack in stacks]
    names = list(stacks[0].values)
    rows = -(-len(names) // MAP_COLUMNS)
    figure, panels = new_figure(14, 2.4 * rows, rows, MAP_COLUMNS, sharey=True, squeeze=False)
    for panel, name in zip(panels.flat, names, strict=False):
        values = np.stack([stack.values[name] for stack in stacks])  # [stacks, H]
        largest = 1.0 if name in SHARES else values.max() or 1.0
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


def _name_stack(stack: StackMeans | Recording) -> str:
    return f"layer {stack.layer}" + (f", {stack.site}" if stack.site != "after_block" else "")


def format_page(title: str, labels: list[str], recordings: list[Recording]) -> str:
    """Return a self-contained HTML page that shows what each stack pushes, pops and reads at each token.

    The tokens are the first MAX_PAGE_TOKENS `labels` of the first sequence of the recordings.
    """
    labels = labels[:MAX_PAGE_TOKENS]
    stacks = [
        {
            "name": _name_stack(recording),
            "values": {
                name: [[round(x, 4) for x in row] for row in value[0, : len(labels)].tolist()]
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
  const largest = data.shares.includes(name) ? 1 : Math.max(...values, 1e-9);
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
