"""Certify a run: extract its automaton, compare it with that of its task, and write what was proved and measured."""

import copy
import dataclasses
import platform
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stackexp.certification import automata, expressions, picture, regular, stack_proof, stacks
from stackexp.certification.automata import REGULAR, STACK_TASKS, Automaton, format_string
from stackexp.certification.machine import NetworkMachine, ReadState
from stackexp.config.model import TransformerConfig
from stackexp.errors import ConfigError, RunError
from stackexp.evaluation.loading import LoadedRun, load_run
from stackexp.files import write_json
from stackexp.models.memories.stack import StackMemory
from stackexp.reports.report import save_figure
from stackexp.tasks import TASKS
from stackexp.tasks.definition import Task, TaskBatch

EXHAUSTIVE = {
    **{"even_pairs": 16, "parity_check": 16, "cycle_navigation": 10, "modular_arithmetic": 7},
    **{"missing_duplicate": 10, "word_problem_s3": 6, "word_problem_s5": 2},
    **dict.fromkeys(("word_problem_z60", "word_problem_a4_z5", "word_problem_a5"), 2),
    **{"reverse_string": 12, "stack_manipulation": 7, expressions.BRACKETS: 12, expressions.EQUATIONS: 12},
}
"""Supported task -> the default for `--exhaustive`: at most 131,070 strings."""
MAX_STRINGS = 10_000_000  # `--exhaustive` gives at most this many strings of full length
MAX_SYMBOLS = 16  # the same for expressions and equations, in symbols
PREFIXES = 20  # strings that one random stream gives
HARDNESS = 1e4  # factor on the action logits: gaps above 0.002 give a probability of 1 in float32
GRIDS = (1024, 128, 32, 8, 1)  # inverse steps that slots are rounded to
SEED = 44
WITHOUT_ACTIONS = "hard actions were not tried: with discipline: push_only, every token pushes"


@dataclass
class Certificate:
    """The verdict with its reasons. `proved` and `measured` are sentences."""

    task: str
    differs_at: list[tuple[int, ...]] = field(default_factory=list)
    is_automaton_with: str | None = None  # the change of the network under which this is proved; "" for none
    agrees_up_to: int = 0
    proved: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    missing_rules: list[dict[str, Any]] | None = None
    automaton: dict[str, Any] | None = None
    figure: Any = None

    @property
    def verdict(self) -> str:
        """The line that the verb prints last."""
        if self.differs_at:
            return f"differs at {format_string(TASKS[self.task].symbols, min(self.differs_at, key=len))}"
        if self.is_automaton_with == "":
            return "is the automaton"
        proof = f", is the automaton with {self.is_automaton_with}" if self.is_automaton_with else ""
        return f"agrees up to {self.agrees_up_to}{proof}"


def run(
    path: str, ckpt_path: str | None, strings: int, max_length: int, exhaustive: int | None, out: str | None
) -> int:
    """Certify a run, print the certificate, and write certificate.json and automaton.png. Return 1 if it differs."""
    started, loaded = time.monotonic(), load_run(path, ckpt_path)
    task = check_run(loaded)
    num_symbols = TASKS[task].num_symbols
    limit = MAX_SYMBOLS if task in expressions.OPERATORS_OF else int(np.log(MAX_STRINGS) / np.log(num_symbols))
    shortest = TASKS[task].min_length
    if exhaustive is not None and not shortest <= exhaustive <= limit:
        raise ConfigError(f"certify: --exhaustive: expected {shortest} to {limit} for {task}, found {exhaustive}")
    loaded.model.float()  # trainer.precision can be bf16-true or 64-true
    batch_size = regular.BATCH_SIZE if task in REGULAR and can_enumerate(loaded) else None
    machine = NetworkMachine(
        loaded.model, num_symbols, batch_size=batch_size, answers_every_token=TASKS[task].answers_every_token
    )
    folder = Path(out) if out else loaded.folder.path / "certificate"
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{loaded.checkpoint}, {task}\n")
    if task in REGULAR:
        certificate = certify_regular(loaded, machine, strings, max_length, exhaustive)
    elif task in STACK_TASKS:
        certificate = certify_stack(loaded, machine, strings, max_length, exhaustive)
    else:
        certificate = certify_expressions(loaded, machine, strings, max_length, exhaustive)
    write_certificate(certificate, loaded, folder, time.monotonic() - started)
    for title, lines in (("proved", certificate.proved), ("measured", certificate.measured)):
        print("\n".join([f"{title}:", *(f"- {line}" for line in lines), ""]))
    print(f"written: {folder}\n\nverdict: {certificate.verdict}")
    return 1 if certificate.differs_at else 0


