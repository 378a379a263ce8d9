"""The verb `evaluate`."""

from argparse import Namespace
from pathlib import Path

from stackexp.verbs.dispatch import choose_wait_policy
from stackexp.verbs.parser import Parser, Verb, count, flag, split_names

PREFIX = "hf:"


class Evaluate(Verb):
    """Score a run, or a Hugging Face folder, on downstream benchmarks: accuracy, and bits per byte of the right answer.

    Tasks are those of lm-eval and smollm2, which states the protocol of the paper's baselines (docs/benchmarks.md).
    """

    examples = (
        "evaluate --run RUN --tasks smollm2",
        "evaluate --run RUN --tasks arc_easy,piqa --limit 200",
        "evaluate --model hf:exported/ --tasks smollm2 --datasets benchmarks/",
    )

    def add_arguments(self, parser: Parser) -> None:
        add = parser.add_argument
        model = parser.add_mutually_exclusive_group(required=True)
        model.add_argument("--run", metavar="FOLDER", help="run folder")
        model.add_argument("--model", metavar="hf:FOLDER", help="folder with a Hugging Face model and its tokenizer")
        parser.add_ckpt_path("best|last|ema|PATH", "checkpoint of the run (default: the newest)")
        add("--trust-remote-code", **flag("run the code in the folder of --model"))
        add("--tasks", action="append", default=[], metavar="NAME,...", help="tasks, groups or tags")
        add("--limit", **count(1, "score only the first N documents of each task"))
        add("--num_fewshot", **count(0, "shots, instead of each task's own number"))
        add("--exclude_long", **flag("leave out documents longer than the model's context"))
        add("--batch_size", **count(1, "sequences", 16))
        datasets = "local datasets: FOLDER/<task>/<split>.jsonl (default: download)"
        add("--datasets", type=Path, metavar="FOLDER", help=datasets)
        add("--out", type=Path, metavar="FILE.json", help="write here instead of RUN/benchmarks.json")

    def run(self, args: Namespace) -> int:
        parser = args.parser
        if args.model and args.ckpt_path:
            parser.error("--ckpt_path requires --run")
        if args.trust_remote_code and not args.model:
            parser.error("--trust-remote-code requires --model")
        parser.check_output("--out", args.out, [".json"])
        names = [name for names in args.tasks for name in split_names(names)]
        if not names:
            parser.error("--tasks: name tasks, such as smollm2 or arc_easy,piqa")
        if args.datasets and not args.datasets.is_dir():
            parser.error(f"--datasets {args.datasets}: no such folder")
        if args.run:
            parser.check_run(args)
        elif not args.model.startswith(PREFIX):
            parser.error(f"--model {args.model}: expected hf:FOLDER")
        elif not Path(args.model.removeprefix(PREFIX), "config.json").is_file():
            parser.error(f"--model {args.model}: no config.json; give a folder with a Hugging Face model")
        from stackexp.evaluation.benchmarks.tasks import check_installed

        check_installed()
        choose_wait_policy()
        from stackexp.evaluation.benchmarks import evaluate as engine

        options = engine.BenchmarkOptions(
            names, args.limit, args.num_fewshot, args.batch_size, args.datasets, args.exclude_long, args.out
        )
        if args.run:
            model = engine.open_run_model(args.run, args.ckpt_path, args.batch_size)
        else:
            folder = Path(args.model.removeprefix(PREFIX))
            model = engine.open_hugging_face_model(folder, args.batch_size, args.trust_remote_code)
        engine.score_benchmarks(model, options)
        return 0
