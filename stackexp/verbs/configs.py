"""List, show and explain configs."""

from argparse import Namespace

from stackexp.config.layers import list_catalog
from stackexp.tables import format_table
from stackexp.verbs.parser import Parser, Verb, list_configs

INTRODUCTIONS = {  # kind of entry -> the line above its table
    "config": "",
    "recipe": "\nRecipes, as in --config mine.yaml --config recipe/smollm:\n\n",
    "choice": "\nSection choices, as in model.memory=queue:\n\n",
    "sweep": "\nSweeps, as in sweep run quick_grid:\n\n",
    "verdict": "\nVerdicts, as in verdict verdicts/tiny_english.yaml:\n\n",
}


class List(Verb):
    """List the shipped configs, recipes, choices for each section, sweeps and verdicts."""

    examples = ("configs list",)

    def run(self, args: Namespace) -> int:
        entries = list_catalog()
        for kind, introduction in INTRODUCTIONS.items():
            rows = [(name, purpose) for other, name, purpose in entries if other == kind]
            print(introduction + format_table(rows, header=(kind, "purpose")))
        print("\n`configs show NAME` prints a resolved config with its size and cost.")
        return 0


class Show(Verb):
    """Print a resolved config, then its parameters, tokens, steps and FLOPs."""

    examples = ("configs show pretrain/stacktrans-360m", "configs show ablation/queue --seed 1")

    def add_arguments(self, parser: Parser) -> None:
        action = parser.add_argument("name", metavar="NAME_OR_PATH", help="a shipped config or a YAML file")
        action.completer = list_configs  # type: ignore[attr-defined]
        parser.accepts_overrides = True

    def run(self, args: Namespace) -> int:
        from stackexp.config.compose import compose

        config = compose([args.name], args.overrides)
        from stackexp.planning.cost import describe_config

        print(describe_config(config))
        return 0


def _list_keys(**_: object) -> list[str]:
    """Return all keys, for completion."""
    import stackexp.config.compose  # noqa: F401  (registers the kinds)
    from stackexp.config.reference import list_keys

    return [key.name for key in list_keys()]


class Explain(Verb):
    """Explain a config key: type, limits, default and meaning; of a section, list the keys.

    Without a key, print the reference of all keys. With --config, include the kinds of its plugins.
    """

    examples = ("configs explain model.memory.num_slots", "configs explain > docs/configuration.md")

    def add_arguments(self, parser: Parser) -> None:
        key = parser.add_argument(
            "key", nargs="?", metavar="KEY", help="a key, such as trainer.max_steps, or a section"
        )
        key.completer = _list_keys  # type: ignore[attr-defined]
        config = parser.add_argument("--config", action="append", default=[], metavar="NAME_OR_PATH")
        config.completer = list_configs  # type: ignore[attr-defined]

    def run(self, args: Namespace) -> int:
        from stackexp.config.compose import compose  # registers the kinds
        from stackexp.config.reference import explain, format_reference

        if args.config:
            compose(args.config)  # registers those of plugins
        print(explain(args.key) if args.key else format_reference(), end="\n" if args.key else "")
        return 0
