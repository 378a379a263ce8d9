"""The verb `certify`, on networks whose automaton is known, against brute force and labels of tasks."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from known_networks import (
    REVERSE,
    SMALL,
    build_late_reverse,
    build_manipulation,
    build_parity,
    build_reverse,
    certify,
    flip,
    parity_options,
    write_run,
)

from stackexp import cli
from stackexp.certification import regular, stack_proof, stacks
from stackexp.certification.automata import (
    NO_STRING,
    REGULAR,
    STACK_TASKS,
    Automaton,
    format_string,
)
from stackexp.certification.certify import Certificate, describe_learned, harden
from stackexp.certification.machine import NetworkMachine, ReadState, hash_rows, list_prefixes
from stackexp.evaluation.loading import load_run
from stackexp.tasks import TASKS

ALL = REGULAR["parity_check"]().grammar  # all strings of two symbols


@pytest.mark.parametrize("task", STACK_TASKS)
def test_pushdown_automata_have_the_labels(task):
    rng = np.random.default_rng(0)
    known = STACK_TASKS[task]
    prefixes = [level for level, _ in list_prefixes(known.grammar, 5)[1:]]
    listed = {n: set(map(tuple, p[known.grammar.are_strings(p)])) for n, p in enumerate(prefixes, 1)}
    for length in (*range(1, 13), 100):
        batch = TASKS[task].sample(rng, 300, length)
        answers = known.pushdown.run(batch.inputs, batch.targets.shape[1])
        np.testing.assert_array_equal(answers, np.where(batch.mask, batch.targets, NO_STRING))
        assert length > 5 or set(map(tuple, batch.inputs)) <= listed[length]
    drawn = {tuple(row) for _ in range(20) for row in TASKS[task].sample(rng, 1000, 4).inputs}
    assert drawn == listed[4], "every string of the list is a string of the task"


def test_long_runs_of_a_string_are_shortened():
    assert format_string(tuple("-0+"), (0, 0, *[1] * 131, 2)) == "--(0 x 131)+"
    assert format_string(("POP", "0"), (0, 1)) == "POP 0"


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("parity"), *parity_options(), *SMALL, weights=build_parity)


def test_a_network_with_finitely_many_states_is_the_automaton(parity, capsys):
    code, printed, record = certify(capsys, parity, "--exhaustive", "10")
    assert code == 0
    assert record["verdict"] == "is the automaton"
    assert "reach only 3 states" in printed, "the start, and the slots 0 and 1"
    assert record["automaton"] == {
        "initial": 0,
        "answers": ["0", "1"],
        "transitions": [{"a": 0, "b": 1}, {"a": 1, "b": 0}],
    }
    assert "proved:\n- all 2,046 strings of up to 10 symbols" in printed
    assert Path(parity[-1], "automaton.png").read_bytes()[:4] == b"\x89PNG"


def test_enumerated_states_include_strings_in_batches_of_every_size(tmp_path, monkeypatch):
    """Products of 1, 2 or 3 rows round differently from larger ones on CPUs."""
    torch.manual_seed(0)
    options = ("model.num_layers=1", "model.attention_window=1", "model.memory.num_heads=1")
    run = write_run(tmp_path, "formal/stacktrans/parity_check", *options)
    loaded, known = load_run(run[1], run[3]), set()
    hard = harden(loaded, NetworkMachine(loaded.model, 2, batch_size=regular.BATCH_SIZE))

    def record_states(cache):
        keys = hash_rows(cache)
        known.update(keys)
        return keys

    monkeypatch.setattr(regular, "hash_rows", record_states)
    _, count = regular.close_states(hard, ALL)
    assert count == len(known) + 1 > 10, "the start has no bits"
    strings = np.array(list(itertools.product(range(2), repeat=8)))
    for rows in (1, 2, 3, 4, 5, 129, 256):
        for part in (strings[start : start + rows] for start in range(0, min(256, 20 * rows), rows)):
            cache = ReadState()
            for symbols in part.T:
                cache = hard.read(cache, symbols[:, None])
                assert known.issuperset(hash_rows(cache))
            assert hash_rows(hard.read(ReadState(), part)) == hash_rows(cache)


def test_a_network_whose_bits_depend_on_the_row_has_no_proof(parity):
    class Uneven(NetworkMachine):
        def read(self, cache, tokens):
            cache = super().read(cache, tokens)
            for layer, state in cache.states.items():
                slots = state.slots.clone()
                slots[7:8] += 2.0**-20  # so that the row of a string matters
                cache.states[layer] = state._replace(slots=slots)
            return cache

    model = load_run(parity[1], parity[3]).model
    assert regular.close_states(NetworkMachine(model, 2, batch_size=16), ALL)[1] == 3
    assert regular.close_states(Uneven(model, 2, batch_size=16), ALL) is None


def test_states_with_hard_actions_or_rounded_slots_are_finite(tmp_path, capsys, monkeypatch):
    def weights(state):
        state = build_parity(state)
        state["layers.0.memory.actions"][0, :, 0] = torch.tensor([2.0, -2.0, -2.0])  # 0.96 push, 0.02 pop and no-op
        return state

    monkeypatch.setattr(regular, "MAX_STATES", 10)
    run = write_run(tmp_path, *parity_options(), *SMALL, weights=weights)
    _, printed, record = certify(capsys, run, "--exhaustive", "5")
    assert record["verdict"] == "agrees up to 5, is the automaton with hard actions", "soft ones leave traces"
    assert "with hard actions, strings of every length reach only 3 states" in printed
    monkeypatch.setattr("stackexp.certification.certify.HARDNESS", 1)
    _, printed, record = certify(capsys, run, "--exhaustive", "5")
    assert record["verdict"] == "agrees up to 5, is the automaton with slots rounded to multiples of 1/1024"
    monkeypatch.setattr("stackexp.certification.certify.GRIDS", (1,))  # 0.96 of a push becomes 1
    _, printed, record = certify(capsys, run, "--exhaustive", "5")
    assert "with slots rounded to whole numbers, strings of every length reach only 3 states" in printed


@pytest.mark.parametrize(
    ("name", "index", "is_needed"),
    [
        ("embedding.weight", (1, 1), True),
        ("layers.0.memory.feedback", (0, 0), True),
        ("head.weight", (1, 2), True),
        ("head.weight", (1, 5), False),
    ],
)
def test_a_flipped_weight_is_rejected_if_the_answers_change(tmp_path, capsys, name, index, is_needed):
    run = write_run(tmp_path, *parity_options(), *SMALL, weights=flip(build_parity, name, index))
    model = load_run(run[1], run[3]).model
    strings = [s for n in range(1, 7) for s in itertools.product(range(2), repeat=n)]
    with torch.no_grad():
        answers = [int(model(torch.tensor([[*s, 2]])).logits[0, -1].argmax()) for s in strings]
    wrong = [s for s, answer in zip(strings, answers, strict=True) if answer != sum(s) % 2]
    picture = Path(run[-1], "automaton.png")
    picture.parent.mkdir(exist_ok=True)
    picture.touch()  # of an earlier certificate
    code, _, record = certify(capsys, run, "--exhaustive", "6")
    assert code == bool(wrong) == is_needed
    assert picture.exists() == (record["automaton"] is not None)
    if wrong:
        shown = record["verdict"].removeprefix("differs at ")
        assert len(shown) == len(wrong[0]), "the shortest string on which they differ"
        assert tuple("ab".index(c) for c in shown) in wrong


def test_random_strings_alone_can_reject_a_network(parity, capsys, monkeypatch):
    """A single answer is wrong: that to the last random string."""
    sample = regular.sample

    def answer_wrongly(*arguments):
        answers, contents = sample(*arguments)
        answers.answers[-1][-1] ^= 1
        return answers, contents

    monkeypatch.setattr(regular, "sample", answer_wrongly)
    monkeypatch.setattr(regular, "learn", lambda *_: None)  # no automaton of the network has this answer
    code, _, record = certify(capsys, parity, "--exhaustive", "5")
    streams = ALL.draw(np.random.default_rng(44), 10, 60)
    assert (code, record["verdict"]) == (1, f"differs at {format_string('ab', tuple(streams[-1]))}")


@pytest.mark.parametrize("strings", [100, 150, 4987])
def test_a_wrong_automaton_is_compared_with_strings_of_many_lengths(strings):
    """It is right for the shortest strings only: a third state answers wrongly after three symbols."""
    parity = REGULAR["parity_check"]().automaton
    late = Automaton(np.array([[2, 3], [3, 2], [4, 5], [5, 4], [1, 0], [0, 1]]), np.array([0, 1, 0, 1, 1, 0]))
    counts = []
    for automaton in (parity, late):
        result = Certificate("parity_check")
        describe_learned(result, automaton, REGULAR["parity_check"](), [], strings)
        (line,) = [line for line in result.measured if "labels of the task differ" in line]
        counts.append([int(n.replace(",", "")) for n in re.findall(r"^[\d,]+|\d+$", line)])
    (count, right), (_, wrong) = counts
    assert abs(count - strings) <= 40, "as many of each of 80 lengths"
    assert right == 0
    assert wrong > count / 4


def test_the_strings_of_exhaustive_are_limited(parity, invoke):
    error = invoke("certify", *parity, "--exhaustive", "24", expect=2)
    assert "--exhaustive: expected 1 to 23 for parity_check, found 24" in error


@pytest.mark.parametrize(("task", "shortest", "longest"), [("missing_duplicate", 2, 11), ("solve_equation", 3, 16)])
def test_the_shortest_strings_of_exhaustive_exist(tmp_path, invoke, task, shortest, longest):
    run = write_run(tmp_path, f"formal/stacktrans/{task}", *SMALL[:6])
    error = invoke("certify", *run, "--exhaustive", shortest - 1, expect=2)
    assert f"expected {shortest} to {longest} for {task}, found {shortest - 1}" in error


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_networks_of_every_precision_are_certified_in_float32(tmp_path, capsys, precision):
    run = write_run(tmp_path, "formal/stacktrans/reverse_string", *SMALL, f"trainer.precision={precision}")
    _, printed, record = certify(capsys, run, "--exhaustive", "3", "--strings", "100", "--max-length", "40")
    error = float(re.search(r"float32 against float64 at 40 symbols: (\S+)", printed)[1])
    assert 0 < error < 1e-4
    assert record["checkpoint"] == run[3], "the path, because it is no checkpoint of the run"


def test_a_network_with_negated_answers_is_rejected(tmp_path, capsys):
    def weights(state):
        state = build_parity(state)
        state["head.weight"] *= -1
        return state

    code, _, record = certify(
        capsys, write_run(tmp_path, *parity_options(), *SMALL, weights=weights), "--exhaustive", "5"
    )
    assert (code, record["verdict"]) == (1, "differs at a")


def test_a_network_trained_on_wrong_labels_is_rejected(tmp_path, capsys):
    """Training of the last layer turns the answers of a network that computes parity to the opposite ones."""
    right = write_run(tmp_path / "right", *parity_options(), *SMALL, weights=build_parity)
    model, task, rng = load_run(right[1], right[3]).model, TASKS["parity_check"], np.random.default_rng(0)
    optimizer = torch.optim.Adam([model.output_head.weight], 0.1)
    for length in [*range(1, 9)] * 12:
        batch = task.sample(rng, 64, length)
        tokens = torch.from_numpy(np.column_stack([batch.inputs, np.full(64, task.num_symbols)]))
        logits = model(tokens).logits[:, -1]
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(1 - batch.targets[:, 0])).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (logits.argmax(1).numpy() != batch.targets[:, 0]).all()
    trained = write_run(tmp_path, *parity_options(), *SMALL, weights=lambda _: model.state_dict())
    code, _, record = certify(capsys, trained, "--exhaustive", "5")
    assert (code, record["verdict"]) == (1, "differs at a")


def test_a_network_that_forgets_differs_after_many_repetitions(tmp_path, capsys, monkeypatch):
    """The symbol `a` multiplies s - 1/2 by a factor below 1, until the answer of state 1 is no longer far enough."""

    def weights(state):
        state = build_parity(state)
        state["layers.0.memory.feedback_read"][0, 0] = 2  # slope 1 at s = 1/2
        state["layers.0.memory.feedback_token"][0, 0] = -1
        state["head.weight"][1, 0] = -1.1
        return state

    s, wrong_after = 0.5 + 0.5 * np.tanh(1.0), None  # after b
    for n in range(1, 2000):
        s = 0.5 + 0.5 * np.tanh(2 * s - 1)
        if 2 * s - 1.1 < 0:
            wrong_after = n + 1
            break
    assert wrong_after is not None
    run = write_run(tmp_path, *parity_options(), *SMALL, weights=weights)
    model, known = load_run(run[1], run[3]).model, REGULAR["parity_check"]()
    strings, automaton = regular.list_loops(known, wrong_after), known.automaton
    expected = automaton.outputs[automaton.run(strings)]
    for length in range(1, wrong_after + 1):  # after b, other words than a may fail earlier
        tokens = np.column_stack([strings[:, :length], np.full(len(strings), 2)])
        with torch.no_grad():
            answers = model(torch.from_numpy(tokens)).logits[:, -1].argmax(-1).numpy()
        if (answers != expected[:, length - 1]).any():
            break
    for batch_size in (None, 16):
        machine = NetworkMachine(model, 2, batch_size=batch_size)
        found, _, loops, repeated = regular.repeat_loops(machine, known, 3 * wrong_after, 3 * wrong_after)
        assert loops == 8
        assert repeated < loops
        assert len(found) == length
        assert sum(found) % 2 == 1
    monkeypatch.setattr(regular, "MAX_STATES", 10)
    code, printed, record = certify(capsys, run, "--exhaustive", "5", "--max-length", str(length - 1))
    assert (code, record["verdict"]) == (1, f"differs at {format_string('ab', tuple(found))}")
    assert "the network has more than 10 states" not in printed, "a rounded slot is 0 or 1"
    assert "with slots rounded to multiples of 1/8, strings of every length reach only 3 states" in printed


def test_a_network_that_answers_every_symbol_is_read_as_in_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(regular, "MAX_STATES", 20)
    monkeypatch.setattr(regular, "limit_queries", lambda _: 50)
    run = write_run(tmp_path, "formal/stacktrans-gated", "data.task=word_problem_s3", *SMALL)
    model, strings = load_run(run[1], run[3]).model, ALL.draw(np.random.default_rng(0), 5, 9)
    machine = NetworkMachine(model, 6, batch_size=16, answers_every_token=True)
    with torch.no_grad():
        expected = model(torch.from_numpy(strings)).logits
    cache = ReadState()
    for i in range(9):
        cache = machine.read(cache, strings[:, i : i + 1])
        torch.testing.assert_close(machine.answer(cache, 5), expected[:, i : i + 1])
    code, _, record = certify(capsys, run, "--exhaustive", "2")
    assert (code, record["verdict"][:10]) == (1, "differs at"), "it is not trained"


def test_loops_stop_after_all_states_repeat(parity):
    machine = NetworkMachine(load_run(parity[1], parity[3]).model, 2, batch_size=regular.BATCH_SIZE)
    read, lengths = machine.read, []
    machine.read = lambda cache, tokens: lengths.append(cache.length) or read(cache, tokens)
    assert regular.repeat_loops(machine, REGULAR["parity_check"](), 5000, 5000) == (None, None, 8, 8)
    assert 200 <= max(lengths) + 1 < 220


def test_the_bits_of_a_state_include_the_keys_and_values_in_the_window(tmp_path):
    run = write_run(tmp_path, *parity_options(), *SMALL, "model.attention_window=2")
    machine = NetworkMachine(load_run(run[1], run[3]).model, 2)
    cache = machine.read(ReadState(), np.array([[0, 0], [1, 0]]))
    for layer, state in cache.states.items():  # equal slots, but attention still sees the first symbol
        cache.states[layer] = state._replace(slots=state.slots[:1].repeat(2, *[1] * (state.slots.ndim - 1)))
    assert len(set(hash_rows(cache))) == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.attention_window=null",),
        *(("model.memory.axis=token_major",), ("model.memory.discipline=queue",), ("model.memory.read=global",)),
    ],
)
def test_stacks_that_are_not_full_are_compared(tmp_path, capsys, overrides):
    run = write_run(tmp_path, "formal/stacktrans", "data.task=parity_check", *SMALL, *overrides)
    _, printed, _ = certify(capsys, run, "--exhaustive", "3")
    assert "no proof for all lengths: it requires attention_window, " in printed
    assert "the slots of layer 0 separate the states of the automaton best: " in printed


@pytest.mark.parametrize("task", ["parity_check", "reverse_string"])
def test_hard_actions_are_not_tried_if_every_token_pushes(tmp_path, capsys, task):
    options = ["model.memory.discipline=push_only", "model.memory.action_noise=0"]
    options += ["model.memory.action_noise_warmup_steps=0"]
    run = write_run(tmp_path, "formal/stacktrans", f"data.task={task}", *SMALL, *options)
    _, printed, _ = certify(capsys, run, "--exhaustive", "3")
    assert "- hard actions were not tried: with discipline: push_only, every token pushes" in printed


def test_slots_that_are_not_allocated_count_as_zeros():
    slots, states = torch.randn(2, 40, 1, 3, 2), np.tile(np.arange(40) % 2, (2, 1))
    slots[0, :, :, 2] = 0
    slots[:, 1::2, :, 0] += 9
    full = regular.separate_states([{0: x} for x in slots], states)
    assert regular.separate_states([{0: slots[0, :, :, :2]}, {0: slots[1]}], states) == full
    assert 0 < full[0] < 0.5
    assert regular.separate_states([{0: torch.zeros(x.shape)} for x in slots], states) == {}, "an unused stack"


def test_reverse_string_by_a_known_stack(tmp_path, capsys):
    right = write_run(tmp_path / "right", *REVERSE, weights=build_reverse)
    code, printed, record = certify(capsys, right, "--exhaustive", "9")
    assert code == 0
    assert record["verdict"] == "agrees up to 64, is the automaton with hard actions"  # it has 64 slots
    assert "- all 1,022 strings of up to 9 symbols: network = pushdown automaton of the task" in printed
    assert (
        "in all cases, the most probable action of head 0 is that of the pushdown automaton. With hard actions, "
        in printed
    )
    assert "with hard actions (logits x 1e+04): wrong on 0 of " in printed
    for name, index in (
        ("head.weight", (0, 4)),
        ("layers.0.memory.actions", (0, 2, 3)),
        ("layers.0.memory.up", (4, 0)),
    ):
        wrong = write_run(tmp_path / name, *REVERSE, weights=flip(build_reverse, name, index))
        code, printed, record = certify(capsys, wrong, "--exhaustive", "5")
        assert (code, record["verdict"][:10], record["automaton"]) == (1, "differs at", None)
        assert "no proof beyond these strings: no head takes the actions" in printed
    deep = write_run(tmp_path / "deep", *REVERSE, "model.num_layers=2", weights=lambda state: state)
    assert "no proof beyond these strings: it requires one layer" in certify(capsys, deep, "--exhaustive", "3")[1]


@pytest.mark.parametrize(
    ("task", "build", "sharpness"),
    [
        ("reverse_string", build_reverse, 0.1),
        ("reverse_string", build_late_reverse, 0.1),
        ("stack_manipulation", build_manipulation, 0.15),
    ],
)
def test_proofs_for_stacks_hold_on_all_short_strings(tmp_path, task, build, sharpness):
    """Check networks whose weights are scaled at random: those with a proof are right up to the proved length."""
    options = [f"data.task={task}", f"model.memory.action_sharpness={sharpness}"]
    run = write_run(tmp_path, *REVERSE, *options, weights=build)
    model, generator = load_run(run[1], run[3]).model, torch.Generator().manual_seed(0)
    known, num_empty, proved = {k: v.clone() for k, v in model.state_dict().items()}, TASKS[task].output_length, []
    for spread in [0.0, 0.0, *[0.1] * 6, *[0.3] * 6, *[1.0] * 6]:
        weights = {k: v * (1 + spread * torch.randn(v.shape, generator=generator)) for k, v in known.items()}
        model.load_state_dict(weights)
        proof = stack_proof.prove(model, STACK_TASKS[task], num_empty)
        proved.append(proof.longest if proof else 0)
        if proof is not None and proof.longest:
            machine = NetworkMachine(model, TASKS[task].num_symbols)
            assert not stacks.compare_all(machine, STACK_TASKS[task], num_empty, min(proof.longest, 7)).differing
            assert (proof.heads, proof.is_late) == ([0], build is build_late_reverse)
    assert min(proved) == 0
    assert sorted(proved)[-3] > 1


@pytest.mark.parametrize(("strength", "tolerance"), [(0.0, 0.5), (0.1, 0.45), (1.0, None)])
def test_proofs_for_stacks_include_what_other_heads_may_read(tmp_path, strength, tolerance):
    """A second head takes no action of the automaton; with enough weight, it could change an answer."""

    def weights(state):
        state = build_reverse(state)
        state["layers.0.memory.down"][2, 1] = 1
        state["layers.0.memory.up"][4, 2] = strength
        return state

    run = write_run(tmp_path, *REVERSE, "model.memory.num_heads=2", weights=weights)
    proof = stack_proof.prove(load_run(run[1], run[3]).model, STACK_TASKS["reverse_string"], lambda length: length)
    assert (proof and proof.tolerance) == (tolerance and pytest.approx(tolerance))


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("head.weight", (1, 4), float("nan")),
        ("layers.0.memory.up", (4, 0), float("inf")),
        ("layers.0.memory.actions", (0, 2, 2), -8.0),  # no-op is nearly as probable as push
    ],
)
def test_no_proof_without_finite_weights_or_clear_actions(tmp_path, name, index, value):
    def weights(state):
        build_reverse(state)[name][index] = value
        return state

    run = write_run(tmp_path, *REVERSE, weights=weights)
    model = load_run(run[1], run[3]).model
    assert stack_proof.prove(model, STACK_TASKS["reverse_string"], lambda length: length) is None


@pytest.mark.parametrize(("sharpness", "proved", "fails_at"), [(0.1, 25, 45), (0.06, 5, 12)])
def test_soft_actions_limit_the_proved_length(tmp_path, sharpness, proved, fails_at):
    options = f"model.memory.action_sharpness={sharpness}"
    run = write_run(tmp_path, *REVERSE, options, weights=build_reverse)
    model, task, rng = load_run(run[1], run[3]).model, STACK_TASKS["reverse_string"], np.random.default_rng(0)
    assert stack_proof.prove(model, task, lambda length: length).longest == proved
    for length, is_right in ((proved, True), (fails_at, False)):
        strings = [rng.integers(0, 2, (200, length))]
        found = stacks.compare_random(NetworkMachine(model, 2), task, lambda length: length, strings)
        assert (found.differing == 0) == is_right


def test_random_strings_alone_can_reject_a_stack(tmp_path, capsys):
    run = write_run(tmp_path, *REVERSE, "model.memory.action_sharpness=0.06", weights=build_reverse)
    code, printed, record = certify(capsys, run, "--exhaustive", "5")
    assert "all 62 strings of up to 5 symbols: network = pushdown automaton" in printed
    shown = record["verdict"].removeprefix("differs at ")
    assert (code, 5 < len(shown) <= 64) == (1, True)


@pytest.mark.parametrize(
    ("config", "overrides", "finished", "message"),
    [
        ("formal/stacktrans/bucket_sort", (), True, "no automaton for task bucket_sort; supported: even_pairs, "),
        ("formal/stacktrans/parity_check", (), False, "the run is not finished; resume it with fit --run"),
        ("formal/lstm", ("data.task=parity_check",), True, "the model has no stack over the tokens; give a run with "),
        (
            *("formal/stacktrans/even_pairs", ("model.causal=false", "model.attention_window=null"), True),
            "the model is bidirectional (model.causal: false); give a causal run",
        ),
        ("arithmetic/addition", (), True, "trained on arithmetic; give a run on a formal language"),
    ],
)
def test_runs_without_a_certificate_are_one_line(tmp_path, capsys, config, overrides, finished, message):
    run = write_run(tmp_path, config, *overrides, finished=finished)
    assert cli.main(["certify", *run]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: certify: ")
    assert message in line
