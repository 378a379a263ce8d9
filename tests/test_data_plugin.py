"""A dataset outside the repository has the same rights as the built-in ones: training, evaluation, exact resume."""

import re
from pathlib import Path

import pytest
from records import losses, record

from stackexp.cli import main
from stackexp.data import hash_log
from stackexp.datamodules.base import StepBatches, check_resumable
from stackexp.errors import RunError
from stackexp.runs import RunFolder

DOCS = Path(__file__).parents[1] / "docs" / "data.md"
SMALL = "model.hidden_size=32 model.num_layers=2 model.num_heads=2 model.num_kv_heads=1 model.intermediate_size=40 "
SMALL += "trainer.max_steps=6 trainer.checkpoint_interval=3 trainer.keep_checkpoints=3 trainer.val_check_interval=3 "
SMALL += "trainer.accelerator=cpu schedule.warmup_steps=2 logging.progress_bar=false logging.loggers=[]"


@pytest.mark.usefixtures("restored_registry", "empty_folder")
def test_a_dataset_in_a_plugin_trains_validates_and_resumes():
    """The files are those that docs/data.md shows."""
    for name in ("counting.py", "counting.yaml"):
        [code] = re.findall(rf"```\w+\n(# {name}\n.*?)```", DOCS.read_text(), re.DOTALL)
        Path(name).write_text(code)
    fit = ["fit", "--config", "counting.yaml", *SMALL.split()]
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


def test_a_training_loader_without_a_state_is_refused():
    check_resumable(StepBatches(None, dict))
    with pytest.raises(RunError, match="list: the training loader has no state_dict"):
        check_resumable([])
