"""Turn text or token files into a prepared set of token shards.

SOURCE is a file or a folder of .txt, .md, .rst or .py files (one document each), of .jsonl, .jsonl.gz, .json.gz or
.jsonl.zst files (one document per line, under the key "text"), of .parquet files (one document per row, in the column
"text"), or of token files (.npy, .bin: raw uint16 like OLMo's, or NumPy's format; documents end with end-of-text).
After a kill, the same command resumes. Lines without a document, or longer than 256 MiB, are counted and listed in
FOLDER/bad_lines.log.

--filter 'COLUMN OPERATOR VALUE' keeps the documents that fulfill a condition on another column of JSON Lines or parquet
files; several --filter must all be fulfilled. OPERATOR is ==, !=, >=, <=, > or <. a.b is the field b of the column a.
Documents without a value are left out.

Several machines can share the work: --launcher slurm submits an array of --tasks with --workers processes each, and a
job that merges. Without Slurm, run the command with --part 1/N ... --part N/N on any machines. Then run it once without
--part: it verifies the parts, writes missing units, and merges. The result is the same, bit for bit.
"""

import argparse
import itertools
import os
import re
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from stackexp.errors import ConfigError
from stackexp.verbs.parser import Parser, at_least

if TYPE_CHECKING:
    from stackexp.data.columns import Filter
    from stackexp.data.prepare import Plan
    from stackexp.data.shards import Corpus

USAGE = "SOURCE --to FOLDER (--tokenizer FILE | --vocab-size N) [OPTIONS] | --config NAME_OR_PATH [KEY=VALUE ...]"
EXAMPLES = (
    "data prepare texts/ --to shards/ --vocab-size 32768 --context-length 1024",
    "data prepare dolma/ --to shards/ --tokenizer tokenizer.json --workers 8",
    "data prepare fineweb-edu/ --to shards/ --tokenizer tokenizer.json --filter 'int_score>=4' --filter language==en",
    "data prepare dolma/ --to shards/ --tokenizer tokenizer.json --launcher slurm --tasks 64 --workers 8",
    "data prepare dolma/ --to shards/ --tokenizer tokenizer.json --part 3/64",
    "data prepare --config quickstart",
)
SLURM_OPTIONS = ("partition", "account", "qos", "time")
SOURCE_OPTIONS = (
    *("to", "tokenizer", "vocab_size", "context_length", "text_column", "filter", "workers", "strict", "unit_bytes"),
    *("part", "launcher", "tasks", *SLURM_OPTIONS),
)
SHOWN_BAD_LINES = 10


def add_arguments(parser: Parser) -> None:
    parser.accepts_overrides = True  # SOURCE is found among these words
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="folder of the prepared set")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="a Hugging Face tokenizer.json")
    vocab_size = "train a byte-level BPE of N tokens on the text"
    parser.add_argument("--vocab-size", type=at_least(300), metavar="N", help=vocab_size)
    context_length = "tokens per sequence (default: %(default)s)"
    parser.add_argument("--context-length", type=at_least(2), default=2048, metavar="N", help=context_length)
    parser.add_argument("--text-column", metavar="NAME", help="column of the text (default: text)")
    parser.add_argument(
        "--filter", action="append", default=[], type=_parse_filter, metavar="CONDITION", help="such as 'int_score>=3'"
    )
    parser.add_argument("--workers", type=at_least(1), metavar="N", help="processes (default: one per CPU)")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad line")
    parser.add_argument("--config", action="append", metavar="NAME_OR_PATH", help="prepare the corpus of a config")
    unit_bytes = "source bytes per unit of work (%(default)s)"
    parser.add_argument("--unit-bytes", type=at_least(1), default=1 << 24, metavar="N", help=unit_bytes)
    parser.add_argument("--part", type=_parse_part, metavar="I/N", help="write only part I of N, without merging")
    parser.add_argument("--launcher", choices=["local", "slurm"], default="local", help="default: %(default)s")
    parser.add_argument("--tasks", type=at_least(1), metavar="N", help="size of the Slurm array")
    for name in SLURM_OPTIONS:
        parser.add_argument(f"--{name}", metavar="D-HH:MM:SS" if name == "time" else "NAME", help="as for sbatch")


def run(args: Namespace) -> int:
    """Prepare SOURCE here or with Slurm, or prepare the corpus of a config."""
    if args.config:
        return _prepare_config(args)
    source = _check_arguments(args)
    if args.workers:  # limits the threads of tokenizers while it trains, or with a single process
        os.environ.setdefault("RAYON_NUM_THREADS", str(args.workers))
    from stackexp.data.columns import Columns
    from stackexp.data.prepare import Plan

    source = source.absolute() if args.launcher == "slurm" else source
    columns = Columns(args.text_column or "text", tuple(args.filter))
    plan = Plan(source, args.tokenizer, args.vocab_size, args.context_length, args.unit_bytes, columns)
    return _submit(plan, args) if args.launcher == "slurm" else _prepare(plan, args)


def _parse_part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 <= I <= N, such as 3/64, found {text}")
    return int(match[1]), int(match[2])


