"""`stackexp data fetch`: OLMo's perplexity sets V2 and V3 onto this machine."""

import argparse
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

from stackexp.config.suggestions import nearest
from stackexp.data import olmo
from stackexp.errors import RunError
from stackexp.verbs.parser import Parser

EXAMPLES = [
    "data fetch v2",
    "data fetch v2 v3 --only c4_en pile",
    "data fetch v3 --to /scratch/olmo",
    "data fetch v2 v3 --mirror copies/",
]
ABOUT = """\
The sets come to FOLDER/v2 and FOLDER/v3, one file of raw token ids (uint16, GPT-NeoX-20B) each with a record beside
it; `data.validation=v2` (v3, olmo) finds them in the default folder. Run the same command again after whatever
stopped it: whole files stay, partial ones are gone on with.

--mirror takes a URL below which v2_small_gptneox20b/ lies, or a folder: laid out like the server (what
`wget -x -nH --cut-dirs=2` makes) or like FOLDER.
"""


def main(argv: list[str]) -> int:
    """Run the verb. Raises ConfigError for a mistake on the command line, RunError if sets are missing in the end."""
    parser = _parser()
    options = parser.parse(argv)
    sets = _chosen(parser, options)
    if options.mirror:
        _check_mirror(parser, options.mirror)
    from stackexp.data.fetch import fetch

    fetched = fetch(sets, options.to, options.mirror, verify=options.verify)
    if fetched.there:
        print(_summary(fetched.there), file=sys.stderr if fetched.unreached else sys.stdout)
    if fetched.unreached:
        return _elsewhere(fetched.unreached, fetched.why_unreached, options.mirror or olmo.BASE_URL)
    if fetched.failed:
        names = ", ".join(map(str, fetched.failed))
        raise RunError(f"{len(fetched.failed)} of {len(sets)} sets could not be fetched: {names}; see above")
    print(f"in {', '.join(str(options.to / v) for v in sorted({s.version for s in sets}))}")
    return 0


def _parser() -> Parser:
    usage = "v2|v3 [--only SET ...] [--to FOLDER] [--mirror URL|FOLDER]"
    parser = Parser("data fetch", "Download OLMo's perplexity sets V2 and V3, and check them.", EXAMPLES, usage, ABOUT)
    parser.add_argument("version", nargs="*", metavar="v2|v3", help=f"13 sets, 11 sets: {_all_names()}")
    parser.add_argument("--only", nargs="+", action="extend", default=[], metavar="SET", help="some of the sets")
    parser.add_argument("--to", type=Path, default=olmo.DEFAULT_FOLDER, metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--mirror", metavar="URL|FOLDER", help="take the files from there")
    parser.add_argument("--verify", action="store_true", help="also read whole files again and compare their SHA-256")
    return parser


def _all_names() -> str:
    return ", ".join(sorted({name for names in olmo.NAMES.values() for name in names}, key=str.lower))


def _chosen(parser: Parser, options: argparse.Namespace) -> list[olmo.OlmoSet]:
    """The sets that the command line names, in the catalogue's order."""
    versions = [version for argument in options.version for version in argument.split(",")]
    for version in versions:
        if version not in olmo.NAMES:
            parser.error(f"expected v2 or v3, found {version!r}")
    if not versions:
        parser.error("expected v2 or v3")
    sets = [one for version in olmo.NAMES if version in versions for one in olmo.olmo_sets(version)]
    only = [name for argument in options.only for name in argument.split(",")]
    names = sorted({one.name for one in sets}, key=str.lower)
    for name in only:
        if name not in names:
            hint = nearest(name, names) or f"; there are {', '.join(names)}"
            parser.error(f"--only {name}: no set of {' or '.join(versions)}{hint}")
    return [one for one in sets if not only or one.name in only]


def _check_mirror(parser: Parser, mirror: str) -> None:
    scheme, url, rest = mirror.partition("://")
    if not url:
        if not Path(mirror).is_dir():
            parser.error(f"--mirror {mirror}: no such folder; a URL begins with http:// or https://")
    elif "@" in rest.partition("/")[0]:
        parser.error("--mirror: a URL without a user's name and password is expected")  # which are not repeated
    elif scheme not in ("http", "https"):
        parser.error(f"--mirror {mirror}: expected http://..., https://... or a folder")
    elif not _is_valid(mirror):
        parser.error(f"--mirror {mirror}: no valid URL; other characters than ASCII's are written %XX")


def _is_valid(url: str) -> bool:
    """Whether it has a host, a port that is a number if one, and none but printable ASCII characters."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname.encode("idna"), parts.port
    except (ValueError, AttributeError):
        return False
    return bool(host) and re.fullmatch("[!-~]+", url) is not None


def _summary(there: dict) -> str:
    from stackexp.reports.tables import table

    rows = [["set", f"instances of {olmo.INSTANCE}", "tokens", "bytes", "sha256"]]
    for one, record in there.items():
        counts = (record.tokens // olmo.INSTANCE, record.tokens, record.bytes)
        rows.append([str(one), *(f"{count:,}" for count in counts), record.sha256[:12]])
    return table(rows, align="<>>><", rules=[1])


def _elsewhere(missing: list[olmo.OlmoSet], why: str, base: str) -> int:
    """Say what to fetch where there is a way to the server: one line, and the URLs on standard output."""
    base = base.rstrip("/")
    depth = len([part for part in urlsplit(base).path.split("/") if part])
    print(
        f"error: {base} cannot be reached from this machine ({why}): elsewhere, put the {len(missing)} URLs on "
        f"standard output into urls.txt and run `wget -x -nH --cut-dirs={depth} -i urls.txt -P copies`; then here the "
        "same command with `--mirror copies`",
        file=sys.stderr,
    )
    for one in missing:
        print(f"{base}/{one.path}")
    return 1
