"""`verdict`: equal tuning, the plan, pairs until every arm is decided, and what is printed. Trials are fake."""

import contextlib
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from processes import read_to_end, wait_until
from verdict_question import SEEDS

from stackexp.config.compose import build_dataclass, compose
from stackexp.config.memory import MECHANISM
from stackexp.config.yaml_files import read_file
from stackexp.errors import ConfigError
from stackexp.runs import RunFolder
from stackexp.sequential import compute_power, count_pairs, judge
from stackexp.sweeps.controls import build_question
from stackexp.sweeps.question import VerdictConfig
from stackexp.sweeps.trials import get_number
from stackexp.sweeps.tuning import TunedSpace, Tuning, choose_point, estimate_noise
from stackexp.sweeps.verdict import PairPlan, load_verdicts

VERDICTS = Path(__file__).parents[1] / "verdicts"
DIVERGED = "step 3: loss nan with gradient norm nan on sequences [1] of rank 0; nothing was updated"


def test_arms_are_tuned_then_paired_until_all_are_decided(question, invoke):
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
    threads = {path.read_text().split()[2] for path in question.folder.glob("*/*/attempts")}
    assert len(threads) == 1, "runs of a batch of any size are equally fast"
    before = {path: path.stat().st_mtime_ns for path in question.folder.glob("*/*/result.json")}
    assert rows["good"] in question.run(), "nothing is left to do"
    assert before == {path: path.stat().st_mtime_ns for path in question.folder.glob("*/*/result.json")}
    assert "undecided" not in invoke("verdict", question.path, "--report")
    printed = invoke("verdict", question.path, "--dry-run")
    assert "18 runs, 18 done" in printed
    left = 3 * len(SEEDS) - len(pairs)
    assert f"24 runs, {len(pairs)} done, {left} not needed, because their arms are decided\n" in printed
    (question.folder / "verdict.json").unlink()
    next(question.folder.glob("tuning/same-0-seed=50-*/result.json")).unlink()
    assert "no pairs yet; 17 of 18 tuning runs are done" in invoke("verdict", question.path, "--report")
    assert "pairs   24 runs: 8 seeds of 4 arms with 3 configs" in invoke("verdict", question.path, "--dry-run")


def test_a_stopped_verdict_continues_and_a_diverged_trial_is_the_worst(question):
    question.behavior["same-2-seed=50-"] = {"first": ["error"] * 9, "error": DIVERGED}
    question.behavior["good-1-seed=51-"] |= {"first": ["kill"]}
    question.keep_arms("plain", "good", "same")
    printed = question.run(expect=1)
    assert "1 of 18 runs failed, the first good-1-seed=51" in printed, "a diverged trial is no failure"
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
    process = question.start()
    wait_until(lambda: list(question.folder.glob("tuning/plain-0-seed=50-*/attempts")), process)
    process.terminate()
    output, _ = read_to_end(process, expect=75)
    assert f"stopped; resume with: python -m stackexp verdict {question.path}" in output
    (question.folder / "go").touch()
    assert "  helps  " in question.run()


def test_an_arm_stops_at_a_pair_that_diverged(question, invoke):
    """A training that failed, and one whose loss was not finite in the end, which its result has as null."""
    question.behavior["same-seed=102-"] = {"first": ["error"] * 9, "error": DIVERGED}
    question.behavior["good-seed=101-"] = {"seconds": 0.01, "loss": None}
    question.keep_arms("plain", "good", "same")
    question.write(tuning=None)
    printed = question.run()
    rows = {line.split()[0]: line for line in printed.splitlines() if f"/{len(SEEDS)} " in line}
    assert "undecided: seed 102 diverged" in rows["same"]
    assert "undecided: seed 101 diverged" in rows["good"]
    (path,) = question.folder.glob("pairs/good-seed=101-*/result.json")
    assert "null" in path.read_text()
    assert {name.partition("seed=")[2] for name in question.list_runs("pairs")} <= {"100", "101", "102", "103"}
    assert "same: seed 102 has no finite score" in invoke("verdict", question.path, "--report")


def test_a_diverged_training_has_no_second_chance(question):
    question.behavior["good-seed=101-"] |= {"first": ["error"], "error": DIVERGED}
    question.keep_arms("plain", "good")
    question.write(tuning=None, pairs=4, retries=2)
    assert "undecided: seed 101 diverged" in question.run()
    (attempts,) = question.folder.glob("pairs/good-seed=101-*/attempts")
    assert len(attempts.read_text().splitlines()) == 1