def _announce(step: str) -> None:
    """Print the step that begins now, because each may take minutes."""
    print(f"checking: {step}", file=sys.stderr, flush=True)


def check_run(loaded: LoadedRun) -> str:
    """Return the task of a run. Raises RunError or ConfigError if it cannot be certified."""
    where, config = f"certify: {loaded.folder.path}", loaded.config
    if config.data.kind != "formal_language":
        raise ConfigError(f"{where}: trained on {config.data.kind}; give a run on a formal language")
    task = config.data.task
    if task not in EXHAUSTIVE:
        raise ConfigError(f"{where}: no automaton for task {task}; supported: {', '.join(EXHAUSTIVE)}")
    if not loaded.folder.result.is_file():
        raise RunError(f"{where}: the run is not finished; resume it with fit --run")
    memories = loaded.model.memories if isinstance(config.model, TransformerConfig) else []
    if not memories or not isinstance(memories[0], StackMemory) or memories[0].axis == "depth":
        raise ConfigError(f"{where}: the model has no stack over the tokens; give a run with model.memory.axis=time")
    if not config.model.causal:
        raise ConfigError(f"{where}: the model is bidirectional (model.causal: false); give a causal run")
    return task


def can_enumerate(loaded: LoadedRun) -> bool:
    """Return True if the network's state is its hashed bits (`hash_rows`), which may repeat as the string grows."""
    model, memory = loaded.config.model, loaded.model.memories[0].config
    is_shift_invariant = model.positional in ("none", "alibi") and model.attention_window is not None
    return is_shift_invariant and memory.read == "top" and memory.discipline == "stack"


