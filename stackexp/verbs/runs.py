"""List, show, copy and remove runs."""

import contextlib
import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from stackexp.verbs.parser import Parser, Verb, flag


class List(Verb):
    """List the runs below a folder: state, step, training loss, best validation loss and size."""

    examples = ("runs list", "runs list runs/quickstart --state unfinished")

    def add_arguments(self, parser: Parser) -> None:
        from stackexp.frame import STATES

        parser.add_argument("folders", nargs="*", default=["runs"], metavar="FOLDER", help="default: runs")
        parser.add_argument("--state", choices=STATES, help="only the runs in this state")
        parser.add_argument("--json", **flag("print a list of objects"))

    def run(self, args: Namespace) -> int:
        from stackexp.frame import read_rows
        from stackexp.reports.compare import format_list

        for folder in args.folders:
            if not Path(folder).is_dir():
                args.parser.error(f"{folder}: no such folder; give a folder of runs, such as runs/")
        rows = [row for row in read_rows(args.folders) if args.state in (None, row["state"])]
        if args.json:
            print(json.dumps([_summarize(row) for row in rows], indent=2))
        elif rows:
            print(format_list(rows))
        else:
            state = f"{args.state} " if args.state else ""
            print(f"no {state}runs in {', '.join(args.folders)}")
        return 0


def _summarize(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that every run has, null where a value is missing."""
    from stackexp.frame import SUMMARY

    return {key: row.get(key) for key in SUMMARY}


class Show(Verb):
    """Show a run: its state, its sessions, its checkpoints and the command that resumes it."""

    examples = ("runs show runs/quickstart/ID",)

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("run", metavar="RUN", help="a run folder")
        parser.add_argument("--json", **flag("print one object"))

    def run(self, args: Namespace) -> int:
        from stackexp import runs
        from stackexp.errors import RunError
        from stackexp.frame import read_run
        from stackexp.reports.compare import format_run

        folder = runs.open_run(args.run)
        row, sessions = read_run(folder), []
        with contextlib.suppress(RunError):  # it is the problem in the row
            sessions = folder.read_sessions()
        origins = filter(None, (session.get("origin") for session in reversed(sessions)))
        details: dict[str, Any] = {
            "sessions": [{k: session.get(k) for k in ("started", "command", "commit", "host")} for session in sessions],
            "origin": next(origins, None),
            "checkpoints": [checkpoint.name for checkpoint in folder.list_checkpoints()],
        }
        if row["state"] == "unfinished":
            details["resume"] = runs.format_resume_command(folder)
        print(json.dumps(_summarize(row) | details, indent=2) if args.json else format_run(row, details))
        return 0


class Copy(Verb):
    """Copy what reports read of finished and failed runs: small enough to commit, without checkpoints and event files.

    Copies the config, the results, test scores, interventions, the environment, the last hash of the data, the losses
    of chunks and the failure, without the name of the host and the paths of checkpoints. Folders keep their structure
    and the plan of a verdict. Reports read the copies like the runs, except `report dynamics`, `report benchmarks`,
    `report actions` and `report states`, which need more files. Runs that are named after the folder above, such as
    runs/quickstart/ID, are copied with it.
    """

    examples = ("runs copy runs/ablation_small --to docs/results/ablation_small",)

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders of run folders")
        parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder of the copies")

    def run(self, args: Namespace) -> int:
        from stackexp.frame import find_runs, name_arm
        from stackexp.reports.publish import copy_run, list_plans
        from stackexp.runs import RunFolder
        from stackexp.sweeps.trials import has_failed

        roots = sorted(args.runs, key=lambda root: -len(root.resolve().parts))  # the last, outermost one counts
        sources = {folder.path.resolve(): (folder, root) for root in roots for folder in find_runs([root])}
        ended = [(run, root) for run, root in sources.values() if run.is_finished or has_failed(run)]
        if not ended:
            args.parser.error(f"{', '.join(map(str, args.runs))}: no finished runs; give folders with a result.json")
        targets: dict[Path, Path] = {}
        for folder, root in ended:
            path, target = folder.path.resolve(), args.to / folder.path.relative_to(root)
            if target == args.to:  # `root` is the run
                target /= path.name
            if name_arm(target) != name_arm(path):
                target = args.to / path.parent.name / path.name
            for source in (folder.path, *list_plans(folder.path, root)):
                copy = target if source == folder.path else args.to / source.relative_to(root)
                if targets.setdefault(copy, source) != source:
                    args.parser.error(f"{targets[copy]} and {source} have the same name; copy them separately")
                if copy.exists():
                    args.parser.error(f"{copy}: exists already; remove it first, or choose another --to")
        for target, source in targets.items():
            if source.is_dir():
                copy_run(RunFolder(source), target)
                print(target)
            else:
                shutil.copyfile(source, target)
        if others := len(sources) - len(ended):
            print(f"left out, neither finished nor failed: {others} of {len(sources)} runs", file=sys.stderr)
        return 0


class Remove(Verb):
    """Delete run folders. Without --yes, only list what would be deleted.

    Refuses folders that are not run folders, and runs that a process is using.
    """

    examples = ("runs remove runs/quickstart/ID", "runs remove runs/quickstart/ID --yes")

    def add_arguments(self, parser: Parser) -> None:
        parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
        parser.add_argument("--yes", **flag("delete the folders"))

    def run(self, args: Namespace) -> int:
        from stackexp import runs
        from stackexp.errors import FolderBusyError, RunError
        from stackexp.files import is_locked, try_lock
        from stackexp.frame import read_run
        from stackexp.reports.compare import format_size
        from stackexp.sweeps.trials import CLAIM

        marked = [runs.RunFolder(Path(path)) for path in args.runs]  # a run that failed early has no config.yaml
        folders = [folder if folder.is_marked else runs.open_run(str(folder.path)) for folder in marked]
        folders = list({folder.path.resolve(): folder for folder in folders}.values())
        busy = "{}: another process uses this folder; stop it first"
        for folder in folders:
            if folder.path.is_symlink():
                raise RunError(f"{folder.path}: a symbolic link; give the run folder, {folder.path.resolve()}")
            folder.check_ownership()
            row = read_run(folder)
            if row["state"] == "running" or is_locked(folder.path / CLAIM):
                raise FolderBusyError(busy.format(folder.path))
            text = f"{row['state']}, step {row['step']}, {format_size(row['bytes'])}"
            print(f"{folder.path}: {text}{'' if args.yes else ' (kept)'}")
        if not args.yes:
            print("add --yes to delete these folders")
            return 0
        for folder in folders:
            claim = try_lock(folder.path / CLAIM)  # against a worker that starts this trial now
            if claim is None:
                raise FolderBusyError(busy.format(folder.path))
            with claim, folder.lock():
                shutil.rmtree(folder.path)
        return 0
