"""`report formal --arms`: mean accuracy of every arm under equal budgets."""

import json
import shutil

from formal_runs import finish, write_run

from stackexp.files import read_hashed_json, write_hashed_json, write_json
from stackexp.reports.formal_arms import find_best_arms
from stackexp.runs import RunFolder
from stackexp.tables import ABSENT


def test_arms_have_means_intervals_and_solved_seeds(tmp_path, invoke):
    scores = {"LSTM": [0.5, 0.6, 0.7], "StackTrans": [1.0, 1.0, 0.95]}
    for model, arm in (("LSTM", "lstm"), ("StackTrans", "stacktrans-time")):
        for seed, score in enumerate(scores[model]):
            name = f"{arm}-seed={100 + seed}-0123456{seed}"
            finish(
                write_run(tmp_path / "parity_check/pairs" / name, model, "parity_check", seed=100 + seed), beyond=score
            )
        tuning = tmp_path / "parity_check/tuning" / f"{arm}-0-seed=50-01234567"
        finish(write_run(tuning, model, "parity_check", seed=50), beyond=0.0)
    lengths = ("data.max_length=20", "data.validation_max_length=40", "data.eval_max_length=200")
    run = write_run(tmp_path / "repl_s3/pairs/lstm-seed=100-01234569", "LSTM", "repl_s3", *lengths, seed=100)
    finish(run, beyond=0.25, longest=200)
    for path in tmp_path.rglob("result.json"):
        write_hashed_json(path, read_hashed_json(path, "") | {"seconds": 900.0})
    printed = invoke("report formal --arms", tmp_path, "--markdown")
    assert "| task | lstm | stacktrans-time (ours) |" in " ".join(printed.split())
    # Student's t with two degrees of freedom: 4.303 * 0.1 / sqrt(3) = 0.248, 4.303 * 0.02887 / sqrt(3) = 0.0717
    assert "| parity_check | 0.60 (0.35 to 0.85) | **0.98** (0.91 to 1.00) |" in " ".join(printed.split())
    assert "| parity_check | 0/3 | 2/3 |" in " ".join(printed.split())
    assert f"| repl_s3 (21 to 200) | 0.33 | {ABSENT} |" in " ".join(printed.split())
    assert f"| repl_s3 (21 to 200) | 0/1 | {ABSENT} |" in " ".join(printed.split())
    assert "without a recorded time" not in printed
    assert "| hours | 1.2 | 1.0 |" in " ".join(printed.split()), "the tuning counts as cost, not as a score"


def test_best_arms_are_those_that_none_beats():
    solved, mixed, guessing = [1.0] * 5, [1.0, 1.0, 1.0, 1.0, 0.5], [0.5, 0.5, 0.51, 0.49, 0.5]
    assert find_best_arms({"a": guessing, "b": mixed, "c": solved}) == {"b", "c"}
    assert find_best_arms({"a": guessing, "b": [0.49, 0.5, 0.51, 0.5, 0.51]}) == set(), "all are guessing"
    assert find_best_arms({"a": solved, "b": solved, "c": guessing}) == {"a", "b"}
    # 21 of 252 permutations have at least this difference
    below = {"b": [1.0, 1.0, 0.5, 0.5, 0.5]}
    assert find_best_arms({"a": solved, **below}) == set()
    assert find_best_arms({"a": solved, "c": guessing[:1]}) == set(), "one seed decides nothing"
    # One of 252 permutations, times the arms by Holm's method: 12 arms are significant, 13 are not
    assert find_best_arms({"a": solved, **dict.fromkeys("bcdefghijklm", guessing)}) == {"a"}
    assert find_best_arms({"a": solved, **dict.fromkeys("bcdefghijklmn", guessing)}) == set()
    assert find_best_arms({"a": solved}) == find_best_arms({}) == set()


