"""A real S3 server (moto's) on loopback, that can be made to fail or to dawdle."""

import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


class S3:
    """`with S3() as s3:` starts it; `s3.environment` is what a program needs to reach it.

    `fail_every` 3: each third request for an object ends in an error 500 or, by turns, in a reset connection. HEAD and
    GET count by themselves, and each object, or else requests of other threads can make all attempts at one fail.
    `seconds_per_chunk`: how long each piece of 64 KiB of an answer takes.
    `stalls`: answers for objects whose key ends so come after a minute.
    """

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self.fail_every = 0
        self.seconds_per_chunk = 0.0
        self.stalls: str | None = None
        self.stalled = 0
        self.requests: list[str] = []  # paths of GET requests
        self.failures = 0
        self.refuses: int | None = None  # the status that all requests for objects are answered with
        self._counts: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> "S3":
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = KEYS | {"S3_ENDPOINT_URL": url, "AWS_EC2_METADATA_DISABLED": "true"}
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        self.client = boto3.Session(**keys).client("s3", endpoint_url=url)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()

    def upload(self, folder: Path, bucket: str, prefix: str) -> str:
        """Copy a folder to s3://bucket/prefix; that URL."""
        self.client.create_bucket(Bucket=bucket)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.client.put_object(
                    Bucket=bucket, Key=f"{prefix}/{path.relative_to(folder)}", Body=path.read_bytes()
                )
        return f"s3://{bucket}/{prefix}"

    def downloads(self, name: str) -> int:
        """How often an object whose key ends in `name` was asked for."""
        return sum(path.endswith(name) for path in self.requests)

    def _answer(self, environ: dict, start_response) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD") or environ["PATH_INFO"].count("/") < 2:
            return self._app(environ, start_response)
        with self._lock:
            self.requests += [environ["PATH_INFO"]] if environ["REQUEST_METHOD"] == "GET" else []
            asked = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            fails = self.fail_every and self._counts[asked] % self.fail_every == 0
            self._counts[asked] += 1
            self.failures += bool(fails)
            resets = fails and self.failures % 2
        if resets:
            connection = environ["werkzeug.socket"]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        if fails or self.refuses:
            start_response(f"{500 if fails else self.refuses} No", [("Content-Length", "0")])
            return [b""]
        if self.stalls and environ["PATH_INFO"].endswith(self.stalls):
            self.stalled += 1
            time.sleep(60)
        return self._slowly(self._app(environ, start_response))

    def _slowly(self, answer: Iterable[bytes]) -> Iterable[bytes]:
        for part in answer:
            for begin in range(0, len(part), 1 << 16):
                time.sleep(self.seconds_per_chunk)
                yield part[begin : begin + (1 << 16)]


def without_credentials(folder: Path) -> dict[str, str]:
    """The environment of somebody who has none."""
    nowhere = {"AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"), "AWS_CONFIG_FILE": str(folder / "none")}
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | nowhere
