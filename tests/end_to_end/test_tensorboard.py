"""The real TensorBoard server shows a run's curves in a real browser."""

import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from processes import kill, wait_until

CHROMIUM = shutil.which("chromium")
# Without --disable-3d-apis the curves are drawn by WebGL, which a headless machine does not have.
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-3d-apis", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--window-size=1600,3000", "--virtual-time-budget=30000"),
]


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


def curves(url: str, tag_filter: str, profile: Path) -> dict[str, int]:
    """Segments of the longest curve of each card that the Time Series page shows for a tag filter."""
    address = f"{url}/?tagFilter={urllib.parse.quote(tag_filter, safe='')}#timeseries"
    page = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    drawn: dict[str, int] = {}
    for card in page.split("<card-view ")[1:]:
        if title := re.search(r'title="([^"]+/[^"]+)"', card):
            # A curve is a path of straight lines alone, one between each two neighbouring points.
            paths = re.findall(r'd="(M[\d.,-]+(?:L[\d.,-]+)+)"', card)
            drawn[title[1]] = max((path.count("L") for path in paths), default=0)
    return drawn


def reloaded_until_loaded(url: str, tag_filter: str, folder: Path) -> dict[str, int]:
    """As a user would: load the page again while the server has not read the events yet."""
    for attempt in range(5):
        if drawn := curves(url, tag_filter, folder / f"profile-{tag_filter.replace('/', '-')}-{attempt}"):
            break
        time.sleep(2)
    return drawn


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
        losses = reloaded_until_loaded(url, "loss/train", tmp_path)
        probes = reloaded_until_loaded(url, "memory/entropy", tmp_path)
    finally:
        kill(server)
    assert (losses["loss/train"], losses["loss/train_by_tokens"]) == (11, 11), "12 steps"
    assert probes == {"memory/entropy/layer_00": 2, "memory/entropy/layer_01": 2}, "at steps 1, 5 and 10"
