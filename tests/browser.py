"""A headless Chromium, controlled over its debugging pipe (Chrome DevTools Protocol)."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from processes import kill

CHROMIUM = shutil.which("chromium")
# Without --disable-3d-apis TensorBoard draws its curves by WebGL, which a headless machine does not have.
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-3d-apis", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--window-size=1600,3000", "--remote-debugging-pipe"),
]


class Browser:
    """A page of a new browser: `with Browser(folder) as page: page.open(url)`."""

    def __init__(self, profile: Path):
        self._profile, self._calls = profile, 0

    def __enter__(self) -> "Browser":
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()

        def use_descriptors_3_and_4() -> None:  # as --remote-debugging-pipe requires
            high = os.dup(commands), os.dup(answers)
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            preexec_fn=use_descriptors_3_and_4,
            pass_fds=(3, 4),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self._answers = os.fdopen(self._read, "rb")
        self._session = None
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return self

    def __exit__(self, *_: object) -> None:
        kill(self._process)
        self._answers.close()
        os.close(self._write)

    def call(self, method: str, **parameters: object) -> dict:
        self._calls += 1
        command = {"id": self._calls, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer
                return answer["result"]

    def _message(self) -> bytes:
        message = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        return bytes(message)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> object:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def html(self) -> str:
        return self.evaluate("document.documentElement.outerHTML") or ""


def poll(read, expected: object, seconds: float = 120) -> object:
    """Return `read()` once it equals `expected`, or after the timeout."""
    deadline = time.monotonic() + seconds
    while (found := read()) != expected and time.monotonic() < deadline:
        time.sleep(0.5)
    return found
