"""`report states`: states of tasks, distances, traces of stacks, and the prediction of failure."""

import itertools
import re
from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
import pytest
import torch
from formal_runs import finish, write_run
from small_models import make_model, make_tokens

from stackexp import cli
from stackexp.config.model import LSTMConfig, StackRNNConfig
from stackexp.datamodules.formal_language import build_string_batch
from stackexp.errors import RunError
from stackexp.inspection.states import (
    WINDOW,
    build_states,
    compare_states,
    label_tokens,
    measure_depth,
    measure_sharpness,
    run_model,
    trace_stacks,
)
from stackexp.models.recurrent import LSTM, StackRNN
from stackexp.models.stack_recording import ACTIONS, record_memories
from stackexp.models.transformer import Cache
from stackexp.reports.formal_runs import FormalRun
from stackexp.reports.report import format_report
from stackexp.reports.states import StateRun, build_state_report, compute_auc, correlate_ranks
from stackexp.stack import use_implementation
from stackexp.tables import ABSENT
from stackexp.tasks import TASKS

# States of the tasks


def walk(symbols: list[int]) -> int:
    position = 0
    for symbol in symbols:
        position += {0: -1, 1: 0, 2: 1}[symbol]
    return position % 5


def split_terms(symbols: list[int]) -> tuple[int, int, bool]:
    """Return the sum of the finished terms, the last term or the factor of the next digit, and which of these it is."""
    text = "".join(TASKS["modular_arithmetic"].symbols[symbol] for symbol in symbols)
    has_term = text[-1].isdigit()
    *terms, last = re.findall(r"[+-]?[\d*]+", text if has_term else text + "1")
    return sum(map(eval, terms)) % 5, eval(last) % 5, has_term


ORACLES: dict[str, Callable[[list[int]], Hashable]] = {
    "even_pairs": lambda symbols: [(0, 0), (0, 1), (1, 0), (1, 1)].index((symbols[0], symbols[-1])),
    "parity_check": lambda symbols: symbols.count(1) % 2,
    "cycle_navigation": walk,
    "modular_arithmetic": split_terms,
}


def draw(task, batch_size=8, length=21):
    return TASKS[task].sample(np.random.default_rng(0), batch_size, length)


@pytest.mark.parametrize(
    ("task", "count"), [("modular_arithmetic", 50), ("cycle_navigation", 5), ("even_pairs", 4), ("parity_check", 2)]
)
def test_states_are_those_of_each_prefix(task, count):
    strings = draw(task, batch_size=500)
    labels, pairs = label_tokens(TASKS[task], strings), set()
    for row, states in zip(strings.inputs.tolist(), labels.tolist(), strict=True):
        for end in range(len(row) - WINDOW + 1, len(row) + 1):
            pairs.add((ORACLES[task](row[:end]), states[end - 1]))
    ours, theirs = (set(side) for side in zip(*pairs, strict=True))
    assert len(pairs) == len(ours) == len(theirs) == count, "one to one"


def test_the_last_tokens_have_labels():
    regular = label_tokens(TASKS["parity_check"], draw("parity_check"))
    assert ((regular >= 0).sum(1) == WINDOW).all()
    assert (regular[:, -1] == -1).all(), "the empty token follows the last symbol"
    strings = draw("stack_manipulation", batch_size=64)
    labels = label_tokens(TASKS["stack_manipulation"], strings)
    for row, answer, mask in zip(labels, strings.targets, strings.mask, strict=True):
        assert row[row >= 0].tolist() == answer[mask][-WINDOW:].tolist()
    products = draw("word_problem_s3")
    labels = label_tokens(TASKS["word_problem_s3"], products)
    assert labels[:, -WINDOW:].tolist() == products.targets[:, -WINDOW:].tolist(), "an answer at every token"


