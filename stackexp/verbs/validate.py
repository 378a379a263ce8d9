"""Score a model on its validation sets or test sets."""

from argparse import Namespace
from pathlib import Path
from typing import Any, Literal

from stackexp.errors import RunError
from stackexp.verbs.dispatch import choose_wait_policy
from stackexp.verbs.parser import Parser, Verb, flag


class Validate(Verb):
    """Score a model on every validation set, or on --sets: loss, perplexity and bits per byte.

    For formal languages: accuracy at each length up to data.validation_max_length.
    """

    stage: Literal["validate", "test"] = "validate"
    examples: tuple[str, ...] = (
        "validate --run runs/quickstart/ID",
        "validate --config quickstart --ckpt_path model.safetensors",
        "validate --run RUN --sets v2,v3",
        "validate --run RUN --sets mine=texts/,books=books.npy",
        "validate --run RUN --by_position",
    )

    def add_arguments(self, parser: Parser) -> None:
        stage = self.stage
        section = "data.validation" if stage == "validate" else "data.test"
        model = parser.add_mutually_exclusive_group(required=True)
        run = "run folder; uses its config and newest checkpoint (formal languages: the best one)"
        model.add_argument("--run", metavar="FOLDER", help=run)
        parser.add_config(model)
        parser.add_ckpt_path("best|last|ema|PATH", "score this checkpoint; required with --config")
        sets = f"names from {section}, v2 and v3 (see `data fetch`), or NAME=PATH of a set or a folder of sets"
        parser.add_argument("--sets", action="append", default=[], metavar="NAME,...", help=sets)
        parser.add_argument("--score-remainder", **flag("score the tokens after the last whole chunk too"))
        out = f"write here instead of RUN/{stage}.json; also writes the table of sets as .md"
        parser.add_argument("--out", metavar="FILE.json", type=Path, help=out)
        parser.add_argument("--json", **flag("print the written record instead of the table"))
        if stage == "validate":
            by_position = "loss at each position up to 4 x data.context_length, as a table, JSON and a figure"
            parser.add_argument("--by_position", **flag(by_position))

    def run(self, args: Namespace) -> int:
        stage = self.stage
        _check_arguments(args)
        parser = args.parser
        from stackexp.config import compose
        from stackexp.runs import RunFolder

        configs = [str(parser.check_run_folder(args.run))] if args.run else args.config
        config = compose.compose(configs, args.overrides, is_training=False)
        parser.check_checkpoint(args.ckpt_path)
        if args.score_remainder:
            if config.data.objective != "language_modeling":
                parser.error("--score-remainder requires a run on text")
            args.overrides.append("data.score_remainder=true")
            config = compose.compose(configs, args.overrides, is_training=False)
        from stackexp.data.path_checks import check_paths, check_requested_sets

        sets = [name.strip() for names in args.sets for name in names.split(",")]
        if not sets:
            check_paths(config.data, stage)
            if stage == "test" and getattr(config.data, "test", None) == {}:  # without this key, data have test sets
                raise RunError("data.test: no sets to test on; name some in the config, or with --sets")
        elif config.data.objective == "language_modeling":
            section = "validation" if stage == "validate" else "test"
            check_requested_sets(sets, getattr(config.data, section, None), f"data.{section}")
        choose_wait_policy()
        from stackexp.evaluation.request import EvaluationRequest

        folder = RunFolder(Path(args.run)) if args.run else None
        request = EvaluationRequest(
            stage, config, folder, args.ckpt_path, tuple(sets), args.out, tuple(args.overrides), as_json=args.json
        )
        if getattr(args, "by_position", False):
            _score_by_position(request)
            return 0
        from stackexp.evaluation.evaluate import evaluate

        evaluate(request)
        return 0


class Test(Validate):
    """Score a model on every test set, or on --sets: loss, perplexity and bits per byte.

    For formal languages: accuracy at each length up to data.eval_max_length, as a table.
    """

    stage = "test"
    examples = tuple(e.replace("validate", "test", 1) for e in Validate.examples if "--by_position" not in e)


def _check_arguments(args: Namespace) -> None:
    parser = args.parser
    if args.config and not args.ckpt_path:
        parser.error("--config requires --ckpt_path, the checkpoint to evaluate")
    if args.config and args.ckpt_path in ("best", "last", "ema"):
        parser.error(f"--ckpt_path {args.ckpt_path} requires --run; give the path of a checkpoint")
    parser.check_output("--out", args.out, [".json"])
    if args.json and not (args.run or args.out):
        parser.error("--json prints the record in --out; give a file")
    if getattr(args, "by_position", False):
        if not args.run:
            parser.error("--by_position requires --run")
        if args.score_remainder:
            parser.error("--by_position scores whole sequences only; omit --score-remainder")
        if args.json:
            parser.error("--by_position writes its record to a file only; omit --json")


def _score_by_position(request: Any) -> None:
    from stackexp.evaluation.by_position import get_output, score_by_position
    from stackexp.reports.report import draw_by_position, save_figure

    context, losses = score_by_position(request)
    figure = get_output(request).with_suffix(".png")
    save_figure(draw_by_position(context, list(losses.items())), figure)
    print(f"figure: {figure}")
