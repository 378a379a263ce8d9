"""The verb `generate`."""

from argparse import Namespace

from stackexp.verbs.parser import Parser, Verb, count

MIN_TEMPERATURE = 1e-3


class Generate(Verb):
    """Continue a text with the model of a run."""

    examples = ("generate --run runs/quickstart/ID --prompt 'def main('", "generate --run RUN --temperature 0")

    def add_arguments(self, parser: Parser) -> None:
        parser.add_checkpoint()
        parser.add_argument("--prompt", default="", help="text to continue (default: empty)")
        parser.add_argument("--max_new_tokens", **count(1, "tokens to add", 128))
        parser.add_argument("--temperature", type=float, default=0.8, help="0: greedy decoding (default: %(default)s)")
        parser.add_argument("--top_p", type=float, default=0.95, help="nucleus probability mass (default: %(default)s)")
        parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")

    def run(self, args: Namespace) -> int:
        parser = args.parser
        if args.temperature and not MIN_TEMPERATURE <= args.temperature < float("inf"):
            parser.error(f"--temperature {args.temperature}: must be 0 (greedy) or a number >= {MIN_TEMPERATURE}")
        if not 0 < args.top_p <= 1:
            parser.error(f"--top_p {args.top_p}: must be a number in (0, 1]")
        if not 0 <= args.seed < 2**63:
            parser.error(f"--seed {args.seed}: must be an integer from 0 to 2^63 - 1")
        parser.check_text("--prompt", args.prompt)
        parser.check_run(args)
        from stackexp.evaluation.loading import load_run
        from stackexp.terminal import set_up_log
        from stackexp.training.trainer import find_device_type

        set_up_log()
        run = load_run(args.run, args.ckpt_path)
        run.model.to(find_device_type(run.config))
        print(run.generate(args.prompt, args.max_new_tokens, args.temperature, args.top_p, args.seed))
        return 0