def _parse_filter(text: str) -> "Filter":
    from stackexp.data.columns import parse_filter

    try:
        return parse_filter(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _check_arguments(args: Namespace) -> Path:
    """Return SOURCE. Raises ConfigError for missing, excess or conflicting arguments."""
    error, words = args.parser.error, args.overrides
    if unexpected := [word for word in words if word.startswith("-")] or words[1:]:
        error(f"unexpected argument {unexpected[0]}")
    if not words or not args.to:
        error("expected SOURCE --to FOLDER, or --config NAME_OR_PATH")
    if (args.tokenizer is None) == (args.vocab_size is None):
        error("give either --tokenizer FILE, or --vocab-size N to train one")
    if args.launcher == "slurm":
        if args.tasks is None:
            error("--launcher slurm requires --tasks N, the number of tasks that share the work")
        if args.part:
            error("--part and --launcher slurm exclude each other; each task of the array is a part")
    elif excess := [name for name in ("tasks", *SLURM_OPTIONS) if getattr(args, name) is not None]:
        error(f"--{excess[0]} requires --launcher slurm")
    return Path(words[0])


def _prepare(plan: "Plan", args: Namespace) -> int:
    from stackexp.data.prepare import prepare

    corpus = prepare(plan, args.to, workers=args.workers, strict=args.strict, part=args.part)
    if corpus is None:
        number, count = args.part
        print(f"{args.to}: part {number} of {count} is done; after the last part, run the command without --part")
    else:
        _print_corpus(corpus, args.to)
    return 0


def _print_corpus(corpus: "Corpus", folder: Path) -> None:
    from stackexp.data.units import BAD_LINES
    from stackexp.terminal import wrap_text

    size = f"{corpus.documents:,} documents, {corpus.bytes:,} bytes, {corpus.tokens:,} tokens"
    print(wrap_text(f"{folder}: {size}, {corpus.sequences:,} sequences of {corpus.context_length}", indent=2))
    if corpus.filtered_documents:
        print(f"{corpus.filtered_documents:,} documents filtered out")
    print(f"{corpus.bad_lines:,} bad lines{':' if corpus.bad_lines else ''}")
    with open(folder / BAD_LINES, encoding="utf-8") as log:
        for line in itertools.islice(log, SHOWN_BAD_LINES):
            print(f"  {line}", end="")
    if corpus.bad_lines > SHOWN_BAD_LINES:
        print(f"  and {corpus.bad_lines - SHOWN_BAD_LINES:,} more: {folder / BAD_LINES}")
    print(f"to train on it:\n  data.kind=shards data.path={folder}")
    print(f"  data.vocab_size={corpus.vocab_size} data.context_length={corpus.context_length}")
    print(f"  data.global_batch_tokens={8 * corpus.context_length}")
    print(f"to validate on it:\n  data.validation.NAME={folder}")


def _submit(plan: "Plan", args: Namespace) -> int:
    from stackexp.sweeps.prepare_jobs import submit_preparation
    from stackexp.sweeps.schema import Resources

    folder = args.to.absolute()
    resources = Resources(**{name: getattr(args, name) for name in SLURM_OPTIONS}, cpus_per_task=args.workers or 1)
    jobs = submit_preparation(plan, folder, tasks=args.tasks, resources=resources, strict=args.strict)
    if jobs is None:  # nothing to do
        return _prepare(plan, args)
    print(f"job {jobs.array}: {jobs.tasks} tasks for {len(plan.units)} units of work in {len(plan.sources)} files")
    print(f"job {jobs.merge}: verifies and merges them into {folder}")
    print(f"progress:  squeue --jobs={jobs.array},{jobs.merge}\nlogs:      {jobs.logs}")
    print(f"{folder / 'corpus.json'} marks a finished set; the same command without --launcher writes missing units")
    return 0


def _prepare_config(args: Namespace) -> int:
    """Prepare the standard library corpus with the vocabulary and context length of a config."""
    words = args.overrides
    given = [word for word in words[:1] if "=" not in word and not word.startswith("-")]
    changed = [name for name in SOURCE_OPTIONS if getattr(args, name) != args.parser.get_default(name)]
    if given := given + [f"--{name.replace('_', '-')}" for name in changed]:
        args.parser.error(f"--config prepares the config's own corpus; it takes only KEY=VALUE, found {given[0]}")
    from stackexp.config.compose import compose
    from stackexp.config.data import StdlibConfig

    data = compose(args.config, words).data
    if not isinstance(data, StdlibConfig):
        raise ConfigError(
            f"data prepare: data.kind {data.kind} has no corpus of its own; give SOURCE --to FOLDER and set data.path"
        )
    from stackexp.data.shards import TokenSet
    from stackexp.data.stdlib import prepare_stdlib

    sets = prepare_stdlib(data)
    for folder in (sets.train, *sets.validation.values(), *sets.test.values()):
        assert folder is not None
        corpus = TokenSet(folder).corpus
        print(f"{folder}: {corpus.documents:,} documents, {corpus.tokens:,} tokens, {corpus.sequences:,} sequences")
    return 0
