"""The verb `certify`."""

from argparse import Namespace

from stackexp.verbs.parser import Parser, Verb, count


class Certify(Verb):
    """Extract the automaton of a run on a formal language, and compare it with the automaton of the task.

    Prints each step on standard error, then what was proved, what was only measured, and one verdict: "is the
    automaton" (proved for strings of every length), "agrees up to N" (on all strings of up to N symbols, and on all
    longer ones that were tried), or "differs at STRING". If it agrees, the proof is also tried for the same weights
    with one-hot actions. The exit code is 1 if it differs. Writes certificate.json and automaton.png to
    RUN/certificate. The run must be finished and have a stack over the tokens.

    Tasks: even_pairs, parity_check, cycle_navigation, modular_arithmetic, missing_duplicate, the word problems of
    groups, reverse_string and stack_manipulation; for modular_arithmetic_brackets and solve_equation, it lists the
    rules that the run lacks.
    """

    examples = ("certify --run RUN", "certify --run RUN --exhaustive 18 --out certificate")

    def add_arguments(self, parser: Parser) -> None:
        parser.add_checkpoint("the best by validation")
        parser.add_argument("--strings", **count(100, "random strings", 10_000))
        longest = "symbols of the longest random string; repeated words have up to five times as many"
        parser.add_argument("--max-length", **count(20, longest, 1000))
        exhaustive = "compare all strings of up to N symbols (default: about 100,000 strings)"
        parser.add_argument("--exhaustive", **count(1, exhaustive))
        parser.add_argument("--out", metavar="FOLDER", help="write here instead of RUN/certificate")

    def run(self, args: Namespace) -> int:
        args.parser.check_run(args)
        from stackexp.certification import certify

        return certify.run(args.run, args.ckpt_path, args.strings, args.max_length, args.exhaustive, args.out)
