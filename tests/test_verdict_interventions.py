"""Interventions on the memories of a verdict's pairs: measured once, on text and on formal languages."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy

from stackexp.cli import main
from stackexp.datamodules.formal_language import LengthSet, build_string_batch
from stackexp.evaluation.loading import load_run
from stackexp.files import write_hashed_json
from stackexp.inspection.inspect import open_set
from stackexp.inspection.interventions import measure_interventions
from stackexp.inspection.pairs import measure_pairs
from stackexp.reports.interventions import FILE, VERSION, build_interventions, get_identity, list_unmeasured
from stackexp.runs import RunFolder
from stackexp.sweeps.verdict import load_verdicts
from stackexp.tasks import TASKS


def test_interventions_are_measured_once(trained, tmp_path):
    """The runs are copies of one; that of the last seed has lost its checkpoints."""
    config = trained / "config.yaml"
    arms = [{"name": "plain", "model.memory": None}, {"name": "stack"}]
    question = {"config": str(config), "arms": arms, "pairs": 4, "interventions_chunks": 8}
    (tmp_path / "copies.yaml").write_text(yaml.safe_dump(question))
    verdict = load_verdicts(tmp_path / "copies.yaml", [f"logging.root={tmp_path}"])[0]
    plan = verdict.load_or_write_plan()
    folders = [trial.folder.path for (arm, _, _), trial in verdict.build_pairs(plan).trials.items() if arm == "stack"]
    for folder in folders:
        shutil.copytree(trained, folder)
    shutil.rmtree(folders[-1] / "checkpoints")
    measure_pairs(verdict)
    files = [folder / "interventions.json" for folder in folders[:-1]]
    changes = json.loads(files[0].read_text())["changes"]
    loaded = load_run(folders[0], "last")
    sets = [
        measure_interventions(loaded.model, open_set(loaded, name, 8).batches, heads=False)
        for name in ("left", "right")
    ]
    for name, other in (("mean action", "actions frozen at their mean"), ("dropped read", "reads dropped")):
        expected = [change["change"] for found in sets for change in found if change["intervention"] == other]
        assert changes[name] == pytest.approx(sum(expected) / 2, abs=1e-9)
        assert abs(changes[name]) > 1e-6

    before = [(file.stat().st_mtime_ns, file.read_text()) for file in files]
    files[0].write_text(before[0][1].replace("0.", "1."))
    pairs = verdict.build_pairs(verdict.read_plan())
    table, notes = build_interventions(verdict, pairs)
    assert table.rows[1] == ["stack", "dropped read", f"{changes['dropped read']:+.4f}", table.rows[1][3], "2"]
    assert "not as it was written" in notes[0]
    assert "stack: 2 runs without interventions" in notes[1]
    measure_pairs(verdict)
    assert files[0].read_text() == before[0][1]
    assert [file.stat().st_mtime_ns for file in files[1:]] == [time for time, _ in before[1:]]
    assert build_interventions(verdict, pairs)[0].rows[1][-1] == "3"
    for file, run in zip(files, folders, strict=False):
        identity = get_identity(verdict, RunFolder(run))
        write_hashed_json(run / FILE, identity | {"changes": changes})
        assert RunFolder(run) in list_unmeasured(verdict), "an earlier version has measured it"
        notes = build_interventions(verdict, pairs)[1]
        assert "stack: 1 run with actions frozen at the mean of four batches, not of all tokens" in notes
        write_hashed_json(run / FILE, identity | {"changes": {"dropped read": 0.1}})
        assert not any("frozen" in note for note in build_interventions(verdict, pairs)[1])
        write_hashed_json(run / FILE, identity | VERSION | {"changes": changes | {"dropped read": math.inf}})
        if file is files[1]:
            assert build_interventions(verdict, pairs)[0].rows[1][-1] == "1", (
                "a change that is not finite does not count"
            )
    assert build_interventions(verdict, pairs)[0].rows[1][-1] == "0"
    assert (
        build_interventions(replace(verdict, config=replace(verdict.config, interventions_chunks=4)), pairs)[0] is None
    )


def test_interventions_on_formal_languages_use_all_validation_strings(empty_folder):
    """Dropped reads have the losses of a model whose stack output has the weight 0, on each length of 41 to 60."""
    options = "data.task=parity_check name=tiny model.num_layers=1 trainer.max_steps=2 schedule.warmup_steps=0 "
    options += "data.eval_length_stride=459 data.eval_sequences=1 data.validation_sequences=4 trainer.accelerator=cpu"
    assert main(["fit", "--config", "formal/stacktrans", *options.split(), "logging.loggers=[]"]) == 0
    (trained,) = Path("runs/tiny").iterdir()
    arms = [{"name": "plain", "model.memory": None}, {"name": "stack"}]
    question = {"config": str(trained / "config.yaml"), "arms": arms, "pairs": 4}
    Path("strings.yaml").write_text(yaml.safe_dump(question))
    verdict = load_verdicts(Path("strings.yaml"))[0]
    for (arm, _, _), trial in verdict.build_pairs(verdict.load_or_write_plan()).trials.items():
        if arm == "stack":
            shutil.copytree(trained, trial.folder.path)
    measure_pairs(verdict)
    table, _ = build_interventions(verdict, verdict.build_pairs(verdict.read_plan()))
    assert "mean over seeds, on all validation strings" in table.title

    run, losses = load_run(trained, "last"), []
    strings = [
        build_string_batch(LengthSet(TASKS["parity_check"], "validate", n, 4).sample(), TASKS["parity_check"])
        for n in range(41, 61)
    ]
    for _ in range(2):
        with torch.no_grad():
            logits = [run.model(batch["tokens"]).logits[:, -1] for batch in strings]
        targets = [batch["targets"][:, -1] for batch in strings]
        losses.append(np.mean([cross_entropy(*pair).item() for pair in zip(logits, targets, strict=True)]))
        run.model.layers[0].memory.up.data.zero_()
    assert table.rows[1] == ["stack", "dropped read", f"{losses[1] - losses[0]:+.4f}", table.rows[1][3], "4"]
    assert abs(losses[1] - losses[0]) > 1e-4
