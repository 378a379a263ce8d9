"""Print a resolved config, then its parameters, tokens, steps and FLOPs."""

from argparse import Namespace

from stackexp.verbs.parser import Parser

USAGE = "NAME_OR_PATH [KEY=VALUE ...]"
EXAMPLES = ("configs show pretrain/stacktrans-360m", "configs show ablation/queue --seed 1")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME_OR_PATH", help="a shipped config or a YAML file")
    parser.accepts_overrides = True


def run(args: Namespace) -> int:
    from stackexp.config.compose import compose

    config = compose([args.name], args.overrides)
    from stackexp.planning.tables import describe_config

    print(describe_config(config))
    return 0
