"""`verdict`: equal tuning, the plan, pairs until every arm is decided, and what is printed. Trials are fake."""

import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
from processes import wait_until
from verdict_question import SEEDS, Question

from stackexp.cli import main
from stackexp.config.compose import build_dataclass
from stackexp.config.yaml_files import read_file
from stackexp.errors import ConfigError
from stackexp.reports.verdict import compute_best_of, find_share_of_steps
from stackexp.runs import RunFolder
from stackexp.sweeps.tuning import TunedSpace, Tuning, estimate_noise
from stackexp.sweeps.verdict import VerdictConfig

DIVERGED = "step 3: loss nan with gradient norm nan on sequences [1] of rank 0; nothing was updated"


@pytest.fixture
def question(tmp_path) -> Question:
    return Question(tmp_path)


def test_arms_are_tuned_then_paired_until_all_are_decided(question):
    printed = question.run()
    plan = json.loads((question.folder / "verdict.json").read_text())
    assert plan["values"] == {arm: {"optimizer.lr": 0.002} for arm in ("plain", "copy", "good", "same")}
    assert len(question.list_runs("tuning")) == 3 * 3 * 2, "the copy shares the runs of its original"
    rows = dict(reversed([(line.split()[0], line) for line in printed.splitlines() if f"/{len(SEEDS)} " in line]))
    assert "  helps  " in rows["good"]
    assert "no effect above 0.01" in rows["same"]
    assert "no effect above 0.01" in rows["copy"]
    assert "+0.0000" in rows["copy"], "two copies of an arm tie"
    pairs = question.list_runs("pairs")
    assert 3 <= sum(name.startswith("good") for name in pairs) < len(SEEDS), "a decided arm stops"
    before = {path: path.stat().st_mtime_ns for path in question.folder.glob("*/*/result.json")}
    assert rows["good"] in question.run(), "nothing is left to do"
    assert before == {path: path.stat().st_mtime_ns for path in question.folder.glob("*/*/result.json")}
    assert "undecided" not in question.run("--report")
    assert "18 runs, 18 done" in question.run("--dry-run")


def test_a_stopped_verdict_continues_and_a_diverged_trial_is_the_worst(question):
    question.behavior["same-2-seed=50-"] = {"first": ["error"] * 9, "error": DIVERGED}
    question.behavior["good-1-seed=51-"] |= {"first": ["kill"]}
    question.keys["arms"] = [arm for arm in question.keys["arms"] if arm["name"] != "copy"]
    question.write()
    printed = question.run(expect=1)
    assert "2 of 18 trials failed" in printed
    printed = question.run()
    assert "  helps  " in printed
    attempts = {
        path.parent.name.rpartition("-")[0]: len(path.read_text().splitlines())
        for path in question.folder.glob("tuning/*/attempts")
    }
    assert attempts["good-1-seed=51"] == 2
    assert attempts["same-2-seed=50"] == 1, "it would diverge again"
    losses = {tuple(values.values()): scores for values, scores in question.load().read_tuning()["same"]}
    assert losses[0.004,][0] == math.inf


def test_a_stop_names_the_command_that_continues(question):
    question.behavior["plain-0-seed=50-"]["wait"] = True
    question.prepare()
    process = subprocess.Popen(question.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: list(question.folder.glob("tuning/plain-0-seed=50-*/attempts")), process)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert f"stopped; resume with: python -m stackexp verdict {question.path}" in output
    (question.folder / "go").touch()
    assert "  helps  " in question.run()


