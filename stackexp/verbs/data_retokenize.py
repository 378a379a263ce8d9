"""Convert token files to another tokenizer.

SOURCE is a token file (.npy, .bin) or a folder with such files at any depth. Each document is decoded, then encoded
with the new tokenizer. The new files have the same names. Their records contain the bytes of text, so that bits per
byte are comparable across vocabularies. Complete files are kept; rerun the same command to resume.
"""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from stackexp.verbs.parser import Parser, at_least

USAGE = "SOURCE --to FOLDER --from TOKENIZER.json --tokenizer TOKENIZER.json"
EXAMPLES = (
    "data retokenize data/olmo/v2 --to data/olmo-49152/v2 --from gpt-neox-20b.json --tokenizer tokenizer.json",
    "data retokenize ptb.npy --to data/mine --from gpt-neox-20b.json --tokenizer shards/tokenizer.json",
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a token file or a folder of them")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder for the new files")
    parser.add_argument(
        "--from", dest="old", type=Path, required=True, metavar="FILE", help="tokenizer.json with which SOURCE was made"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE", help="tokenizer.json to encode with")
    end_of_text = "id that ends documents in SOURCE (default: found in the files)"
    parser.add_argument("--end-of-text", type=at_least(0), metavar="ID", help=end_of_text)


def run(args: Namespace) -> int:
    from stackexp.data.retokenize import Retokenizer
    from stackexp.data.tokenizer import KnownTokenizer, load_tokenizer

    old, new = KnownTokenizer.read(args.old), load_tokenizer(args.tokenizer)
    records = Retokenizer(old, new, args.end_of_text).retokenize(args.source, args.to)
    print(_format_records(records))
    if replaced := sum(record.replaced_documents or 0 for record in records.values()):
        print(f"{replaced:,} documents contain bytes that are not UTF-8, replaced by U+FFFD", file=sys.stderr)
    print(f"to validate on these files:\n  data.validation.NAME={args.to}")
    return 0


def _format_records(records: dict[str, Any]) -> str:
    from stackexp.tables import format_table

    rows = []
    for name, record in records.items():
        counts = (record.documents, record.tokens, record.text_bytes)
        rows.append([name, *(f"{count:,}" for count in counts), f"{record.text_bytes / record.tokens:.3f}"])
    return format_table(rows, header=["file", "documents", "tokens", "bytes of text", "bytes/token"], align="<>>>>")
