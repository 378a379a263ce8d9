"""List the shipped configs, the recipes, and the choices for each section."""

import json
from argparse import Namespace

from stackexp.verbs.parser import Parser

USAGE = "[--json]"
EXAMPLES = ("configs list",)


def add_arguments(parser: Parser) -> None:
    """Add the options of `configs list`."""
    parser.add_argument("--json", action="store_true", help="print a list of objects: kind, name and purpose")


def run(args: Namespace) -> int:
    """Print the catalog."""
    from stackexp.config.catalog import format_catalog, list_catalog

    if args.json:
        entries = [{"kind": kind, "name": name, "purpose": purpose} for kind, name, purpose in list_catalog()]
        print(json.dumps(entries, indent=2, ensure_ascii=False))
    else:
        print(format_catalog())
    return 0
