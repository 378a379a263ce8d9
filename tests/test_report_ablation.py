"""`report ablation`: the paper's variants, paired differences with intervals, and commands for missing cells."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from language_runs import finish, write_run

from stackexp import cli
from stackexp.data.olmo import NAMES
from stackexp.errors import RunError
from stackexp.evaluation.scores import write_chunk_losses
from stackexp.reports.ablation import build_ablation
from stackexp.reports.arms import read_arms, read_finished_run
from stackexp.reports.differences import compute_difference
from stackexp.reports.report import Report, format_report
from stackexp.runs import RunFolder
from stackexp.tables import ABSENT

LOSSES = {"transformer": (3.0, 3.2, 3.1), "stacktrans": (2.9, 3.12, 2.99), "value_skip": (2.0, 3.3, 3.1)}


@pytest.fixture
def runs(tmp_path) -> Path:
    """Return a folder with three arms of three seeds; seed 2 of the value skip trained on other data."""
    for arm, losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            memory = "null" if arm == "transformer" else arm
            data = "ff" if (arm, seed) == ("value_skip", 2) else "aa"
            run = write_run(
                tmp_path / f"{arm}-seed={seed}-0123abc{seed}", f"model.memory={memory}", seed=seed, data=data
            )
            finish(run, loss, parameters=1100 if memory == "stacktrans" else 1000)
    return tmp_path


def read_table(report: Report, number: int) -> dict[str, dict[str, str]]:
    """Return run -> column -> cell."""
    table = report.tables[number]
    return {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}


def record_chunks(run: Path, loss: float, rng: np.random.Generator, shared: np.ndarray) -> None:
    """Write chunk losses with this mean: those that all runs share, and a little noise of its own."""
    nats = (shared + 0.01 * rng.standard_normal(len(shared))) * 10
    counts = np.full(len(nats), 10.0)
    nats += counts * (loss - nats.sum() / counts.sum())
    exact = math.fsum(nats) / math.fsum(counts)
    write_chunk_losses(run / "validate.json", "held-out", np.stack([nats, counts]))
    finish(run, loss, sets={"held-out": {"loss": exact, "perplexity": 100 * loss}})


def test_intervals_include_the_sampling_of_chunks(runs):
    rng = np.random.default_rng(0)
    shared = 3 + rng.standard_normal(400)  # far larger than the difference of the arms, and the same in both
    for run in runs.iterdir():
        record_chunks(run, LOSSES[run.name.partition("-seed")[0]][int(run.name[-1])], rng, shared)
    report = build_ablation([runs])
    mean, low, high = (
        next(r for r in report.records if r["arm"] == "stacktrans")[f"average {key}"]
        for key in ("difference", "low", "high")
    )
    over_seeds = compute_difference([-0.1, -0.08, -0.11])
    chunk_margin = 1.96 * 0.01 * math.sqrt(2 / 3 / 400)
    assert mean == pytest.approx(over_seeds.mean)
    margin = math.hypot((over_seeds.high - over_seeds.low) / 2, chunk_margin)
    assert (high - low) / 2 == pytest.approx(margin, rel=0.001)

    pair = [next(runs.glob(f"{arm}-seed=0-*")) for arm in ("transformer", "stacktrans")]
    cell = read_table(build_ablation(pair), 1)["stacktrans"]["average"]
    assert cell == "-0.100 [-0.102 to -0.098]", "one seed: chunks only, not bold"
    (pair[1] / "validate.chunks" / "held-out.npy").write_bytes(b"x")
    with pytest.raises(RunError, match=r"held-out.npy: damaged .*; run `validate` again"):
        build_ablation(pair)
    write_chunk_losses(pair[1] / "validate.json", "held-out", np.ones((2, 400)))
    assert read_table(build_ablation(pair), 1)["stacktrans"]["average"] == "-0.100", "chunks of another checkpoint"


def test_differences_are_paired_by_seed_and_data(runs):
    report = build_ablation([runs])
    losses, differences = read_table(report, 0), read_table(report, 1)
    assert losses["stacktrans"]["average"] == "3.003 / 300.33"
    assert losses["stacktrans"]["training loss"] == "2.503"
    assert losses["stacktrans"]["paper: V2"] == "3.432 / 32.89"
    assert losses["queue"]["paper: V2"] == "3.679 / 35.14†"
    assert (losses["queue"]["seeds"], losses["queue"]["average"]) == ("0", ABSENT)
    assert differences["stacktrans"]["average"] == "**-0.097 (-0.135 to -0.059)**"
    assert differences["stacktrans"]["parameters"] == "+10.0%"
    assert float(differences["stacktrans"]["FLOPs/token"].rstrip("%")) == pytest.approx(5.0, abs=0.3)
    assert differences["value_skip"]["pairs"] == "2"
    assert differences["value_skip"]["average"].startswith("-0.450 (-"), "wide, not bold, and without seed 2"
    assert any(
        "value_skip, seed 2: not paired with transformer" in note and "differ at step 10" in note
        for note in report.notes
    )


def test_other_numbers_of_tokens_and_missing_seeds_are_not_compared(runs):
    (stacktrans,) = runs.glob("stacktrans-seed=0-*")
    finish(stacktrans, 2.9, tokens=999)
    (transformer,) = runs.glob("transformer-seed=1-*")
    (transformer / "result.json").unlink()
    report = build_ablation([runs])
    assert read_table(report, 1)["stacktrans"]["pairs"] == "1"
    assert read_table(report, 1)["stacktrans"]["average"] == "-0.110"
    notes = "\n".join(report.notes)
    assert "stacktrans, seed 0: not paired with transformer: trained on 999 tokens, the baseline on 10240" in notes
    assert "stacktrans, seed 1: not paired with transformer: the baseline has no finished run with this seed" in notes
    assert f"transformer: unfinished: `python -m stackexp fit --run {transformer}`" in notes


def test_missing_cells_have_commands(runs):
    trials = [{"name": "queue", "model.memory": "queue"}]
    sweep = {"name": "s", "config": ["quickstart"], "list": trials, "seeds": [0, 1]}
    (runs / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    notes = build_ablation([runs]).notes
    assert f"missing Queue: `python -m stackexp sweep run {runs}`" in notes
    (base,) = runs.glob("transformer-seed=0-*")
    options = f"logging.root={runs} name=push_only model.memory=push_only"
    assert f"missing Push-Only: `python -m stackexp fit --config {base}/config.yaml {options}`" in notes
    assert "missing V2 and V3 of all runs: `python -m stackexp validate --run RUN --sets v2,v3` for each RUN" in notes
    assert any(note.startswith("missing the control adapter: `python -m stackexp fit --config") for note in notes)
    (wide,) = [
        note for note in notes if note.startswith("missing a Transformer of equal size: `python -m stackexp match")
    ]
    assert "`python -m stackexp match --config" in wide


def test_commands_of_other_folders(runs):
    stacktrans = next(runs.glob("stacktrans-seed=0-*"))
    fit = f"`python -m stackexp fit --config {stacktrans}/config.yaml name=transformer model.memory=null`"
    assert f"missing Transformer: {fit}" in build_ablation([stacktrans]).notes
    value_skip = next(runs.glob("value_skip-*"))
    fit = f"`python -m stackexp fit --config {value_skip}/config.yaml name=queue model.memory=queue`"
    assert f"missing Queue: {fit}" in build_ablation([value_skip]).notes
    copies = runs / "ablation_small"
    copies.mkdir()
    value_skip.rename(copies / value_skip.name)
    missing = "Transformer, StackTrans, Queue, Push-Only, Single-Head, Full-Dimension: `python -m stackexp sweep run"
    assert f"missing {missing} ablation_small`" in build_ablation([copies]).notes


def test_missing_variants_have_the_width_of_the_narrowest_run(tmp_path):
    wide = ("model.memory=null", "model.intermediate_size=3000")
    finish(write_run(tmp_path / "transformer_wide-0123abcd", *wide), 3.0)
    finish(write_run(tmp_path / "adapter-0123abcd", "model.memory=adapter"), 3.0)
    options = f"logging.root={tmp_path} name=stacktrans model.memory=stacktrans"
    command = f"`python -m stackexp fit --config {tmp_path}/adapter-0123abcd/config.yaml {options}`"
    assert f"missing StackTrans: {command}" in build_ablation([tmp_path]).notes


def test_a_config_that_is_invalid_here_has_no_flops(runs):
    for config in runs.glob("stacktrans*/config.yaml"):
        config.write_text(config.read_text() + "beside: 1\n")
    report = build_ablation([runs])
    assert read_table(report, 1)["stacktrans"]["FLOPs/token"] == ABSENT
    assert [note.endswith("/config.yaml` says why") for note in report.notes].count(True) == 1


def test_other_options_than_the_memory_are_named(runs):
    for seed in (0, 1):
        options = ("model.memory=stacktrans", "model.embedding_scale=1", "optimizer.lr=0.1")
        finish(write_run(runs / f"unscaled-seed={seed}-0123abc{seed}", *options, seed=seed), 2.0)
    notes = build_ablation([runs]).notes
    found = "apart from memory and size, differs from transformer in model.embedding_scale=1.0, optimizer.lr=0.1"
    assert [note for note in notes if "apart from" in note] == [f"unscaled: {found}"]


def test_a_baseline_without_a_finished_run_is_an_error(runs):
    write_run(runs / "begun-0123abcd", "model.memory=queue")
    with pytest.raises(RunError, match=r"begun has no finished run; finish it with `python -m stackexp fit --run "):
        build_ablation([runs], "begun")


def test_later_validations_fill_v2_and_v3(runs):
    (run,) = runs.glob("stacktrans-seed=0-*")
    sets = {f"v2/{name}": {"loss": 3.5, "perplexity": 38.0} for name in NAMES["v2"]}
    sets |= {f"v3/{name}": {"loss": 2.0, "perplexity": 7.4} for name in NAMES["v3"]}
    sets["v2/pile"] = {"loss": 4.8, "perplexity": 51.0}
    record = {"checkpoint": "00000010", "step": 10, "overrides": [], "sets": sets}
    (run / "validate-v2+v3.json").write_text(json.dumps(record))
    (run / "validate-last.json").write_text(json.dumps(record | {"step": 5, "sets": {"v2/a": {"loss": 9.0}}}))
    report = build_ablation([runs])
    row = read_table(report, 0)["stacktrans"]
    assert (row["V2"], row["V3"]) == ("3.600 / 39.00", "2.000 / 7.40")
    commands = [note for note in report.notes if note.startswith("missing V2 and V3")]
    assert len(commands) == 8
    assert not any(str(run) in command for command in commands)
    (transformer,) = runs.glob("transformer-seed=0-*")
    del sets["v2/pile"]
    (transformer / "validate-v2+v3.json").write_text(json.dumps(record))
    report = build_ablation([run, transformer])
    difference = read_table(report, 1)["stacktrans"]
    assert difference["V3"] == "+0.000"
    assert "V2" not in difference, "only averages over the same sets are compared"
    assert any(note.startswith("missing V2 and V3") and str(transformer) in note for note in report.notes)


def test_later_sets_do_not_change_the_average(runs):
    (run,) = runs.glob("stacktrans-seed=0-*")
    before = read_table(build_ablation([runs]), 0)["stacktrans"]
    sets = {"mine": {"loss": 9.0, "perplexity": 8000.0}}
    record = {"checkpoint": "00000010", "step": 10, "sets": sets}
    (run / "validate-mine.json").write_text(json.dumps(record))
    report = build_ablation([runs])
    assert read_table(report, 0)["stacktrans"] == before
    assert "average" in read_table(report, 1)["stacktrans"]
    finish(run, 2.9, sets={})
    assert read_finished_run(RunFolder(run), {}).sets == sets, "the only sets of a run are its average"


def test_unfinished_trials_are_not_in_the_table(runs):
    failed = write_run(runs / "H=1-0123abcd", "model.memory=single_head")
    report = build_ablation([runs])
    assert read_table(report, 0)["single_head"]["average"] == ABSENT
    assert "H=1" not in {row[0] for row in report.tables[0].rows}
    assert f"H=1: unfinished: `python -m stackexp fit --run {failed}`" in report.notes
    assert not any(note.startswith("missing Queue, Push-Only, Single-Head") for note in report.notes)


def test_a_variant_prefers_the_arm_with_its_name(runs):
    finish(write_run(runs / "small-0123abcd", "model.memory=queue"), 3.0, parameters=10)
    finish(write_run(runs / "other-0123abcd", "model.memory=null"), 3.0, parameters=10)
    names = [row[0] for row in build_ablation([runs]).tables[0].rows]
    assert names[:3] == ["transformer", "stacktrans", "small (Queue)"]
    assert "other" in names


def test_diverged_runs_have_no_losses(runs):
    for seed, loss in enumerate((None, float("nan"), 4.0)):
        (run,) = runs.glob(f"stacktrans-seed={seed}-*")
        finish(run, 3.0, train_loss={"last_20_steps": loss}, sets={"held-out": {"loss": loss, "perplexity": None}})
    report = build_ablation([runs])
    row = read_table(report, 0)["stacktrans"]
    assert (row["training loss"], row["average"]) == ("4.000", "4.000")
    assert sum(note.startswith("without a finite loss, not in the means: ") for note in report.notes) == 2
    assert set(read_table(report, 1)["stacktrans"].values()) >= {"3", ABSENT}, "no difference without all seeds"


def test_bigram_counts_have_a_row(runs):
    (run,) = runs.glob("stacktrans-seed=0-*")
    sets = {"held-out": {"loss": 4.5, "perplexity": 90.0}}
    finish(run, 2.9, bigrams={"sets": sets, "average": sets["held-out"]})
    assert read_table(build_ablation([runs]), 0)["bigram counts"]["average"] == "4.500 / 90.00"
    (other,) = runs.glob("stacktrans-seed=1-*")
    finish(other, 2.9, bigrams={"sets": {"held-out": {"loss": 4.7, "perplexity": 94.0}}})
    row = read_table(build_ablation([runs]), 0)["bigram counts"]
    assert (row["seeds"], row["average"]) == ("2", "4.600 / 92.00"), "the mean over the seeds, like that of the runs"
    (longer,) = runs.glob("value_skip-seed=0-*")
    finish(longer, 2.9, tokens=999, bigrams={"sets": sets})
    names = [row[0] for row in build_ablation([runs]).tables[0].rows if "bigram" in row[0]]
    assert names == ["bigram counts (data of stacktrans)", "bigram counts (data of value_skip)"]


def test_the_latest_run_of_a_seed_counts(runs):
    run = write_run(runs / "transformer-seed=0-ffffffff", "model.memory=null")
    finish(run, 3.5)
    arms, notes = read_arms([runs])
    transformer = next(arm for arm in arms if arm.name == "transformer")
    assert sorted(r.result["average"]["loss"] for r in transformer.runs) == [3.1, 3.2, 3.5]
    assert notes == [f"left out, the same seed as {run}: {runs}/transformer-seed=0-0123abc0"]


def test_formats(runs, tmp_path, capsys):
    out = [f"--csv={tmp_path}/a.csv", f"--figure={tmp_path}/a.pdf"]
    assert cli.main(["report", "ablation", str(runs), *out]) == 0
    assert "-0.097 (-0.135 to -0.059)*" in capsys.readouterr().out
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    lines = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert len(lines) == 9
    stacktrans = [line for line in lines if line["variant"] == "StackTrans"]
    assert float(stacktrans[0]["average"]) == 2.9
    assert float(stacktrans[0]["average difference"]) == pytest.approx(-0.29 / 3)
    latex = format_report(build_ablation([runs]), "latex")
    assert r"\textbf{$-$0.097 ($-$0.135 to $-$0.059)}" in latex
    assert r"push\_only" in latex
    assert r"35.14$\dagger$" in latex
    assert "% missing Queue: `python" in latex
    markdown = format_report(build_ablation([runs]), "markdown")
    assert "**-0.097 (-0.135 to -0.059)** |" in markdown


def test_mistakes_are_one_line(runs, tmp_path, capsys):
    with pytest.raises(RunError, match="no run named mamba; choose among stacktrans, transformer, value_skip"):
        build_ablation([runs], "mamba")
    with pytest.raises(RunError, match="nowhere: no such folder; give run folders"):
        build_ablation([Path("nowhere")])
    (alone,) = runs.glob("transformer-seed=0-*")
    assert cli.main(["report", "ablation", str(alone), f"--figure={tmp_path}/none.png"]) == 0
    printed = capsys.readouterr()
    assert "Differences from" not in printed.out
    assert printed.err == f"{tmp_path}/none.png: not drawn, there is nothing to compare yet\n"
    named = build_ablation([runs], "value_skip")
    assert named.tables[1].title == "Differences from value_skip"
