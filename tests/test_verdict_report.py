"""Report of a verdict: pairs and hours, the date of the plan, tuning, averaged weights; and plans before any run."""

import itertools
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from stackexp.files import read_hashed_json, write_hashed_json, write_json, write_json_lines
from stackexp.reports.pair_plan import _format_stage
from stackexp.reports.verdict import compute_best_of, find_share_of_steps
from stackexp.runs import RunFolder
from stackexp.sequential import compute_deviation_interval, count_pairs


def test_an_undecided_arm_has_the_pairs_and_hours_of_a_new_verdict(question, invoke):
    """The differences are 0.05, 0.15, 0.05, 0.15. Runs take an hour, those of the arm two."""
    for i, seed in enumerate(range(100, 104)):
        question.behavior[f"same-seed={seed}-"]["loss"] = question.behavior[f"plain-seed={seed}-"]["loss"]
        question.behavior[f"same-seed={seed}-"]["loss"] += 0.05 + 0.1 * (i % 2)
    for name in question.behavior:
        question.behavior[name]["speed"] = 10 / (7200 if name.startswith("same") else 3600)
    question.keep_arms("plain", "same")
    question.write(tuning=None, pairs=4)
    question.run()
    needed = count_pairs(0.01, float(np.std([0, 0.1, 0, 0.1], ddof=1)), degrees=3)
    command = ["verdict", str(question.path), "--report"]
    printed = invoke(*command)
    assert f"undecided: {needed} new pairs ({needed * 3:.1f} hours)" in printed
    assert re.search(r"^same .* 4/4 .* 2\.00x$", printed, re.M)
    assert re.search(r"^same +1\.000 +2\.000$", printed, re.M), "of its steps, of its time"
    (last,) = question.folder.glob("pairs/same-seed=103-*/result.json")
    contents = last.read_text()
    last.unlink()
    assert "undecided: 1 more pair (3.0 hours)" in invoke(*command)
    last.write_text(contents)
    (first,) = question.folder.glob("pairs/same-seed=100-*/result.json")
    contents, failure = first.read_text(), first.with_name("failure.json")
    first.unlink()
    write_json(failure, {"cause": "killed by SIGKILL", "attempts": 1, "forgiven": 0, "tried_again": False})
    printed = invoke(*command)
    assert "undecided: 1 more pair (3.0 hours)" in printed
    assert "0/4" in printed, "in the order of the seeds"
    assert f"{first.parent.name}: failed (killed by SIGKILL); the pairs after it count once it has run" in printed
    first.write_text(contents)
    failure.unlink()
    for path in question.folder.glob("pairs/*/metrics.jsonl"):  # as in copies of runs
        result = RunFolder(path.parent).result
        write_hashed_json(result, read_hashed_json(result, "") | {"seconds": 30.0 if "same" in str(path) else 10.0})
        path.unlink()
    printed = invoke(*command)
    assert f"undecided: {needed} new pairs ({needed * 40 / 3600:.1f} hours)" in printed
    assert re.search(r"^same .* 4/4 .* 3\.00x$", printed, re.M)
    assert "Times are those of whole runs" in printed


def test_the_gain_is_split_by_the_controls(question):
    """Each arm differs from the baseline by another amount, on every seed."""
    shifts = {"transformer_wide": 0.0, "transformer": 0.1, "transformer_flops": 0.2, "wider_stream": 0.5}
    shifts |= {"adapter": 0.7, "residual_scale": 1.1, "stack": 0.3}
    arms = [{"name": name, "model.memory": None, "model.intermediate_size": 32 + i} for i, name in enumerate(shifts)]
    arms[-3] = {"name": "adapter", "model.memory.discipline": "push_only", "model.memory.num_slots": 1}
    arms[-1] = {"name": "stack"}
    noise = {"transformer_wide": 0.0} | {name: 0.01 * i for i, name in enumerate(shifts)}
    for seed, arm in itertools.product(range(100, 104), shifts):
        question.behavior[f"{arm}-seed={seed}-"] = {"seconds": 0.01, "loss": 4 + shifts[arm] + noise[arm] * (seed % 2)}
    question.write(arms=arms, tuning=None, pairs=4)
    split = question.run().partition("Split of the gain")[2].partition("Notes")[0]
    rows = {
        cause: (pair, float(mean))
        for cause, pair, mean in re.findall(r"^(\w.*?)  +(\w+ minus \w+) +(\S+) ", split, re.M)
    }
    assert {cause: pair for cause, (pair, _) in rows.items()} == {
        "parameters": "transformer_wide minus transformer",
        "residual width at equal FLOPs": "wider_stream minus transformer_flops",
        "scaling of the residual stream": "residual_scale minus transformer",
        "mechanism": "stack minus adapter",
    }
    for cause, (pair, mean) in rows.items():
        arm, base = pair.split(" minus ")
        assert mean == pytest.approx(shifts[arm] - shifts[base], abs=0.05), cause


