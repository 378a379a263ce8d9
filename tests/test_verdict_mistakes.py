"""Mistakes in the file of a verdict, and runs that do not answer its question, are refused."""

import json

import pytest

from stackexp.errors import ConfigError
from stackexp.files import read_json, write_hashed_json
from stackexp.runs import hash_plugins


def test_runs_that_are_no_pair_or_of_another_config_are_refused(question, invoke):
    question.keep_arms("plain", "same")
    question.write(tuning=None, pairs=4, overrides=["trainer.accelerator=auto"])
    question.run()

    def report() -> str:
        return invoke("verdict", question.path, "--report", expect=1)

    (folder,) = question.folder.glob("pairs/same-seed=101-*")
    changes = [
        ("environment.json", '["card"]', "[]", "had other data or another device than"),
        ("result.json", '"steps": 12', '"steps": 13', "was resumed with another trainer.max_steps"),
        ("result.json", '"steps": 12', '"steps": 11', "ended at step 11 of 12; remove the callback"),
        ("config.yaml", "eval_sequences: null", "eval_sequences: 3", "was resumed with another data.eval_sequences"),
    ]
    for name, old, new, expected in changes:
        before = (folder / name).read_text()
        assert old in before
        (folder / name).write_text(before.replace(old, new))
        if name == "result.json":
            result = read_json(folder / name)
            write_hashed_json(folder / name, {key: result[key] for key in result if key != "sha256"})
        assert f"same-seed=101-{folder.name.rpartition('-')[2]}: {expected}" in report()
        (folder / name).write_text(before)
    result = read_json(folder / "result.json")
    write_hashed_json(folder / "result.json", {key: result[key] for key in result if key not in ("sha256", "steps")})
    assert "result.json has no steps" in report()
    write_hashed_json(folder / "result.json", {key: result[key] for key in result if key != "sha256"})
    earlier = folder / "config.step-5.yaml"
    text = (folder / "config.yaml").read_text()
    earlier.write_text(text.replace("eval_sequences: null", "eval_sequences: 3"))
    invoke("verdict", question.path, "--report")  # only the last validation counts
    earlier.write_text(text.replace("skip_spikes: false", "skip_spikes: true"))
    assert "was resumed with another trainer.skip_spikes" in report()
    copies = question.folder.with_name("copies")
    invoke("runs copy", folder, "--to", copies)
    assert list(copies.glob("**/config.step-5.yaml"))
    earlier.unlink()
    sessions = folder / "environment.json"
    before = sessions.read_text()
    sessions.write_text(json.dumps([*json.loads(before), {"gpus": ["new"]}]))  # resumed on another GPU
    assert "(card and then new, not card)" in report()
    sessions.write_text(before)
    for run, digest in ((folder, "aa"), (next(question.folder.glob("pairs/plain-seed=101-*")), "bb")):
        (run / "data.jsonl").write_text(json.dumps({"step": 10, "hash": digest}) + "\n")
    assert "they differ at step 10" in report()
    assert "they differ at step 10" in question.run(expect=1), "before it is judged"
    for path in question.folder.glob("pairs/*/data.jsonl"):
        path.unlink()
    question.run()
    path = folder / "environment.json"
    path.write_text(path.read_text().replace('"gpus"', '"versions": {"torch": "2.0"}, "gpus"'))
    printed = invoke("verdict", question.path, "--report")
    assert "1 pairs: the two runs had different CPUs or versions of torch" in printed


def test_pairs_on_cpus_need_no_equal_gpus(question, invoke):
    """A visible GPU is not used with trainer.accelerator=cpu."""
    question.keep_arms("plain", "same")
    question.write(tuning=None, pairs=4, overrides=["trainer.accelerator=cpu"])
    question.run()
    (path,) = question.folder.glob("pairs/same-seed=101-*/environment.json")
    path.write_text(path.read_text().replace('["card"]', "[]"))
    assert "Verdict against plain" in invoke("verdict --report", question.path)


def test_pairs_that_were_scored_on_other_data_are_refused(question, invoke):
    question.keep_arms("plain", "same")
    question.write(tuning=None, pairs=4)
    question.run()
    for unit in ("tokens", "bytes"):
        for name, count in (("plain", 1000), ("same", 417)):
            (path,) = question.folder.glob(f"pairs/{name}-seed=101-*/result.json")
            result = read_json(path) | {"sets": {"val": {"loss": 4.0, unit: count}}}
            write_hashed_json(path, {key: result[key] for key in result if key != "sha256"})
        assert f"scored on 417 {unit} of val, not 1000" in invoke("verdict", question.path, "--report", expect=1)
    write_hashed_json(path, {key: result[key] for key in result if key not in ("sha256", "sets")})
    assert "only one of them is scored on val" in invoke("verdict", question.path, "--report", expect=1)


