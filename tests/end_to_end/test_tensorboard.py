"""The real TensorBoard server shows a run's curves in a real browser."""

import contextlib
import re
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, poll
from processes import kill, wait_until

from stackexp.modules.scores import tag_scores
from stackexp.training.loggers import RunTensorBoard, write_points

LOSSES = {"train/loss": 11, "train/loss_by_tokens": 11}  # segments of 12 steps
PROBES = {"memory/entropy/layer_00": 2, "memory/entropy/layer_01": 2}  # of steps 1, 5 and 10


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def has_loaded(url: str) -> bool:
    """Return True if the server has read the events of the run."""
    return "train/loss" in fetch(f"{url}/data/plugin/timeseries/tags")


def fetch(url: str) -> str:
    """Return the answer of a server, or nothing."""
    try:
        return urllib.request.urlopen(url, timeout=5).read().decode()
    except OSError:
        return ""


def count_segments(page: str) -> dict[str, int]:
    """Return the number of segments of the longest curve of each card on the Time Series page."""
    drawn: dict[str, int] = {}
    for card in page.split("<card-view ")[1:]:
        if title := re.search(r'title="([^"]+/[^"]+)"', card):
            # A curve is a path of straight lines alone, one between each two neighbouring points.
            paths = re.findall(r'd="(M[\d.,-]+(?:L[\d.,-]+)+)"', card)
            if paths:
                drawn[title[1]] = max(path.count("L") for path in paths)
    return drawn


def read_curves(url: str, tag_filter: str, expected: dict[str, int], profile: Path) -> object:
    """Return the curves on the Time Series page for a tag filter."""
    address = f"{url}/?tagFilter={urllib.parse.quote(tag_filter, safe='')}#timeseries"
    return read_page(address, lambda page: count_segments(page.html()), expected, profile)


def read_page(address: str, read: Callable[[Browser], object], expected: object, profile: Path) -> object:
    """Return what `read` finds on a page; reload the page until that is as expected, at most three times.

    The server answers before it has read all runs, and a page shows what was read when it was opened.
    """
    with Browser(profile) as page:
        for _ in range(4):
            page.open(address)
            if (found := poll(lambda: read(page), expected, seconds=30)) == expected:
                break
        return found


@contextlib.contextmanager
def tensorboard(logdir: Path, has_loaded: Callable[[str], bool]) -> Iterator[str]:
    """Start a server, and return its address once it has read the events."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--load_fast=false"]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: has_loaded(url), server)
        yield url
    finally:
        kill(server)


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH (apt-get install chromium)")


@pytest.mark.process
@needs_chromium
def test_the_page_shows_the_curves_of_a_run(program, tiny, tmp_path):
    program.run("fit", "--config", tiny, "logging.loggers=[tensorboard]")
    with tensorboard(tmp_path / "runs", has_loaded) as url:
        losses = read_curves(url, "train/loss", LOSSES, tmp_path / "first")
        probes = read_curves(url, "memory/entropy", PROBES, tmp_path / "second")
    assert losses == LOSSES
    assert probes == PROBES


TEXTS = """
(function texts(root) {
  return [...root.querySelectorAll("*")].flatMap(element => [
    ...(element.shadowRoot ? texts(element.shadowRoot) : []),
    ...(element.children.length ? [] : [element.textContent.trim()]),
  ]);
})(document)
"""


@needs_chromium
def test_hparams_tab_starts_with_the_papers_symbols(tmp_path):
    for heads in (1, 2):
        folder = tmp_path / "study" / f"H={heads}-0123abcd"
        hyperparameters = {"data.context_length": 2048, "model.memory.head_dim": 16, "model.memory.num_slots": 24}
        hyperparameters["model.memory.kind"] = "stack"
        sets = {"left": {"loss": 2.5, "perplexity": 12.0, "bits_per_byte": 1.0}}
        figures = tag_scores("val", sets)
        write_points(folder, "validate", [(tag, value, 10) for tag, value in figures.items()])
        logger = RunTensorBoard(folder)
        logger.start({}, {}, hyperparameters | {"model.memory.num_heads": heads}, ["train/final_loss", *figures])
        logger.finish(2.125, 10)
        logger.close()
    columns = ["H", "Memory", "S", "d_s", "data.context_length", "train/final_loss", "val/loss/average"]
    rows = ["H=1-0123abcd", "H=2-0123abcd"]

    def table(page: Browser) -> list[list[str]]:
        texts = page.evaluate(TEXTS) or []
        texts = texts[texts.index("Trial ID") :] if "Trial ID" in texts else []
        return [[text for text in texts if text in columns][: len(columns)], sorted({*texts} & {*rows})]

    def has_both(url: str) -> bool:
        tags = fetch(f"{url}/data/plugin/timeseries/tags")
        return all(row in tags for row in rows)

    with tensorboard(tmp_path / "study", has_both) as url:
        assert read_page(f"{url}/#hparams", table, [columns, rows], tmp_path / "profile") == [columns, rows]
