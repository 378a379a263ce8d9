"""`report ablation`: arms and variants, paired differences with intervals, and notes."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from language_runs import finish, write_run

from stackexp import cli
from stackexp.config.affects import flatten_config
from stackexp.config.compose import compose
from stackexp.data.olmo import NAMES
from stackexp.errors import RunError
from stackexp.evaluation.scores import write_chunk_losses
from stackexp.files import write_hashed_json
from stackexp.modules.scores import SamplingError
from stackexp.reports.ablation import (
    PAPER,
    adjust_holm,
    build_ablation,
    classify_effect,
    contradicts_itself,
    judge_arms,
)
from stackexp.reports.arms import (
    CHOICES,
    COLUMNS,
    Difference,
    compare_arms,
    compute_difference,
    find_variant,
    list_seeds,
    load_arms,
)
from stackexp.reports.page import build_page
from stackexp.reports.report import Report, format_report
from stackexp.tables import ABSENT

LOSSES = {"transformer": (3.0, 3.2, 3.1), "stacktrans": (2.9, 3.12, 2.99), "value_skip": (2.0, 3.3, 3.1)}


@pytest.fixture
def runs(tmp_path) -> Path:
    """Return a folder with three arms of three seeds; seed 2 of the value skip trained on other data."""
    for arm, losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            memory = "null" if arm == "transformer" else arm
            data = "ff" if (arm, seed) == ("value_skip", 2) else "aa"
            folder = tmp_path / f"{arm}-seed={seed}-0123abc{seed}"
            run = write_run(folder, f"model.memory={memory}", seed=seed, data=data)
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
    row = next(r for r in report.records if r["arm"] == "stacktrans")
    mean, low, high = (row[f"average {key}"] for key in ("difference", "low", "high"))
    over_seeds = compute_difference([-0.1, -0.08, -0.11])
    chunk_margin = 1.96 * 0.01 * math.sqrt(2 / 3 / 400)
    assert mean == pytest.approx(over_seeds.mean)
    margin = math.hypot((over_seeds.high - over_seeds.low) / 2, chunk_margin)
    assert (high - low) / 2 == pytest.approx(margin, rel=0.001)
    assert row["average seed noise"] == pytest.approx(0.0153, abs=0.0001)
    assert row["average chunk noise"] == pytest.approx(0.01 * math.sqrt(2 / 400), rel=0.3)
    assert row["average chunks needed"] < 100
    assert any(note.startswith("Noise of one pair in average") for note in report.notes)

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
    assert float(differences["stacktrans"]["FLOPs/token"].rstrip("%")) == pytest.approx(5, abs=0.3)
    assert differences["value_skip"]["pairs"] == "2"
    assert differences["value_skip"]["average"].startswith("-0.450 (-"), "wide, not bold, and without seed 2"
    text = "1 run not paired with transformer: trained on other data (they differ at step 10): value_skip (seed 2)"
    assert text in report.notes


def test_other_numbers_of_tokens_and_missing_seeds_are_not_compared(runs):
    (stacktrans,) = runs.glob("stacktrans-seed=0-*")
    finish(stacktrans, 2.9, tokens=999)
    (transformer,) = runs.glob("transformer-seed=1-*")
    (transformer / "result.json").unlink()
    report = build_ablation([runs])
    assert read_table(report, 1)["stacktrans"]["pairs"] == "1"
    assert read_table(report, 1)["stacktrans"]["average"] == "-0.110"
    (note,) = [note for note in report.notes if "not paired with transformer" in note]
    assert note.startswith("4 runs not paired with transformer: ")
    assert "trained on 999 tokens, the baseline on 10240: stacktrans (seed 0)" in note
    assert "the baseline has no finished run with this seed: stacktrans (seed 1), value_skip (seed 1)" in note
    assert f"1 run unfinished, `python -m stackexp fit --run RUN` resumes one: {transformer}" in report.notes


def test_other_options_than_the_memory_are_named(runs):
    for seed in (0, 1):
        options = ("model.memory=stacktrans", "model.embedding_scale=1", "optimizer.lr=0.1")
        finish(write_run(runs / f"unscaled-seed={seed}-0123abc{seed}", *options, seed=seed), 2.0)
    notes = build_ablation([runs]).notes
    options = "model.embedding_scale=1.0, optimizer.lr=0.1"
    (note,) = [note for note in notes if "apart from" in note]
    assert (
        note
        == f"2 runs with other options than transformer apart from memory and size: {options}: unscaled (seeds 0, 1)"
    )
    assert not [note for note in notes if "share the learning rate" in note]


def test_later_validations_fill_v2_and_v3(runs):
    (run,) = runs.glob("stacktrans-seed=0-*")
    sets = {f"v2/{name}": {"loss": 3.5, "perplexity": 38.0} for name in NAMES["v2"]}
    sets |= {f"v3/{name}": {"loss": 2.0, "perplexity": 7.4} for name in NAMES["v3"]}
    sets["v2/pile"] = {"loss": 4.8, "perplexity": 51.0}
    record = {"checkpoint": "00000010", "step": 10, "overrides": [], "time": "", "sets": sets}
    write_hashed_json(run / "validate-v2+v3.json", record)
    write_hashed_json(run / "validate-last.json", record | {"step": 5, "sets": {"v2/a": {"loss": 9.0}}})
    report = build_ablation([runs])
    row = read_table(report, 0)["stacktrans"]
    assert (row["V2"], row["V3"]) == ("3.600 / 39.00", "2.000 / 7.40")
    (note,) = [note for note in report.notes if note.startswith("8 runs without V2 and V3")]
    assert (note.count("seed="), str(run) in note) == (8, False)
    (transformer,) = runs.glob("transformer-seed=0-*")
    del sets["v2/pile"]
    write_hashed_json(transformer / "validate-v2+v3.json", record)
    report = build_ablation([run, transformer])
    difference = read_table(report, 1)["stacktrans"]
    assert difference["V3"] == "+0.000"
    assert "V2" not in difference, "only averages over the same sets are compared"


def test_diverged_runs_have_no_losses(runs):
    for seed, loss in enumerate((None, float("nan"), 4.0)):
        (run,) = runs.glob(f"stacktrans-seed={seed}-*")
        finish(run, 3.0, train_loss={"last_20_steps": loss}, sets={"held-out": {"loss": loss, "perplexity": None}})
    report = build_ablation([runs])
    row = read_table(report, 0)["stacktrans"]
    assert (row["training loss"], row["average"]) == ("4.000", "4.000")
    (note,) = [note for note in report.notes if note.startswith("2 runs without a finite loss in training")]
    assert note.count("stacktrans-seed=") == 2
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
    run = finish(write_run(runs / "transformer-seed=0-00000000", "model.memory=null"), 3.5)
    for day, path in enumerate((runs / "transformer-seed=0-0123abc0", run), 1):
        (path / "environment.json").write_text(f'[{{"started": "2026-01-0{day}T00:00:00+0000"}}]')
    arms, notes = load_arms([runs])
    assert sorted(row["val/average/loss"] for row in arms["transformer"]) == [3.1, 3.2, 3.5]
    assert notes == [f"1 run left out, a later run has the same seed: {runs}/transformer-seed=0-0123abc0"]


def test_formats(runs, tmp_path, invoke):
    out = [f"--csv={tmp_path}/a.csv", f"--figure={tmp_path}/a.pdf"]
    assert "-0.097 (-0.135 to -0.059)*" in invoke("report ablation", runs, *out)
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    lines = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert len(lines) == 9
    stacktrans = [line for line in lines if line["variant"] == "StackTrans"]
    assert float(stacktrans[0]["average"]) == 2.9
    assert float(stacktrans[0]["average difference"]) == pytest.approx(-0.29 / 3)
    latex = format_report(build_ablation([runs]), "latex")
    for text in (r"\textbf{$-$0.097 ($-$0.135", r"push\_only", r"35.14$\dagger$", "% Filled by `python -m stackexp sw"):
        assert text in latex
    assert "**-0.097 (-0.135 to -0.059)** |" in format_report(build_ablation([runs]), "markdown")


def test_mistakes_are_one_line(runs, tmp_path, capsys):
    with pytest.raises(RunError, match="no run named mamba; choose among stacktrans, transformer, value_skip"):
        build_ablation([runs], "mamba")
    with pytest.raises(RunError, match="nowhere: no such folder; give run folders"):
        build_ablation([Path("nowhere")])
    (alone,) = runs.glob("transformer-seed=0-*")
    assert cli.main(["report", "ablation", str(alone), f"--figure={tmp_path}/none.png"]) == 0
    assert "none.png: not drawn" in capsys.readouterr().err
    assert build_ablation([runs], "value_skip").tables[1].title == "Differences from value_skip"


def test_arms_of_one_name_are_told_apart_by_their_options(tmp_path):
    for number, slots in enumerate((6, 24)):
        options = ("model.memory=stacktrans", f"model.memory.num_slots={slots}")
        write_run(tmp_path / "q" / f"20261124-21565{number}-4dc3", *options)
    write_run(tmp_path / "other", "model.memory=null")
    assert list(load_arms([tmp_path])[0]) == ["other", "q (num_slots=6)", "q (num_slots=24)"]
    write_run(tmp_path / "q" / "20261124-215652-4dc3", "model.memory=null")
    names = list(load_arms([tmp_path])[0])
    assert names[1:] == [f"q (20261124-21565{number}-4dc3)" for number in range(3)], "too many options to name"


def test_runs_that_treat_loss_spikes_differently_are_other_arms(tmp_path):
    for seed, options in enumerate([(), ("trainer.skip_spikes=true",), ("trainer.spike_threshold=3",)]):
        write_run(tmp_path / f"q-seed={seed}-0123abc{seed}", *options, seed=seed)
    assert list(load_arms([tmp_path])[0]) == [
        "q (skip_spikes=false, spike_threshold=6.0)",
        "q (skip_spikes=true, spike_threshold=6.0)",
        "q (skip_spikes=false, spike_threshold=3.0)",
    ]


def test_cells_of_a_grid_are_not_the_papers_variants(tmp_path):
    finish(write_run(tmp_path / "H=2-d_s=4-S=2-0123abcd", "model.memory=stacktrans"), 3.0)
    table = read_table(build_ablation([tmp_path]), 0)
    assert "H=2-d_s=4-S=2" in table
    assert not [name for name in table if "(StackTrans)" in name]
    assert "paper: V2" not in table["H=2-d_s=4-S=2"], "no arm is a variant of the paper"


def test_notes_follow_the_tables_and_name_the_runs_of_each_reason_once(runs):
    (run,) = runs.glob("transformer-seed=2-*")
    (run / "result.json").unlink()
    report = build_ablation([runs])
    assert len({note.partition(": ")[0] for note in report.notes}) == len(report.notes)
    for style in ("terminal", "markdown"):
        text = format_report(report, style)
        ends = [max(text.index(row[0], text.index(table.title)) for row in table.rows) for table in report.tables]
        assert max(ends) < text.index(f"- {report.notes[0][:20]}")


def test_the_figure_is_sorted_by_loss_and_explains_the_average(runs):
    figure = build_ablation([runs]).draw()
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["value_skip", "stacktrans"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1], "the lowest loss is at the top"
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["training loss", "average (sets outside V2 and V3)", "differences below 0.01"]
    assert axes.get_title() == "95 % intervals", "no arm has one seed"
    assert figure.bbox.contains(*legend.get_window_extent().p0)
    assert figure.bbox.contains(*legend.get_window_extent().p1)
    for label in axes.get_yticklabels():
        assert label.get_window_extent().x0 >= 0


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (-0.03, -0.01, "helps"),
        (0.002, 0.005, "hurts"),
        (-0.009, 0.008, "no effect"),
        (-0.01, 0.0, "undecided"),
        (-0.005, 0.05, "undecided"),
        (-0.05, 0.005, "undecided"),
    ],
)
def test_an_interval_that_contains_the_effect_is_undecided(low, high, word):
    assert classify_effect(low, high, effect=0.01) == word
    corrected = {"helps": "undecided", "hurts": "no effect"}
    assert classify_effect(low, high, effect=0.01, is_significant=False) == corrected.get(word, word)


def test_holm_multiplies_the_smallest_p_values_most():
    assert adjust_holm([0.01, 0.04, 0.03, 0.9]) == pytest.approx([0.04, 0.09, 0.09, 0.9])
    assert adjust_holm([]) == []


@pytest.mark.parametrize(("seeds", "chunk_error"), [(3, 0.0), (30, 1.0)])
def test_arms_without_an_effect_rarely_help_or_hurt(seeds, chunk_error):
    """The arms share the baseline, so their differences are correlated. Chunk errors have four degrees of freedom."""
    rng, count, found = np.random.default_rng(0), 1000, 0
    for _ in range(count):
        losses = rng.standard_normal((18, seeds)) + chunk_error * rng.standard_normal((18, 1))
        differences = {}
        for arm in range(1, 18):
            estimate = chunk_error * math.sqrt(2 * rng.chisquare(4) / 4)
            chunks = SamplingError(estimate, 4) if chunk_error else None
            differences[str(arm)] = compute_difference((losses[arm] - losses[0]).tolist(), chunks)
        found += any(verdict.outcome in ("helps", "hurts") for verdict in judge_arms(differences, 0.01).values())
    assert 0.01 < found / count < 0.05 + 2 * math.sqrt(0.05 * 0.95 / count)


@pytest.mark.parametrize("arms", [1, 17])
def test_arms_with_the_effect_rarely_have_none(arms):
    """Every arm has an effect of 1, the smallest that `no effect above 1` excludes."""
    rng, count, found = np.random.default_rng(1), 1000, 0
    for _ in range(count):
        differences = {str(arm): compute_difference(1 + rng.normal(0, 0.5, 4)) for arm in range(arms)}
        found += any(verdict.outcome == "no effect" for verdict in judge_arms(differences, 1).values())
    assert 0.001 < found / count < 0.025 + 2 * math.sqrt(0.025 * 0.975 / count), "one side of a 95 % interval"


def test_verdicts_are_corrected_for_the_number_of_arms():
    clear = compute_difference([-0.1, -0.08, -0.11])  # p = 0.0082
    assert judge_arms({"a": clear}, 0.01)["a"].outcome == "helps"
    others = {str(i): compute_difference([-0.1, 0.1, 0.0]) for i in range(6)}
    assert judge_arms({"a": clear} | others, 0.01)["a"] == ("undecided", (clear.low, clear.high))
    same = judge_arms({"a": compute_difference([0.0, 0.0]), "one": Difference(-0.5, -0.6, -0.4, 1), "no": None}, 0.01)
    assert [verdict.outcome for verdict in same.values()] == ["no effect", "undecided", "undecided"]


def test_the_verdict_is_below_the_differences_in_every_format(runs, tmp_path, invoke):
    for seed, loss in enumerate((3.0, 3.2, 3.1)):
        finish(write_run(runs / f"copy-seed={seed}-0123abcd", "model.memory=adapter", seed=seed), loss)
    text = (
        "Verdict on the average (effect 0.01 nats, 95 %, Holm over 3 arms; a gain above the number in parentheses is "
        "excluded): helps: stacktrans (0.135); no effect above 0.01: copy (0.000); undecided: value_skip (7.438)."
    )
    report = build_ablation([runs])
    assert report.tables[1].conclusion == text
    assert {r["arm"]: r["average verdict"] for r in report.records if r["arm"] != "transformer"} == {
        "stacktrans": "helps",
        "copy": "no effect above 0.01",
        "value_skip": "undecided",
    }
    for style, notes in (("terminal", "\nNotes\n\n- Filled"), ("markdown", "\n**Notes**\n\n- Filled")):
        printed = format_report(report, style)
        assert printed.rindex("value_skip  ") < printed.index(text) < printed.index(notes)
    assert text.replace("%", r"\%").replace("_", r"\_") in format_report(report, "latex")
    page = build_page(runs)
    assert page.rindex("value_skip</td>") < page.index(f"<p>{text}</p>") < page.index("<h3>Notes</h3>")
    options = ["--loss", "training loss", "--effect", "0.2", "--tables"]
    output = invoke("report ablation", runs, *options)
    assert output.endswith(
        "Verdict on the training loss (effect 0.2 nats, 95 %, Holm over 3 arms; a gain above the number in parentheses "
        "is excluded): helps: stacktrans (0.135); no effect above 0.2: copy (0.000); undecided: value_skip (7.438).\n"
    )
    error = invoke("report ablation", runs, "--effect", "-1", expect=2)
    assert "--effect -1: not a difference in nats; use a positive number" in error


def test_runs_of_a_verdict_are_named(runs):
    (runs / "verdict.json").touch()
    assert build_ablation([runs]).notes[0].startswith(f"Runs of the verdict {runs}, whose arms may have stopped")


def test_one_pair_decides_nothing(runs):
    pair = [next(runs.glob(f"{arm}-seed=0-*")) for arm in ("transformer", "stacktrans")]
    conclusion = build_ablation(pair).tables[1].conclusion
    assert conclusion == "Verdict on the average: undecided; an interval over seeds needs two pairs or more."
    conclusion = build_ablation([*pair, *runs.glob("transformer-*"), *runs.glob("value_skip-*")]).tables[1].conclusion
    assert "undecided: stacktrans (one pair), value_skip (7.438)" in conclusion


def test_a_variant_that_several_arms_could_be_has_no_row(runs):
    for name in ("a", "b"):
        finish(write_run(runs / f"{name}-0123abcd", "model.memory=queue", f"optimizer.lr=0.0{len(name)}"), 3.0)
    report = build_ablation([runs])
    table = read_table(report, 0)
    assert not {"queue", "a (Queue)", "b (Queue)"} & table.keys()
    assert table["a"]["paper: V2"] == ABSENT
    assert table["single_head"]["paper: V2"] == "3.552 / 33.56†", "no arm could be it"
    assert {r["variant"] for r in report.records if r["arm"] in ("a", "b")} == {None}


def test_reasons_share_a_note_up_to_their_first_colon():
    reasons = [("left out", "a", 1), ("on another device: x", "a", 1), ("on another device: y", "b", 0)]
    reasons += [("on another device: x", "a", 0)]
    assert list_seeds(reasons) == [
        "1 run left out: a (seed 1)",
        "3 runs on another device: x: a (seeds 0, 1); y: b (seed 0)",
    ]


def test_means_and_differences_are_over_the_same_sets(tmp_path):
    losses = {"v2/pile": 4.0, "v2/c4_en": 3.0}
    for name, memory in (("transformer", "null"), ("queue", "queue")):
        for seed in (0, 1):
            sets = {key: {"loss": loss} for key, loss in losses.items() if seed == 0 or key == "v2/pile"}
            finish(write_run(tmp_path / f"{name}-seed={seed}-0123abc{seed}", f"model.memory={memory}", seed=seed), 5.0)
            folder = tmp_path / f"{name}-seed={seed}-0123abc{seed}"
            record = {"checkpoint": "00000010", "step": 10, "overrides": [], "time": "", "sets": sets}
            write_hashed_json(folder / "validate-v2.json", record)
    report = build_ablation([tmp_path])
    assert next(row for row in report.tables[0].rows if row[0] == "queue")[3] == "3.500", "the mean of seed 0"
    note = "2 runs scored on some sets only, not in the mean of V2: queue (seed 1), transformer (seed 1)"
    assert note in report.notes
    assert "V2" not in report.tables[1].header


def test_other_parts_of_a_set_and_diverged_sets_are_not_compared(runs):
    for path in runs.iterdir():
        is_part = path.name.startswith("stacktrans")
        sets = {"a": {"loss": 2.0, "perplexity": 8.0, "tokens": 100 if is_part else 5000}}
        if path.name.startswith("value_skip"):
            sets["b"] = {"loss": None, "perplexity": None, "tokens": 70}
        finish(path, 3.0, sets=sets)
    report = build_ablation([runs])
    rows = read_table(report, 0)
    assert rows["stacktrans"]["average"] == rows["transformer"]["average"] == "2.000 / 8.00"
    assert rows["value_skip"]["average"] == ABSENT, "the other set would hide that it diverged"
    assert "average" not in report.tables[1].header
    reason = "scored on other sets, or other parts of them, than transformer: not compared in average"
    assert any(reason in note and "stacktrans (seeds 0, 1, 2)" in note for note in report.notes), report.notes
    (note,) = [note for note in report.notes if "without a finite loss in training or on a set" in note]
    assert note.startswith("3 runs")


@pytest.mark.parametrize("counts", [[[10.0] * 59] * 2, [[10.0] * 60, [10.0] * 61]])
def test_sets_with_few_chunks_or_other_chunks_have_no_chunk_intervals(tmp_path, counts):
    for name in ("null", "queue"):
        for seed in (0, 1):
            run = finish(write_run(tmp_path / f"{name}-seed={seed}-0123abcd", f"model.memory={name}", seed=seed), 5.0)
            chunks = np.stack([5.0 * np.array(counts[seed]), np.array(counts[seed])])
            write_chunk_losses(run / "validate.json", "held-out", chunks)
    assert build_ablation([tmp_path]).tables[1].rows[0][-1] == "+0.000 (+0.000 to +0.000)"


def test_runs_from_before_and_after_a_new_option_are_one_arm(tmp_path):
    runs = [tmp_path / f"q-seed={seed}-0123abc{seed}" for seed in range(3)]
    for seed, run in enumerate(runs):
        finish(write_run(run, *(["trainer.z_loss=0.1"] if seed == 2 else []), seed=seed), loss=5.0)
    config = runs[1] / "config.yaml"
    config.write_text("".join(line for line in config.open() if "z_loss" not in line))
    arms, notes = load_arms([tmp_path])
    assert [[row["seed"] for row in rows] for rows in arms.values()] == [[0, 1], [2]], "0.0 is the default of z_loss"
    assert not notes


def test_intervals_are_those_of_student():
    difference = compute_difference([-0.1, -0.08, -0.11])
    assert difference.mean == pytest.approx(-0.09667, abs=1e-5)
    assert (difference.low, difference.high) == pytest.approx((-0.13461, -0.05872), abs=1e-5)  # scipy.stats.t
    assert str(difference) == "**-0.097 (-0.135 to -0.059)**"
    assert str(compute_difference([0.1, -0.08])) == "+0.010 (-1.134 to +1.154)"
    assert str(compute_difference([-0.5])) == "-0.500", "one seed is never bold"
    assert str(compute_difference([-0.0001])) == "+0.000", "zero has no minus sign"


def test_variants_are_found_by_their_options():
    for variant, memory in (CHOICES | {"Transformer": "null"}).items():
        assert find_variant(flatten_config(compose(["quickstart"], [f"model.memory={memory}"]))) == variant
    others = [["stacktrans-normalized"], ["authors_code"], ["adapter"], ["value_skip"], ["push_only", "num_slots=1"]]
    for memory, *changes in [*others, ["stacktrans", "empty_slot=true"], ["queue", "action_noise=2"]]:
        overrides = [f"model.memory={memory}", *(f"model.memory.{change}" for change in changes)]
        assert find_variant(flatten_config(compose(["quickstart"], overrides))) is None
    assert find_variant({"model.kind": "lstm"}) is None


def test_pairs_from_other_hardware_are_named(tmp_path):
    for name, seed, gpus in (("null", 0, []), ("null", 1, []), ("queue", 0, ["NVIDIA H200"]), ("queue", 1, [])):
        run = finish(write_run(tmp_path / f"{name}-seed={seed}-0123abcd", f"model.memory={name}", seed=seed), 3.0)
        (run / "environment.json").write_text(json.dumps([{"gpus": gpus, "versions": {"torch": "2.11.0"}}]))
    cpu = "trainer.accelerator=cpu"
    on_cpu = finish(write_run(tmp_path / "dense-seed=0-0123abcd", "model.memory=dense_former", cpu), 3.0)
    (on_cpu / "environment.json").write_text(json.dumps([{"gpus": ["NVIDIA H200"], "versions": {"torch": "2.15.0"}}]))
    arms, _ = load_arms([tmp_path])
    found = [m for arm in ("queue", "dense") for m in compare_arms(arm, arms[arm], "null", arms["null"]).mismatches]
    assert [(reason.partition(": ")[2], arm, seed) for reason, arm, seed in found if "started" in reason] == [
        ("on NVIDIA H200 with torch 2.11.0, null on a CPU with torch 2.11.0", "queue", 0),
        ("on a CPU with torch 2.15.0, null on a CPU with torch 2.11.0", "dense", 0),
    ]


def test_the_paper_contradicts_itself_in_four_cells():
    cells = {(name, column): cell for name, row in PAPER.items() for column, cell in zip(COLUMNS, row, strict=False)}
    found = {key for key, cell in cells.items() if contradicts_itself(*cell)}
    assert found == {("Queue", "V2"), ("Push-Only", "V2"), ("Push-Only", "V3"), ("Single-Head", "V2")}
