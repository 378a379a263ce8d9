"""`report efficiency`: our costs and those of the paper, and what a file lacks."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from stackexp.errors import RunError
from stackexp.reports.efficiency import build_efficiency
from stackexp.tables import ABSENT


def build_row(model: str, ratio: float, implementation: str = "auto", memory: bool = False) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "implementation": implementation, "train": 0.2}
    row |= {"parameters": 1000 * ratio, "flops_per_token": 10, "tokens_per_second": 4096.5, "peak_share": 0.5}
    for key in ("train", "prefill", "decode", *["memory"] * memory):
        row |= {f"{key}_ratio": ratio, f"{key}_spread": [ratio - 0.1, ratio + 0.1]}
    return row


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    environment = {"cpu": {"model": "Xeon"}, "gpus": [], "commit": "abc", "started": "2026-01-02T03:04"}
    record = {"environment": environment, "configs": ["quickstart"], "overrides": ["seed=1"], "rows": rows}
    path.write_text(json.dumps(record))
    return path


def test_costs_are_compared_with_the_paper(tmp_path, invoke):
    rows = [build_row("transformer", 1.0), build_row("stacktrans", 1.3), build_row("stacktrans", 2.2, "reference")]
    file = write(tmp_path / "efficiency.json", rows)
    outputs = [f"--csv={tmp_path}/out.csv", f"--figure={tmp_path}/out.png"]
    printed = invoke("report efficiency", file, *outputs)
    lines = {line.split("  ")[0]: line.split() for line in printed.splitlines()}
    ratio = ["1.300", "(1.200-1.400)"]
    own = ["+30.0%", "+0.0%", "4,096", "50.0%", *ratio, *ratio, ABSENT, *ratio]
    assert lines["stacktrans"] == ["stacktrans", *own, "1.16", "1.09", "1.12"]
    assert lines["stacktrans (reference)"][-3:] == [ABSENT] * 3
    assert lines["full_dim"] == ["full_dim", *[ABSENT] * 8, "3.78", "3.30", "1.73"]
    assert "- missing: single_head, full_dim" in printed
    assert "Measured on Xeon, 2026-01-02, commit abc" in printed
    _, stacktrans, reference = csv.DictReader((tmp_path / "out.csv").open())
    assert (stacktrans["model"], float(stacktrans["train_ratio"])) == ("stacktrans", 1.3)
    assert (reference["model"], float(reference["train_spread_low"])) == ("stacktrans (reference)", pytest.approx(2.1))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_decode_is_left_out_if_the_control_differs_from_1(tmp_path):
    rows = [build_row("transformer", 1.0), build_row("stacktrans", 1.1) | {"bandwidth_share": 0.8}]
    report = build_efficiency(write(tmp_path / "a.json", rows))
    assert {"decode", "decode: share of bandwidth"} <= set(report.tables[0].header)
    assert report.tables[0].rows[1][5] == "80.0%"
    rows[0]["decode_ratio"] = 1.43
    report = build_efficiency(write(tmp_path / "a.json", rows))
    assert not [name for name in report.tables[0].header if name.startswith("decode")]
    assert "Decode is left out: the Transformer measured 1.43 times its own time." in report.notes


DAMAGED = ["{", "[]", "{}", '{"rows": []}', '{"rows": [{"model": "x"}]}', '{"rows": ["x"]}', '{"rows": 5}']
DAMAGED += ['{"rows": [{"model": 5, "train_ratio": 1}]}', '{"rows": [{"model": "x", "train_ratio": 1}]}']


@pytest.mark.parametrize("text", DAMAGED)
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RunError, match=r"a.json: .*; give a file that `bench efficiency --out` wrote"):
        build_efficiency(tmp_path / "a.json")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunError, match=r"pipe: not a regular file"):
        build_efficiency(tmp_path / "pipe")
    with pytest.raises(RunError, match=r"nowhere.json: No such file or directory; give"):
        build_efficiency(tmp_path / "nowhere.json")
