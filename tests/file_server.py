"""A local HTTP file server for download tests."""

import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class FileServer(ThreadingHTTPServer):
    """An HTTP server whose faults a test chooses.

    Attributes:
        files: The served bytes by path.
        requests: The (path, status) of each request so far.
        faults: By path, one fault per request: a status such as 503, or the bytes after which the connection closes.
        headers: Replace headers that are sent; None removes one.
        redirect: The target of the faults 301 and 302.
        pause: Seconds between chunks of 1000 bytes.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[int]] = defaultdict(list)
        self.requests: list[tuple[str, int]] = []
        self.headers: dict[str, str | None] = {}
        self.pause = 0.0
        self.redirect = ""
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Ignore clients that were killed by a test."""


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        path = self.path.lstrip("/")
        fault = self.server.faults[path].pop(0) if self.server.faults[path] else None
        body = self.server.files.get(path)
        if body is None or (fault and fault in range(300, 600)):
            redirect = {"Location": self.server.redirect} if fault in (301, 302) else {}
            return self._answer(fault or 404, redirect | {"Content-Length": "0"}, b"")
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(body))}
        self._answer(200, headers, body[:fault])

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.server.requests.append((self.path.lstrip("/"), status))
        self.send_response(status)
        headers |= self.server.headers
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        step = 1000 if self.server.pause else max(1, len(body))
        for first in range(0, len(body), step):
            self.wfile.write(body[first : first + step])
            time.sleep(self.server.pause)

    def log_message(self, *_: object) -> None:
        pass
