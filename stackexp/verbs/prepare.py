"""`stackexp data prepare`: text -> a prepared set of token shards."""

import argparse
import itertools
from pathlib import Path

from stackexp.errors import ConfigError
from stackexp.verbs.parser import Parser

EXAMPLES = [
    "data prepare texts/ --to shards/ --vocab-size 32768 --context-length 1024",
    "data prepare dolma/ --to shards/ --tokenizer tokenizer.json --workers 8",
    "data prepare --config quickstart",
]
ABOUT = """\
SOURCE is a file or a folder of .txt, .md, .rst, .py (a document each), .jsonl, .jsonl.gz or .jsonl.zst (a document
a line, under "text"). Killed or interrupted, the same command goes on where it was. Lines that hold no document are
counted and listed in FOLDER/bad_lines.log.
"""
BAD_LINES_SHOWN = 10


def main(argv: list[str]) -> int:
    """Run the verb. Raises ConfigError for a mistake on the command line, RunError for what goes wrong later."""
    parser = _parser()
    options, rest = parser.split(argv)  # the rest: overrides after --config, else SOURCE
    if options.config:
        if options.to or (rest and "=" not in rest[0] and not rest[0].startswith("-")):
            parser.error("--config prepares the config's own corpus; it takes neither SOURCE nor --to")
        return _prepare_config(options.config, rest)
    unexpected = [argument for argument in rest if argument.startswith("-")] or rest[1:]
    if unexpected:
        parser.error(f"unexpected argument {unexpected[0]}")
    if not rest or not options.to:
        parser.error("expected SOURCE --to FOLDER, or --config NAME_OR_PATH")
    if (options.tokenizer is None) == (options.vocab_size is None):
        parser.error("give either --tokenizer FILE, or --vocab-size N to train one")
    for name, least in {"vocab_size": 300, "context_length": 2, "workers": 1}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')}: expected an integer >= {least}, found {value}")
    return _prepare_source(Path(rest[0]), options)


def _parser() -> Parser:
    usage = "SOURCE --to FOLDER (--tokenizer FILE | --vocab-size N) [OPTIONS] | --config NAME_OR_PATH [KEY=VALUE ...]"
    parser = Parser("data prepare", "Turn text into token shards.", EXAMPLES, usage, ABOUT)
    parser.add_argument("--to", metavar="FOLDER", help="where the prepared set goes")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="a Hugging Face tokenizer.json")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="train a byte-level BPE of N tokens on the text")
    parser.add_argument("--context-length", type=int, default=2048, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per CPU)")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad line")
    parser.add_argument("--config", action="append", metavar="NAME_OR_PATH", help="prepare a config's own corpus")
    return parser


def _prepare_source(source: Path, options: argparse.Namespace) -> int:
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
    )
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


def _prepare_config(configs: list[str], overrides: list[str]) -> int:
    from stackexp.config.compose import compose
    from stackexp.config.schema import StdlibConfig

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
