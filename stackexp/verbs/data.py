"""Prepare, download, convert and inspect datasets."""

import argparse
import itertools
import json
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stackexp.data import olmo
from stackexp.errors import RunError, suggest_name
from stackexp.tables import format_table
from stackexp.terminal import wrap_text
from stackexp.verbs.parser import Parser, Verb, count, flag, setting, split_names

if TYPE_CHECKING:
    from stackexp.data.readers import Filter
    from stackexp.data.shards import Corpus

SHOWN_BAD_LINES = 10
DTYPES = ("uint16", "uint32", "int32", "int64", "uint64")


class Prepare(Verb):
    """Turn text or token files into a prepared set of token shards.

    SOURCE is a file or a folder of .txt, .md, .rst or .py files (one document each), of .jsonl, .jsonl.gz, .json.gz or
    .jsonl.zst files (one document per line, under the key "text"), of .parquet files (one document per row, in the
    column "text"), or of token files (.npy, .bin: the format of NumPy, llm.c or Megatron with its .idx, or raw uint16
    like OLMo's, unless --dtype names another type; documents end with end-of-text). After a kill, the same command
    resumes. Lines without a document, or longer than 256 MiB, are counted and listed in FOLDER/bad_lines.log.

    --filter 'COLUMN OPERATOR VALUE' keeps the documents that fulfill a condition on another column of JSON Lines or
    parquet files; several --filter must all be fulfilled. OPERATOR is ==, !=, >=, <=, > or <. a.b is the field b of the
    column a. Documents without a value are left out.

    Several machines can share the work: run the command with --part 1/N ... --part N/N, for example as tasks of a Slurm
    array. Then run it once without --part: it writes missing units and merges. The result is the same, bit for bit.
    """

    examples = (
        "data prepare texts/ --to shards/ --vocab-size 32768 --context-length 1024",
        "data prepare dolma/ --to shards/ --tokenizer tokenizer.json --workers 8",
        "data prepare fineweb/ --to shards/ --tokenizer tokenizer.json --filter 'int_score>=4' --filter language==en",
        "data prepare dolma/ --to shards/ --tokenizer tokenizer.json --part 3/64",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("source", type=Path, metavar="SOURCE", help="a file, or a folder of files")
        parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder of the prepared set")
        tokenizer = parser.add_mutually_exclusive_group(required=True)
        tokenizer.add_argument("--tokenizer", type=Path, metavar="FILE", help="a Hugging Face tokenizer.json")
        tokenizer.add_argument("--vocab-size", **count(300, "train a byte-level BPE of N tokens on the text"))
        parser.add_argument("--context-length", **count(2, "tokens per sequence", 2048))
        packing = "concatenate (default): cut at every sequence end; best_fit: cut few documents"
        parser.add_argument("--packing", choices=("concatenate", "best_fit"), default="concatenate", help=packing)
        parser.add_argument("--text-column", default="text", metavar="NAME", help="column of the text (%(default)s)")
        condition = setting("CONDITION", "such as 'int_score>=3'", type=_parse_filter)
        parser.add_argument("--filter", action="append", default=[], **condition)
        parser.add_argument("--workers", **count(1, "processes (default: one per CPU)"))
        parser.add_argument("--strict", **flag("stop at the first bad line"))
        parser.add_argument("--unit-bytes", **count(1, "source bytes per unit of work", 1 << 24))
        parser.add_argument("--part", type=_parse_part, metavar="I/N", help="write only part I of N, without merging")
        _add_dtype(parser)

    def run(self, args: Namespace) -> int:
        if args.workers:  # limits the threads of tokenizers while it trains, or with a single process
            os.environ.setdefault("RAYON_NUM_THREADS", str(args.workers))
        from stackexp.data.prepare import Preparation, prepare
        from stackexp.data.readers import Columns

        columns = Columns(args.text_column, tuple(args.filter))
        names = ("source", "tokenizer", "vocab_size", "context_length", "unit_bytes", "dtype", "packing")
        plan = Preparation(columns=columns, **{name: getattr(args, name) for name in names})
        corpus = prepare(plan, args.to, workers=args.workers, strict=args.strict, part=args.part)
        if corpus is None:
            number, count = args.part
            print(f"{args.to}: part {number} of {count} is done; after the last part, run the command without --part")
        else:
            _print_corpus(corpus, args.to)
        return 0


def _add_dtype(parser: Parser) -> None:
    dtype = "integer type of raw token files (default: uint16)"
    parser.add_argument("--dtype", choices=DTYPES, metavar="TYPE", help=f"{dtype}; one of {', '.join(DTYPES)}")


def _parse_part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 <= I <= N, such as 3/64, found {text}")
    return int(match[1]), int(match[2])


def _parse_filter(text: str) -> "Filter":
    from stackexp.data.readers import parse_filter

    try:
        return parse_filter(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _print_corpus(corpus: "Corpus", folder: Path) -> None:
    from stackexp.data.units import BAD_LINES

    size = f"{corpus.documents:,} documents, {corpus.bytes:,} bytes, {corpus.tokens:,} tokens"
    print(wrap_text(f"{folder}: {size}, {corpus.sequences:,} sequences of {corpus.context_length}", indent=2))
    if corpus.cut_by_concatenation:
        print(f"{corpus.cut_documents:,} documents cut; concatenation would cut {corpus.cut_by_concatenation:,}")
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


class Fetch(Verb):
    """Download OLMo's perplexity sets V2 and V3, and check them.

    Each set is written to FOLDER/v2 or FOLDER/v3: a file of raw token ids (uint16, GPT-NeoX-20B), and a record next to
    it. `data.validation=v2` (v3, olmo) finds them in the default folder. Complete files are kept, so rerun the same
    command after any failure.

    --mirror takes a URL that contains v2_small_gptneox20b/, or a folder. The folder has the layout of the server (as
    `wget -x -nH --cut-dirs=2` writes it) or of FOLDER.
    """

    examples = (
        "data fetch v2",
        "data fetch v2 v3 --only c4_en pile",
        "data fetch v3 --to /scratch/olmo",
        "data fetch v2 v3 --mirror copies/",
    )

    def add_arguments(self, parser: Parser) -> None:
        names = sorted({name for names in olmo.NAMES.values() for name in names}, key=str.lower)
        version = f"13 sets, 11 sets: {', '.join(names)}"
        parser.add_argument("version", nargs="+", choices=list(olmo.NAMES), metavar="v2|v3", help=version)
        add = parser.add_argument
        add("--only", nargs="+", action="extend", default=[], metavar="SET", help="fetch only these sets")
        add("--to", type=Path, default=olmo.DEFAULT_FOLDER, metavar="FOLDER", help="default: %(default)s")
        parser.add_argument("--mirror", metavar="URL|FOLDER", help="copy the files from here")

    def run(self, args: Namespace) -> int:
        """Fetch the sets and print a table of them. Raises RunError if sets are still missing."""
        sets = _choose_sets(args)
        if args.mirror:
            _check_mirror(args.parser, args.mirror)
        from stackexp.data.fetch import fetch

        records = fetch(sets, args.to, args.mirror)
        if records:
            print(_format_records(records))
        if missing := [str(olmo_set) for olmo_set in sets if olmo_set not in records]:
            names = ", ".join(missing)
            raise RunError(f"{len(missing)} of {len(sets)} sets could not be fetched: {names}; see the errors above")
        print(f"in {', '.join(str(args.to / v) for v in sorted({s.version for s in sets}))}")
        return 0


def _choose_sets(args: Namespace) -> list[olmo.OlmoSet]:
    versions = sorted(set(args.version))
    sets = [olmo_set for version in versions for olmo_set in olmo.list_olmo_sets(version)]
    only = [name for argument in args.only for name in split_names(argument)]
    names = sorted({olmo_set.name for olmo_set in sets}, key=str.lower)
    for name in only:
        if name not in names:
            hint = suggest_name(name, names) or f"; choose from {', '.join(names)}"
            args.parser.error(f"--only {name}: not a set of {' or '.join(versions)}{hint}")
    return [olmo_set for olmo_set in sets if not only or olmo_set.name in only]


def _check_mirror(parser: Parser, mirror: str) -> None:
    scheme, separator, rest = mirror.partition("://")
    if not separator and not Path(mirror).is_dir():
        parser.error(f"--mirror {mirror}: no such folder; a URL begins with http:// or https://")
    if "@" in rest.partition("/")[0]:  # the message must not repeat the password
        parser.error("--mirror: the URL contains a user name or password; remove it")
    if separator and scheme not in ("http", "https"):
        parser.error(f"--mirror {mirror}: expected http://..., https://... or a folder")


def _format_records(records: dict[olmo.OlmoSet, Any]) -> str:
    rows = []
    for olmo_set, record in records.items():
        counts = (record.tokens // olmo.INSTANCE_LENGTH, record.tokens, record.bytes)
        rows.append([str(olmo_set), *(f"{count:,}" for count in counts), record.sha256[:12]])
    header = ["set", f"instances of {olmo.INSTANCE_LENGTH}", "tokens", "bytes", "sha256"]
    return format_table(rows, header=header, align="<>>><")


class English(Verb):
    """Build a corpus of English manuals, dictionaries and books from Debian packages, and prepare it.

    Needs `apt-get download` and dpkg-deb, so Debian or Ubuntu, but no root and no installation. About 280 MB are
    downloaded. The list of packages has their versions and SHA-256, so every machine gets the same text. Whole genres
    are held out as validation and test sets. Rerun the same command after any failure: finished steps are kept.

    --latest takes the versions that the machine's mirror has, and leaves out packages that it lacks. The text then
    differs from the published one. FOLDER/text/sources.json has versions, hashes, licenses and sizes.
    """

    examples = (
        "data english",
        "data english --to /scratch/english --vocab-size 8192 --context-length 512",
        "data english --latest --packages my_packages.yaml",
    )

    def add_arguments(self, parser: Parser) -> None:
        from stackexp.data.path_checks import ENGLISH

        parser.add_argument("--to", type=Path, default=ENGLISH, metavar="FOLDER", help="default: %(default)s")
        parser.add_argument("--packages", type=Path, metavar="FILE", help="a list of packages (default: the built-in)")
        parser.add_argument("--latest", **flag("take the versions of this machine's mirror"))
        parser.add_argument("--vocab-size", **count(300, "token ids of the tokenizer that is trained", 4096))
        parser.add_argument("--context-length", **count(2, "tokens per sequence", 256))
        parser.add_argument("--workers", **count(1, "processes that tokenize (default: one per CPU)"))

    def run(self, args: Namespace) -> int:
        from stackexp.data.debian import load_packages
        from stackexp.data.english import PACKAGES, build_english
        from stackexp.data.prepare import Preparation, prepare

        packages = load_packages(args.packages or PACKAGES)
        sources = build_english(args.to, packages, args.latest)
        plan = Preparation(args.to / "text/train", vocab_size=args.vocab_size, context_length=args.context_length)
        corpus = prepare(plan, args.to / "train", workers=args.workers)
        assert corpus is not None
        print(_format_sizes(sources))
        is_published = sources["sha256"] == packages.sha256
        print(f"SHA-256 of the text: {sources['sha256']}, {'as' if is_published else 'not as'} in the list of packages")
        _print_corpus(corpus, args.to / "train")
        return 0


def _format_sizes(sources: dict[str, Any]) -> str:
    genres = {package["name"]: package["genre"] for package in sources["packages"]}
    rows = []
    for name, size in sources["sets"].items():
        section, _, item = name.partition("/")
        genre = genres.get(item, "") if section == "train" else item
        rows.append([name, genre, f"{size['documents']:,}", f"{size['bytes']:,}"])
    return format_table(rows, header=["set", "genre", "documents", "bytes"], align="<<>>")


class Retokenize(Verb):
    """Convert token files to another tokenizer.

    SOURCE is a token file (.npy, .bin) or a folder with such files at any depth. Each document is decoded, then encoded
    with the new tokenizer. The new files have the same names. Their records contain the bytes of text, so that bits per
    byte are comparable across vocabularies. Complete files are kept; rerun the same command to resume.
    """

    examples = (
        "data retokenize data/olmo/v2 --to data/olmo-49152/v2 --from gpt-neox-20b.json --tokenizer tokenizer.json",
        "data retokenize ptb.npy --to data/mine --from gpt-neox-20b.json --tokenizer shards/tokenizer.json",
    )

    def add_arguments(self, parser: Parser) -> None:
        add, new = parser.add_argument, "tokenizer.json to encode with"
        add("source", type=Path, metavar="SOURCE", help="a token file or a folder of them")
        add("--to", required=True, **setting("FOLDER", "folder for the new files", type=Path))
        old = setting("FILE", "tokenizer.json with which SOURCE was made", type=Path, dest="old")
        add("--from", required=True, **old)
        add("--tokenizer", required=True, **setting("FILE", new, type=Path))
        add("--end-of-text", **count(0, "id that ends documents in SOURCE (default: found in the files)"))
        _add_dtype(parser)

    def run(self, args: Namespace) -> int:
        from stackexp.data.retokenize import Retokenizer
        from stackexp.data.tokenizer import KnownTokenizer, load_tokenizer

        old, new = KnownTokenizer.read(args.old), load_tokenizer(args.tokenizer)
        records = Retokenizer(old, new, args.end_of_text, args.dtype).retokenize(args.source, args.to)
        print(_format_converted(records))
        if replaced := sum(record.replaced_documents or 0 for record in records.values()):
            print(f"{replaced:,} documents contain bytes that are not UTF-8, replaced by U+FFFD", file=sys.stderr)
        print(f"to validate on these files:\n  data.validation.NAME={args.to}")
        return 0


def _format_converted(records: dict[str, Any]) -> str:
    rows = []
    for name, record in records.items():
        counts = (record.documents, record.tokens, record.text_bytes)
        rows.append([name, *(f"{count:,}" for count in counts), f"{record.text_bytes / record.tokens:.3f}"])
    return format_table(rows, header=["file", "documents", "tokens", "bytes of text", "bytes/token"], align="<>>>>")


class Inspect(Verb):
    """Show the contents of a dataset and verify its files.

    PATH is a set made by `data prepare`, a token file (.npy, .bin), or a folder of several of these. Every file is
    compared with its recorded hash. The exit code is 1 if a file is missing, cut short or corrupt.
    """

    examples = (
        "data inspect shards/ --samples 5 --seed 1",
        "data inspect data/olmo/v2 --tokenizer gpt-neox-20b.json --samples 1",
        "data inspect part-000.npy --json",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("path", type=Path, metavar="PATH", help="a dataset, or a folder of datasets")
        parser.add_argument("--samples", **count(0, "samples to show", 3))
        parser.add_argument("--seed", **count(0, "choice of samples", 0))
        parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json of token ids without one")
        parser.add_argument("--json", **flag("print JSON"))

    def run(self, args: Namespace) -> int:
        """Inspect the datasets at a path; return 1 if a file is damaged."""
        from stackexp.data.inspection import InspectOptions, inspect_path
        from stackexp.data.tokenizer import KnownTokenizer

        tokenizer = KnownTokenizer.read(args.tokenizer) if args.tokenizer else None
        inspections = inspect_path(args.path, InspectOptions(args.samples, args.seed, tokenizer))
        if args.json:
            print(json.dumps([inspection.as_dict() for inspection in inspections], indent=2, ensure_ascii=False))
        else:
            print("\n".join(inspection.format() for inspection in inspections))
        return int(any(inspection.damage for inspection in inspections))
