"""`stackexp report compare`: runs side by side."""

import sys
from pathlib import Path

from stackexp.verbs.parser import Parser

EXAMPLES = ["report compare runs/quickstart/* --figure loss.png"]


def main(argv: list[str]) -> int:
    """Run the verb. Raises ConfigError for a mistake on the command line."""
    parser = Parser(
        "report",
        "Runs side by side, from their folders alone; refused if they were not trained on the same data.",
        EXAMPLES,
        "compare RUN ... [--figure FILE] [--different-data]",
    )
    parser.add_argument("what", metavar="compare", choices=["compare"])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="also draw the losses into this file")
    parser.add_argument("--different-data", action="store_true", help="compare them whatever they were trained on")
    options = parser.parse(argv)
    from stackexp.reports.compare import check_same_data, draw_losses, markdown
    from stackexp.runs import at

    runs = [at(path) for path in options.runs]
    if not options.different_data:
        for line in check_same_data(runs):
            print(line, file=sys.stderr)
    print(markdown(runs))
    if options.figure:
        draw_losses(runs, options.figure)
    return 0
