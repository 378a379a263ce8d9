"""Explain a config key: type, limits, default and meaning; of a section, list the keys.

Without a key, print the reference of all keys.
"""

from argparse import Namespace

from stackexp.verbs.parser import Parser

USAGE = "[KEY]"
EXAMPLES = ("configs explain model.memory.num_slots", "configs explain > docs/configuration.md")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("key", nargs="?", metavar="KEY", help="a key, such as trainer.max_steps, or a section")


def run(args: Namespace) -> int:
    import stackexp.config.compose  # noqa: F401  (registers the kinds)
    from stackexp.config.reference import explain, format_reference

    print(explain(args.key) if args.key else format_reference(), end="\n" if args.key else "")
    return 0
