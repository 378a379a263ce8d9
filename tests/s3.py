"""A real S3 server (moto) on the loopback interface that can be slow or fail."""

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
    """A server that runs in a `with` block; a program reaches it with the variables in `environment`.

    Attributes:
        fail_every: With 3, every third request for an object ends in status 500 or, alternately, a reset connection.
            Each object and method is counted separately, so that no object fails in all attempts.
        seconds_per_chunk: The delay of each 64 KiB of an answer.
        status: If set, the status of all answers.
        stall_on: Requests for objects whose key ends with this are answered after a minute.
    """

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self.reset()

    def reset(self) -> None:
        """Answer normally, and forget the requests so far."""
        self.fail_every, self.seconds_per_chunk = 0, 0.0
        self.status: int | None = None
        self.stall_on: str | None = None
        self.requests: list[str] = []  # paths of GET requests
        self.num_failures = self.num_stalls = 0

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
        """Copy a folder to s3://bucket/prefix and return that URL."""
        self.client.create_bucket(Bucket=bucket)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(folder)}"
                self.client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
        return f"s3://{bucket}/{prefix}"

    def count_downloads(self, name: str) -> int:
        """Return the number of requests for objects whose key ends with `name`."""
        return sum(path.endswith(name) for path in self.requests)

    def _answer(self, environ: dict, start_response) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method not in ("GET", "HEAD") or path.count("/") < 2:
            return self._app(environ, start_response)
        with self._lock:
            if method == "GET":
                self.requests.append(path)
            fails = self.fail_every and self._counts[method, path] % self.fail_every == 0
            self._counts[method, path] += 1
            self.num_failures += bool(fails)
            resets = fails and self.num_failures % 2
        if resets:
            connection = environ["werkzeug.socket"]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        if fails or self.status:
            start_response(f"{500 if fails else self.status} No", [("Content-Length", "0")])
            return [b""]
        if self.stall_on and path.endswith(self.stall_on):
            self.num_stalls += 1
            time.sleep(60)
        return self._delay(self._app(environ, start_response))

    def _delay(self, answer: Iterable[bytes]) -> Iterable[bytes]:
        for part in answer:
            for begin in range(0, len(part), 1 << 16):
                time.sleep(self.seconds_per_chunk)
                yield part[begin : begin + (1 << 16)]


def remove_credentials(folder: Path) -> dict[str, str]:
    """Return this process's environment without AWS credentials."""
    missing = {"AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"), "AWS_CONFIG_FILE": str(folder / "none")}
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | missing