def test_a_plan_is_dated_and_known_before_the_pairs(question, invoke):
    question.keep_arms("plain", "same")
    question.run()
    report, dry = (["verdict", str(question.path), option] for option in ("--report", "--dry-run"))

    def read(command: list[str]) -> str:
        return " ".join(invoke(*command).split())

    plan = json.loads((question.folder / "verdict.json").read_text())
    runs = sorted(question.folder.glob("pairs/*/environment.json"))
    assert f"{len(runs)} have no date." in read(report)
    for path, year in zip(runs, ["2001"] + ["2100"] * len(runs), strict=False):
        path.write_text(json.dumps([{"started": f"{year}-01-01T00:00:00+0000", "gpus": ["card"]}]))
    assert f"verdict.json, written {plan['written']}: 1 runs started earlier, 0 have no date." in read(report)
    runs[0].write_text(runs[1].read_text())
    assert f"verdict.json, written {plan['written']}, before the first pair." in read(report)
    low, high = compute_deviation_interval(plan["deviation"], plan["degrees"])
    noise = f"{plan['deviation']:.4f} ({low:.4f} to {high:.4f})"
    assert f"With the deviation {noise} of the tuning pairs" in read(report)
    write_hashed_json(
        question.folder / "verdict.json", {k: v for k, v in plan.items() if k not in ("written", "sha256")}
    )
    assert "verdict.json, which has no date" in read(report)
    shutil.rmtree(question.folder / "pairs")
    (question.folder / "verdict.json").unlink()
    text = read(dry)
    assert f"deviation of a pair {noise}: an effect of 0.01 takes " in text
    assert "pairs 16 runs, 0 done; the rest takes about " in text
    (tuned,) = question.folder.glob("tuning/same-0-seed=50-*/result.json")
    tuned.unlink()
    assert "pairs 16 runs: 8 seeds of 2 arms" in read(dry)


def test_a_chosen_edge_and_a_short_search_are_named(question, invoke):
    """Three rates: `same` gains 1 with each, which is more than half the effect, `plain` gains nothing.

    The best of one has the mean 3, that of two 7/3; half of three trials are between both, 2/3 above the best of three.
    """
    for i, seed in itertools.product(range(3), (50, 51)):
        question.behavior[f"same-{i}-seed={seed}-"]["loss"] = 4 - i
        question.behavior[f"plain-{i}-seed={seed}-"]["loss"] = 4
    question.keep_arms("plain", "same")
    question.run()
    printed = invoke("verdict", question.path, "--report")
    assert "same: chose the largest optimizer.lr that was tried, so the best may lie beyond" in printed
    assert "plain: chose the smallest optimizer.lr that was tried" in printed
    tuning = printed.partition("Tuning:")[2].partition("Notes")[0]
    assert re.search(r"^same .* 0\.6667 +no$", tuning, re.M)
    assert re.search(r"^plain .* 0\.0000 +yes$", tuning, re.M)


def test_averaged_weights_are_compared_too(question, invoke):
    """The average is 1 better for `same`, and 0 for the baseline."""
    for name, behavior in question.behavior.items():
        behavior["ema"] = behavior["loss"] - name.startswith("same")
    question.keep_arms("plain", "same")
    for score, other, shift in (("average.loss", "ema.average.loss", -1), ("ema.average.loss", "average.loss", 1)):
        question.write(name=score, score=score, tuning=None, pairs=4, overrides=["trainer.ema_decay=0.9"])
        question.folder = question.folder.with_name(score)
        question.run()
        verdict, _, table = invoke("verdict", question.path, "--report").partition(f"The differences in {other}")
        ours, theirs = (re.search(r"^same .*?([+-][\d.]+) ", text, re.M)[1] for text in (verdict, table))
        assert float(theirs) - float(ours) == pytest.approx(shift, abs=2e-4)
    question.write(name="other", score="average.loss")
    question.folder = question.folder.with_name("other")
    for behavior in question.behavior.values():
        del behavior["ema"]
    assert "The differences in ema" not in question.run(), "as in data whose runs are not scored with averages"


