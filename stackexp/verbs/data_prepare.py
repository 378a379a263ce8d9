"""`stackexp data prepare`: text or token files -> a prepared set of token shards."""

import argparse
import hashlib
import itertools
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from stackexp.errors import ConfigError, RunError
from stackexp.verbs.parser import Parser

EXAMPLES = [
    "data prepare texts/ --to shards/ --vocab-size 32768 --context-length 1024",
    "data prepare dolma/ --to shards/ --tokenizer tokenizer.json --workers 8",
    "data prepare dolma/ --to shards/ --tokenizer tokenizer.json --launcher slurm --tasks 64 --workers 8",
    "data prepare dolma/ --to shards/ --tokenizer tokenizer.json --part 3/64",
    "data prepare --config quickstart",
]
ABOUT = """\
SOURCE is a file or a folder of .txt, .md, .rst, .py (a document each), .jsonl, .jsonl.gz, .json.gz or .jsonl.zst (a
document a line, under "text"), or of token files (.npy, .bin: raw uint16 as OLMo's, or a real .npy; documents end
with end-of-text). Killed or interrupted, the same command goes on where it was. Lines that hold no document are
counted and listed in FOLDER/bad_lines.log.

Several machines share the work: --launcher slurm submits an array of --tasks, each with --workers processes, and a
job that merges. By hand: start the command with --part 1/N ... --part N/N, anywhere, then once without --part, which
checks what they made, does what is missing, and merges. The result is the same, bit for bit.
"""
SLURM = ("partition", "account", "qos", "time")
BAD_LINES_SHOWN = 10


def main(argv: list[str]) -> int:
    """Run the verb. Raises ConfigError for a mistake on the command line, RunError for what goes wrong later."""
    parser = _parser()
    options, rest = parser.split(argv)  # the rest: overrides after --config, else SOURCE
    if options.config:
        if options.to or (rest and "=" not in rest[0] and not rest[0].startswith("-")):
            parser.error("--config prepares the config's own corpus; it takes neither SOURCE nor --to")
        if options.part or options.launcher == "slurm":
            parser.error("--config prepares a small corpus; it takes neither --part nor --launcher slurm")
        return _prepare_config(options.config, rest)
    unexpected = [argument for argument in rest if argument.startswith("-")] or rest[1:]
    if unexpected:
        parser.error(f"unexpected argument {unexpected[0]}")
    if not rest or not options.to:
        parser.error("expected SOURCE --to FOLDER, or --config NAME_OR_PATH")
    if (options.tokenizer is None) == (options.vocab_size is None):
        parser.error("give either --tokenizer FILE, or --vocab-size N to train one")
    for name, least in {"vocab_size": 300, "context_length": 2, "workers": 1, "tasks": 1, "unit_bytes": 1}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')}: expected an integer >= {least}, found {value}")
    _check_sharing(parser, options)
    if options.launcher == "slurm":
        return _submit(Path(rest[0]), options)
    return _prepare_source(Path(rest[0]), options)


def _check_sharing(parser: Parser, options: argparse.Namespace) -> None:
    """Turn --part into (i, n). Raises ConfigError for options that do not go together."""
    if options.part is not None:
        found = re.fullmatch(r"(\d+)/(\d+)", options.part)
        part = found and (int(found[1]), int(found[2]))
        if not part or not 1 <= part[0] <= part[1]:
            parser.error(f"--part: expected I/N with 1 <= I <= N, such as 3/64, found {options.part}")
        options.part = part
    if options.launcher == "slurm":
        if options.tasks is None:
            parser.error("--launcher slurm: say with --tasks N how many tasks share the work")
        if options.part:
            parser.error("give --part, or --launcher slurm, which gives each task its part")
    else:
        for name in ("tasks", *SLURM):
            if getattr(options, name) is not None:
                parser.error(f"--{name} is for --launcher slurm")


def _parser() -> Parser:
    usage = "SOURCE --to FOLDER (--tokenizer FILE | --vocab-size N) [OPTIONS] | --config NAME_OR_PATH [KEY=VALUE ...]"
    parser = Parser("data prepare", "Turn text or token files into token shards.", EXAMPLES, usage, ABOUT)
    parser.add_argument("--to", metavar="FOLDER", help="where the prepared set goes")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="a Hugging Face tokenizer.json")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="train a byte-level BPE of N tokens on the text")
    parser.add_argument("--context-length", type=int, default=2048, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per CPU)")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad line")
    parser.add_argument("--config", action="append", metavar="NAME_OR_PATH", help="prepare a config's own corpus")
    parser.add_argument(
        "--unit-bytes", type=int, default=1 << 24, metavar="N", help="small files share a unit of work (%(default)s)"
    )
    parser.add_argument("--part", metavar="I/N", help="only part I of N; without it all are merged")
    parser.add_argument("--launcher", choices=["local", "slurm"], default="local", help="default: %(default)s")
    parser.add_argument("--tasks", type=int, metavar="N", help="of the Slurm array, of --workers processes each")
    for name in SLURM:
        parser.add_argument(f"--{name}", metavar="WORD" if name != "time" else "D-HH:MM:SS", help="as sbatch's")
    return parser