def test_two_copies_of_one_arm_need_no_noise(question):
    question.keep_arms("plain", "copy")
    question.write(pairs=None)
    assert "no effect above 0.01" in question.run()
    assert len(json.loads((question.folder / "verdict.json").read_text())["seeds"]) == 4


def test_a_score_may_be_null():
    assert get_number({"average": {"loss": None}}, "average.loss", missing=math.inf) == math.inf


@pytest.mark.process
def test_two_processes_share_a_verdict(question):
    """They start together, and a third one joins during the pairs."""
    question.keep_arms("plain", "same")
    question.write(tuning={"space": {"optimizer.lr": {"values": [0.002]}}}, pairs=4)
    question.behavior["same-seed=102-"] |= {"wait": True}
    question.prepare()
    processes = [question.start(), question.start()]
    wait_until(lambda: list(question.folder.glob("pairs/same-seed=102-*/attempts")), processes[0])
    processes.append(question.start())
    (question.folder / "go").touch()
    outputs = [read_to_end(process, 300, expect=0)[0] for process in processes]
    reports = {output[output.index("Verdict against") :] for output in outputs}
    assert len(reports) == 1
    assert "no effect above 0.01" in reports.pop()
    assert set(question.count_attempts()) == {1}


def test_at_equal_time_a_slower_arm_gets_fewer_steps(question, invoke):
    """`good` runs at half the speed of the baseline, in steps of as many tokens."""
    for name in question.behavior:
        question.behavior[name] |= {"speed": 1280 if name.startswith("good") else 2560}
    question.behavior["good-1-seed=50-"] |= {"speed": 1380}
    question.behavior["good-1-seed=51-"] |= {"speed": 1180, "host": "b"}
    question.keep_arms("plain", "good")
    question.write(equal="time", pairs=4, tuning={"space": {"schedule.warmup_steps": {"values": [2, 4, 6]}}})
    error = question.run(expect=1).splitlines()[-1]
    assert "good-1-seed=51" in error
    assert error.endswith("on b with card; equal: time requires tuning runs on one machine")
    (path,) = question.folder.glob("tuning/good-1-seed=51-*/environment.json")
    path.write_text(path.read_text().replace('"b"', '"a"'))
    printed = question.run()
    plan = json.loads((question.folder / "verdict.json").read_text())
    steps = [(values["trainer.max_steps"], values["schedule.warmup_steps"]) for values in plan["values"].values()]
    assert steps == [(12, 4), (6, 2)]
    assert "at equal time" in printed
    assert ["good", "1,280", "6", "0.500"] in [line.split() for line in printed.splitlines()]
    configs = [yaml.safe_load(path.read_text()) for path in question.folder.glob("pairs/good-*/config.yaml")]
    assert {config["trainer"]["max_steps"] for config in configs} == {6}
    assert re.search(r"^good +3 +warmup_steps=4 +4\.050 ", printed, re.M), "as tuned, not as scaled"
    assert "chose the smallest" not in printed
    question.write(equal="tokens")
    assert "equal changed since" in invoke("verdict", question.path, "--report", expect=2)


def test_the_speed_of_an_arm_is_that_of_its_point_also_if_it_shares_the_run(question, monkeypatch):
    arms = [{"name": "stack"}, {"name": "slots"}]
    slots = {"values": [2, 3], "arms": ["slots"]}
    space = {"model.memory.num_slots": slots, "optimizer.lr": {"values": [0.001]}}
    question.write(arms=arms, equal="time", pairs=4, tuning={"space": space, "trials": 2})
    loaded = question.load()
    default = {loaded.tuning.trials["stack", i, 50].config.model.memory.num_slots for i in range(2)}
    question.write(tuning={"space": space | {"model.memory.num_slots": slots | {"values": [2, *default]}}, "trials": 2})
    loaded = question.load()
    trials, points = loaded.tuning.trials, loaded.config.tuning.draw_points("slots")
    (i,) = (i for i, point in enumerate(points) if point["model.memory.num_slots"] in default)
    assert trials["slots", i, 50] is trials["stack", i, 50], "the default number of slots"
    monkeypatch.setattr(RunFolder, "is_finished", True)
    runs = loaded._list_tuning_runs({"slots": points[i], "stack": loaded.config.tuning.draw_points("stack")[i]})
    assert runs["slots"] == [trials["slots", i, seed].folder for seed in (50, 51)]


