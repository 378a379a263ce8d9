"""List the shipped configs, the recipes, and the choices for each section."""

from argparse import Namespace

from stackexp.verbs.parser import Parser

USAGE = ""
EXAMPLES = ("configs list",)


def add_arguments(parser: Parser) -> None:
    """Add no options."""


def run(args: Namespace) -> int:
    """Print the catalog."""
    from stackexp.planning.catalog import format_catalog

    print(format_catalog())
    return 0