def _prepare_source(source: Path, options: argparse.Namespace) -> int:
    if options.workers:  # also the library's threads, where there is one process and while a tokenizer is trained
        os.environ.setdefault("RAYON_NUM_THREADS", str(options.workers))
    from stackexp.data.packing import BAD_LINES
    from stackexp.data.prepare import prepare

    folder = Path(options.to)
    corpus = prepare(
        source,
        folder,
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
        context_length=options.context_length,
        workers=options.workers,
        strict=options.strict,
        unit_bytes=options.unit_bytes,
        part=options.part,
    )
    if options.part:
        i, n = options.part
        print(f"{folder}: part {i} of {n} is done; when all are, the same command without --part merges them")
        return 0
    print(
        f"{folder}: {corpus.documents:,} documents, {corpus.bytes:,} bytes, {corpus.tokens:,} tokens, "
        f"{corpus.sequences:,} sequences of {corpus.context_length}"
    )
    print(f"{corpus.bad_lines:,} bad lines{':' if corpus.bad_lines else ''}")
    with open(folder / BAD_LINES, encoding="utf-8") as log:
        for line in itertools.islice(log, BAD_LINES_SHOWN):
            print(f"  {line}", end="")
    if corpus.bad_lines > BAD_LINES_SHOWN:
        print(f"  and {corpus.bad_lines - BAD_LINES_SHOWN:,} more: {folder / BAD_LINES}")
    print("to train on it:")
    print(f"  data.kind=shards data.path={folder}")
    print(f"  data.vocab_size={corpus.vocab_size} data.context_length={corpus.context_length}")
    print(f"to validate on it:\n  data.validation.NAME={folder}")
    return 0


def _submit(source: Path, options: argparse.Namespace) -> int:
    """Submit an array of parts, and a job that merges when all have ended, however: it does what they left undone."""
    from stackexp.data.prepare import Plan, begin
    from stackexp.sweeps import slurm
    from stackexp.sweeps.schema import Resources

    workers = options.workers or 1
    resources = Resources(**{name: getattr(options, name) for name in SLURM}, cpus_per_task=workers)
    for name, problem in resources.problems():
        raise ConfigError(f"data prepare: --{name}: {problem}")
    if not slurm.available():
        raise ConfigError("data prepare --launcher slurm: there is no sbatch here; start it where Slurm's commands are")
    folder = Path(options.to).absolute()
    plan = Plan(source.absolute(), options.tokenizer, options.vocab_size, options.context_length, options.unit_bytes)
    name = f"prepare-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if found := slurm.jobs_named(name):
        ids = ",".join(sorted(set(found)))
        raise RunError(f"{folder}: Slurm is at it already, jobs {ids}; wait for them, or end them with scancel {ids}")
    begin(plan, folder)  # after that: where sources have changed it waits until none is at work
    if (folder / "corpus.json").exists():
        return _prepare_source(source, options)
    tasks, logs = min(options.tasks, len(plan.units)), folder / "jobs"
    logs.mkdir(exist_ok=True)
    command = _command(plan, folder, workers, options.strict)
    shared = ["--requeue", "--open-mode=append", "--nodes=1", "--ntasks=1", *slurm.resource_options(resources)]
    part = f"#!/bin/bash\nexec {command} --part $SLURM_ARRAY_TASK_ID/{tasks}\n"
    array = slurm.submit(name, part, f"--array=1-{tasks}", f"--output={logs}/%A_%a.txt", *shared)
    after = [f"--dependency=afterany:{array}", f"--output={logs}/%j-merge.txt"]
    try:
        merge = slurm.submit(name, f"#!/bin/bash\nexec {command}\n", *after, *shared)
    except RunError as error:
        raise RunError(
            f"job {array}, an array of {tasks} tasks, is submitted, but not the job that merges ({error}); when they "
            f"have ended, merge them with: {command}"
        ) from error
    print(f"job {array}: {tasks} tasks for {len(plan.units)} units of work in {len(plan.sources)} files")
    print(f"job {merge}: checks and merges them into {folder}")
    print(f"how they stand:  squeue --jobs={array},{merge}\ntheir logs:      {logs}")
    print(f"done when {folder / 'corpus.json'} is there; the same command without --launcher does what is missing")
    return 0


def _command(plan: Any, folder: Path, workers: int, strict: bool) -> str:
    """The command that prepares, as a line for the shell."""
    words = [sys.executable, "-m", "stackexp", "data", "prepare", plan.source, "--to", folder, "--workers", workers]
    if plan.tokenizer:
        words += ["--tokenizer", plan.tokenizer.absolute()]
    else:
        words += ["--vocab-size", plan.vocab_size]
    words += ["--context-length", plan.context_length, "--unit-bytes", plan.unit_bytes] + ["--strict"] * strict
    return shlex.join(map(str, words))


def _prepare_config(configs: list[str], overrides: list[str]) -> int:
    from stackexp.config.compose import compose
    from stackexp.config.data import StdlibConfig

    data = compose(configs, overrides).data
    if not isinstance(data, StdlibConfig):
        raise ConfigError(
            f"data prepare: data.kind {data.kind} has no corpus of its own; give SOURCE --to FOLDER and set data.path"
        )
    from stackexp.data.shards import TokenSet
    from stackexp.data.stdlib import prepare_stdlib

    sets = prepare_stdlib(data)
    for folder in (sets.train, *sets.validation.values(), *sets.test.values()):
        corpus = TokenSet(folder).corpus
        print(f"{folder}: {corpus.documents:,} documents, {corpus.tokens:,} tokens, {corpus.sequences:,} sequences")
    return 0
