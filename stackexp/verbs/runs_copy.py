"""Copy what reports read of finished runs: small enough to commit, without checkpoints and event files.

Copies the config, the results, the environment, the last hash of the data, and the losses of the validation chunks,
without the name of the host and the paths of checkpoints. Reports read the copies like the runs, except `report
dynamics`, `report benchmarks` and `report actions`, which need more files.
"""

import shutil
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from stackexp.verbs.parser import Parser

if TYPE_CHECKING:
    from stackexp.runs import RunFolder

USAGE = "RUNS ... --to FOLDER"
EXAMPLES = ("runs copy runs/ablation_small --to docs/results/ablation_small",)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of run folders")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder of the copies")


def run(args: Namespace) -> int:
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


def copy_run(folder: "RunFolder", copy: "RunFolder") -> None:
    """Copy a run into the empty folder `copy`. Raises RunError for damage."""
    from stackexp.files import append_json_line, read_json, read_json_lines, write_json
    from stackexp.reports.arms import read_validations

    copy.mark()
    for path in [folder.config, folder.result]:
        shutil.copyfile(path, copy.path / path.name)
    records = {record.pop("file"): record for record in read_validations(folder)}
    records |= {path.name: read_json(path) for path in folder.path.glob("test.json")}
    for name, record in records.items():
        write_json(copy.path / name, record | {"checkpoint": Path(record["checkpoint"]).name})
    for chunks in folder.path.glob("validate*.chunks"):
        scores = chunks.with_suffix(".json")
        if scores.name in records or not scores.exists():  # not of a checkpoint of another run
            shutil.copytree(chunks, copy.path / chunks.name)
    sessions = [{k: v for k, v in session.items() if k != "host"} for session in folder.read_sessions()]
    for origin in (session["origin"] for session in sessions if "origin" in session):
        origin["path"] = Path(origin["path"]).name
    write_json(copy.path / "environment.json", sessions)
    for line in list(read_json_lines(folder.path / "data.jsonl", skip_damaged=True))[-1:]:
        append_json_line(copy.path / "data.jsonl", line)
