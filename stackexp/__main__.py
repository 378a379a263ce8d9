"""Run the command line: `python -m stackexp`, or the command `stackexp`."""

# PYTHON_ARGCOMPLETE_OK: the shell may run this file to complete a command line

import signal
import sys
from typing import NoReturn

from stackexp.cli import main


def run() -> NoReturn:
    """Run the verb that the process arguments name, and exit. Later Ctrl-C do not interrupt the exit."""
    try:
        code = main()
    except KeyboardInterrupt:  # while an error was reported
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    run()
