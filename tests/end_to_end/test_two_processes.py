"""Two CPU processes and one give the same validation figures, and train alike."""

import json

import pytest
from processes import kill, wait_until

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


def test_two_processes_resume_after_sigkill(program, tiny, tmp_path):
    two = ("trainer.devices=2", "trainer.strategy=ddp", "data.micro_batch_size=2", "trainer.max_steps=30")
    command = ("fit", "--config", tiny, *two, "trainer.checkpoint_interval=7", "trainer.val_check_interval=14")
    program.run(*command)
    (reference,) = map(RunFolder, tmp_path.glob("runs/tiny/*"))

    command = (*command, f"logging.root={tmp_path}/killed")
    process = program.start(*command)
    wait_until(lambda: any(len(list(RunFolder(p).read_metrics())) > 9 for p in tmp_path.glob("killed/tiny/*")), process)
    kill(process)
    (run,) = map(RunFolder, tmp_path.glob("killed/tiny/*"))
    assert not run.finished
    program.run(*command, "--ckpt_path", "last")
    tags = ("step", "loss/train", "optimizer/grad_norm", "validation/loss/average")
    lines = [[{tag: line.get(tag) for tag in tags} for line in r.read_metrics()] for r in (run, reference)]
    assert lines[0] == lines[1]
