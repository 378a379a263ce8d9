"""The processes that load training batches."""

import multiprocessing
import time
from multiprocessing.connection import Client
from multiprocessing.resource_sharer import DupFd, _resource_sharer

from stackexp.datamodules.loader import _set_up_worker


def _lose_the_run() -> None:
    """Connect to the thread that sends batches, as the run does, and close the connection without a request."""
    receiver, _sender = multiprocessing.Pipe(duplex=False)
    _set_up_worker(receiver, worker_id=0)
    DupFd(0)  # starts the thread
    Client(_resource_sharer._address, authkey=multiprocessing.current_process().authkey).close()
    time.sleep(0.3)


def test_worker_prints_no_traceback_if_its_run_is_killed_while_it_fetches_a_batch(capfd):
    worker = multiprocessing.get_context("fork").Process(target=_lose_the_run)
    worker.start()
    worker.join(30)
    assert worker.exitcode == 0
    assert "Traceback" not in capfd.readouterr().err