def test_depth_is_the_nesting_of_brackets_or_the_position_in_the_stack():
    task, strings = TASKS["solve_equation"], draw("solve_equation", length=40)
    expected = []
    for row in strings.inputs:
        text, depth = "".join(task.symbols[symbol] for symbol in row), 0
        while "(" in text:  # remove the innermost brackets
            depth += 1
            start = [i for i, symbol in enumerate(text) if symbol == "("]
            pairs = [(i, text.index(")", i)) for i in start if "(" not in text[i + 1 : text.index(")", i)]]
            for first, last in reversed(pairs):
                text = text[:first] + text[last + 1 :]
        expected.append([depth])
    depth = measure_depth(task, strings)
    assert depth is not None
    assert depth.tolist() == expected
    assert len(set(depth.flat)) > 1
    for task in (TASKS["dyck_2_5"], TASKS["generate_dyck_2"], TASKS["recognize_dyck_2_3"]):
        strings = task.sample(np.random.default_rng(0), 8, 40)
        for row, found in zip(strings.inputs, measure_depth(task, strings), strict=True):
            text = " ".join(task.symbols[symbol] for symbol in row)
            depths = [
                len(re.findall(r"[(\[]", text[:i])) - len(re.findall(r"[)\]]", text[:i])) for i in range(len(text) + 1)
            ]
            assert set(found) == {max(depths[1:])}
    assert measure_depth(TASKS["repl_s3"], draw("repl_s3", length=5)) is None
    reverse = measure_depth(TASKS["reverse_string"], draw("reverse_string"))
    assert reverse is not None
    assert reverse[3].tolist() == list(range(1, 22))
    assert measure_depth(TASKS["bucket_sort"], draw("bucket_sort")) is None


def test_runs_without_an_unseen_range_are_skipped(tmp_path):
    """The score over 41..500 of a run trained on up to 80 symbols would include lengths of its training."""
    lengths = ("data.max_length=80", "data.validation_max_length=90")
    run = finish(write_run(tmp_path / "runs" / "80", "LSTM", "even_pairs", *lengths), beyond=1.0)
    with pytest.raises(RunError, match=rf"skipped, trained on up to 80 symbols, so 41\.\.500 are no test: {run}\)"):
        build_states([run.parent])


# Distances


def test_within_over_between_is_that_of_all_pairs_of_tokens():
    rng = np.random.default_rng(0)
    states = np.arange(600) % 3
    centers = np.array([[0.0, 0, 0, 0], [3, 0, 0, 0], [0, 4, 0, 0]])
    vectors = centers[states] + rng.normal(size=(600, 4)) * np.array([1, 2, 0.5])[states, None]
    squares = np.square(vectors[:, None] - vectors).sum(-1)
    within = [squares[np.ix_(states == a, states == a)].sum() / (200 * 199) for a in range(3)]
    between = [squares[np.ix_(states == a, states == b)].mean() for a, b in itertools.combinations(range(3), 2)]
    moved = vectors + np.array([0, 0, 2.5, 0])
    found = compare_states({20: (vectors, states), 40: (vectors, states), 60: (moved, states)})
    assert found[20]["within_between"] == pytest.approx(np.sqrt(np.mean(within) / np.mean(between)), rel=2e-3)
    assert found[20]["shift"] == pytest.approx(0, abs=1e-12)
    assert found[60]["shift"] == pytest.approx(2.5 / np.sqrt((9 + 16 + 25) / 3), rel=0.03)
    assert found[60]["within_between"] == pytest.approx(found[20]["within_between"])


def test_states_that_are_points_or_inseparable_are_the_extremes():
    rng, states = np.random.default_rng(0), np.arange(4000) % 2
    points = compare_states({40: (np.eye(2)[states], states)})
    assert points[40]["within_between"] == 0
    noise = compare_states({40: (rng.normal(size=(4000, 8)), states)})
    assert noise[40]["within_between"] == pytest.approx(1, abs=1e-3)
    others = compare_states({40: (np.eye(4)[states], states), 200: (np.eye(4)[states + 2], states + 2)})
    assert others[200] == {"within_between": 0}, "no state of the reference"
    assert compare_states({40: (np.ones((4000, 3)), states)}) == {}, "constant vectors"
    assert compare_states({40: (np.eye(2)[[0, 1]], np.array([0, 1]))}) == {}, "one token in a state"