def certify_regular(
    loaded: LoadedRun, machine: NetworkMachine, num_strings: int, max_length: int, exhaustive: int | None
) -> Certificate:
    """Certify a network on a regular task."""
    task = TASKS[loaded.config.data.task]
    known = REGULAR[task.name]()
    expected, grammar = known.automaton, known.grammar
    result, rng = Certificate(task.name), np.random.default_rng(SEED)
    n = exhaustive or EXHAUSTIVE[task.name]
    _announce(f"all strings of up to {n} symbols")
    table = regular.tabulate(machine, n, grammar)
    streams = grammar.draw(rng, max(1, num_strings // PREFIXES), max_length)
    lengths = sorted(set(np.linspace(max_length / PREFIXES, max_length, PREFIXES).round().astype(int).tolist()))
    _announce(f"random strings of up to {max_length:,} symbols")
    drawn, contents = regular.sample(machine, streams, lengths, grammar)
    differing = [answers.compare(expected, known.contains) for answers in (table, drawn)]
    result.differs_at += [first for _, first in differing if first is not None]
    if differing[0][1] is None:
        result.agrees_up_to = n
        others = f", except for {differing[0][0]:,} that the task does not have" if differing[0][0] else ""
        strings = f"all {table.count:,} strings of up to {n} symbols{others}"
        result.proved.append(f"{strings}: network = automaton of the task")
    if known.strings:
        result.measured.append(f"strings: {known.strings}")
        add_task_strings(result, machine, task, num_strings, max_length)
    _announce("the automaton that L* learns")
    learned = regular.learn(machine, [table, drawn], known)
    describe_learned(result, learned, known, [table, drawn], num_strings)
    result.measured.append(
        f"{drawn.count:,} random strings ({PREFIXES} prefixes of each of {len(streams)} streams) of up to "
        f"{max_length:,} symbols: network and task differ on {differing[1][0]}"
    )
    add_loops(result, loaded, machine, known, max_length)
    hard = harden(loaded, machine)
    add_closure(result, machine, hard, known)
    if hard is None:
        result.measured.append(WITHOUT_ACTIONS)
    else:
        short = regular.tabulate(hard, max(1, n - 3), grammar)
        long, _ = regular.sample(hard, streams[: max(1, len(streams) // 10)], lengths, grammar)
        wrong = sum(answers.compare(expected)[0] for answers in (short, long))
        result.measured.append(
            f"with hard actions (logits x {HARDNESS:.0e}): wrong on {wrong} of "
            f"all strings of up to {max(1, n - 3)} symbols and {long.count:,} random ones"
        )
    states = np.stack([expected.run(strings)[:, -1] for strings in drawn.strings])
    half = len(contents) // 2
    if ratios := regular.separate_states(contents[half:], states[half:]):
        layer, ratio = min(ratios.items(), key=lambda item: item[1])
        result.measured.append(
            f"the slots of layer {layer} separate the states of the automaton best: root mean square distance of two "
            f"random strings in one state / in two states: {ratio:.2g}"
        )
    add_gap(result, machine, min(table.gap, drawn.gap), drawn.strings[-1][:8])
    return result


def add_task_strings(
    result: Certificate, machine: NetworkMachine, task: Task, num_strings: int, max_length: int
) -> None:
    """Compare the network with the labels of random strings of the task; hardly any of its grammar are in the task."""
    reader, count, num_wrong = dataclasses.replace(machine, batch_size=None), 0, 0
    for batch in draw_strings(task, np.random.default_rng(SEED + 2), num_strings, max_length):
        is_string = np.ones(len(batch.inputs), bool)
        answers, _ = regular.ask(reader, reader.read(ReadState(), batch.inputs), is_string)
        wrong = np.flatnonzero(answers != batch.targets[:, -1])
        result.differs_at += [tuple(map(int, batch.inputs[row])) for row in wrong[:1]]
        count, num_wrong = count + len(answers), num_wrong + len(wrong)
    result.measured.append(
        f"{count:,} random strings of the task of up to {max_length:,} symbols, lengths in geometric steps: network "
        f"and labels differ on {num_wrong}"
    )


def describe_learned(
    result: Certificate,
    learned: Automaton | None,
    known: automata.RegularTask,
    tables: list[regular.Answers],
    num_strings: int,
) -> None:
    """Compare the learned automaton with that of the task: their product, and random strings with the task's labels."""
    if learned is None:
        result.measured.append(f"L* found no automaton with fewer than {regular.limit_queries(known):,} queries")
        return
    task = result.task
    result.automaton = automata.describe_automaton(task, learned)
    arrows = {(state, target) for state, row in enumerate(learned.transitions.tolist()) for target in row}
    if len(arrows) <= picture.MAX_ARROWS:
        result.figure = picture.draw_automaton(task, learned)
    agreeing = sum(answers.compare(learned)[0] for answers in tables)
    result.measured.append(
        f"L* learned an automaton of {learned.num_states} states; it differs from the network on {agreeing} of "
        f"{sum(answers.count for answers in tables):,} strings, all short and all random ones"
    )
    difference = automata.find_difference(learned, known.automaton)
    if difference is None:
        result.measured.append(
            "product of the learned and the task's automaton: equal on all strings of any length; each state of the "
            "learned automaton has a string that reaches it, and each pair a string that distinguishes it"
        )
    else:
        shown = format_string(TASKS[task].symbols, difference)
        result.measured.append(f"product of the learned and the task's automaton: the shortest difference is {shown}")
    batches = draw_strings(TASKS[task], np.random.default_rng(SEED + 1), num_strings, 1000)
    is_wrong = [learned.outputs[learned.run(b.inputs)[:, -1]] != b.targets[:, -1] for b in batches]
    result.measured.append(
        f"{sum(map(len, is_wrong)):,} random strings of up to 1,000 symbols, lengths in geometric steps: automaton and "
        f"labels of the task differ on {sum(int(wrong.sum()) for wrong in is_wrong)}"
    )


def add_loops(
    result: Certificate, loaded: LoadedRun, machine: NetworkMachine, known: automata.RegularTask, max_length: int
) -> None:
    """Repeat short words in every state, up to and beyond the maximum length."""
    longest = 5 * max_length
    _announce(f"repeated words of up to {longest:,} symbols")
    is_cheap = loaded.config.model.attention_window is not None  # otherwise a read takes all earlier keys and values
    first, outside, count, repeated = regular.repeat_loops(machine, known, longest, longest if is_cheap else max_length)
    symbols = TASKS[result.task].symbols
    words = "random words of up to two symbols in random states" if count == regular.MAX_LOOPS else ""
    words = words or "each word of up to two symbols in each state"
    if outside is not None:
        shown = format_string(symbols, outside)
        where = f"{shown}, a string of {len(outside):,} symbols that the task does not have"
        result.measured.append(f"repeated words: the network differs at {where}")
    if first is None:
        asked = f"every symbol up to {longest if is_cheap else max_length:,}"
        asked += "" if is_cheap else f" and every {regular.STRIDE} symbols up to {longest:,}"
        result.measured.append(
            f"{count:,} loops ({words}), with answers after {asked}: no {'other ' if outside else ''}difference; "
            f"the state of {repeated} repeats bit for bit"
        )
    else:
        result.differs_at.append(first)
        result.measured.append(
            f"{count:,} loops ({words}): the network differs at {format_string(symbols, first)}, a string of "
            f"{len(first):,} symbols"
        )


def add_closure(
    result: Certificate, machine: NetworkMachine, hard: NetworkMachine | None, known: automata.RegularTask
) -> None:
    """Try to prove the network equal to the automaton by enumerating all states that it reaches.

    If they are too many, the same is tried with one-hot actions, with slots that are rounded after each token, and with
    both.
    """
    if machine.batch_size is None or hard is None:
        result.measured.append(
            "no proof for all lengths: it requires attention_window, positional: alibi or none, read: top and "
            "discipline: stack"
        )
        return
    changes = [("", machine), ("hard actions", hard)]
    for words, subject in list(changes):
        start = f"{words} and " if words else ""
        for grid in GRIDS:
            rounded = f"slots rounded to {'whole numbers' if grid == 1 else f'multiples of 1/{grid}'}"
            changes.append((start + rounded, dataclasses.replace(subject, grid=grid)))
    for words, subject in changes:
        _announce(f"all states that strings reach, with {words or 'the weights as trained'}")
        closed = regular.close_states(subject, known.grammar)
        if closed is None:
            continue
        states, count = closed
        difference = automata.find_difference(states, known.automaton)
        start = f"with {words}, " if words else ""
        reached = f"{start}strings of every length reach only {count:,} states, compared bit for bit"
        reached += f" (symbol by symbol, in batches of {machine.batch_size})"
        if difference is None:
            result.is_automaton_with = words
            result.proved.append(f"{reached}; merged by their answers they are the automaton of the task")
            return
        shown = format_string(TASKS[result.task].symbols, difference)
        note = "" if known.contains(difference) else ", which is no string of the task"
        result.measured.append(f"{reached}; merged by their answers they differ from the task at {shown}{note}")
        if not words:
            result.differs_at += [difference] * known.contains(difference)
            return
    result.measured.append(
        f"no proof for all lengths: the network has more than {regular.MAX_STATES:,} states, its bits depend on the "
        "row of the batch, or its answers differ from the task, as trained and with each change"
    )


def harden(loaded: LoadedRun, machine: NetworkMachine) -> NetworkMachine | None:
    """Return the machine with actions of probability 0 or 1, except for tiny gaps; None if it has no actions."""
    if loaded.model.memories[0].always_pushes:
        return None
    sharpness = HARDNESS * loaded.config.model.memory.action_sharpness
    return dataclasses.replace(machine, model=loaded.modify(action_sharpness=sharpness).model.float())


def add_gap(result: Certificate, machine: NetworkMachine, gap: float, strings: np.ndarray) -> None:
    """Compare the smallest gap of the answers with the rounding error of the logits, from the model in float64."""
    logits = []
    for model in (machine.model, copy.deepcopy(machine.model).double()):
        reader = dataclasses.replace(machine, model=model, batch_size=None)
        logits.append(reader.answer(reader.read(ReadState(), strings), len(strings)).double())
    error = float((logits[0] - logits[1]).abs().max())
    result.measured.append(
        f"smallest gap between the two largest logits of an answer: {gap:.3g}; float32 against float64 at "
        f"{strings.shape[1]:,} symbols: {error:.2g}"
    )


def certify_stack(
    loaded: LoadedRun, machine: NetworkMachine, num_strings: int, max_length: int, exhaustive: int | None
) -> Certificate:
    """Certify a network on a stack task."""
    task = TASKS[loaded.config.data.task]
    expected, result, rng = STACK_TASKS[task.name], Certificate(task.name), np.random.default_rng(SEED)
    n = exhaustive or EXHAUSTIVE[task.name]
    _announce(f"all strings of up to {n} symbols")
    short = stacks.compare_all(machine, expected, task.output_length, n)
    num_slots = machine.model.memories[0].num_slots
    longest = min(max_length, num_slots)
    batches = draw_strings(task, rng, num_strings, longest)
    _announce(f"random strings of up to {longest:,} symbols")
    labels_differ = sum(_count_wrong_labels(expected, batch) for batch in batches)
    long = stacks.compare_random(machine, expected, task.output_length, [batch.inputs for batch in batches])
    result.differs_at += [found.first for found in (short, long) if found.first is not None]
    if not short.differing:
        result.agrees_up_to = n
        result.proved.append(
            f"all {short.count:,} strings of up to {n} symbols: network = pushdown automaton of the task"
        )
    _announce("a proof for strings of every length")
    add_stack_proof(result, loaded, expected, num_slots)
    result.measured += [
        f"{long.count:,} random strings of up to {longest:,} symbols, lengths in geometric steps: network and pushdown "
        f"automaton differ on {long.differing}",
        f"the same strings: pushdown automaton and labels of the task differ on {labels_differ}",
        f"the stack has {num_slots} slots (eval_num_slots): longer contents are lost",
    ]
    hard = harden(loaded, machine)
    if hard is None:
        result.measured.append(WITHOUT_ACTIONS)
    else:
        few = [batch.inputs[: max(1, len(batch.inputs) // 10)] for batch in batches]
        hardened = stacks.compare_random(hard, expected, task.output_length, few)
        result.measured.append(
            f"with hard actions (logits x {HARDNESS:.0e}): wrong on {hardened.differing} of {hardened.count:,} random "
            f"strings"
        )
    add_gap(result, machine, min(short.gap, long.gap), task.sample(rng, 4, longest).inputs)
    if result.is_automaton_with is not None:
        result.automaton = automata.describe_pushdown(task.name, expected.pushdown)
        result.figure = picture.draw_pushdown(task.name, expected.pushdown)
    return result


def draw_strings(task: Task, rng: np.random.Generator, count: int, longest: int) -> list[TaskBatch]:
    """Draw about `count` strings of up to `longest` symbols, a batch for each length of a geometric sequence."""
    lengths = np.geomspace(task.min_length, longest, 4 * PREFIXES).round().astype(int)
    return [task.sample(rng, max(1, round(count / len(lengths))), int(length)) for length in lengths]


def _count_wrong_labels(task: automata.StackTask, batch: Any) -> int:
    answers = task.pushdown.run(batch.inputs, batch.targets.shape[1])
    return int(((answers != np.where(batch.mask, batch.targets, automata.NO_STRING)).any(1)).sum())


def add_stack_proof(result: Certificate, loaded: LoadedRun, expected: automata.StackTask, num_slots: int) -> None:
    """Try to prove the network equal to the pushdown automaton for strings of every length."""
    if obstacle := stack_proof.find_obstacle(loaded.config.model):
        result.measured.append(f"no proof beyond these strings: it {obstacle}")
        return
    proof = stack_proof.prove(loaded.model, expected, TASKS[result.task].output_length)
    if proof is None:
        reason = "no head takes the actions of the automaton, or the other heads could change an answer"
        result.measured.append(f"no proof beyond these strings: {reason}")
        return
    heads = f"head{'s' * (len(proof.heads) > 1)} {' and '.join(map(str, proof.heads))}"
    late = ", one token late until the first empty token" if proof.is_late else ""
    result.is_automaton_with = "hard actions"
    result.agrees_up_to = max(result.agrees_up_to, min(proof.longest, num_slots))
    result.proved += [
        "the actions and the pushed vectors depend on a token and the one before; in all cases, the most probable "
        f"action of {heads} is that of the pushdown automaton{late}. With hard actions, all answers to strings of "
        "every length are right, if there are as many slots as symbols",
        f"as trained, other actions have at most the probability {proof.largest_leak:.2g} for each token, and answers "
        f"are right while these add up to less than {proof.tolerance:.2g}: in all strings of up to "
        f"{proof.longest:,} symbols, if there are as many slots",
    ]


def certify_expressions(
    loaded: LoadedRun, machine: NetworkMachine, num_strings: int, max_length: int, exhaustive: int | None
) -> Certificate:
    """Certify a network on arithmetic or equations with brackets, and list the rules that it lacks."""
    task = TASKS[loaded.config.data.task]
    n, result = exhaustive or EXHAUSTIVE[task.name], Certificate(task.name)
    short = expressions.list_strings(task.name, n)
    _announce(f"all {len(short):,} strings of up to {n} symbols")
    wrong = expressions.find_wrong(machine, task.name, short)
    _announce(f"all {len(expressions.RULES)} orders of three operations")
    if not wrong:
        result.agrees_up_to = n
        result.proved.append(f"all {len(short):,} strings of up to {n} symbols: network = task")
    result.missing_rules = expressions.find_missing_rules(machine, task.name)
    for rule in result.missing_rules:
        failing, digits = rule["wrong_expressions"], rule["digits"].items()
        at = ", ".join(f"{name} in {' '.join(known)}" for name, known in digits if len(known) < expressions.MODULUS)
        result.measured.append(
            f"{rule['rule']}: {len(failing)} of {rule['of']} wrong{at and f' ({at})'}, such as {failing[0]}"
        )
        wrong += failing
    result.measured.append(f"rules checked: all {len(expressions.RULES)} orders of three operations, with all digits")
    _announce(f"random strings of up to {max_length:,} symbols")
    batches = draw_strings(task, np.random.default_rng(SEED), num_strings, max_length)
    valued = [
        ("".join(task.symbols[i] for i in string), int(value))
        for batch in batches
        for string, value in zip(batch.inputs, batch.targets[:, 0], strict=True)
    ]
    random_wrong = expressions.find_wrong(machine, task.name, valued)
    result.measured.append(
        f"{len(valued):,} random strings of up to {max_length:,} symbols, lengths in geometric steps: network and task "
        f"differ on {len(random_wrong)}"
    )
    result.differs_at += [tuple(map(task.symbols.index, text)) for text in wrong + random_wrong]
    return result


def write_certificate(result: Certificate, loaded: LoadedRun, folder: Path, seconds: float) -> None:
    """Write certificate.json and automaton.png. A checkpoint of the run itself is named without its path."""
    checkpoint = loaded.checkpoint
    if loaded.folder.has_checkpoint(checkpoint):
        checkpoint = checkpoint.resolve().relative_to(loaded.folder.checkpoints.resolve())
    command = shlex.join(["python", "-m", "stackexp", *sys.argv[1:]]) if sys.argv[1:2] == ["certify"] else None
    write_json(
        folder / "certificate.json",
        {
            "verdict": result.verdict,
            "task": result.task,
            "command": command,
            "checkpoint": str(checkpoint),
            "proved": result.proved,
            "measured": result.measured,
            "automaton": result.automaton,
            "missing_rules": result.missing_rules,
            "seconds": round(seconds, 1),
            "torch": torch.__version__,
            "processor": platform.machine(),
        },
    )
    picture = folder / "automaton.png"
    if result.figure is None:
        picture.unlink(missing_ok=True)  # of an earlier certificate
    else:
        save_figure(result.figure, picture)