def test_columns_name_what_is_the_papers_and_what_is_ours(tmp_path, invoke):
    for arm, model, options in (
        ("feedback", "StackTrans", []),
        ("plain", "StackTrans", ["model.memory.feedback=false"]),
        ("depth", "StackTrans depth", ["model.memory.action_noise=2.0"]),
        ("lstm", "LSTM", []),
    ):
        folder = tmp_path / f"pairs/{arm}-seed=100-01234567"
        finish(write_run(folder, model, "parity_check", *options, seed=100), beyond=0.5)
    printed = " ".join(invoke("report formal --arms", tmp_path, "--markdown").split())
    assert "| task | depth (paper) | feedback (ours) | lstm | plain (ours) |" in printed
    assert "feedback (ours) differs from the paper's stack in read=top, feedback=true" in printed
    assert "plain (ours) differs from the paper's stack in read=top" in printed


def test_a_failed_run_counts_as_not_solved(tmp_path, invoke):
    for seed in (100, 101):
        run = write_run(tmp_path / f"pairs/lstm-seed={seed}-0123456{seed % 10}", "LSTM", "parity_check", seed=seed)
        if seed == 100:
            finish(run, beyond=1.0)
    command = ["report", "formal", "--arms", str(tmp_path), "--markdown"]
    (run / "failure.json").write_text('{"tried_again": true}')
    assert "| parity_check | 1/1 |" in " ".join(invoke(*command).split()), "its next attempt has not ended"
    (run / "failure.json").write_text('{"tried_again": false}')
    printed = " ".join(invoke(*command).split())
    assert "| parity_check | 1/2 |" in printed
    assert "the last session; those without a recorded time (1) count as 0" in printed
    assert "Failed runs count as not solved, and are in no mean accuracy: lstm on parity_check (1)" in printed
    assert "left out" not in printed
    again = write_run(tmp_path / "again/pairs/lstm-seed=101-01234561", "LSTM", "parity_check", seed=101)
    with RunFolder(run).lock():
        assert "| parity_check | 1/1 |" in " ".join(invoke(*command).split()), "its next attempt is running"
    finish(again, beyond=1.0)
    assert "| parity_check | 2/2 |" in " ".join(invoke(*command).split()), "its seed has finished elsewhere"
    shutil.rmtree(tmp_path / "again")
    (run / "failure.json").write_text("{")
    assert "| parity_check | 1/1 |" in " ".join(invoke(*command).split()), "damaged"
    (run / "failure.json").write_text('{"tried_again": false}')
    text = " ".join(invoke("report formal", tmp_path, "--markdown").split())
    assert "**1.00** / 1.00 (1/2) |" in text
    assert f"failed runs count as not solved, and are in no other score: {run}" in text


def test_an_arm_or_a_task_whose_runs_all_failed_is_in_the_table_and_in_copies(tmp_path, invoke):
    finish(write_run(tmp_path / "q/parity_check/pairs/lstm-seed=100-01234560", "LSTM", "parity_check"), beyond=1.0)
    finish(write_run(tmp_path / "q/parity_check/tuning/lstm-0-seed=50-01234560", "LSTM", "parity_check"), beyond=1.0)
    for arm, model, task in (("transformer", "Transformer", "parity_check"), ("lstm", "LSTM", "even_pairs")):
        run = write_run(tmp_path / f"q/{task}/pairs/{arm}-seed=100-01234561", model, task)
        cause = "step 3: loss nan with gradient norm 1; last good checkpoint: /home/me/checkpoints/00000003"
        write_json(run / "failure.json", {"cause": cause})
    unfinished = write_run(tmp_path / "q/parity_check/pairs/lstm-seed=101-01234562", "LSTM", "parity_check")
    write_hashed_json(tmp_path / "q/parity_check/verdict.json", {"version": 1})
    copies = tmp_path / "copies"
    invoke("runs copy", tmp_path / "q", "--to", copies)
    found = {str(path.relative_to(copies)) for path in copies.rglob("*") if path.suffix or "seed" in path.name}
    assert {"parity_check/verdict.json", "parity_check/tuning/lstm-0-seed=50-01234560"} <= found
    assert not any(unfinished.name in path for path in found)
    cause = json.loads((copies / run.relative_to(tmp_path / "q") / "failure.json").read_text())["cause"]
    assert cause == "step 3: loss nan with gradient norm 1; last good checkpoint: 00000003"
    inner = tmp_path / "q/parity_check/pairs"
    for number, folders in enumerate(([tmp_path / "q", inner], [inner, tmp_path / "q"])):
        invoke("runs copy", *folders, "--to", tmp_path / f"both{number}")
        assert (tmp_path / f"both{number}/parity_check/pairs/lstm-seed=100-01234560").is_dir()
    for folder in (tmp_path / "q", copies):
        printed = " ".join(invoke("report formal --arms", folder, "--markdown").split())
        assert "| parity_check | 1/1 | 0/1 |" in printed
        assert f"| even_pairs | 0/1 | {ABSENT} |" in printed
    assert "failed (0/1)" in invoke("report formal", copies, "--markdown")


