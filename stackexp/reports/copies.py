"""Copies of run folders with only what reports read."""

import shutil
from pathlib import Path

from stackexp.files import append_json_line, read_json, read_json_lines, write_json
from stackexp.frame import list_tests, read_validations
from stackexp.runs import RunFolder


def copy_run(folder: RunFolder, copy: RunFolder) -> None:
    """Copy a run into the empty folder `copy`. Raises RunError for damage."""
    copy.mark()
    for path in [folder.config, folder.result]:
        shutil.copyfile(path, copy.path / path.name)
    records = {record.pop("file"): record for record in read_validations(folder)}
    records |= {path.name: read_json(path) for path in list_tests(folder)}
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
