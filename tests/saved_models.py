"""A small model saved as a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from stackexp.config.compose import compose, to_dict
from stackexp.errors import RunError
from stackexp.models import checkpoints
from stackexp.models.checkpoints import CheckpointWriter

QUICKSTART = compose(["quickstart"])


def make_state(config=QUICKSTART, step: int = 3, **changes: Any) -> dict[str, Any]:
    """Return the part of `state.pt` that these tests read."""
    state = {"version": checkpoints.CHECKPOINT_VERSION, "config": to_dict(config)}
    return {"global_step": step, "stackexp": state | changes}


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.rand(4, 8)).square().sum().backward()
    optimizer.step()


def collect_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save(path: Path, tensors: dict[str, Any], state: dict[str, Any]) -> None:
    writer = CheckpointWriter()
    writer.save(path, tensors, state, lambda: None)
    writer.wait()


def get_error(function, *arguments: Any) -> str:
    """Return the message of the RunError that a call raises: one line."""
    with pytest.raises(RunError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def save_small_model(path: Path) -> Path:
    """Save `make_model` after one step."""
    model, optimizer = make_model()
    take_step(model, optimizer)
    save(path, collect_tensors(model, optimizer), make_state())
    return path
