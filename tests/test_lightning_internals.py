"""The private parts of Lightning that stackexp touches still do what the code relies on."""

import inspect
import signal

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from stackexp.training.lightning_internals import (
    has_position,
    keep_signal_handlers,
    rescale_progress,
    run_validation,
    set_max_steps,
)

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def make_trainer(**options) -> pl.Trainer:
    return pl.Trainer(**QUIET, **options)


def test_lightning_installs_its_handlers_in_the_method_that_is_replaced(restored_signals, tmp_path):
    signal.signal(signal.SIGTERM, handler := lambda *_: None)
    trainer = make_trainer(fast_dev_run=1)
    source = inspect.getsource(_SignalConnector.register_signal_handlers)
    assert "signal.SIGTERM" in source
    assert "signal_connector.register_signal_handlers()" in inspect.getsource(pl.Trainer)
    keep_signal_handlers(trainer)
    trainer.fit(BoringModel())
    assert signal.getsignal(signal.SIGTERM) is handler


class Validate(pl.Callback):
    """Validates before the first step, and counts what Lightning does."""

    def __init__(self) -> None:
        self.steps, self.validated = [], []

    def on_train_start(self, trainer, module):
        run_validation(trainer)
        assert trainer.training, "the fit continues"

    def on_train_batch_end(self, trainer, *_):
        self.steps.append(trainer.global_step)

    def on_validation_batch_end(self, trainer, *_):
        assert trainer.validating
        self.validated.append(trainer.global_step)


def test_a_validation_before_the_first_step_runs_all_batches_and_the_fit_continues():
    callback = Validate()
    options = {"max_steps": 4, "limit_val_batches": 3, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    options |= {"val_check_interval": 100, "check_val_every_n_epoch": None, "callbacks": [callback]}
    make_trainer(**options).fit(BoringModel())
    assert callback.steps == [1, 2, 3, 4]
    assert callback.validated == [0, 0, 0]


def test_the_last_step_of_a_fit_can_be_changed(tmp_path):
    trainer = make_trainer(max_steps=1, limit_val_batches=0, enable_checkpointing=False)
    set_max_steps(trainer, 3)
    trainer.fit(BoringModel())
    assert trainer.global_step == 3
    assert "max_steps" in vars(_TrainingEpochLoop(trainer, max_steps=1))


def test_checkpoints_count_micro_batches_where_they_are_rescaled(tmp_path):
    trainer = make_trainer(max_steps=3, accumulate_grad_batches=2, limit_val_batches=0, default_root_dir=tmp_path)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    rescale_progress(checkpoint, before=2, now=4)
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert progress["total"] == dict.fromkeys(("ready", "started", "processed", "completed"), 12)


class StatefulLoader(torch.utils.data.DataLoader):
    """A loader with a position, which Lightning saves."""

    def state_dict(self):
        return {"batch": 3}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("loader", [StatefulLoader, torch.utils.data.DataLoader])
def test_a_checkpoint_has_the_position_of_a_loader_with_a_state(loader, tmp_path):
    trainer = make_trainer(max_steps=3, limit_val_batches=0, default_root_dir=tmp_path)
    trainer.fit(BoringModel(), loader(torch.ones(8, 32)))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert has_position(checkpoint) == (loader is StatefulLoader)
    if loader is StatefulLoader:
        assert checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [{"batch": 3}]


def test_the_writer_of_tensorboard_is_opened_at_its_first_use(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="")
    assert logger._experiment is None
    assert logger.log_dir.rstrip("/") == str(tmp_path)
    assert logger.experiment is logger._experiment
    logger.finalize("success")


def test_the_progress_bar_has_the_methods_that_are_overridden():
    for name in ("init_train_tqdm", "init_validation_tqdm", "reset_dataloader_idx_tracker"):
        assert callable(getattr(pl.callbacks.TQDMProgressBar, name))
