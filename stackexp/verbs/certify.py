"""The verb `certify`."""

from argparse import Namespace

from stackexp.verbs.parser import Parser, Verb, at_least


class Certify(Verb):
    """Extract the automaton of a run on a formal language, and compare it with the automaton of the task.

    Prints what was proved, what was only measured, and one verdict: "is the automaton" (proved for strings of every
    length), "agrees up to N" (on all strings of up to N symbols, and on all longer ones that were tried), or "differs
    at STRING". The exit code is 1 if it differs. Writes certificate.json and automaton.png to RUN/certificate.

    Tasks: even_pairs, parity_check, cycle_navigation, reverse_string and stack_manipulation; for
    modular_arithmetic_brackets, it lists the rules that the run lacks.
    """

    examples = ("certify --run RUN", "certify --run RUN --exhaustive 18 --out certificate")

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("--run", metavar="FOLDER", required=True, help="run folder")
        parser.add_ckpt_path("best|last|ema|PATH", "checkpoint (default: the best, or newest)")
        strings = "random strings (default: %(default)s)"
        parser.add_argument("--strings", type=at_least(100), default=10_000, metavar="N", help=strings)
        length = "symbols of the longest string that the verdict is about (default: %(default)s)"
        parser.add_argument("--max-length", type=at_least(20), default=1000, metavar="N", help=length)
        exhaustive = "compare all strings of up to N symbols (default: about 100,000 strings)"
        parser.add_argument("--exhaustive", type=at_least(1), metavar="N", help=exhaustive)
        parser.add_argument("--out", metavar="FOLDER", help="write here instead of RUN/certificate")

    def run(self, args: Namespace) -> int:
        args.parser.check_run_folder(args.run)
        args.parser.check_checkpoint(args.ckpt_path)
        from stackexp.certification import certify

        return certify.run(args.run, args.ckpt_path, args.strings, args.max_length, args.exhaustive, args.out)