def test_best_of_n_is_that_of_random_subsets():
    losses = [3.0, 1.0, 2.0, math.inf]
    assert compute_best_of(losses, 4) == (1, 1, 1)
    subsets = [min(a, b) for i, a in enumerate(losses) for b in losses[i + 1 :]]
    assert compute_best_of(losses, 2)[0] == pytest.approx(np.mean(subsets))
    assert compute_best_of(losses, 1)[0] == math.inf


def test_share_of_steps_to_the_loss_of_the_baseline(tmp_path):
    def write(name: str, losses: list[float]) -> RunFolder:
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        lines = [{"step": i + 1, "tokens": i + 1, "train/loss": loss} for i, loss in enumerate(losses)]
        write_json_lines(folder.metrics, lines)
        return folder

    base = write("base", [5 - i / 100 for i in range(200)])
    fast = write("fast", [5 - i / 50 for i in range(200)])
    assert find_share_of_steps(base, base) == 1
    assert find_share_of_steps(fast, base) == pytest.approx(0.5, abs=0.05)
    assert find_share_of_steps(base, fast) is None
    dip = write("dip", [5 - i / 100 - (100 < i < 150) for i in range(200)])
    assert find_share_of_steps(dip, dip) > 0.9, "an early dip does not count"


def test_a_verdict_that_was_moved_is_read_from_logging_root(question, invoke):
    question.keep_arms("plain", "same")
    question.write(tuning=None, pairs=4)
    question.run()
    command = ["verdict", str(question.path), "--report", "--tables", "1"]
    printed = invoke(*command)
    copies = question.path.parent / "copies"
    question.folder.parent.rename(copies)
    assert invoke(*command, "--logging.root", copies) == printed
    assert invoke(*command, f"--logging.root={copies}", "--figure", copies / "verdict.png") == printed
    assert (copies / "verdict.png").read_bytes().startswith(b"\x89PNG")


def test_runs_that_a_needed_arm_shares_are_needed(tmp_path):
    """The decided arm `copy` has the config of the baseline, so both have the same runs."""
    trials = {}
    for seed in range(3):
        trial = SimpleNamespace(
            name=f"run-{seed}", folder=SimpleNamespace(is_finished=False), failure=tmp_path / "none"
        )
        trials |= {("plain", 0, seed): trial, ("copy", 0, seed): trial}
    text = _format_stage("pairs", SimpleNamespace(trials=trials), {"plain": 60.0, "copy": 60.0}, ["plain"])
    assert text == "pairs   3 runs, 0 done; the rest takes about 3 min 0 s, one run after the other"


def test_before_the_first_pair_no_csv_file_is_written(question, capture, tmp_path):
    _, errors = capture("verdict", question.path, "--report", "--csv", tmp_path / "pairs.csv")
    assert errors.endswith("pairs.csv: not written, this report has no values for it\n")
    assert not (tmp_path / "pairs.csv").exists()


def test_pairs_are_planned_from_runs_on_record(invoke):
    runs = Path(__file__).parent.parent / "docs/results/ablation_small"
    command = ["plan", "--effect", "0.01", "--runs", str(runs), "--baseline", "transformer_wide"]
    rows = [line.split() for line in invoke(*command).splitlines()]
    (row,) = [row for row in rows if row[:1] == ["stacktrans"]]
    (pooled,) = [row for row in rows if row[:1] == ["pooled"]]
    assert 0.005 < float(row[1]) < 0.03 < float(row[4].rstrip(")")), "three pairs leave a wide interval"
    assert pooled[:6] == ["pooled", "(17", "arms", "of", "3", "pairs)"]
    assert 0.005 < float(pooled[6]) < 0.03
    assert float(pooled[9].rstrip(")")) > 2 * float(pooled[6]), "17 arms share three runs of the baseline"
    assert 15 < int(pooled[-2]) < 60
    (of_six,) = [line.split() for line in invoke(*command, "--arms", "6").splitlines() if line.startswith("pooled")]
    assert int(of_six[-2]) == count_pairs(0.01, float(of_six[6]), 0.05 / 6)
    assert "--effect requires --runs" in invoke("plan --effect 0.01", expect=2)
    command[2] = "1e-9"
    assert "over 10000" in invoke(*command)
    command[2] = "inf"
    assert "--effect: expected a finite number above 0, found inf" in invoke(*command, expect=2)