def test_sharpness_counts_tokens_below_the_limits():
    actions = np.array([[1, 0, 0], [0.05, 0.95, 0], [0.5, 0.25, 0.25], [0.0, 0.0, 1.0]])[:, None]
    entropy = (-0.95 * np.log(0.95) - 0.05 * np.log(0.05) + 1.5 * np.log(2)) / 4
    expected = {"max_probability": 3.45 / 4, "below_0.9": 0.25, "below_0.99": 0.5, "entropy": entropy}
    assert measure_sharpness(actions) == pytest.approx(expected)


# Traces


STACKS = {
    "time, top": {"axis": "time", "read": "top", "feedback": True, "num_slots": 5},
    "time, global": {"axis": "time", "read": "global", "read_mask": "log"},
    "token_major": {"axis": "token_major", "read": "top"},
    "depth": {"axis": "depth"},
}


@pytest.mark.parametrize("name", STACKS)
@torch.no_grad()
def test_a_trace_is_what_the_stacks_do_token_by_token(name):
    model, tokens = make_model(STACKS[name]).eval(), make_tokens()
    for memory in model.memories:
        memory.down.mul_(20)  # sharper actions
    with trace_stacks(model) as traced, use_implementation("eager"):
        output = model(tokens)
    with record_memories(model) as recordings:
        recorded = model(tokens)
    torch.testing.assert_close(output.logits, recorded.logits)
    for i, recording in enumerate(recordings):
        actions = torch.cat(traced[f"stack {i} actions"], 1)
        torch.testing.assert_close(actions.float(), torch.stack([recording.values[a] for a in ACTIONS], -1))
    if name.startswith("time"):
        cache, place = Cache(), "top" if "global" in name else "read"
        for t, column in enumerate(tokens.split(1, 1)):
            with use_implementation("eager"):
                model(column, cache=cache)
            for i in range(len(model.memories)):
                top = torch.cat(traced[f"stack {i} {place}"], 1)[:, t]
                torch.testing.assert_close(top, cache.states[i].slots[..., 0, :])


@torch.no_grad()
def test_the_trace_of_a_stack_rnn_is_its_state_after_each_token():
    torch.manual_seed(0)
    model = StackRNN(StackRNNConfig(vocab_size=13, hidden_size=12, num_layers=2, slot_size=3, num_slots=4)).eval()
    tokens, cache = make_tokens(), Cache()
    with trace_stacks(model) as traced:
        model(tokens)
    actions = torch.stack([model(tokens, probe=True).probes[0][name] for name in ACTIONS])
    torch.testing.assert_close(traced["stack 0 actions"][0].mean((0, 1, 2)), actions)
    for t, column in enumerate(tokens.split(1, 1)):
        model(column, cache=cache)
        for layer in range(2):
            torch.testing.assert_close(traced[f"stack {layer} read"][0][:, t], cache.states[layer][1][:, 0])


@torch.no_grad()
def test_batches_do_not_change_logits(monkeypatch):
    torch.manual_seed(0)
    model, task = LSTM(LSTMConfig(vocab_size=3, output_vocab_size=2, hidden_size=8)).eval(), TASKS["reverse_string"]
    strings = draw("reverse_string")
    monkeypatch.setattr("stackexp.inspection.states.MAX_TOKENS", 100)
    logits, traced = run_model(model, task, strings)
    output = model(build_string_batch(strings, task)["tokens"])
    torch.testing.assert_close(logits, output.logits[:, -21:])
    assert traced.keys() == {"hidden"}
    assert traced["hidden"].shape == (8, 42, 8)


# Prediction


