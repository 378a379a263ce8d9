"""Delete run folders. Without --yes, only list what would be deleted.

Refuses folders that are not run folders, and runs that a process is using.
"""

import shutil
from argparse import Namespace

from stackexp.verbs.parser import Parser

USAGE = "RUN ... [--yes]"
EXAMPLES = ("runs remove runs/quickstart/ID", "runs remove runs/quickstart/ID --yes")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--yes", action="store_true", help="delete the folders")


def run(args: Namespace) -> int:
    """Delete the runs, or list them."""
    from stackexp import runs
    from stackexp.errors import FolderBusyError, RunError
    from stackexp.reports.summaries import format_size, summarize

    folders = [runs.open_run(path) for path in args.runs]
    folders = list({folder.path.resolve(): folder for folder in folders}.values())
    for folder in folders:
        if folder.path.is_symlink():
            raise RunError(f"{folder.path}: a symbolic link; give the run folder, {folder.path.resolve()}")
        folder.check_ownership()
        summary = summarize(folder)
        if summary.state == "running":
            raise FolderBusyError(f"{folder.path}: another process uses this folder; stop it first")
        size = format_size(summary.bytes)
        print(f"{folder.path}: {summary.state.value}, step {summary.step}, {size}{'' if args.yes else ' (kept)'}")
    if not args.yes:
        print("add --yes to delete these folders")
        return 0
    for folder in folders:
        with folder.lock():
            shutil.rmtree(folder.path)
    return 0