@pytest.mark.process
def test_two_processes_share_a_verdict(question):
    """They start together, and a third one joins during the pairs."""
    question.behavior["same-seed=102-"] |= {"wait": True}
    question.prepare()

    def start() -> subprocess.Popen:
        return subprocess.Popen(question.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    processes = [start(), start()]
    wait_until(lambda: list(question.folder.glob("pairs/same-seed=102-*/attempts")), processes[0])
    processes.append(start())
    (question.folder / "go").touch()
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    reports = {output[output.index("Verdict against") :] for output in outputs}
    assert len(reports) == 1
    assert "  helps  " in reports.pop()
    assert set(question.count_attempts()) == {1}


def test_another_question_needs_another_name(question, capsys):
    question.run()
    question.write(effect=0.02)
    question.keys["arms"][2]["model.memory.num_slots"] = 4
    question.write()
    assert main(["verdict", str(question.path), "--report"]) == 2
    error = capsys.readouterr().err
    assert "arms, effect changed since" in error
    assert error.rstrip().endswith("give it another name")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"arms": [{"name": "a"}]}, "arms: expected at least two"),
        ({"arms": [{"name": "a"}, {"name": "a"}]}, "a is the name of two arms"),
        ({"arms": [{"name": "a=1"}, {"name": "b"}]}, "expected a name without '='"),
        ({"arms": [{"name": "a", "seed": 1}, {"name": "b"}]}, "the verdict chooses the seeds"),
        ({"baseline": "plane"}, "no arm is named plane; did you mean 'plain'?"),
        ({"tuning": None, "pairs": None}, "pairs: required without tuning"),
        ({"first_seed": 50}, "tuning.seeds: 50 is also a seed of the pairs"),
        ({"tuning": {"space": {"optimizer.lr": {"low": 1, "high": 2}}}}, "required, because optimizer.lr is a range"),
        ({"tuning": {"space": {}}}, "name at least one key"),
        ({"tuning": {"space": {"optimizer.lr": {"values": [1]}}, "seeds": [1]}}, "two different seeds or more"),
        ({"tuning": {"space": {k: {"values": [1]} for k in "abcd"}}}, "plain tunes 4 options; expected at most 3"),
        ({"tuning": {"space": {"a": {"values": [1], "arms": ["good"]}}}}, "only some arms tune a"),
        ({"tuning": {"space": {"a": {"values": [1], "arms": ["godo"]}}, "trials": 2}}, "no arm is named godo"),
        ({"score": "average.accuracy"}, "average.accuracy is an accuracy; expected a loss"),
        ({"overrides": ["optimizer.lr=1"]}, "optimizer.lr is chosen by the verdict"),
        ({"overrides": ["seed=1"]}, "seed is chosen by the verdict"),
        ({"efect": 1}, "did you mean 'effect'?"),
        ({"grid": 1}, "grid: unknown key; a verdict has arms, baseline"),
    ],
)  # fmt: skip
def test_mistakes_in_the_file_are_one_line(question, keys, expected, capsys):
    question.write(**keys)
    assert main(["verdict", str(question.path), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_every_arm_gets_the_same_draws():
    lr = TunedSpace(low=1e-3, high=1e-1, log=True)
    own = {"x": TunedSpace(values=[1, 2, 3], arms=["b"]), "n": TunedSpace(low=2, high=5, int=True, arms=["b"])}
    tuning = Tuning({"optimizer.lr": lr} | own, 8)
    a, b = tuning.draw_points("a"), tuning.draw_points("b")
    assert [point["optimizer.lr"] for point in a] == [point["optimizer.lr"] for point in b]
    assert {point["x"] for point in b} == {1, 2, 3}
    assert {point["n"] for point in b} <= {2, 3, 4, 5}
    logs = np.log10([point["optimizer.lr"] for point in a])
    assert sorted(np.floor(4 * (logs + 3) / 2)) == [0, 0, 1, 1, 2, 2, 3, 3], "spread over the range"
    assert Tuning(tuning.space, 16).draw_points("b")[:8] == b, "a longer search begins with the same draws"


def test_best_of_n_is_that_of_random_subsets():
    losses = [3.0, 1.0, 2.0, math.inf]
    assert compute_best_of(losses, 4) == (1, 1, 1)
    subsets = [min(a, b) for i, a in enumerate(losses) for b in losses[i + 1 :]]
    assert compute_best_of(losses, 2)[0] == pytest.approx(np.mean(subsets))
    assert compute_best_of(losses, 1)[0] == math.inf


def test_noise_is_that_of_pairs_at_equal_rank():
    random = np.random.default_rng(0)
    seeds = random.normal(0, 1, 200)  # shared by both arms, so that it cancels
    tuned = {
        arm: [({}, list(4 + gap + seeds + random.normal(0, 0.01, 200))) for gap in (0, 0.1, 5)]
        for arm in ("base", "arm")
    }
    tuned["arm"].append(({}, [math.inf] * 200))
    assert estimate_noise(tuned, "base") == pytest.approx(0.01 * math.sqrt(2), rel=0.1)


def test_share_of_steps_to_the_loss_of_the_baseline(tmp_path):
    def write(name: str, losses: list[float]) -> RunFolder:
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        lines = [{"step": i + 1, "tokens": i + 1, "train/loss": loss} for i, loss in enumerate(losses)]
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    base = write("base", [5 - i / 100 for i in range(200)])
    fast = write("fast", [5 - i / 50 for i in range(200)])
    assert find_share_of_steps(base, base) == 1
    assert find_share_of_steps(fast, base) == pytest.approx(0.5, abs=0.05)
    assert find_share_of_steps(base, fast) is None


def test_a_memory_is_compared_with_its_controls(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["verdict", "--memory", "queue", "--config", "ablation/small", "--dry-run"]
    assert main(command) == 0
    path = Path("runs/verdict-small-queue/question.yaml")
    assert f"wrote {path}" in capsys.readouterr().out
    _, tree = read_file(path)
    config = build_dataclass(VerdictConfig, tree)
    arms = {arm["name"]: arm for arm in config.arms}
    assert arms["transformer_wide"]["model.intermediate_size"] == 427, "as in the small ablation"
    assert arms["wider_stream"]["model.hidden_size"] > 128
    assert {"transformer", "adapter", "residual_scale", "queue", "transformer_flops"} <= arms.keys()
    assert main([*command, "trainer.max_steps=600"]) == 2
    assert "has other overrides" in capsys.readouterr().err


def test_loading_checks_the_arms(question):
    question.keys["arms"][2]["model.memory.num_slotz"] = 3
    question.write()
    with pytest.raises(ConfigError, match=r"question\.yaml:\d+: model\.memory\.num_slotz: unknown key"):
        question.load().check()


def test_pairs_are_planned_from_runs_on_record(capsys):
    runs = Path(__file__).parent.parent / "docs/results/ablation_small"
    command = ["plan", "--effect", "0.01", "--runs", str(runs), "--baseline", "transformer_wide"]
    assert main(command) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (row,) = [row for row in rows if row[:1] == ["stacktrans"]]
    (pooled,) = [row for row in rows if row[:1] == ["all"]]
    assert 0.005 < float(row[1]) < 0.03 < float(row[4].rstrip(")")), "three pairs leave a wide interval"
    assert 0.005 < float(pooled[2]) < 0.03
    assert 15 < int(pooled[-2]) < 60
    assert main(["plan", "--effect", "0.01"]) == 2
    assert "--effect requires --runs" in capsys.readouterr().err
