"""The verb `generate`."""

from argparse import Namespace

from stackexp.evaluation.sampling import find_sampling_error
from stackexp.verbs.parser import Parser, Verb, count


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
        sampling = (args.max_new_tokens, args.temperature, args.top_p, args.seed)
        if error := find_sampling_error(*sampling):
            parser.error(f"--{error}")
        parser.check_text("--prompt", args.prompt)
        parser.check_run(args)
        from stackexp.evaluation.loading import load_run
        from stackexp.terminal import set_up_log
        from stackexp.training.trainer import find_device_type

        set_up_log()
        run = load_run(args.run, args.ckpt_path)
        run.model.to(find_device_type(run.config))
        print(run.generate(args.prompt, *sampling))
        return 0
