"""The private parts of Lightning that stackexp uses, each with the reason.

tests/test_lightning_internals.py fails if one of them changes. `RunTensorBoard` also reads the private attribute
`TensorBoardLogger._experiment`, to delete the event files of earlier sessions before the writer opens.
"""

from typing import Any

import lightning.pytorch as pl


def keep_signal_handlers(trainer: pl.Trainer) -> None:
    """Prevent Lightning from installing signal handlers.

    A handler would save a checkpoint, a collective operation, at a different step on each rank. `StopRequest` stops all
    ranks after the same step. Lightning has no option for this.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


def run_validation(trainer: pl.Trainer) -> None:
    """Run a validation before the first training step of a resumed run, in the hook on_train_start.

    Lightning has no public method for this: `trainer.validate` would end the fit.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False  # otherwise Lightning skips the batches of the previous validation
    trainer.validating = True  # as Lightning itself does between two steps
    loop.run()
    trainer.training = True


def set_max_steps(trainer: pl.Trainer, steps: int) -> None:
    """Set the last step. Lightning skips a fit without steps, and with it the hooks of a missed validation."""
    trainer.fit_loop.epoch_loop.max_steps = steps


def has_position(checkpoint: dict[str, Any]) -> bool:
    """Return True if a checkpoint holds the position of the training loader; `StepBatches` needs none."""
    states = checkpoint["loops"]["fit_loop"].get("state_dict", {}).get("combined_loader")
    return isinstance(states, list) and len(states) == 1 and isinstance(states[0], dict)


def rescale_progress(checkpoint: dict[str, Any], before: int, now: int) -> None:
    """Convert the micro-batch counts of a checkpoint in place, from `before` to `now` micro-batches per optimizer step.

    No public hook converts the progress, which is saved in the state of Lightning's loops.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        ready = counts["ready"]
        assert not ready % before, "checkpoints are saved between two optimizer steps"
        for key, count in counts.items():  # the last micro-batch is completed after the callbacks that save
            counts[key] = ready // before * now - (ready - count)
