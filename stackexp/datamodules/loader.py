"""The loader of training batches. Its worker processes exit with it or with the run."""

import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any

import numpy as np
import torch
from streaming import StreamingDataLoader, StreamingDataset

from stackexp.data.documents import compute_document_ids, find_document_bounds

WORKER_EXIT_SECONDS = 5  # of a killed worker, from its first closed socket to its exit


class TokenLoader(StreamingDataLoader):
    """A StreamingDataLoader whose workers ignore SIGTERM and exit with the loader or with the run.

    torch requests its workers to exit through queues. That does not reach a worker that is in a download, or whose
    queue was garbage-collected first, and Python would wait for such a worker forever at exit.
    """

    def __init__(self, dataset: StreamingDataset, **options: Any):
        stop_receiver, stop_sender = multiprocessing.Pipe(duplex=False)
        # Called by the process that made the loader, before it is collected or before Python waits for the workers.
        self._stop_workers = multiprocessing.util.Finalize(self, stop_sender.send_bytes, (b"",), exitpriority=0)
        super().__init__(dataset, worker_init_fn=partial(_set_up_worker, stop_receiver), **options)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches."""
        try:
            yield from super().__iter__()
        except (ConnectionError, EOFError):
            # A killed worker closes its sockets first. Once it has exited, torch raises an error that names it.
            time.sleep(WORKER_EXIT_SECONDS)
            raise

    def __del__(self) -> None:
        self._stop_workers()
        super().__del__()


def _set_up_worker(stop_receiver: Connection, worker_id: int) -> None:
    """Ignore signals that are meant for the run (Slurm's SIGTERM, Ctrl-C), and exit with the loader or the run."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _ignore_lost_connection
    run = multiprocessing.parent_process()
    assert run is not None
    Thread(target=_exit_when_ready, args=([stop_receiver, run.sentinel],), daemon=True).start()


def _ignore_lost_connection(kind: type[BaseException], *failure: Any) -> None:
    """Suppress the traceback of a worker whose run was killed while it fetched a batch; the worker exits next."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, *failure)


def _exit_when_ready(events: list[Any]) -> None:
    wait(events)  # nobody receives the message, so that every worker finds it
    os._exit(0)


def collate(samples: list[dict[str, Any]], end_of_document: int | None = None) -> dict[str, torch.Tensor | np.ndarray]:
    """Return a batch: tokens int64 [B, T], index int64 [B], and as numpy arrays source int64 [B] and hash uint64 [B].

    With the id of the token that ends documents, also documents int64 [B, T], the document number of each token, and
    document_bounds int32 [n + 1]; see data/documents.py.
    """
    tokens = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))
    batch: dict[str, torch.Tensor | np.ndarray] = {
        "tokens": tokens,
        "index": torch.tensor([sample["index"] for sample in samples]),
        "source": np.array([sample["source"] for sample in samples]),
        "hash": np.array([sample["hash"] for sample in samples], np.uint64),
    }
    if end_of_document is not None:
        documents = compute_document_ids(tokens, end_of_document)
        batch |= {"documents": documents, "document_bounds": find_document_bounds(documents)}
    return batch
