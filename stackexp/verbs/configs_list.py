"""List the shipped configs, the recipes, and the choices for each section."""

from argparse import Namespace

from stackexp.verbs.parser import Parser

USAGE = ""
EXAMPLES = ("configs list",)


def add_arguments(parser: Parser) -> None:
    """Add no options."""


def run(args: Namespace) -> int:
    """Print the catalog."""
    from stackexp.config.catalog import format_catalog
    from stackexp.tables import terminal_width

    print(format_catalog(terminal_width()))
    return 0
