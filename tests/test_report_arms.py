"""The arms of a comparison: their names, and the interval of a difference."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from language_runs import finish, write_run

from stackexp.config.affects import flatten_config
from stackexp.config.compose import compose
from stackexp.errors import RunError
from stackexp.evaluation.scores import write_chunk_losses
from stackexp.frame import name_arm
from stackexp.reports.ablation import build_ablation
from stackexp.reports.arms import name_memory, read_arms
from stackexp.reports.differences import compare_arms, compute_difference
from stackexp.reports.paper import CHOICES, find_variant


def test_arms_are_named_without_id_seed_and_hash():
    names = {
        "runs/depth/stacktrans-normalized-seed=0-aaba76c9": "stacktrans-normalized",
        "runs/depth/H=4-S=8-0123abcd": "H=4-S=8",
        "runs/depth/seed=1-0123abcd": "depth",
        "runs/quickstart/20261124-215655-4dc3": "quickstart",
        "runs/mine": "mine",
    }
    assert {path: name_arm(Path(path)) for path in names} == names


def test_arms_of_one_name_are_told_apart_by_their_options(tmp_path):
    for number, slots in enumerate((6, 24)):
        write_run(
            tmp_path / "q" / f"20261124-21565{number}-4dc3",
            "model.memory=stacktrans",
            f"model.memory.num_slots={slots}",
        )
    write_run(tmp_path / "other", "model.memory=null")
    assert [arm.name for arm in read_arms([tmp_path])[0]] == ["other", "q (num_slots=6)", "q (num_slots=24)"]
    write_run(tmp_path / "q" / "20261124-215652-4dc3", "model.memory=null")
    names = [arm.name for arm in read_arms([tmp_path])[0]]
    assert names[1:] == [f"q (20261124-21565{number}-4dc3)" for number in range(3)], "too many options to name"


def test_arms_of_different_lengths_have_different_names(tmp_path):
    for number, (steps, rate) in enumerate(((300, 0.004), (600, 0.004), (600, 0.01))):
        options = (f"trainer.max_steps={steps}", f"optimizer.lr={rate}", "schedule.warmup_steps=10")
        finish(write_run(tmp_path / "q" / f"20261124-21565{number}-4dc3", *options), loss=5.0 - number)
    losses = {arm.name: arm.runs[0].sets["held-out"]["loss"] for arm in read_arms([tmp_path])[0]}
    names = [f"q (max_steps={steps}, lr={rate})" for steps, rate in ((300, 0.004), (600, 0.004), (600, 0.01))]
    assert losses == dict(zip(names, (5.0, 4.0, 3.0), strict=True))


def test_only_validations_of_the_final_weights_of_a_run_count(tmp_path):
    run = finish(write_run(tmp_path / "q-0123abcd"), loss=5.0)

    def validate(file: str, loss: float, checkpoint: str = "checkpoints/00000010", **record: Any) -> None:
        record |= {"checkpoint": str(run / checkpoint), "step": 10, "sets": {"v2/pile": {"loss": loss}}}
        (run / file).write_text(json.dumps(record))

    validate("validate-a.json", 1.0, time="2026-11-27T02:00:00+0000")
    validate("validate-b.json", 2.0, time="2026-11-27T01:00:00+0000")  # older
    validate("validate-c.json", 3.0, "../other-0123abcd/checkpoints/00000010", time="2026-11-27T03:00:00+0000")
    validate("validate-d.json", 4.0, "checkpoints/00000010/ema", time="2026-11-27T03:00:00+0000")
    validate("validate-e.json", 5.0, overrides=["data.score_remainder=true"], time="2026-11-27T03:00:00+0000")
    assert read_arms([tmp_path])[0][0].runs[0].sets["v2/pile"] == {"loss": 1.0}
    validate("validate-f.json", 6.0, overrides=["data.eval_batch_size=4"], time="2026-11-27T03:00:00+0000")
    assert read_arms([tmp_path])[0][0].runs[0].sets["v2/pile"] == {"loss": 6.0}, "the option changes no score"
    (run / "validate-notes.json").write_text("[1]")
    with pytest.raises(RunError, match=r"validate-notes.json: not a file of `validate`; move it elsewhere"):
        read_arms([tmp_path])


def test_means_and_differences_are_over_the_same_sets(tmp_path):
    losses = {"v2/pile": 4.0, "v2/c4_en": 3.0}
    for name, memory in (("transformer", "null"), ("queue", "queue")):
        for seed in (0, 1):
            sets = {key: {"loss": loss} for key, loss in losses.items() if seed == 0 or key == "v2/pile"}
            finish(write_run(tmp_path / f"{name}-seed={seed}-0123abc{seed}", f"model.memory={memory}", seed=seed), 5.0)
            folder = tmp_path / f"{name}-seed={seed}-0123abc{seed}"
            record = {"checkpoint": "00000010", "step": 10, "sets": sets}
            (folder / "validate-v2.json").write_text(json.dumps(record))
    report = build_ablation([tmp_path])
    assert next(row for row in report.tables[0].rows if row[0] == "queue")[3] == "3.500", "the mean of seed 0"
    assert "queue, seed 1: scored on some sets only, not in the mean: V2" in report.notes
    assert "V2" not in report.tables[1].header


@pytest.mark.parametrize("counts", [[[10.0], [10.0]], [[10.0, 10.0], [10.0, 10.0, 10.0]]])
def test_sets_with_one_chunk_or_other_chunks_have_no_chunk_intervals(tmp_path, counts):
    for name, memory in (("transformer", "null"), ("queue", "queue")):
        for seed in (0, 1):
            run = write_run(tmp_path / f"{name}-seed={seed}-0123abc{seed}", f"model.memory={memory}", seed=seed)
            finish(run, 5.0)
            chunks = np.stack([5.0 * np.array(counts[seed]), np.array(counts[seed])])
            write_chunk_losses(run / "validate.json", "held-out", chunks)
    assert build_ablation([tmp_path]).tables[1].rows[0][-1] == "+0.000 (+0.000 to +0.000)"


def test_runs_from_before_and_after_a_new_option_are_one_arm(tmp_path):
    runs = [tmp_path / f"q-seed={seed}-0123abc{seed}" for seed in range(3)]
    for seed, run in enumerate(runs):
        finish(write_run(run, *(["trainer.z_loss=0.1"] if seed == 2 else []), seed=seed), loss=5.0)
    config = runs[1] / "config.yaml"
    config.write_text("".join(line for line in config.open() if "z_loss" not in line))
    arms, notes = read_arms([tmp_path])
    assert [[run.seed for run in arm.runs] for arm in arms] == [[0, 1], [2]], "0.0 is the default of z_loss"
    assert not notes


def test_damaged_run_is_skipped_with_a_note(tmp_path):
    for seed in range(2):
        finish(write_run(tmp_path / f"q-seed={seed}-0123abc{seed}", seed=seed), loss=5.0)
    (tmp_path / "q-seed=0-0123abc0" / "result.json").write_text("{")
    arms, notes = read_arms([tmp_path])
    assert [[run.seed for run in arm.runs] for arm in arms] == [[1]]
    assert len(notes) == 1
    assert "result.json" in notes[0]


def test_intervals_are_those_of_student():
    difference = compute_difference([-0.1, -0.08, -0.11])
    assert difference.mean == pytest.approx(-0.09667, abs=1e-5)
    assert (difference.low, difference.high) == pytest.approx((-0.13461, -0.05872), abs=1e-5)  # scipy.stats.t
    assert str(difference) == "**-0.097 (-0.135 to -0.059)**"
    assert str(compute_difference([0.1, -0.08])) == "+0.010 (-1.134 to +1.154)"
    assert str(compute_difference([-0.5])) == "-0.500", "one seed is never bold"
    assert str(compute_difference([-0.0001])) == "+0.000", "zero has no minus sign"


def test_variants_are_found_by_their_options():
    for variant, name in CHOICES.items():
        memory = "null" if variant == "Transformer" else name
        assert find_variant(flatten_config(compose(["quickstart"], [f"model.memory={memory}"]))) == variant
    for memory in ("stacktrans-normalized", "authors_code", "adapter", "value_skip"):
        assert find_variant(flatten_config(compose(["quickstart"], [f"model.memory={memory}"]))) is None
    assert find_variant({"model.kind": "lstm"}) is None


def test_families_of_other_stacks_are_named_by_their_options():
    names = {
        memory: name_memory(flatten_config(compose(["quickstart"], [f"model.memory={memory}"])))
        for memory in ("null", "single_head", "adapter", "value_skip", "residual_stack", "residual_streams")
    }
    assert names == {
        "null": "Transformer",
        "single_head": "Single-Head",
        "adapter": "stack (discipline=push_only, read_mask=log, push_norm=head)",
        "value_skip": "value_skip",
        "residual_stack": "residual_stack",
        "residual_streams": "residual_stack (update=none)",
    }
    config = compose(["quickstart"], ["model.memory=mhc", "model.memory.dynamic=false", "model.memory.num_streams=2"])
    assert name_memory(flatten_config(config)) == "mhc (dynamic=False)"
    config = compose(["quickstart"], ["model.memory=single_head", "model.memory.action_bias=2"])
    assert name_memory(flatten_config(config)) == "stack (action_bias=2.0, num_heads=1)"
    config = compose(["quickstart"], ["model.memory.residual_gate=read", "warm_start.memory=identity"])
    assert name_memory(flatten_config(config)) == "stack (residual_gate=read), identity start"
    config = compose(["quickstart"], ["model.memory=null", "warm_start.memory=identity"])
    assert name_memory(flatten_config(config)) == "Transformer"


def test_pairs_from_other_hardware_are_named(tmp_path):
    for name, seed, gpus in (("null", 0, []), ("null", 1, []), ("queue", 0, ["NVIDIA H200"]), ("queue", 1, [])):
        run = finish(write_run(tmp_path / f"{name}-seed={seed}-0123abcd", f"model.memory={name}", seed=seed), 3.0)
        (run / "environment.json").write_text(json.dumps([{"gpus": gpus, "versions": {"torch": "2.11.0"}}]))
    cpu = "trainer.accelerator=cpu"
    on_cpu = finish(write_run(tmp_path / "dense-seed=0-0123abcd", "model.memory=dense_former", cpu), 3.0)
    (on_cpu / "environment.json").write_text(json.dumps([{"gpus": ["NVIDIA H200"], "versions": {"torch": "2.15.0"}}]))
    arms = {arm.name: arm for arm in read_arms([tmp_path])[0]}
    starts = [line for name in ("queue", "dense") for line in compare_arms(arms[name], arms["null"]).mismatches]
    assert [line.partition(": rounding")[0] for line in starts if "started" in line] == [
        "queue, seed 0: started on NVIDIA H200 with torch 2.11.0, null on a CPU with torch 2.11.0",
        "dense, seed 0: started on a CPU with torch 2.15.0, null on a CPU with torch 2.11.0",
    ]
