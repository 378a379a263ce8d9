"""The verb `inspect`."""

from argparse import Namespace

from stackexp.errors import suggest_name
from stackexp.tasks import TASKS
from stackexp.verbs.parser import Parser, Verb, count, flag


class Inspect(Verb):
    """Show what the stacks of a run do per layer, head and token, and how interventions on them change the loss.

    Writes inspect.json, stacks.png (maps of layers and heads) and tokens.html (token by token) to a folder for each
    text, set and task in RUN/inspect. With --set or --task it also forces, freezes and hardens actions, clears stacks
    and drops reads, and prints the change of the loss with a 95 % interval over the sequences.
    """

    examples = (
        "inspect --run RUN --text 'def main(): return 0'",
        "inspect --run RUN --set stdlib-asyncio",
        "inspect --run RUN --task reverse_string:60",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_checkpoint("the newest; formal languages: the best")
        tokens = parser.add_mutually_exclusive_group(required=True)
        tokens.add_argument("--text", help="a text")
        tokens.add_argument("--set", metavar="NAME", dest="set_name", help="a validation set of the run, or NAME=PATH")
        tokens.add_argument("--task", metavar="NAME[:LENGTH]", help="strings of the run's formal language")
        parser.add_argument("--chunks", **count(2, "chunks of --set; intervals require 60", 64))
        parser.add_argument("--heads", **flag("also drop the read of every single head"))
        parser.add_argument("--out", metavar="FOLDER", help="write here instead of RUN/inspect")

    def run(self, args: Namespace) -> int:
        parser = args.parser
        if args.heads and args.text is not None:
            parser.error("--heads: a single text has no interval; use --set or --task")
        parser.check_text("--text", args.text or "")
        from stackexp.config.compose import load_config

        config = parser.check_run(args)
        task = (args.task or "").partition(":")[0]
        if task and task not in TASKS:
            load_config(config)  # imports its plugins
        if task and task not in TASKS:
            hint = suggest_name(task, TASKS) or f"; choose {', '.join(TASKS)}"
            parser.error(f"--task {task}: no such task{hint}")
        from stackexp.inspection import inspect

        return inspect.run(
            args.run, args.ckpt_path, args.text, args.set_name, args.task, args.chunks, args.heads, args.out
        )
