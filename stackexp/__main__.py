"""Run the command line: `python -m stackexp`."""

import sys

from stackexp.cli import main

if __name__ == "__main__":
    sys.exit(main())