def test_two_runs_of_one_seed_are_an_error(tmp_path, invoke):
    for name, steps in (("equal", 600), ("equal-budget-0.1", 60)):
        folder = tmp_path / name / "parity_check/pairs/lstm-seed=100-01234567"
        run = write_run(folder, "LSTM", "parity_check", f"trainer.max_steps={steps}", seed=100)
        finish(run, beyond=0.5)
    error = invoke("report formal --arms", tmp_path, expect=1)
    assert "are runs of lstm on parity_check with one seed; give the folder of one" in error


def test_runs_without_scores_are_an_error(tmp_path, invoke):
    finish(write_run(tmp_path / "lstm-seed=0-01234567", "LSTM", "parity_check"), beyond=0.5, longest=60)
    assert "no finished run is tested over 41..500" in invoke("report formal --arms", tmp_path, expect=1)


def test_one_setting_may_have_another_kind(tmp_path, invoke):
    """The trials differ in an option that only one kind has, and in one that changes no result; one has no score."""
    muon = ["optimizer.kind=muon", "logging.probe_interval=5"]
    for trial, (options, score) in enumerate([(muon, 0.5), ([], 0.75), (["optimizer.lr=0.5"], 1.0)]):
        run = tmp_path / f"parity_check/tuning/transformer-{trial}-seed=50-01234567"
        finish(write_run(run, "Transformer", "parity_check", *options, seed=50), beyond=0.0, validation=score)
    result = read_hashed_json(run / "result.json", "")
    write_hashed_json(run / "result.json", {key: x for key, x in result.items() if key != "validation_accuracy"})
    for seed, (options, score) in enumerate([([], 0.25), (muon, 0.5)], 100):
        run = tmp_path / f"parity_check/pairs/transformer-seed={seed}-01234567"
        finish(write_run(run, "Transformer", "parity_check", *options, seed=seed), beyond=score)
    printed = " ".join(invoke("report formal --arms --one-setting --markdown", tmp_path).split())
    assert "| parity_check | 0.25 |" in printed
    assert "One setting of transformer: optimizer.kind=adamw" in printed


def test_one_setting_is_chosen_over_all_tasks(tmp_path, invoke):
    """Rate 1e-3 is best on parity_check, 2e-3 on even_pairs and over both; only runs at 2e-3 count."""
    accuracy = {("parity_check", 1e-3): 0.75, ("parity_check", 2e-3): 0.5, ("even_pairs", 1e-3): 0.5}
    for task in ("parity_check", "even_pairs"):
        for trial, lr in enumerate((1e-3, 2e-3)):
            run = tmp_path / f"equal/{task}/tuning/lstm-{trial}-seed=50-01234567"
            write_run(run, "LSTM", task, f"optimizer.lr={lr}", seed=50)
            finish(run, beyond=0.0, longest=60, validation=accuracy.get((task, lr), 1.0))
    for folder, task, lr, score in (
        ("equal", "parity_check", 1e-3, 1.0),
        ("equal", "even_pairs", 2e-3, 0.75),
        ("again", "even_pairs", 2e-3, 0.25),
        ("one", "parity_check", 2e-3, 0.5),
    ):
        run = tmp_path / f"{folder}/{task}/pairs/lstm-seed=100-01234567"
        finish(write_run(run, "LSTM", task, f"optimizer.lr={lr}", seed=100), beyond=score)
    command = ["report", "formal", "--arms", "--markdown", "--one-setting"]
    printed = " ".join(invoke(*command, tmp_path / "equal").split())
    assert "| even_pairs | 0.75 |" in printed
    assert "| parity_check |" not in printed
    assert (
        "One setting of lstm: optimizer.lr=0.002; mean validation accuracy of 0.750 over the 2 tuned tasks" in printed
    )
    printed = " ".join(invoke(*command, tmp_path / "equal", tmp_path / "one", tmp_path / "again").split())
    assert "| even_pairs | 0.75 |" in printed, "equal runs count once"
    assert "| parity_check | 0.50 |" in printed
    error = invoke(*command, tmp_path / "one", expect=1)
    assert "no finished run in a folder tuning/ chooses a setting" in error
    assert "--one-setting requires --arms" in invoke("report formal --one-setting", tmp_path, expect=2)


