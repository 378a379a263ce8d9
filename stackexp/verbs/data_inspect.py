"""`stackexp data inspect`: a look inside prepared sets, token files and shards, and a check of every file."""

import json
import sys
from pathlib import Path
from typing import Any

from stackexp.verbs.parser import Parser

EXAMPLES = [
    "data inspect shards/",
    "data inspect shards/ --figure lengths.png --samples 5 --seed 1",
    "data inspect data/olmo/v2 --tokenizer gpt-neox-20b.json --samples 1",
    "data inspect part-000.npy --json",
]
ABOUT = """\
PATH is a set that `data prepare` made, a token file (.npy, .bin), a folder of MDS shards, or a folder of several of
these. Every file is compared with its recorded hash; exit code 1 if one is missing, cut short or corrupt.
"""


def main(argv: list[str]) -> int:
    """Run the verb; 1 if a file is damaged. Raises ConfigError for a mistake on the command line, else RunError."""
    parser = Parser(
        "data inspect", "Look into a set of tokens, and check its files.", EXAMPLES, "PATH [OPTIONS]", ABOUT
    )
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="pieces of text to show (default: 3)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which ones (default: 0)")
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="draw the lengths of the documents")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="of ids that come without their tokenizer.json")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    options, rest = parser.split(argv)
    if len(rest) != 1 or rest[0].startswith("-"):
        parser.error(f"unexpected argument {(rest[1:] or rest)[0]}" if rest else "expected PATH")
    for name in ("samples", "seed"):
        if getattr(options, name) < 0:
            parser.error(f"--{name}: expected an integer >= 0, found {getattr(options, name)}")
    if options.figure and options.figure.suffix not in (".png", ".pdf", ".svg"):
        parser.error(f"--figure: expected a name that ends in .png, .pdf or .svg, found {options.figure}")
    from stackexp.data.evaluation_sets import KnownTokenizer
    from stackexp.reports.data.inspection import Wish, inspect

    known = options.tokenizer and KnownTokenizer.read(options.tokenizer)
    found = inspect(Path(rest[0]), Wish(options.samples, options.seed, known, sys.stderr.isatty()))
    if options.json:
        print(json.dumps([one.as_dict() for one in found], indent=2, ensure_ascii=False))
    else:
        for one in found:
            _show(one)
    if options.figure:
        _draw(found, options.figure)
    return int(any(one.damage for one in found))


def _show(found: Any) -> None:
    print(f"{found.path}  {found.kind}")
    for name, fact in found.facts.items():
        print(f"  {name:<11} {fact}")
    if found.lengths and found.lengths.total:
        print(f"\n  {found.lengths.summary(found.unit)}")
        for line in found.lengths.bars():
            print(f"  {line}")
    for place, text in found.samples.items():
        print(f"\n  {place}:")
        for line in text.splitlines()[:12]:
            print(f"    | {''.join(c if c.isprintable() else ' ' for c in line)[:160]}")
    print()
    if found.checked:
        files = "1 file is as its" if found.checked == 1 else f"{found.checked:,} files are as their"
        print(f"  {files} index or record says")
    if found.unchecked:
        print(f"  not checked by hash: {found.unchecked}")
    for line in found.damage:
        print(f"  DAMAGED {line}")
    if found.damage and found.kind == "prepared set":
        print(f"  to mend it, delete {found.path / 'corpus.json'} and run the same data prepare command again")
    print()


def _draw(found: list[Any], path: Path) -> None:
    """One figure; of several sets one each, <stem>-<set>.png."""
    several = [one for one in found if one.lengths and one.lengths.total]
    for one in several:
        name = path if len(several) == 1 else path.with_name(f"{path.stem}-{one.path.stem}{path.suffix}")
        one.lengths.draw(name, f"{one.path.name}: {one.lengths.total:,} documents", one.unit, one.context_length)
        print(name)
    if not several:
        print("no figure: there are no documents whose lengths are known", file=sys.stderr)
