"""A model that is too large for the machine is refused before the data are prepared."""

import pytest

from stackexp.config.compose import load_config
from stackexp.errors import RunError
from stackexp.training import trainer
from stackexp.training.trainer import check_model_fits

PARAMETERS, GIB = 1_805_446, 2**30  # of the quickstart

TWO = ("trainer.devices=2", "data.micro_batch_size=2")
NODES = ("trainer.devices=2", "trainer.num_nodes=2", "data.micro_batch_size=1")


def set_free_memory(monkeypatch, free_bytes: int) -> None:
    monkeypatch.setattr(trainer, "_read_free_bytes", lambda device_type: free_bytes)


@pytest.mark.parametrize(
    ("options", "bytes_per_parameter"),
    [
        (["trainer.precision=bf16-true"], 8),
        (["trainer.precision=32-true", "optimizer=muon"], 12),
        (["trainer.precision=32-true", *TWO, "trainer.strategy=ddp"], 32),  # both on this machine
        (["trainer.precision=32-true", *TWO, "trainer.strategy=fsdp"], 16),  # divided, both here
        (["trainer.precision=32-true", *NODES, "trainer.strategy=hsdp"], 16),  # divided within this node only
    ],
)
def test_the_bytes_per_parameter_depend_on_precision_and_strategy(monkeypatch, options, bytes_per_parameter):
    config = load_config("quickstart", options)
    needed = PARAMETERS * bytes_per_parameter
    set_free_memory(monkeypatch, needed)
    check_model_fits(config)
    set_free_memory(monkeypatch, needed - 2)  # the division by two may lose one byte per device
    with pytest.raises(RunError, match=f"the model has {PARAMETERS:,} parameters"):
        check_model_fits(config)


def test_the_free_memory_of_this_machine_is_read():
    assert GIB // 4 < trainer._read_free_bytes("cpu") < 2**50
