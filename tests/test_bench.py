"""The bench verbs: what they measure, print and write; speed is not tested."""

import json
import time

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from stackexp import cli, stack
from stackexp.benchmarking import efficiency, harness, stack_step
from stackexp.config.compose import compose
from stackexp.models import cross_entropy
from stackexp.stack import dispatch
from stackexp.tables import ABSENT

SMALL = ["model.hidden_size=16", "model.num_layers=3", "model.intermediate_size=16", "model.num_heads=4"]
SMALL += ["model.num_kv_heads=2", "model.vocab_size=4096", "data.context_length=8", "data.micro_batch_size=2"]
SMALL += ["data.global_batch_tokens=16"]


def split_cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_efficiency_reports_multiples_of_the_transformer(tmp_path, capsys):
    out = tmp_path / "out.json"
    only = ["--only", "stacktrans,single_head", "--steps", "3", "--markdown", "--out", str(out)]
    assert cli.main(["bench", "efficiency", *only, *SMALL]) == 0
    record = json.loads(out.read_text())
    expected = [("transformer", "auto"), ("stacktrans", "auto"), ("stacktrans", "reference"), ("single_head", "auto")]
    assert [(row["model"], row["implementation"]) for row in record["rows"]] == expected
    for row in record["rows"]:
        for quantity in ("train", "prefill", "decode"):
            low, high = row[f"{quantity}_spread"]
            assert 0 < low <= row[f"{quantity}_ratio"] <= high
        assert row["tokens_per_second"] == pytest.approx(16 / row["train"])
        assert 0 < row["peak_share"] < 1
    for quantity in ("parameters", "flops_per_token"):
        assert record["rows"][1][quantity] > record["rows"][0][quantity]
    assert record["environment"]["versions"]["torch"]
    header, _, *rows = split_cells(capsys.readouterr().out)
    assert header[:5] == ["model", "parameters", "FLOPs/token", "tokens/s", "share of peak"]
    names = ["transformer", "stacktrans", "stacktrans (reference)", "single_head", "full_dim"]
    assert [row[0] for row in rows] == names
    assert rows[0][1:3] == ["+0.0%", "+0.0%"]
    assert rows[1][-3:] == ["1.16", "1.09", "1.12"]


