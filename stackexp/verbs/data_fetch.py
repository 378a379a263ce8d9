"""Download OLMo's perplexity sets V2 and V3, and check them.

Each set is written to FOLDER/v2 or FOLDER/v3: a file of raw token ids (uint16, GPT-NeoX-20B), and a record next to it.
`data.validation=v2` (v3, olmo) finds them in the default folder. Complete files are kept, so rerun the same command
after any failure.

--mirror takes a URL that contains v2_small_gptneox20b/, or a folder. The folder has the layout of the server (as
`wget -x -nH --cut-dirs=2` writes it) or of FOLDER.
"""

import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stackexp.config.suggestions import suggest_name
from stackexp.data import olmo
from stackexp.errors import RunError
from stackexp.verbs.parser import Parser, split_names

USAGE = "v2|v3 [--only SET ...] [--to FOLDER] [--mirror URL|FOLDER]"
EXAMPLES = (
    "data fetch v2",
    "data fetch v2 v3 --only c4_en pile",
    "data fetch v3 --to /scratch/olmo",
    "data fetch v2 v3 --mirror copies/",
)


def add_arguments(parser: Parser) -> None:
    names = sorted({name for names in olmo.NAMES.values() for name in names}, key=str.lower)
    parser.add_argument("version", nargs="*", metavar="v2|v3", help=f"13 sets, 11 sets: {', '.join(names)}")
    parser.add_argument("--only", nargs="+", action="extend", default=[], metavar="SET", help="fetch only these sets")
    parser.add_argument("--to", type=Path, default=olmo.DEFAULT_FOLDER, metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--mirror", metavar="URL|FOLDER", help="copy the files from here")
    parser.add_argument("--verify", action="store_true", help="also verify the SHA-256 of complete files")


def run(args: Namespace) -> int:
    """Fetch the sets and print a table of them. Raises RunError if sets are still missing."""
    sets = _choose_sets(args)
    if args.mirror:
        _check_mirror(args.parser, args.mirror)
    from stackexp.data.fetch import fetch

    result = fetch(sets, args.to, args.mirror, verify=args.verify)
    if result.records:
        print(_format_records(result.records), file=sys.stderr if result.unreachable else sys.stdout)
    if result.unreachable:
        _print_urls(result.unreachable, result.reason, args.mirror or olmo.BASE_URL)
        return 1
    if result.failed:
        names = ", ".join(map(str, result.failed))
        raise RunError(f"{len(result.failed)} of {len(sets)} sets could not be fetched: {names}; see the errors above")
    print(f"in {', '.join(str(args.to / v) for v in sorted({s.version for s in sets}))}")
    return 0


def _choose_sets(args: Namespace) -> list[olmo.OlmoSet]:
    versions = [version for argument in args.version for version in split_names(argument)]
    for version in versions:
        if version not in olmo.NAMES:
            args.parser.error(f"expected v2 or v3, found {version!r}")
    if not versions:
        args.parser.error("expected v2 or v3")
    sets = [olmo_set for version in olmo.NAMES if version in versions for olmo_set in olmo.list_olmo_sets(version)]
    only = [name for argument in args.only for name in split_names(argument)]
    names = sorted({olmo_set.name for olmo_set in sets}, key=str.lower)
    for name in only:
        if name not in names:
            hint = suggest_name(name, names) or f"; choose from {', '.join(names)}"
            args.parser.error(f"--only {name}: not a set of {' or '.join(versions)}{hint}")
    return [olmo_set for olmo_set in sets if not only or olmo_set.name in only]


def _check_mirror(parser: Parser, mirror: str) -> None:
    scheme, separator, rest = mirror.partition("://")
    if not separator:
        if not Path(mirror).is_dir():
            parser.error(f"--mirror {mirror}: no such folder; a URL begins with http:// or https://")
        return
    if "@" in rest.partition("/")[0]:  # the message must not repeat the password
        parser.error("--mirror: the URL contains a user name or password; remove it")
    if scheme not in ("http", "https"):
        parser.error(f"--mirror {mirror}: expected http://..., https://... or a folder")
    try:
        parts = urlsplit(mirror)
        is_valid = bool((parts.hostname or "").encode("idna")) and parts.port != 0 and re.fullmatch("[!-~]+", mirror)
    except ValueError:
        is_valid = False
    if not is_valid:
        parser.error(f"--mirror {mirror}: not a valid URL; encode special characters as %XX")


def _format_records(records: dict[olmo.OlmoSet, Any]) -> str:
    from stackexp.tables import format_table

    rows = []
    for olmo_set, record in records.items():
        counts = (record.tokens // olmo.INSTANCE_LENGTH, record.tokens, record.bytes)
        rows.append([str(olmo_set), *(f"{count:,}" for count in counts), record.sha256[:12]])
    header = ["set", f"instances of {olmo.INSTANCE_LENGTH}", "tokens", "bytes", "sha256"]
    return format_table(rows, header=header, align="<>>><")


def _print_urls(missing: list[olmo.OlmoSet], reason: str, base: str) -> None:
    """Print how to download the sets on another machine: one line on stderr, and the URLs on stdout."""
    base = base.rstrip("/")
    depth = len([part for part in urlsplit(base).path.split("/") if part])
    print(
        f"error: {base} cannot be reached from this machine ({reason}); on another machine, save the {len(missing)} "
        f"URLs on standard output as urls.txt and run `wget -x -nH --cut-dirs={depth} -i urls.txt -P copies`, then "
        "rerun this command with `--mirror copies`",
        file=sys.stderr,
    )
    for olmo_set in missing:
        print(f"{base}/{olmo_set.path}")