def test_a_process_takes_the_plan_that_another_has_just_written(question, monkeypatch):
    question.keep_arms("plain", "same")
    question.write(tuning=None, pairs=4)
    first, second = question.load(), question.load()
    read = type(second).read_plan
    written = []

    def read_before_it_is_written(self):
        plan = read(self)
        if self is second and not written:
            written.append(first.load_or_write_plan())
        return plan

    monkeypatch.setattr(type(second), "read_plan", read_before_it_is_written)
    monkeypatch.setattr("stackexp.sweeps.verdict.time.strftime", lambda form: f"time {len(written)}")
    assert second.load_or_write_plan() == written[0]
    assert read(first) == written[0]


@pytest.mark.parametrize("place", ["overrides", "arm"])
def test_a_changed_plugin_is_refused(question, empty_folder, tmp_path, invoke, place):
    plugin = tmp_path / "mine.py"
    plugin.write_text("RATE = 1\n")
    question.keep_arms("plain", "same")
    if place == "arm":
        question.keys["arms"][1]["plugins"] = ["mine.py"]
    question.write(overrides=["plugins=[mine.py]"] * (place == "overrides"), tuning=None, pairs=4)
    question.run()
    for path in question.folder.glob("pairs/*/environment.json"):
        path.write_text(json.dumps([{"plugins": hash_plugins([str(plugin)]), "gpus": []}]))
    invoke("verdict", question.path, "--report")
    plugin.write_text("RATE = 2\n")
    for command in (["--report"], []):
        assert "mine.py: changed since" in invoke("verdict", question.path, *command, expect=2)


def test_the_plan_holds_for_one_config_and_one_version(question, invoke):
    question.keep_arms("plain", "same")
    question.write(tuning=None, pairs=4)
    question.run()
    config = question.path.parent / "tiny.yaml"
    before = config.read_text()
    config.write_text(before.replace("max_steps: 12", "max_steps: 13"))
    assert config.read_text() != before
    assert "the config of plain, same changed since" in invoke("verdict", question.path, "--report", expect=2)
    config.write_text(before)
    note = "3 pairs: training data not compared; data.jsonl is missing or has no common step"
    assert note in " ".join(invoke("verdict --report", question.path).split())
    plan = question.folder / "verdict.json"
    written = json.loads(plan.read_text())
    plan.write_text(json.dumps(written | {"seeds": written["seeds"][:3]}))
    error = invoke("verdict", question.path, "--report", expect=1)
    assert "not as it was written: its sha256 is wrong or missing; restore the file" in error
    plan.unlink()
    assert "but verdict.json is missing; restore it" in question.run(expect=1)
    del written["sha256"]
    for change in ({"version": 2}, {"question": written["question"] | {"new_key": 1}}):
        write_hashed_json(plan, written | change)
        assert "not a plan of this version" in invoke("verdict", question.path, "--report", expect=1)


