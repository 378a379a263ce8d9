"""The verb `fit`."""

from argparse import Namespace
from pathlib import Path

from stackexp.verbs.dispatch import choose_wait_policy
from stackexp.verbs.parser import Parser, Verb, flag


class Fit(Verb):
    """Train the model of a config, on tokens or on strings of a formal language.

    The run folder runs/<name>/<id> is the only record of the run. If NAME_OR_PATH is a sweep, its runs are trained one
    after the other and compared in one table.
    """

    examples = (
        "fit --config quickstart",
        "fit --config quickstart model.memory.num_slots=32 --seed 1",
        "fit --config quickstart --ckpt_path last",
        "fit --run runs/quickstart/ID",
        "fit --config formal/quick",
    )

    def add_arguments(self, parser: Parser) -> None:
        parser.add_config()
        parser.add_ckpt_path("last|PATH", "resume the newest unfinished run, or this checkpoint")
        folder = "start a run in this folder, or resume it; without --config, use the folder's config"
        parser.add_argument("--run", metavar="FOLDER", help=folder)
        parser.add_argument("--print-config", **flag("print the resolved config and exit"))

    def run(self, args: Namespace) -> int:
        if args.run is None:
            args.parser.require_config(args)
        if args.run and args.ckpt_path:
            args.parser.error(
                "--run and --ckpt_path exclude each other; --run resumes from the folder's newest checkpoint"
            )
        from stackexp.config import compose, layers
        from stackexp.data.path_checks import check_paths, check_weights
        from stackexp.runs import RunFolder
        from stackexp.sweeps import is_run_as_fit

        if is_run_as_fit(args.config) and not (args.run or args.ckpt_path or args.print_config):
            from stackexp.sweeps.worker import run_as_fit

            return run_as_fit(args.config[0], args.overrides)
        configs = args.config or [str(args.parser.check_run_folder(args.run))]
        config = compose.compose(configs, args.overrides)
        if args.print_config:
            print(compose.to_yaml(config), end="")
            return 0
        args.parser.check_checkpoint(args.ckpt_path)
        check_paths(config.data, "fit")
        is_resumed = args.ckpt_path or (args.run and RunFolder(Path(args.run)).newest_checkpoint())
        if config.warm_start.weights and not is_resumed:
            check_weights(Path(config.warm_start.weights))
        choose_wait_policy()
        from stackexp.training.loop import train

        train(config, args.ckpt_path, args.run, overridden={key for key, *_ in layers.read_overrides(args.overrides)})
        return 0