@pytest.mark.slow
def test_real_runs_at_equal_time_with_interventions(tiny, program):
    arms = [{"name": "plain", "model.memory": None}, {"name": "stack"}]
    question = {"config": str(tiny), "arms": arms, "effect": 2.0, "pairs": 4, "equal": "time"}
    question |= {"tuning": {"space": {"optimizer.lr": {"values": [0.003]}}}, "interventions_chunks": 8}
    path = tiny.with_name("real.yaml")
    path.write_text(yaml.safe_dump(question))
    printed = program.run("verdict", path, "--max-parallel", 2)
    folder = tiny.parent / "runs" / "real"
    speeds = [
        np.median([measure_speed(path) for path in folder.glob(f"tuning/{arm}-*/metrics.jsonl")])
        for arm in ("plain", "stack")
    ]
    steps = round(12 * speeds[1] / speeds[0])
    runs = [RunFolder(path.parent) for path in folder.glob("pairs/stack-*/result.json")]
    assert {run.read_result().steps for run in runs} == {steps}
    plain, stack = (
        np.array([json.loads(path.read_text())["average"]["loss"] for path in sorted(folder.glob(pattern))])
        for pattern in ("pairs/plain-*/result.json", "pairs/stack-*/result.json")
    )
    judgment = judge({"stack": list(stack - plain)}, 4, 2.0)["stack"]  # the speeds decide the steps, and so the loss
    assert judgment.is_decided
    assert re.search(rf"^stack +{judgment.outcome}.* {judgment.pairs}/4 ", printed, re.M)
    changes = [json.loads((run.path / "interventions.json").read_text())["changes"] for run in runs]
    for name in ("mean action", "dropped read"):
        row = next(line.split() for line in printed.splitlines() if line.startswith("stack ") and name in line)
        assert row[3] == f"{np.mean([change[name] for change in changes]):+.4f}"
        assert row[-1] == str(len(runs))


def measure_speed(path: Path) -> float:
    lines = map(json.loads, path.read_text().splitlines())
    return float(np.median([line["train/tokens_per_second"] for line in lines if "train/tokens_per_second" in line]))


def test_every_arm_gets_the_same_draws():
    lr = TunedSpace(low=1e-3, high=1e-1, log=True)
    own = {"x": TunedSpace(values=[1, 2, 3], arms=["b"]), "n": TunedSpace(low=2, high=5, int=True, arms=["b"])}
    tuning = Tuning({"optimizer.lr": lr} | own, 8)
    a, b = tuning.draw_points("a"), tuning.draw_points("b")
    assert [point["optimizer.lr"] for point in a] == [point["optimizer.lr"] for point in b]
    assert {point["x"] for point in b} == {1, 2, 3}
    assert {point["n"] for point in b} <= {2, 3, 4, 5}
    sizes = Tuning({"n": TunedSpace(low=1, high=1024, log=True, int=True)}, 300).draw_points("a")
    assert np.mean([point["n"] <= 32 for point in sizes]) == pytest.approx(0.5, abs=0.02), "log-uniform integers"
    assert min(point["n"] for point in sizes) == 1
    assert 900 < max(point["n"] for point in sizes) <= 1024
    logs = np.log10([point["optimizer.lr"] for point in a])
    assert sorted(np.floor(4 * (logs + 3) / 2)) == [0, 0, 1, 1, 2, 2, 3, 3], "spread over the range"
    assert Tuning(tuning.space, 16).draw_points("b")[:8] == b, "a longer search begins with the same draws"


def test_noise_is_that_of_pairs_at_equal_rank():
    random = np.random.default_rng(0)
    seeds = random.normal(0, 1, 200)  # shared by both arms, so that it cancels
    tuned = {
        arm: [({}, list(4 + gap + seeds + random.normal(0, 0.01, 200))) for gap in (0, 0.1, 5)]
        for arm in ("base", "arm")
    }
    tuned["arm"].append(({}, [math.inf] * 200))
    deviation, degrees = estimate_noise(tuned, "base")
    assert deviation == pytest.approx(0.01 * math.sqrt(2), rel=0.1)
    assert degrees == pytest.approx(199 * 2 / 1.25), "two points of one arm"


