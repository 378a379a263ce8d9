"""`stackexp bench`: what it says it measures. How fast anything is, is no test's business."""

import json

import pytest
import torch

from stackexp import cli, stack
from stackexp.benchmarking import efficiency
from stackexp.benchmarking import stack as stack_bench
from stackexp.config.compose import compose

SMALL = ["model.hidden_size=16", "model.num_layers=3", "model.intermediate_size=16", "model.num_heads=4"]
SMALL += ["model.num_kv_heads=2", "model.vocab_size=4096", "data.context_length=8", "data.micro_batch_size=2"]
SMALL += ["data.global_batch_tokens=16"]


def lines_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_efficiency_prints_and_writes_multiples_of_the_transformer(tmp_path, capsys):
    out = tmp_path / "out.json"
    only = ["--only", "stacktrans,single_head", "--steps", "3", "--out", str(out)]
    assert cli.main(["bench", "efficiency", *only, *SMALL]) == 0
    record = json.loads(out.read_text())
    expected = [("transformer", "auto"), ("stacktrans", "auto"), ("stacktrans", "reference"), ("single_head", "auto")]
    assert [(row["model"], row["implementation"]) for row in record["rows"]] == expected
    for row in record["rows"]:
        for what in ("train", "prefill", "decode"):
            low, high = row[f"{what}_spread"]
            assert 0 < low <= row[f"{what}_ratio"] <= high
        assert row["tokens_per_second"] == pytest.approx(16 / row["train"])
    assert record["rows"][1]["parameters"] > record["rows"][0]["parameters"]
    assert record["versions"]["torch"]
    assert record["hardware"]["cpu"]["cores"]
    header, _, *rows = lines_of(capsys.readouterr().out)
    assert header[:3] == ["model", "stack", "tokens/s"]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("transformer", "auto", ""),
        ("stacktrans", "auto", "1.16 / 1.09 / 1.12"),
        ("stacktrans", "reference", "1.16 / 1.09 / 1.12"),
        ("single_head", "auto", "1.03 / 1.04 / 1.00"),
    ]


def test_each_row_runs_by_its_own_implementation(monkeypatch):
    """Also in the backward pass's forward, and without touching what is set outside."""
    seen = []
    resolve = stack._resolve

    def watched(automatic):
        seen.append(resolve(automatic))
        return seen[-1]

    monkeypatch.setattr(stack, "_resolve", watched)
    row = efficiency.Row("stacktrans", "reference")
    subject = efficiency.Subject(row, ["quickstart"], SMALL, torch.device("cpu"))
    subject.train()
    subject.prefill()
    subject.decode(subject.filled())
    assert set(seen) == {"reference"}
    assert stack._wanted == "auto"


def test_turns_alternate_and_warm_up_turns_do_not_count(monkeypatch):
    order = []
    monkeypatch.setattr(efficiency, "turn", lambda subject: order.append(subject) or {"train": len(order)})
    taken = efficiency.in_turns(["A", "B"], turns=2)
    assert order == ["A", "B", "B", "A", "A", "B", "B", "A", "A", "B"]
    assert [[t["train"] for t in turns] for turns in taken] == [[8, 9], [7, 10]]


def test_the_floor_of_the_stack_is_what_its_tensors_hold():
    """Against the shapes that `eager` really makes, layer by layer."""
    config = compose(["quickstart"], [*SMALL, "model.memory.num_slots=2"])
    layers, tokens = stack_bench.Layers(config, torch.device("cpu")), 2 * 8
    options = layers.options
    moved = 0
    with stack.use_implementation("eager"):
        state = stack.empty(layers.shape, options["num_slots"], config.model.memory.head_dim, like=layers.pushed[0])
        for x, logits in zip(layers.pushed, layers.logits, strict=True):
            output, after = stack.step(state, x, logits, layers.query, **options)
            moved += sum(t.numel() * 4 for t in (*state, *after, x, logits, output.read))
            state = after
    assert stack_bench.floor_bytes(config, tokens) == moved
    assert stack_bench.floor_flops(config, tokens) == 10 * tokens * 4 * config.model.memory.head_dim * (1 + 2 + 2)


def test_stack_measures_forward_and_backward_by_auto_and_reference(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert cli.main(["bench", "stack", "--steps", "2", "--out", str(out), *SMALL]) == 0
    rows = json.loads(out.read_text())["rows"]
    passes = [(row["implementation"], row["pass"]) for row in rows]
    assert passes == [(i, p) for p in ("forward", "forward + backward") for i in ("auto", "reference")]
    assert rows[2]["bytes"] == 3 * rows[0]["bytes"]
    for row in rows:
        assert row["gigabytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
    assert len(capsys.readouterr().out.splitlines()) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["efficency"], "bench: expected efficiency or stack; did you mean 'efficiency'?"),
        (["efficiency", "--only", "stacktran"], "found 'stacktran'; did you mean 'stacktrans'?"),
        (["efficiency", "--steps", "0"], "--steps: expected an integer >= 1, found 0"),
        (["efficiency", "--out", "x.txt"], "--out: expected a name that ends in .json, found x.txt"),
        (["efficiency", "--out", "no/such/x.json"], "--out: there is no folder no/such; make it first"),
        (["efficiency", "model.hidden_size=7"], "bench efficiency: with model.memory=null: "),
        (["stack", "model.memory=null"], "bench stack: measures stacks over the depth; set model.memory=stacktrans"),
        (["stack", "model.memory.axis=time"], "bench stack: measures stacks over the depth"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message, capsys):
    assert cli.main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
