"""The verb `match`."""

from argparse import Namespace

from stackexp.verbs.parser import Parser, Verb


class Match(Verb):
    """Find the width or depth at which a model equals another one in parameters, FLOPs or memory.

    A memory adds parameters and FLOPs, so a fair baseline is wider than the model with the memory.
    """

    usage = "--config NAME_OR_PATH --to NAME_OR_PATH [OPTIONS] [KEY=VALUE ...]"
    examples = (
        "match --config ablation/transformer --to ablation/stacktrans --by parameters",
        "match --config quickstart model.memory=null --to quickstart --by flops --vary hidden_size",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_config()
        parser.add_argument("--to", action="append", default=[], metavar="NAME_OR_PATH", help="the model to equal")
        by = "quantity to match: parameters, training FLOPs per token, or peak memory (default: %(default)s)"
        parser.add_argument("--by", choices=("parameters", "flops", "memory"), default="parameters", help=by)
        vary = "option of the model to change (default: %(default)s)"
        parser.add_argument(
            "--vary", choices=("intermediate_size", "hidden_size", "num_layers"), default="intermediate_size", help=vary
        )

    def run(self, args: Namespace) -> int:
        """Print the override that makes both models equal, and the remaining difference."""
        if not args.config or not args.to:
            args.parser.error("give --config and --to; `configs list` shows the names")
        from stackexp.config.compose import compose

        config, to = compose(args.config, args.overrides), compose(args.to, [])
        if not hasattr(config.model, args.vary):
            args.parser.error(f"--vary {args.vary}: model.kind {config.model.kind} has no such option")
        from stackexp.planning.match import QUANTITIES, TITLES, match_models

        before = QUANTITIES[args.by](config)
        match = match_models(args.config, args.overrides, to, args.by, args.vary)
        print(f"{TITLES[args.by]}: {before:,.0f}, to match {match.target:,.0f}")
        print(f"use {match.option}={match.value}: {match.quantity:,.0f} ({match.mismatch:+.4%})")
        return 0