def test_arms_that_share_runs_count_once_in_the_noise():
    random = np.random.default_rng(0)
    base, one, two = ([({}, list(4 + random.normal(0, 0.01, 2))) for _ in range(3)] for _ in range(3))
    expected = estimate_noise({"base": base, "one": one, "two": two}, "base")
    shared = {"base": base, "flops": base, "one": one, "stream": base, "two": two, "again": two}
    assert estimate_noise(shared, "base") == expected
    assert estimate_noise({"base": base, "flops": base}, "base")[0] == 0


def test_draws_from_a_narrow_range_stay_in_it_and_differ():
    for low, high in ((0.9985, 0.9999), (0.9981, 0.9994), (-1e-3, 1e-3), (100.0, 100.5)):
        points = Tuning({"optimizer.beta2": TunedSpace(low=low, high=high)}, 16).draw_points("a")
        values = [point["optimizer.beta2"] for point in points]
        assert low <= min(values) < max(values) <= high
        assert len(set(values)) == 16, "rounding must not collapse them"
    rates = Tuning({"optimizer.lr": TunedSpace(low=5e-4, high=1e-2, log=True)}, 3).draw_points("a")
    assert [float(f"{point['optimizer.lr']:.3g}") for point in rates] == [point["optimizer.lr"] for point in rates]


@pytest.mark.parametrize(("arms", "seeds"), [(1, 2), (1, 3), (6, 2)])
@pytest.mark.parametrize("shared", [0.0, 0.5], ids=["independent", "points-share-noise"])
def test_the_planned_pairs_find_the_effect_in_four_of_five_questions(arms, seeds, shared):
    random, deviation, level = np.random.default_rng(arms), 0.01, 0.05 / arms

    def draw() -> list[tuple[dict, list[float]]]:
        own = math.sqrt(shared) * random.normal(0, deviation / math.sqrt(2), seeds)
        rest = math.sqrt(1 - shared) * random.normal(0, deviation / math.sqrt(2), (3, seeds))
        return [({}, list(own + values)) for values in rest] + [({}, [9.0] * seeds)] * 3  # the worse half

    powers = []
    for _ in range(150):
        noise, degrees = estimate_noise({str(i): draw() for i in range(arms + 1)}, "0")
        pairs = count_pairs(0.01, noise, level, degrees=degrees)
        powers.append(compute_power(pairs, 0.01, deviation, level))
    assert 0.8 < np.mean(powers) < 0.95, "0.55 to 0.66 if the estimate counts as the truth"


def test_a_memory_is_compared_with_its_controls(empty_folder, invoke):
    command = ["verdict", "--memory", "queue", "--config", "ablation/small", "--dry-run"]
    printed = invoke(*command)
    path = Path("runs/verdict-small-queue/question.yaml")
    assert f"wrote {path}" in printed
    assert re.findall(r"^(\w+): \+1.\d% flops of the model with queue", printed, re.M) == ["wider_stream"]
    _, tree = read_file(path)
    config = build_dataclass(VerdictConfig, tree)
    arms = {arm["name"]: arm for arm in config.arms}
    assert arms["transformer_wide"]["model.intermediate_size"] == 427, "as in the small ablation"
    assert arms["wider_stream"]["model.hidden_size"] > 128
    assert {"transformer", "residual_scale", "queue", "transformer_flops"} <= arms.keys()
    one_slot = {"model.memory.discipline": "push_only", "model.memory.num_slots": 1}
    assert arms["adapter"] == {"name": "adapter", "model.memory": "queue"} | one_slot
    assert config.effect == 0.01
    assert "has effect: 0.01; change it there" in invoke(*command, "--effect", "0.02", expect=2)
    assert "--effect requires --memory" in invoke("verdict", path, "--effect", "0.02", "--dry-run", expect=2)
    assert "has other overrides" in invoke(*command, "trainer.max_steps=600", expect=2)
    for damaged in ("[", "[1]"):
        whole = path.read_text()
        path.write_text(damaged)
        assert invoke(*command, expect=2).startswith(f"error: {path}:")
        path.write_text(whole)
    Path("other").mkdir()
    Path("other/small.yaml").write_text("defaults: [ablation/small]\n")
    error = invoke("verdict --memory queue --config other/small.yaml --dry-run", expect=2)
    assert "is for the config ['ablation/small']" in error
    command = ["verdict", "--memory", "push_only", "--config", "ablation/small", "--effect", "0.02"]
    error = invoke(*command, "model.hidden_size=64", "--dry-run", expect=2)
    assert "is chosen by the verdict; set it in a config of your own" in error
    invoke(*command, "logging.root=./sub//runs", "--dry-run")
    written = Path("sub/runs/verdict-small-push_only/question.yaml").read_text()
    assert "logging.root=./sub//runs" in written
    assert "effect: 0.02" in written


