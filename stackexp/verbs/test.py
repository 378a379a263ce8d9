"""Score a model on every test set, or on --sets: loss, perplexity and bits per byte.

For formal languages: accuracy at each length up to data.eval_max_length, as a table and a curve.
"""

from argparse import Namespace

from stackexp.verbs import validate
from stackexp.verbs.parser import Parser

USAGE = validate.USAGE
EXAMPLES = tuple(e.replace("validate", "test", 1) for e in validate.EXAMPLES if "--by_position" not in e)


def add_arguments(parser: Parser) -> None:
    validate.add_arguments(parser, "test")


def run(args: Namespace) -> int:
    return validate.run(args, "test")