def test_rank_statistics_equal_their_definitions():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, (5, 12)), rng.integers(0, 6, (5, 12))
    expected = [spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
    assert correlate_ranks(x, y) == pytest.approx(expected)
    is_failed = y < 3
    for figures, failed, area in zip(x, is_failed, compute_auc(x, is_failed), strict=True):
        pairs = [(a > b) + 0.5 * (a == b) for a in figures[failed] for b in figures[~failed]]
        assert area == pytest.approx(np.mean(pairs))
    assert np.isnan(compute_auc(x[0], np.ones(12, bool)))


def make_runs(scores: list[float], accuracies: list[float], ratios: list[float]) -> list[StateRun]:
    """Return runs without a stack."""
    runs = []
    for i, (score, accuracy, ratio) in enumerate(zip(scores, accuracies, ratios, strict=True)):
        row = {"arm": f"run-{i}", "data.task": "parity_check", "seed": i, "path": f"runs/{i}"}
        row["validation_accuracy"] = accuracy
        distances = {("hidden", n): {"within_between": ratio, "shift": 0.5} for n in (20, 60)}
        runs.append(
            StateRun(FormalRun("LSTM", row, [], (41, 500)), score, {("answers", 60): {"accuracy": 1}, **distances})
        )
    return runs


def read_row(text: str, figure: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {figure}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_prediction_compares_figures_with_the_validation_accuracy():
    scores = [1.0, 0.995, 0.99, 1.0, 0.9, 0.7, 0.5, 0.98]
    ratios = [0.1, 0.2, 0.3, 0.15, 0.6, 0.7, 0.9, 0.5]
    runs = make_runs(scores, [1.0] * 6 + [0.6, 1.0], ratios)
    text = format_report(build_state_report(runs, []), "markdown")
    assert "Of 7 runs with a validation accuracy of at least 0.99, 3 fail" in text
    cells = read_row(text, "hidden: within/between at 60")
    assert cells[:2] == ["8", "4"]
    assert cells[2].startswith("-0.9")
    assert cells[3] == "1.00 (1.00 to 1.00)"
    assert cells[4].startswith("0.62 ("), "one of four failed runs has a lower accuracy; the other pairs are ties"
    assert cells[5].startswith("+0.38 (")
    assert read_row(text, "hidden: shift at 60")[2:4] == [ABSENT, "0.50 (0.50 to 0.50)"], "constant"
    assert "slots" not in text.partition("Prediction of failure")[2].partition("**Notes**")[0]
    among = text.partition("Prediction among the 7 runs")[2]
    assert read_row(among, "hidden: within/between at 60")[:2] == ["7", "3"]


def test_few_runs_have_no_interval_and_no_prediction():
    few = make_runs([1.0, 1.0, 0.5, 0.5, 0.5], [1.0, 1.0, 0.5, 0.6, 0.7], [0.1, 0.2, 0.5, 0.6, 0.7])
    text = format_report(build_state_report(few, []), "markdown")
    assert read_row(text, "hidden: within/between at 60")[3] == "1.00 (too few runs)"
    for runs in (few[:3], few[2:]):
        text = format_report(build_state_report(runs, []), "markdown")
        assert "no prediction: it requires 4 runs, some solved and some not" in text
        assert "AUC" not in text


@pytest.mark.process
def test_report_measures_trained_runs(empty_folder, capsys, invoke):
    shared = "data.eval_length_stride=459 data.eval_sequences=1 data.validation_sequences=1 data.batch_size=2 "
    shared += (
        "trainer.max_steps=2 schedule.warmup_steps=0 trainer.accelerator=cpu logging.loggers=[] model.num_layers=1"
    )
    for name in ("stacktrans/reverse_string", "lstm"):
        options = [*shared.split(), "data.task=reverse_string", f"name=tiny/{name.partition('/')[0]}"]
        assert cli.main(["fit", "--config", f"formal/{name}", *options]) == 0
    capsys.readouterr()
    outputs = ["--csv", "states.csv", "--figure", "states.png", "--strings", "8"]
    text = invoke("report states runs --markdown", *outputs)
    assert text.count("| reverse_string |") == 2 + 1 + 2, "distances, actions of one stack, depths"
    assert "no prediction" in text
    records = Path("states.csv").read_text().splitlines()
    assert sum(",stack 0 actions,500," in line for line in records) == 1
    assert sum(",hidden,60," in line for line in records) == 2
    assert Path("states.png").read_bytes().startswith(b"\x89PNG")