def test_the_controls_of_a_changed_config_are_refused(tmp_path, empty_folder, monkeypatch, invoke):
    monkeypatch.setattr("stackexp.planning.cost.match_models", lambda *_: (128, 1.0))  # takes seconds
    config, command = Path("mine.yaml"), "verdict --memory queue --config mine.yaml --dry-run"
    text = f"defaults: [ablation/small]\nlogging: {{root: {tmp_path}/runs}}\n"
    config.write_text(text)
    invoke(command)
    invoke(command)
    Path("elsewhere").mkdir()
    with contextlib.chdir("elsewhere"):
        Path("mine.yaml").write_text(text)
        assert f"reads mine.yaml in the folder {tmp_path}; change `folder` there" in invoke(command, expect=2)
        shipped = f"verdict --memory queue --config ablation/small --dry-run logging.root={tmp_path}/runs"
        invoke(shipped)
    invoke(shipped)
    config.write_text(text + "seed: 5\ntrainer: {val_check_interval: 50}\n")
    invoke(command)
    config.write_text(text + "optimizer: {lr: 0.002}\n")
    assert "its controls are those of an earlier mine.yaml; undo the change, or move" in invoke(command, expect=2)


def test_the_adapter_of_a_stack_differs_in_its_mechanism_only(monkeypatch, invoke):
    monkeypatch.setattr("stackexp.planning.cost.match_models", lambda *_: (128, 1.0))  # takes seconds
    for memory in ("authors_code", "stacktrans-normalized", "full_dim"):
        tree = build_question(["ablation/small"], [], memory)
        arms = {
            arm["name"]: [f"{k}={'null' if v is None else v}" for k, v in arm.items() if k != "name"]
            for arm in tree["arms"]
        }
        adapter, stack = (vars(compose(["ablation/small"], arms[name]).model.memory) for name in ("adapter", memory))
        differences = {key for key in stack if stack[key] != adapter[key]}
        assert {"discipline", "num_slots"} <= differences
        assert all(key.startswith(MECHANISM) for key in differences)
    split = (
        invoke("verdict", VERDICTS / "micro_english.yaml", "logging.root=docs/results", "--report")
        .partition("Split of the gain")[2]
        .partition("Interventions")[0]
    )
    causes = {
        arm: cause.strip() for cause, arm in re.findall(r"^(mechanism.*?)  +(\S+) minus adapter", split, re.MULTILINE)
    }
    assert causes["stacktrans-normalized"] == "mechanism"
    assert causes["stacktrans"] == "mechanism, push_norm"
    assert "residual_stack" not in causes, "not a stack of the paper, so the adapter is not its control"


