"""`report all`: one page with every report that has runs, which opens offline in a browser."""

import json
import re
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, poll
from config_files import build_sweep, finish_trial
from formal_runs import finish as finish_formal
from formal_runs import write_run as write_formal_run
from language_runs import finish, write_run

from stackexp.errors import RunError
from stackexp.reports.page import MAX_NOTES, _format_notes, build_page


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with runs of both families on tokens, a formal language and an efficiency file."""
    root = tmp_path_factory.mktemp("runs<b>")
    for size, steps in ((1000, 10), (2000, 20)):
        for name, memory in (("transformer", "null"), ("stacktrans", "stacktrans")):
            folder = root / f"{name}-{size}-0123abcd"
            run = write_run(folder, f"model.memory={memory}", losses=[9 - 0.1 * step for step in range(20)])
            finish(run, 3 - size / 1e4, parameters=size, tokens=steps * 1024)
    finish_formal(write_formal_run(root / "formal" / "a", "LSTM", "even_pairs"), beyond=0.75)
    row = {"model": "stacktrans", "implementation": "auto", "train_ratio": 1.5, "train_spread": [1.4, 1.6]}
    (root / "efficiency.json").write_text(json.dumps({"environment": {}, "rows": [row]}))
    (root / "other.json").write_text("[]")
    return root


@pytest.fixture(scope="module")
def page(folder) -> str:
    return build_page(folder)


def test_the_page_has_every_report_and_loads_nothing(page):
    for title in ("Ablation", "Scaling", "Training dynamics", "Efficiency: efficiency.json", "Formal languages"):
        assert f">{title}</h2>" in page
    assert page.count("<img ") == 5
    assert "<script" not in page
    addresses = re.findall(r' (?:src|href|srcset|data)="([^"]*)"', page)
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in addresses)
    assert "other.json" not in page


def test_each_sweep_has_its_own_section(empty_folder, monkeypatch):
    for name in ("one/pairs", "two/pairs", "two-pairs"):
        sweep = build_sweep(name=name, grid={"model.memory.num_heads": [1, 2]})
        for trial in sweep.trials:
            finish_trial(trial, 3.0)
        (sweep.folder / "sweep.yaml").write_text(sweep.to_yaml())
    page = build_page(Path("runs"))
    links = re.findall(r'<a href="#([^"]*)">Sweep: ([^<]*)</a>', page)
    assert [name for _, name in links] == ["one/pairs", "two/pairs", "two-pairs"]
    assert len({anchor for anchor, _ in links}) == 3
    assert all(page.count(f'<h2 id="{anchor}">Sweep: {name}</h2>') == 1 for anchor, name in links)
    monkeypatch.chdir("runs/two-pairs")
    assert ">Sweep: two-pairs</h2>" in build_page(Path())


def test_notes_follow_the_tables_and_are_folded(page):
    section = page.partition(">Ablation</h2>")[2].partition("</h2>")[0]
    assert section.rindex("</table>") < section.index("<li>")
    assert "<summary>2 more notes</summary><ul><li>b" in _format_notes([*"1" * MAX_NOTES, "b", "c"])


def test_text_is_escaped(page):
    assert "runs&lt;b&gt;" in page
    assert "runs<b>" not in page
    assert "<code>python -m stackexp sweep run ablation</code>" in page
    assert "<code>python -m stackexp sweep run formal_table</code>" in page
    assert '<td>0.75↓ / 0.75 <span class="whole">(0/1)</span></td>' in page


def test_the_verb_writes_the_page(folder, tmp_path, invoke):
    printed = invoke("report all", folder / "transformer-1000-0123abcd", f"--out={tmp_path}/a.html")
    assert printed == f"{tmp_path}/a.html\n"
    text = (tmp_path / "a.html").read_text()
    assert ">Ablation</h2>" in text
    assert "<li>Formal languages: " in text
    assert "<li>Actions in arithmetic: " in text
    assert "no runs on arithmetic; run <code>python -m stackexp sweep run arithmetic</code></li>" in text


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"^.*: no runs and no file of `bench efficiency --out`; give"):
        build_page(tmp_path)
    write_formal_run(tmp_path / "unfinished", "LSTM", "even_pairs")
    with pytest.raises(RunError, match=r"nothing to report; Ablation: .*no run folders of language models"):
        build_page(tmp_path)


@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_opens_in_a_browser(page, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    with Browser(tmp_path / "profile") as browser:
        browser.call("Network.enable")
        browser.call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )
        browser.open(file.as_uri())
        complete = "[...document.images].filter(image => image.complete && image.naturalWidth > 500).length"
        assert poll(lambda: browser.evaluate(complete), 5, seconds=30) == 5
        assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth") is True
        browser.call("Emulation.setDeviceMetricsOverride", width=1400, height=900, deviceScaleFactor=1, mobile=False)
        cut = "[...document.querySelectorAll('.wide')].filter(table => table.scrollWidth > table.clientWidth).length"
        assert browser.evaluate("window.innerWidth") == 1400
        assert browser.evaluate(cut) == 0
