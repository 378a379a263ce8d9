"""Copy what reports read of finished runs: small enough to commit, without checkpoints and event files.

Copies the config, the results, test scores, the environment, the last hash of the data, and the losses of chunks,
without the name of the host and the paths of checkpoints. Reports read the copies like the runs, except `report
dynamics`, `report benchmarks` and `report actions`, which need more files.
"""

import shutil
from argparse import Namespace
from pathlib import Path

from stackexp.verbs.parser import Parser

USAGE = "RUNS ... --to FOLDER"
EXAMPLES = ("runs copy runs/ablation_small --to docs/results/ablation_small",)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of run folders")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder of the copies")


def run(args: Namespace) -> int:
    from stackexp.reports.copies import copy_run
    from stackexp.reports.summaries import find_runs
    from stackexp.runs import RunFolder

    folders = [folder for folder in find_runs(args.runs) if folder.is_finished]
    if not folders:
        args.parser.error(f"{', '.join(map(str, args.runs))}: no finished runs; give folders with a result.json")
    targets: dict[Path, RunFolder] = {}
    for folder in folders:
        target = args.to / folder.path.resolve().name
        if target in targets:
            args.parser.error(f"{targets[target].path} and {folder.path} have the same name; copy them separately")
        if target.exists():
            args.parser.error(f"{target}: exists already; remove it first, or choose another --to")
        targets[target] = folder
    for target, folder in targets.items():
        hidden = target.with_name(f".{target.name}.new")
        shutil.rmtree(hidden, ignore_errors=True)  # of a copy that was killed
        try:
            copy_run(folder, RunFolder(hidden))
            hidden.replace(target)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        print(target)
    return 0