@pytest.mark.usefixtures("restored_registry")
def test_a_memory_of_a_plugin_is_compared_with_its_controls(empty_folder, invoke):
    """The files are those that the README shows."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    for name in ("moving_average.py", "moving-average.yaml"):
        [code] = re.findall(rf"```\w+\n(# {name}.*?)```", readme, re.DOTALL)
        Path(name).write_text(code)
    invoke("verdict --memory moving_average --config moving-average.yaml --dry-run")
    tree = yaml.safe_load(Path("runs/verdict-moving-average-moving_average/question.yaml").read_text())
    assert {"name": "moving_average"} in tree["arms"]
    assert {"name": "adapter", "model.memory": "adapter"} in tree["arms"]


def test_overrides_of_the_search_do_not_reach_the_pairs(question):
    question.keys["tuning"]["overrides"] = ["data.eval_sequences=3"]
    question.write(pairs=4)
    verdict = question.load()
    assert verdict.tuning is not None
    pairs = verdict.build_pairs(PairPlan({}, {arm: {} for arm in verdict.arms}, [100]))
    found = [[trial.config.data.eval_sequences for trial in stage.trials.values()] for stage in (verdict.tuning, pairs)]
    assert set(found[0]) == {3} != set(found[1])


def test_a_question_is_repeated_for_each_value_with_scaled_steps(question):
    question.write(each={"model.num_layers": [1, 2]}, overrides=["trainer.max_steps=40", "schedule.warmup_steps=1"])
    verdicts = load_verdicts(question.path, budget=0.25)
    assert [verdict.folder.name for verdict in verdicts] == ["1", "2"]
    assert {verdict.folder.parent.name for verdict in verdicts} == {"question-budget-0.25"}
    for verdict, layers in zip(verdicts, (1, 2), strict=True):
        assert verdict.tuning is not None
        configs = [trial.config for trial in verdict.tuning.trials.values()]
        options = {(c.model.num_layers, c.trainer.max_steps, c.schedule.warmup_steps) for c in configs}
        assert options == {(layers, 10, 1)}, "no step becomes 0"
    with pytest.raises(ConfigError, match=r"trainer.max_steps=9: --budget multiplies the steps of the file"):
        load_verdicts(question.path, ["trainer.max_steps=9"], budget=0.25)
    question.keys["tuning"]["overrides"] = ["trainer.max_steps=20"]
    question.write(overrides=["trainer.max_steps=1_000"], each={"schedule.warmup_steps": [2, 8]})
    verdicts = load_verdicts(question.path, budget=0.5)
    assert [verdict.config.overrides[-1] for verdict in verdicts] == [
        "schedule.warmup_steps=1",
        "schedule.warmup_steps=4",
    ]
    mapping = "schedule={kind: wsd, warmup_steps: 10}"
    question.write(overrides=["trainer.max_steps=1_000", mapping], each={})
    with pytest.raises(ConfigError, match=r"--budget requires schedule\.warmup_steps=VALUE, not in a mapping"):
        load_verdicts(question.path, budget=0.5)
    question.keys["arms"][1]["tokens"] = 1000
    question.write(overrides=["trainer.max_steps=1_000"])
    with pytest.raises(ConfigError, match=r"arms: --budget does not scale tokens"):
        load_verdicts(question.path, budget=0.5)
    question.keys["arms"][1].pop("tokens")
    question.write()
    verdict = load_verdicts(question.path, budget=0.5)[0]
    assert verdict.config.overrides[0] == "trainer.max_steps=500"
    assert verdict.config.tuning.overrides == ["trainer.max_steps=10"]


def test_all_pairs_run_unless_decided_arms_stop(question):
    question.keys["arms"] = [arm for arm in question.keys["arms"] if arm["name"] in ("plain", "good")]
    question.write(stop_when_decided=False, each={"model.num_layers": [1, 2]}, tuning=None, pairs=4)
    for value in "12":
        (question.folder / value).mkdir(parents=True)
        (question.folder / value / "behavior.json").write_text(json.dumps(question.behavior))
    lines = question.run().splitlines()
    for value in "12":
        assert len(list(question.folder.glob(f"{value}/pairs/*/result.json"))) == 2 * 4
        assert any(line.split()[:3] == [value, "good", "helps"] for line in lines)


@pytest.mark.parametrize("path", sorted(VERDICTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_verdicts_compose(path):
    verdict = load_verdicts(path)[-1]
    if verdict.tuning is None:
        verdict.check_arms()
    else:
        assert len(verdict.tuning.trials) >= 3 * len(verdict.arms)


def test_of_equally_good_points_the_smallest_values_are_chosen():
    rates = [(0.004, [0.1, 0.1]), (0.001, [0.105, 0.109]), (0.0005, [0.2, 0.2]), (0.002, [0.0, 0.2])]
    points = [({"optimizer.lr": lr, "data.curriculum_steps": 0}, scores) for lr, scores in rates]
    assert choose_point(points, 0.01)["optimizer.lr"] == 0.001
    assert choose_point(points, 0.001)["optimizer.lr"] == 0.002
    assert choose_point(points, 1.0)["optimizer.lr"] == 0.0005
    assert choose_point([({"optimizer.lr": 1}, [0.1, math.inf])], 0.01) is None
    assert choose_point([], 0.01) is None
    mixed = [({"x": 64, "optimizer.lr": 0.001}, [0.1]), ({"x": None, "optimizer.lr": 0.016}, [0.1])]
    assert choose_point(mixed, 0.01)["x"] is None
    assert choose_point([({"x": "b", "y": 2}, [0.1]), ({"x": "a", "y": 1}, [0.1])], 0.01)["y"] == 1
