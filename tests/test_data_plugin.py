"""A dataset outside the repository has the same rights as the built-in ones: training, evaluation, exact resume."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from records import losses, record

from stackexp.cli import main
from stackexp.config import compose
from stackexp.config.registry import build
from stackexp.data import hash_log
from stackexp.data.bigrams import BigramModel
from stackexp.datamodules.base import StepBatches, check_resumable
from stackexp.errors import RunError
from stackexp.runs import RunFolder

DOCS = Path(__file__).parents[1] / "docs" / "data.md"
SMALL = "model.hidden_size=32 model.num_layers=2 model.num_heads=2 model.num_kv_heads=1 model.intermediate_size=40 "
SMALL += "trainer.max_steps=6 trainer.checkpoint_interval=3 trainer.keep_checkpoints=3 trainer.val_check_interval=3 "
SMALL += "trainer.accelerator=cpu schedule.warmup_steps=2 logging.progress_bar=false logging.loggers=[]"


@pytest.mark.usefixtures("restored_registry", "empty_folder")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_dataset_in_a_plugin_trains_validates_and_resumes(accumulation):
    """The files are those that docs/data.md shows."""
    for name in ("counting.py", "counting.yaml"):
        [code] = re.findall(rf"```\w+\n(# {name}\n.*?)```", DOCS.read_text(), re.DOTALL)
        Path(name).write_text(code)
    fit = ["fit", "--config", "counting.yaml", *SMALL.split(), f"data.global_batch_tokens={64 * accumulation}"]
    assert main([*fit, "name=whole", "data.stride=3"]) == 0
    [whole] = map(RunFolder, Path("runs/whole").iterdir())
    checkpoint = f"{whole.path}/checkpoints/00000003"
    assert main([*fit, "name=branch", "data.stride=3", "--ckpt_path", checkpoint]) == 0
    [resumed] = map(RunFolder, Path("runs/branch").iterdir())
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step > 3}
    assert any("val/loss/counting" in line for line in record(whole))
    assert hash_log.read_hashes(whole.path) == hash_log.read_hashes(resumed.path)
    assert main(["validate", "--run", str(whole.path)]) == 0
    assert main([*fit, "name=branch", "data.stride=2", "--ckpt_path", checkpoint]) == 1, "another dataset"

    data = build("data", compose.load_config(whole.config).data, seed=0)
    model = BigramModel(
        [data.sample(number + 1)["tokens"].numpy() for number in range(6 * accumulation)], vocab_size=50
    )
    losses_by_chunk = [model.compute_losses(chunk) for chunk in data.sets("validate")[0].chunks]
    bigrams = whole.read_result().to_dict()["bigrams"]
    assert bigrams["average"]["loss"] == pytest.approx(np.mean(losses_by_chunk)), "counts of the tokens trained on"


def test_a_training_loader_without_a_state_is_refused():
    check_resumable(StepBatches(None, dict))
    with pytest.raises(RunError, match="list: the training loader has no state_dict"):
        check_resumable([])
    check_resumable(Resumable())
    with pytest.raises(RunError, match=r"Endless: .* has no length, so a resumed run would skip batches"):
        check_resumable(Endless())


class Endless:
    """A loader with a state, of which Lightning loads one batch ahead."""

    def __iter__(self):
        return itertools.count()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Resumable(Endless):
    """A loader with a state and a length."""

    def __len__(self):
        return 9