def test_a_setting_counts_only_with_trials_on_all_tasks(tmp_path, invoke):
    """Each rate of the LSTM lacks a task, so no mean is over both."""
    for trial, task in enumerate(("parity_check", "even_pairs", "parity_check", "even_pairs")):
        run = tmp_path / f"{task}/tuning/lstm-{trial}-seed=50-01234567"
        finish(write_run(run, "LSTM", task, f"optimizer.lr=0.00{trial + 1}", seed=50), beyond=0.0, validation=0.5)
    assert "lstm: left out, no setting has" in invoke("report formal --arms --one-setting", tmp_path, expect=1)
    for task in ("parity_check", "even_pairs"):
        run = tmp_path / f"{task}/tuning/transformer-0-seed=50-01234567"
        finish(write_run(run, "Transformer", task, "optimizer.lr=0.001", seed=50), beyond=0.0, validation=0.5)
        run = tmp_path / f"{task}/pairs/transformer-seed=100-01234567"
        finish(write_run(run, "Transformer", task, "optimizer.lr=0.001", seed=100), beyond=0.5)
    run = tmp_path / "parity_check/tuning/transformer-1-seed=50-01234567"
    finish(write_run(run, "Transformer", "parity_check", "optimizer.lr=0.002", seed=50), beyond=0.0, validation=1.0)
    run = tmp_path / "parity_check/tuning/transformer-1-seed=51-01234567"  # a second seed of the better rate only
    finish(write_run(run, "Transformer", "parity_check", "optimizer.lr=0.001", seed=51), beyond=0.0, validation=0.5)
    run = tmp_path / "even_pairs/tuning/transformer-1-seed=51-01234567"
    finish(write_run(run, "Transformer", "even_pairs", "optimizer.lr=0.001", seed=51), beyond=0.0, validation=0.5)
    run = tmp_path / "even_pairs/tuning/transformer-2-seed=50-01234567"
    finish(write_run(run, "Transformer", "even_pairs", "optimizer.lr=0.002", seed=50), beyond=0.0, validation=1.0)
    printed = invoke("report formal --arms --one-setting", tmp_path)
    assert "lstm: left out, no setting has finished trials on all of even_pairs, parity_check" in printed
    assert "One setting of transformer: optimizer.lr=0.001; mean validation accuracy of 0.500 over" in printed


def test_of_two_equal_runs_of_a_seed_the_later_one_counts(tmp_path, invoke):
    for name, score, start in (("a", 0.5, "2026-01-02"), ("b", 0.25, "2026-01-03"), ("c", 0.75, "2026-01-01")):
        run = write_run(tmp_path / name / "parity_check/pairs/lstm-seed=100-01234567", "LSTM", "parity_check", seed=100)
        finish(run, beyond=score)
        write_json(run / "environment.json", [{"started": f"{start}T00:00:00+0000"}])
    printed = " ".join(invoke("report formal --arms --markdown", tmp_path).split())
    assert "| parity_check | 0.25 |" in printed
    assert "left out, a later run has the same seed" in printed
