"""The real TensorBoard server shows a run's curves in a real browser."""

import re
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, poll
from processes import kill, wait_until

LOSSES = {"loss/train": 11, "loss/train_by_tokens": 11}  # segments of 12 steps
PROBES = {"memory/entropy/layer_00": 2, "memory/entropy/layer_01": 2}  # of steps 1, 5 and 10


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def has_loaded(url: str) -> bool:
    """Whether the server answers and has read the run's events."""
    try:
        return "loss/train" in urllib.request.urlopen(f"{url}/data/plugin/timeseries/tags", timeout=5).read().decode()
    except OSError:
        return False


def curves(page: str) -> dict[str, int]:
    """Segments of the longest curve of each card with one on the Time Series page."""
    drawn: dict[str, int] = {}
    for card in page.split("<card-view ")[1:]:
        if title := re.search(r'title="([^"]+/[^"]+)"', card):
            # A curve is a path of straight lines alone, one between each two neighbouring points.
            paths = re.findall(r'd="(M[\d.,-]+(?:L[\d.,-]+)+)"', card)
            if paths:
                drawn[title[1]] = max(path.count("L") for path in paths)
    return drawn


def shown(url: str, tag_filter: str, expected: dict[str, int], profile: Path) -> dict[str, int]:
    """The curves that the Time Series page shows for a tag filter; loaded again until they are as expected."""
    with Browser(profile) as page:
        for _ in range(4):
            page.open(f"{url}/?tagFilter={urllib.parse.quote(tag_filter, safe='')}#timeseries")
            if (found := poll(lambda: curves(page.html()), expected, seconds=30)) == expected:
                break
        return found


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH (apt-get install chromium)")
def test_curves_of_a_run_are_on_the_page(program, tiny, tmp_path):
    program.run("fit", "--config", tiny)
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path / "runs"), "--load_fast=false"]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: has_loaded(url), server)
        losses = shown(url, "loss/train", LOSSES, tmp_path / "first")
        probes = shown(url, "memory/entropy", PROBES, tmp_path / "second")
    finally:
        kill(server)
    assert losses == LOSSES
    assert probes == PROBES
