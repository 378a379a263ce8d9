"""`stackexp data retokenize`: token files of one tokenizer -> token files of another."""

import sys
from functools import partial
from pathlib import Path

from stackexp.verbs.parser import Parser

EXAMPLES = [
    "data retokenize data/olmo/v2 --to data/olmo-49152/v2 --from gpt-neox-20b.json --tokenizer tokenizer.json",
    "data retokenize ptb.npy --to data/mine --from gpt-neox-20b.json --tokenizer shards/tokenizer.json",
]
ABOUT = """\
SOURCE is a token file (.npy, .bin) or a folder of them, at any depth. Every document is decoded and encoded again;
the new files keep their names, and their records hold the bytes of text, so that bits per byte compare across
vocabularies. A file that is there already, made of the same, stays: the same command goes on after a kill.
"""


def main(argv: list[str]) -> int:
    """Run the verb. Raises ConfigError for a mistake on the command line, RunError for what goes wrong later."""
    parser = _parser()
    options = parser.parse(argv)
    if options.end_of_text is not None and options.end_of_text < 0:
        parser.error(f"--end-of-text {options.end_of_text}: ids are not negative")
    from stackexp.data.evaluation_sets import KnownTokenizer
    from stackexp.data.retokenize import Retokenizer
    from stackexp.data.tokenizer import load_tokenizer

    old, new = KnownTokenizer.read(getattr(options, "from")), load_tokenizer(options.tokenizer)
    records = Retokenizer(old, new, options.end_of_text).retokenize(options.source, options.to)
    print(_summary(records))
    if replaced := sum(record.replaced_documents or 0 for record in records.values()):
        print(f"{replaced:,} documents hold bytes that are no UTF-8; U+FFFD stands for them", file=sys.stderr)
    print(f"to validate on it:\n  data.validation.NAME={options.to}")
    return 0


def _parser() -> Parser:
    usage = "SOURCE --to FOLDER --from TOKENIZER.json --tokenizer TOKENIZER.json"
    parser = Parser("data retokenize", "Re-encode token files with another tokenizer.", EXAMPLES, usage, ABOUT)
    add = partial(parser.add_argument, type=Path, required=True)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a token file, or a folder of them")
    add("--to", metavar="FOLDER", help="where the new files go")
    add("--from", metavar="FILE", help="the tokenizer.json that made SOURCE")
    add("--tokenizer", metavar="FILE", help="the tokenizer.json to encode with")
    parser.add_argument(
        "--end-of-text", type=int, metavar="ID", help="the id that ends a document of SOURCE (default: looked for)"
    )
    return parser


def _summary(records: dict) -> str:
    from stackexp.reports.tables import table

    rows = [["file", "documents", "tokens", "bytes of text", "bytes/token"]]
    for name, record in records.items():
        counts = (record.documents, record.tokens, record.text_bytes)
        rows.append([name, *(f"{count:,}" for count in counts), f"{record.text_bytes / record.tokens:.3f}"])
    return table(rows, align="<>>>>", rules=[1])
