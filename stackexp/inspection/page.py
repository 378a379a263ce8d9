"""A self-contained HTML page that shows, token by token, what each stack pushes, pops and reads."""

import html
import json
import re

from stackexp.inspection.batches import InspectionInput
from stackexp.models.stack_recording import MEASUREMENTS, Recording


def format_page(inputs: InspectionInput, recordings: list[Recording], max_tokens: int) -> str:
    """Return the page of the first sequence, up to `max_tokens` tokens."""
    labels = inputs.labels[:max_tokens]
    stacks = [
        {
            "name": f"layer {recording.layer}" + (f", {recording.site}" if recording.site != "after_block" else ""),
            "values": {
                name: [[round(x, 4) for x in row] for row in value[0, : len(labels)].tolist()]
                for name, value in recording.values.items()
            },
        }
        for recording in recordings
    ]
    data = json.dumps({"tokens": labels, "stacks": stacks, "titles": MEASUREMENTS}).replace("</", "<\\/")
    values = {"DATA": data, "TITLE": html.escape(inputs.title)}
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
td, th { padding: 3px 10px; text-align: right; border-bottom: 1px solid #eee }
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
data.stacks[0].values.push[0].forEach((_, i) => option(byId("head"), i, "head " + i));
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
  const isShare = ["push", "pop", "no_op", "read_sharpness"].includes(name);
  const largest = isShare ? 1 : Math.max(...values, 1e-9);
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
  const rows = data.stacks.flatMap((stack, i) => stack.values.push[chosen].map((_, head) => {
    const at = name => stack.values[name][chosen][head];
    const bar = ["push", "pop", "no_op"].map(name =>
      `<span class="bar ${name}" style="width:${60 * at(name)}px" title="${name} ${at(name)}"></span>`).join("");
    const cells = ["entropy", "occupancy", "overflow", "read_slot", "read_sharpness", "read_share"];
    return `<tr><td>${stack.name}</td><td>${head}</td><td style="text-align:left">${bar}</td>` +
      cells.map(name => `<td>${at(name)}</td>`).join("") + "</tr>";
  }));
  byId("detail").innerHTML = `<h2>Token ${chosen}</h2><table><tr><th>stack</th><th>head</th>` +
    `<th style="text-align:left">push, pop, no-op</th><th>entropy</th><th>occupancy</th><th>overflow</th>` +
    `<th>slot read</th><th>sharpness</th><th>|read| / |h|</th></tr>${rows.join("")}</table>`;
}
["measure", "stack", "head"].forEach(id => byId(id).onchange = draw);
draw();
</script></html>
"""