def test_efficiency_continues_after_a_model_that_does_not_fit(tmp_path, capsys, monkeypatch):
    def train(subject: efficiency.Subject) -> None:
        if subject.case.model == "stacktrans":
            raise torch.OutOfMemoryError("CUDA out of memory")
        original(subject)

    original, out = efficiency.Subject.train, tmp_path / "out.json"
    monkeypatch.setattr(efficiency.Subject, "train", train)
    monkeypatch.setattr(efficiency, "measure_peak_flops", lambda device, dtype: 1e12)
    only = ["--only", "stacktrans,single_head", "--steps", "1", "--markdown", "--out", str(out)]
    assert cli.main(["bench", "efficiency", *only, *SMALL]) == 0
    rows = json.loads(out.read_text())["rows"]
    failed = {"model": "stacktrans", "implementation": "auto", "error": "out of memory"}
    assert rows[1:3] == [failed, failed | {"implementation": "reference"}]
    assert rows[3]["model"] == "single_head"
    assert rows[3]["train_ratio"] > 0
    row = split_cells(capsys.readouterr().out)[3]
    assert row == ["stacktrans", *[ABSENT] * 4, *["out of memory"] * 4, "1.16", "1.09", "1.12"]
    assert cli.main(["report", "efficiency", str(out)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stacktrans  ")]
    assert line.count("out of memory") == 4


def test_efficiency_compiles_every_model(monkeypatch):
    """At torch's default limit, models after the second one ran eagerly."""
    counter, compile_module = CompileCounterWithBackend("eager"), torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kwargs: compile_module(self, backend=counter))
    monkeypatch.setattr(cross_entropy, "_compile", lambda function: function)
    monkeypatch.setattr(efficiency, "measure_peak_flops", lambda device, dtype: 1e12)
    torch.compiler.reset()
    limits, counts = torch._dynamo.config.recompile_limit, {}
    options = [*SMALL, "model.num_layers=1", "trainer.compile=true"]
    for row in efficiency.measure(["single_head", "queue"], ["quickstart"], options, 1, torch.device("cpu")):
        counts[row["model"]] = counter.frame_count
    assert 0 < counts["transformer"] < counts["single_head"] < counts["queue"]
    assert counts["queue"] > limits, "the default limit would have been reached"
    assert torch._dynamo.config.recompile_limit == limits


def test_models_beyond_the_limit_of_graphs_raise(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(efficiency, "GRAPHS_PER_MODEL", 1)
    function = torch.compile(lambda x, n: x * n, backend="eager", dynamic=False)
    with efficiency._limit_graphs(1, True):
        function(torch.ones(2), 2)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            function(torch.ones(3), 3)


def test_a_case_runs_with_its_own_implementation(monkeypatch):
    used = []
    select = dispatch._select
    monkeypatch.setattr(dispatch, "_select", lambda automatic: used.append(select(automatic)) or used[-1])
    case = efficiency.Case("stacktrans", "reference")
    subject = efficiency.Subject(case, ["quickstart"], SMALL, torch.device("cpu"))
    subject.train()
    subject.prefill()
    subject.decode(subject.fill_cache())
    assert set(used) == {"reference"}


def test_rounds_alternate_and_warmup_does_not_count():
    order = []
    results = harness.alternate(["A", "B"], lambda subject: order.append(subject) or len(order), rounds=2)
    assert order == ["A", "B", "B", "A", "A", "B", "B", "A", "A", "B"]
    assert results == [[8, 9], [7, 10]]


def test_clock_counts_thread_time_only_where_this_thread_does_the_work(monkeypatch):
    threads = 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert harness.choose_clock(torch.device("cpu")) is time.thread_time
    assert harness.choose_clock(torch.device("cuda")) is time.perf_counter
    threads = 2
    assert harness.choose_clock(torch.device("cpu")) is time.perf_counter


def test_ratio_is_the_median_of_paired_ratios():
    assert harness.compare([2, 6, 4], [1, 2, 1]) == (3, 2.5, 3.5)
    assert harness.compare([2], [1]) == (2, 2, 2)


def test_lower_bound_counts_the_tensors_of_the_eager_step():
    config = compose(["quickstart"], [*SMALL, "model.memory.num_slots=2"])
    layers, tokens = stack_step.Layers(config, torch.device("cpu")), 2 * 8
    head_dim, num_bytes = config.model.memory.head_dim, 0
    with stack.use_implementation("eager"):
        state = stack.empty(layers.shape, layers.options["num_slots"], head_dim, like=layers.pushed[0], axis="depth")
        for x, logits in zip(layers.pushed, layers.logits, strict=True):
            output, after = stack.step(state, x, logits, layers.query, **layers.options)
            num_bytes += sum(t.numel() * 4 for t in (*state, *after, x, logits, output.read))
            state = after
    assert stack_step.count_lower_bound_bytes(config, tokens) == num_bytes
    assert stack_step.count_flops(config, tokens) == 10 * tokens * 4 * head_dim * (1 + 2 + 2)


def test_stack_measures_both_passes_and_implementations(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert cli.main(["bench", "stack", "--steps", "2", "--out", str(out), *SMALL]) == 0
    rows = json.loads(out.read_text())["rows"]
    passes = [(row["implementation"], row["pass"]) for row in rows]
    assert passes == [(i, p) for p in ("forward", "forward + backward") for i in ("auto", "reference")]
    assert rows[2]["bytes"] == 3 * rows[0]["bytes"]
    for row in rows:
        assert row["gigabytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
    assert len(capsys.readouterr().out.splitlines()) == 6
