"""Adaptive search: Optuna proposes the trials, and the run folders are the record."""

import io
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from config_files import build_sweep, finish_trial
from rich.console import Console
from sweep_driver import build_fake_command

from stackexp.config.compose import to_yaml
from stackexp.errors import ConfigError
from stackexp.sweeps import driver
from stackexp.sweeps.display import Display, format_sweep_status
from stackexp.sweeps.launchers.local import LocalLauncher
from stackexp.sweeps.schema import Resources
from stackexp.sweeps.search import Study, _read_values
from stackexp.sweeps.sweep import Sweep, load_sweep
from stackexp.sweeps.trials import State, Trial, get_state

S, LR = "model.memory.num_slots", "optimizer.lr"
SPACE = {S: {"low": 1, "high": 64, "int": True}, LR: {"low": 1e-5, "high": 1e-1, "log": True}}
pytestmark = pytest.mark.usefixtures("empty_folder")


def build(**search: object) -> Sweep:
    return build_sweep(overrides=["trainer.accelerator=cpu"], search=search)


def start(trial: Trial) -> None:
    trial.folder.path.mkdir(parents=True)
    trial.folder.config.write_text(to_yaml(trial.config))


def run_all(sweep: Sweep, compute_loss) -> list[Trial]:
    """Run the trials of a search one at a time and return them in their order."""
    study, order = Study(sweep), []
    while not study.is_complete():
        study.add_trials(1)
        for trial in [trial for trial in study.get_trials() if trial not in order]:
            order.append(trial)
            start(trial)
            finish_trial(trial, compute_loss(trial.values))
    return order


def count_states(study: Study) -> Counter:
    return Counter(trial.state.name for trial in study._study.trials)


def test_search_concentrates_where_results_are_good():
    order = run_all(build(trials=24, space={LR: SPACE[LR]}), lambda values: abs(1e-2 - values[LR]) / values[LR])
    assert len({trial.folder for trial in order}) == 24
    is_near = [3e-3 < trial.values[LR] < 3e-2 for trial in order]
    assert sum(is_near[14:]) > 2 * sum(is_near[:10])
    assert order[0].name.startswith("lr=")


def test_study_is_rebuilt_from_the_run_folders():
    study = Study(build(trials=8, space=SPACE))
    study.add_trials(5)
    trials = study.get_trials()
    for trial in trials:
        start(trial)
    for loss, trial in enumerate(trials[:3]):
        finish_trial(trial, loss)
    trials[3].pruned.write_text("{}")
    trials[4].folder.result.write_text('{"average": {}}')  # without the objective
    again = Study(load_sweep("study.yaml"))
    assert {t.folder: t.values for t in again.get_trials()} == {t.folder: t.values for t in trials}
    assert count_states(again) == {"COMPLETE": 3, "PRUNED": 1, "FAIL": 1}
    assert again._study.best_value == 0
    again.add_trials(10)
    assert len(again.get_trials()) == 8
    assert again.is_complete()


def test_trials_outside_a_narrowed_space_belong_to_another_search():
    study = Study(build(trials=3, space={S: {"values": [1, 2, 3]}}))
    study.add_trials(3)
    for trial in study.get_trials():
        start(trial)
        finish_trial(trial, 1.0)
    narrowed = Study(build(trials=3, space={S: {"values": [1, 2]}}))
    assert sorted(trial.values[S] for trial in narrowed.get_trials()) == [1, 2]
    assert len(Study(build(trials=3, space={S: {"low": 2, "high": 3, "int": True}})).get_trials()) == 2


def test_exhausted_space_ends_the_search():
    sweep = build(trials=10, space={S: {"values": [1, 2, 3]}})
    order = run_all(sweep, lambda values: 1.0)
    assert sorted(trial.values[S] for trial in order) == [1, 2, 3]
    assert len(sweep.find_search_trials()) == 3
    assert build(trials=3, space={LR: SPACE[LR]}).trials == [], "the folders belong to another search"