def test_another_question_needs_another_name(question, invoke):
    question.run()
    question.write(effect=0.02)
    question.keys["arms"][2]["model.memory.num_slots"] = 4
    question.write()
    error = invoke("verdict", question.path, "--report", expect=2)
    assert "arms, effect changed since" in error
    question.keys["arms"][2].pop("model.memory.num_slots")
    question.write(effect=0.01, first_seed=200, max_pairs=30, stop_when_decided=False)
    assert "max_pairs, first_seed changed since" in invoke("verdict", question.path, "--report", expect=2)
    assert error.rstrip().endswith("give it another name, and fresh seeds with first_seed: 108")


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
        ({"tuning": {"space": {"optimizer.lr": {"values": [1]}}, "seeds": [1]}, "pairs": None}, "two or more"),
        ({"each": {"seed": [1, 2]}}, "each.seed: chosen by the verdict"),
        ({"each": {"model.num_layers": []}}, "each.model.num_layers: expected at least one value"),
        ({"each": {"model.num_layers": [1]}, "overrides": ["model.num_layers=2"]}, "model.num_layers is chosen by"),
        ({"each": {"name": ["a"]}}, "each.name: chosen by the verdict"),
        ({"each": {"data.source": ["a/b", "a b"]}}, "two questions have the folder question/a-b"),
        ({"equal": "time", "arms": [{"name": "a", "tokens": 9}, {"name": "b"}]}, "arms[0].tokens: equal: time sets"),
        ({"arms": [{"name": "a"}, {"name": "b", "trainer.max_steps": 24}]}, "arms: b trains on"),
        ({"arms": [{"name": "a"}, {"name": "b", "data.max_chunks": 9}]}, "scored with another data.max_chunks"),
        ({"arms": [{"name": "a"}, {"name": "b", "data.validation": {"x": "y"}}]}, "another data.validation.x"),
        ({"score": "ema.average.loss"}, "arms: plain has no ema.average.loss; set trainer.ema_decay"),
        ({"tuning": {"space": {"trainer.max_steps": {"values": [4, 5]}}}}, "tuning.space changes the tokens"),
        ({"each": {"optimizer.lr": [1, 2]}}, "each.optimizer.lr: chosen by the verdict or its tuning"),
        ({"arms": [{"name": "plain"}, {"name": "a", "optimizer.lr": 1}]}, "arms[1].optimizer.lr: also in tuning.space"),
        ({"arms": [{"name": "plain"}, {"name": "a", "optimizer": {"lr": 1}}]}, "arms[1].optimizer.lr: also in"),
        (
            {"each": {"model.num_layers": [1]}, "arms": [{"name": "a"}, {"name": "b", "model": {"num_layers": 2}}]},
            "each.model.num_layers: chosen by the verdict",
        ),
        (
            {"arms": [{"name": "a"}, {"name": "b", "model": {"num_layers": 2}}], "overrides": ["model.num_layers=3"]},
            "model.num_layers is chosen by",
        ),
        ({"tuning": {"space": {k: {"values": [1]} for k in "abcd"}}}, "plain tunes 4 options; expected at most 3"),
        ({"tuning": {"space": {"a": {"values": [1], "arms": ["good"]}}}}, "only some arms tune a"),
        ({"tuning": {"space": {"a": {"values": [1], "arms": ["godo"]}}, "trials": 2}}, "no arm is named godo"),
        ({"equal": "time", "tuning": None}, "tuning: required for equal: time"),
        ({"equal": "time", "tuning": {"space": {"trainer.max_steps": {"values": [4]}}}}, "sets the steps of each arm"),
        ({"score": "average.accuracy"}, "average.accuracy is an accuracy; expected a loss"),
        ({"overrides": ["optimizer.lr=1"]}, "optimizer.lr is chosen by the verdict"),
        ({"overrides": ["seed=1"]}, "seed is chosen by the verdict"),
        ({"resources": {"devices": 2}, "overrides": ["trainer.devices=1"]}, "trainer.devices is chosen by the verdict"),
        ({"tuning": {"space": {"seed": {"values": [1, 2]}}}}, "tuning.space.seed: the verdict chooses the seeds"),
        ({"tuning": {"space": {"a": {"values": [1]}}, "overrides": ["a=1"]}}, "a is chosen by the verdict"),
        ({"efect": 1}, "did you mean 'effect'?"),
        ({"grid": 1}, "grid: unknown key; a verdict has arms, baseline"),
    ],
)  # fmt: skip
def test_mistakes_in_the_file_are_one_line(question, keys, expected, invoke):
    question.write(**keys)
    error = invoke("verdict", question.path, "--dry-run", expect=2)
    assert expected in error


def test_every_question_of_a_file_is_checked_before_the_first_run(question, invoke):
    question.write(each={"model.intermediate_size": [32, -1]})
    error = invoke("verdict", question.path, "--launcher", "slurm", expect=2)
    assert "model.intermediate_size: expected an integer from 1" in error
    question.write(each={"model.intermediate_size": [32, 64, 96]})
    error = invoke("verdict", question.path, "--launcher", "slurm", "--max-parallel", 2, expect=2)
    assert "--max-parallel: expected at least 3, one for each question" in error
    assert not list(question.path.parent.rglob("tuning"))


def test_output_that_cannot_be_written_is_refused_before_the_runs(question, invoke):
    invoke("verdict", question.path, "--figure", "x.txt", expect=2)
    question.write(each={"model.num_layers": [1, 2]})
    assert "has 2 questions, and a figure draws one" in invoke("verdict", question.path, "--figure", "x.png", expect=2)
    assert not list(question.path.parent.rglob("tuning"))


def test_loading_checks_the_arms(question):
    question.keys["arms"][2]["model.memory.num_slotz"] = 3
    question.write()
    with pytest.raises(ConfigError, match=r"question\.yaml:\d+: model\.memory\.num_slotz: unknown key"):
        question.load().check()


def test_a_verdict_file_is_not_a_sweep(question, invoke):
    error = invoke("sweep run", question.path, expect=2)
    assert error.endswith(f"a question, not a sweep; run: python -m stackexp verdict {question.path}")
