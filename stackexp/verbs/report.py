"""`stackexp report compare`: runs side by side."""

from pathlib import Path

from stackexp.verbs.parser import Parser

EXAMPLES = ["report compare runs/quickstart/* --figure loss.png"]


def main(argv: list[str]) -> int:
    """Run the verb. Raises ConfigError for a mistake on the command line."""
    parser = Parser(
        "report", "Runs side by side, from their folders alone.", EXAMPLES, "compare RUN ... [--figure FILE]"
    )
    parser.add_argument("what", metavar="compare", choices=["compare"])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="also draw the losses into this file")
    options = parser.parse(argv)
    from stackexp.reports.compare import draw_losses, markdown
    from stackexp.runs import at

    runs = [at(path) for path in options.runs]
    print(markdown(runs))
    if options.figure:
        draw_losses(runs, options.figure)
    return 0
