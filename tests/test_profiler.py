"""trainer.profile writes a Chrome trace of the chosen steps."""

import json

import pytest
from config_files import BASE, compose_error
from forks import Forks
from records import losses, only_run


def count_optimizer_steps(run, steps):
    events = json.loads((run.path / "profile" / f"trace-{steps}.json").read_text())["traceEvents"]
    return sum(event.get("name", "").startswith("Optimizer.step#AdamW") for event in events)


@pytest.mark.process
def test_a_trace_holds_the_chosen_steps(tiny, tmp_path):
    forks = Forks(tmp_path)
    options = ("trainer.max_steps=6", "schedule.warmup_steps=0", "data.micro_batch_size=4")
    printed = forks.run("fit", "--config", tiny, *options, "trainer.profile=2-4")
    run = only_run(tmp_path / "runs")
    assert f"profile of steps 2-4: {run.path}/profile/trace-2-4.json" in printed
    assert count_optimizer_steps(run, "2-4") == 3
    forks.run("fit", "--config", tiny, *options, "name=plain")
    assert losses(run) == losses(only_run(tmp_path / "runs", "plain")), "the profiler changes no value"
    forks.run("fit", "--config", tiny, *options, "trainer.profile=5-99", "name=long")
    assert count_optimizer_steps(only_run(tmp_path / "runs", "long"), "5-6") == 2, "the run ended after step 6"


@pytest.mark.process
def test_a_stop_does_not_lose_the_profile(tiny, tmp_path):
    options = ("trainer.max_time=00:00:00:00", "trainer.profile=1-4")
    forks = Forks(tmp_path)
    forks.run("fit", "--config", tiny, *options, expect=75)
    run = only_run(tmp_path / "runs")
    assert count_optimizer_steps(run, "1-1") == 1
    forks.run("fit", "--run", str(run.path), "trainer.max_time=null")
    assert count_optimizer_steps(run, "1-1") == 1, "the resumed run writes a file of its own"
    assert count_optimizer_steps(run, "2-4") == 3


@pytest.mark.parametrize("steps", ["10", "0-3", "5-4", "a-b", "3-"])
def test_steps_are_checked(steps):
    error = compose_error([BASE], f"trainer.profile={steps}")
    assert "trainer.profile: expected two steps such as 10-15, found" in error


def test_steps_after_the_end_are_refused():
    error = compose_error([BASE], "trainer.max_steps=12", "schedule.warmup_steps=0", "trainer.profile=13-20")
    assert "trainer.profile: starts after the last step, trainer.max_steps 12; use earlier steps" in error
