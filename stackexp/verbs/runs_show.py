"""Show a run: its state, its sessions, its checkpoints and the command that resumes it."""

import json
import time
from argparse import Namespace
from typing import Any

from stackexp.verbs.parser import Parser

USAGE = "RUN [--json]"
EXAMPLES = ("runs show runs/quickstart/ID",)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("--json", action="store_true", help="print one object")


def run(args: Namespace) -> int:
    from stackexp import runs
    from stackexp.reports.summaries import summarize

    folder = runs.open_run(args.run)
    summary = dict(vars(summarize(folder)))
    keys = ("started", "command", "commit", "host")
    sessions = folder.read_sessions()
    summary["sessions"] = [{key: session.get(key) for key in keys} for session in sessions]
    summary["origin"] = next((session["origin"] for session in reversed(sessions) if "origin" in session), None)
    summary["checkpoints"] = [checkpoint.name for checkpoint in folder.list_checkpoints()]
    if summary["state"] == "unfinished":
        summary["resume"] = runs.format_resume_command(folder)
    print(json.dumps(summary, indent=2) if args.json else _format(summary))
    return 0


def _format(summary: dict[str, Any]) -> str:
    from stackexp.reports.summaries import format_loss, format_size
    from stackexp.tables import format_table

    rows = [
        ("run", summary["path"]),
        ("state", f"{summary['state']}{': ' + summary['problem'] if summary['problem'] else ''}"),
        ("step", f"{summary['step']} of {summary['max_steps']}"),
        ("tokens", f"{summary['tokens'] or 0:,}"),
        ("loss", f"{format_loss(summary['train_loss'])} training, {format_loss(summary['best_loss'])} best validation"),
        ("size", format_size(summary["bytes"])),
        ("changed", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary["last_change"]))),
        ("checkpoints", ", ".join(summary["checkpoints"]) or "none"),
    ]
    if origin := summary["origin"]:
        step = "" if origin["step"] is None else f", step {origin['step']}"
        rows.append(("origin", f"{origin['path']}{step}, SHA-256 {origin['sha256']}"))
    for session in summary["sessions"]:
        host = f" on {session['host']}" if session.get("host") else ""
        rows += [("session", f"{session['started']}{host}"), ("", session["command"])]
    rows += [("resume", summary["resume"])] if "resume" in summary else []
    return format_table(rows)
