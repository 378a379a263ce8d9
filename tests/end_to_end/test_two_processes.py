"""Two CPU processes and one give the same validation figures, and train alike."""

import json

import pytest

from stackexp.runs import RunFolder


def test_two_processes_equal_one(program, tiny, tmp_path):
    for devices in (1, 2):
        program.run(
            "fit",
            "--config",
            tiny,
            f"trainer.devices={devices}",
            "trainer.strategy=ddp",
            f"data.micro_batch_size={8 // devices}",
            f"logging.root={tmp_path / str(devices)}",
        )
    one, two = (RunFolder(next((tmp_path / str(devices) / "tiny").iterdir())) for devices in (1, 2))
    sets = [json.loads(run.result.read_text())["sets"] for run in (one, two)]
    for name in ("left", "right"):
        assert sets[0][name]["tokens"] == sets[1][name]["tokens"]
        assert sets[0][name]["loss"] == pytest.approx(sets[1][name]["loss"], abs=1e-5)
    losses = [[line["loss/train"] for line in run.read_metrics() if "loss/train" in line] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)

    # The same weights on one and on two processes, batches of another size
    two_devices = ("trainer.devices=2", "trainer.strategy=ddp", "data.micro_batch_size=4")
    program.run("validate", "--run", one.path, *two_devices, "data.eval_batch_size=7")
    again = json.loads((one.path / "validate.json").read_text())["sets"]
    for name in ("left", "right"):
        assert again[name] == pytest.approx(sets[0][name], rel=1e-6)
