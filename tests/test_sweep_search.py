"""Adaptive search: Optuna chooses, the run folders remember."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from config_files import BASE, write
from sweep_driver import fake_command

from stackexp.config.compose import to_yaml
from stackexp.errors import ConfigError
from stackexp.sweeps import driver, grid
from stackexp.sweeps.display import Lines
from stackexp.sweeps.local import LocalLauncher
from stackexp.sweeps.search import Study, _figures, ends
from stackexp.sweeps.status import State, state_of

S, LR = "model.memory.num_slots", "optimizer.lr"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(**search: object) -> grid.Sweep:
    keys = {"config": BASE, "overrides": ["trainer.accelerator=cpu"], "search": search}
    return grid.read(write("study.yaml", yaml.safe_dump(keys)))


SPACE = {S: {"low": 1, "high": 64, "int": True}, LR: {"low": 1e-5, "high": 1e-1, "log": True}}


def begin(trial) -> None:
    trial.folder.path.mkdir(parents=True)
    trial.folder.config.write_text(to_yaml(trial.config))


def finish(trial, loss: float) -> None:
    trial.folder.result.write_text(json.dumps({"average": {"loss": loss}}))


def run(sweep: grid.Sweep, study: Study, loss) -> list:
    """Drive the study by hand, one trial at a time; the trials in their order."""
    order = []
    while not study.complete():
        study.add(1)
        for trial in [trial for trial in study.trials() if trial not in order]:
            order.append(trial)
            begin(trial)
            finish(trial, loss(trial.values))
    return order


def test_later_trials_are_drawn_where_earlier_ones_were_good():
    sweep = read(trials=40, space={LR: SPACE[LR]})
    order = run(sweep, Study(sweep), lambda values: abs(1e-2 - values[LR]) / values[LR])
    assert len({trial.folder for trial in order}) == 40
    near = [3e-3 < trial.values[LR] < 3e-2 for trial in order]
    assert sum(near[20:]) > 2 * sum(near[:10])
    assert order[0].name.startswith("lr=")


def test_a_study_is_rebuilt_from_its_folders():
    sweep = read(trials=8, space=SPACE)
    study = Study(sweep)
    study.add(5)
    trials = study.trials()
    for trial in trials:
        begin(trial)
    for loss, trial in enumerate(trials[:3]):
        finish(trial, loss)
    trials[3].pruned.write_text("{}")
    again = Study(grid.read("study.yaml"))
    assert set(again.trials()) == set(trials)
    assert {trial.folder: trial.values for trial in again.trials()} == {t.folder: t.values for t in trials}
    told = {str(t.state).split(".")[-1]: 0 for t in again._study.trials}
    for t in again._study.trials:
        told[str(t.state).split(".")[-1]] += 1
    assert told == {"COMPLETE": 3, "PRUNED": 1, "RUNNING": 1}
    assert again._study.best_value == 0
    again.add(10)
    assert len(again.trials()) == 8
    assert again.complete()


def test_a_result_without_the_objective_counts_as_failed():
    sweep = read(trials=2, space={S: SPACE[S]})
    study = Study(sweep)
    study.add(1)
    [trial] = study.trials()
    begin(trial)
    trial.folder.result.write_text('{"average": {}}')
    study.trials()
    assert [t.state.name for t in study._study.trials] == ["FAIL"]


def test_folders_of_another_search_are_none_of_this_one():
    sweep = read(trials=3, space={S: SPACE[S]})
    for trial in run(sweep, Study(sweep), lambda values: 1.0):
        assert trial.folder.finished
    other = read(trials=3, space={LR: SPACE[LR]})
    assert len(sweep.begun()) == 3
    assert other.trials == []


def test_a_space_without_anything_new_ends_the_search():
    sweep = read(trials=10, space={S: {"values": [1, 2, 3]}})
    order = run(sweep, Study(sweep), lambda values: 1.0)
    assert sorted(trial.values[S] for trial in order) == [1, 2, 3]


def test_the_ends_of_the_space_are_checked_before_anything_starts():
    assert ends(read(space=SPACE).config.search) == [{S: 1, LR: 1e-5}, {S: 64, LR: 1e-5}, {S: 1, LR: 1e-1}]
    sweep = read(space={S: {"low": 0, "high": 4, "int": True}})
    with pytest.raises(ConfigError, match=r"num_slots: expected an integer >= 1, found 0"):
        [sweep.trial(values, "") for values in ends(sweep.config.search)]


def test_hopeless_trials_are_pruned_by_successive_halving(monkeypatch):
    monkeypatch.setattr(driver, "POLL_SECONDS", 0.05)
    Path("runs").mkdir()
    behaviour = {f"S={slots}-": {"loss": slots, "seconds": 1} for slots in range(1, 10)}
    Path("runs/behaviour.json").write_text(json.dumps(behaviour))
    prune = {"min_steps": 2, "reduction_factor": 2}
    sweep = read(trials=6, space={S: {"low": 1, "high": 9, "int": True}}, prune=prune)
    launcher = LocalLauncher([sweep.any_trial], 2, fake_command)
    driver.Driver(sweep.folder, Study(sweep, 2), launcher, 0, Lines("average.loss")).run()
    states = {trial.values[S]: state_of(trial) for trial in sweep.begun()}
    assert len(states) == 6
    assert set(states.values()) == {State.DONE, State.PRUNED}
    assert states[min(states)] == State.DONE
    pruned = [trial for trial in sweep.begun() if state_of(trial) == State.PRUNED]
    for trial in pruned:
        assert json.loads(trial.pruned.read_text())["validation/loss/average"] == trial.values[S]
        assert not trial.folder.finished
        assert not trial.failure.exists()
    # A driver that starts later knows from the folders what the rungs are.
    assert min(states) in {trial.system_attrs["completed_rung_0"] for trial in Study(sweep)._study.trials}


def test_without_optuna_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'stackexp\[optuna\]'"):
        Study(read(space=SPACE))


def test_training_losses_are_compared_as_means_over_twenty_steps():
    lines = [{"step": step, "loss/train": float(step)} for step in range(15, 65)]
    assert _figures(lines, "loss/train") == [(40, 30.5), (60, 50.5)]