def test_successive_halving_prunes_bad_trials(monkeypatch):
    monkeypatch.setattr(driver, "POLL_SECONDS", 0.05)
    Path("runs").mkdir()
    behavior = {f"S={slots}-": {"loss": slots, "seconds": 0.4} for slots in range(1, 10)}
    Path("runs/behavior.json").write_text(json.dumps(behavior))
    prune = {"min_steps": 2, "reduction_factor": 2}
    sweep = build(trials=6, space={S: {"low": 1, "high": 9, "int": True}}, prune=prune)
    launcher = LocalLauncher(sweep.folder, [sweep.base_trial], Resources(), 2, build_fake_command)
    show = Display("average.loss").update
    driver.Driver(sweep.folder, Study(sweep, 2), launcher, retries=0, show_progress=show).run()
    trials = sweep.find_search_trials()
    states = {trial.values[S]: get_state(trial) for trial in trials}
    assert len(states) == 6
    assert set(states.values()) == {State.DONE, State.PRUNED}
    assert states[min(states)] == State.DONE
    for trial in trials:
        if get_state(trial) == State.PRUNED:
            assert json.loads(trial.pruned.read_text())["val/loss/average"] == trial.values[S]
            assert not trial.folder.is_finished
            assert not trial.failure.exists()
    # A later driver restores the rungs from the folders.
    assert min(states) in {trial.system_attrs["completed_rung_0"] for trial in Study(sweep)._study.trials}


def test_a_trial_is_pruned_even_if_later_values_arrive_at_once():
    prune = {"metric": "val/loss/average", "min_steps": 100, "reduction_factor": 2}
    study = Study(build(trials=2, space={S: SPACE[S]}, prune=prune), 2)
    study.add_trials(2)
    good, bad = study.get_trials()
    for trial, loss in ((good, 1.0), (bad, 9.0)):
        start(trial)
        lines = ({"step": step, "val/loss/average": loss} for step in (100, 150))
        trial.folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert study.find_pruned([good, bad]) == [bad]
    bad.pruned.unlink()  # the driver was killed before it wrote the file
    again = Study(load_sweep("study.yaml"), 2)
    assert [trial.folder for trial in again.find_pruned(again.get_trials())] == [bad.folder]


@pytest.mark.parametrize(("metric", "expected"), [("val/loss/average", -3.0), ("val/accuracy/average", 3.0)])
def test_a_search_that_maximizes_prunes_high_losses_and_low_accuracies(metric, expected):
    sweep = build(trials=1, space={S: SPACE[S]}, prune={"metric": metric, "min_steps": 1})
    sweep.config.direction = "maximize"
    study = Study(sweep)
    study.add_trials(1)
    (trial,) = study.get_trials()
    start(trial)
    lines = ({"step": 4, metric: None}, {"step": 5, metric: 3.0})  # null: not finite
    trial.folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    study.find_pruned([trial])
    (reported,) = study._study.trials
    assert reported.intermediate_values == {5: expected}


def test_a_search_without_trials_has_a_status():
    sweep = build(space=SPACE)
    with Display("average.loss", Console(file=io.StringIO(), force_terminal=True)) as display:
        display.update(sweep.trials)
    assert "no trials yet; no driver is running" in format_sweep_status(sweep, [])


def test_trials_of_another_search_are_ignored():
    other = build_sweep(overrides=["model.memory=null"], search={"space": {LR: SPACE[LR]}})
    start(other.build_trial({LR: 1e-3}, "lr=0.001"))
    sweep = build(trials=1, space=SPACE)
    assert sweep.find_search_trials() == []
    assert len(sweep._foreign) == 1


def test_a_search_over_the_proportions_of_streams_resumes():
    key = "data.streams.web.proportion"
    streams = "data.streams={web: {path: web, proportion: 0.5}, code: {path: code, proportion: 0.5}}"
    overrides = ["data.kind=shards", streams]
    sweep = build_sweep(overrides=overrides, search={"space": {key: {"low": 0.1, "high": 0.9}}})
    trial = sweep.build_trial({key: 0.25}, "web=0.25")
    start(trial)
    assert [found.values for found in sweep.find_search_trials()] == [{key: 0.25}]


def test_a_finished_trial_whose_process_still_runs_is_not_pruned():
    study = Study(build(trials=2, space={S: SPACE[S]}, prune={"metric": "val/loss/average", "min_steps": 1}))
    study.add_trials(1)
    (trial,) = study.get_trials()
    start(trial)
    finish_trial(trial, 1.0)
    assert study.get_trials() == [trial], "its result is reported"
    trial.folder.metrics.write_text(json.dumps({"step": 5, "val/loss/average": 9.0}) + "\n")
    assert study.find_pruned([trial]) == []
    assert not trial.pruned.exists()


def test_missing_optuna_is_a_config_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'stackexp\[optuna\]'"):
        Study(build(space=SPACE))


def test_training_losses_are_averaged_over_twenty_steps():
    lines = [{"step": step, "train/loss": float(step)} for step in range(15, 65)]
    assert _read_values(lines, "train/loss") == [(40, 30.5), (60, 50.5)]
