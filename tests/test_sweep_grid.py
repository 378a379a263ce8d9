"""A sweep's YAML becomes trials: which, under what names and hashes, and what is answered to mistakes."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from config_files import BASE, write

from stackexp.config.memory import StackMemoryConfig
from stackexp.config.yaml_files import names_in
from stackexp.errors import ConfigError
from stackexp.sweeps import grid
from stackexp.sweeps.trials import config_hash

H, D, S = "model.memory.num_heads", "model.memory.head_dim", "model.memory.num_slots"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def sweep(*overrides: str, **keys: object) -> grid.Sweep:
    return grid.read(write("study.yaml", yaml.safe_dump({"config": BASE} | keys, sort_keys=False)), overrides)


def labels(found: grid.Sweep) -> list[str]:
    """The names of the trials without their hashes."""
    return [trial.name.rpartition("-")[0] for trial in found.trials]


def values(found: grid.Sweep) -> list[tuple]:
    return [tuple(trial.values.values()) for trial in found.trials]


def mistake(*overrides: str, **keys: object) -> str:
    with pytest.raises(ConfigError) as caught:
        sweep(*overrides, **keys).trials  # noqa: B018
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_grid_is_the_product():
    found = sweep(grid={H: [1, 2], S: [4, 8, 16]})
    assert values(found) == [(1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (2, 16)]
    memories = [trial.config.model.memory for trial in found.trials]
    assert [(memory.num_heads, memory.num_slots) for memory in memories] == values(found)
    assert labels(found)[1] == "H=1-S=8"


def test_axes_move_one_key_at_a_time_and_meet_in_the_center_once():
    found = sweep(axes={H: [1, 4, 8], S: [8, 24]}, center={H: 4, S: 24})
    assert values(found) == [(4, 24), (1, 24), (8, 24), (4, 8)]


def test_a_list_names_trials_and_takes_choices_and_configs():
    listed = [{"name": "q", "model.memory": "queue"}, {"model.memory": None}, {"config": "quickstart", "seed": 3}]
    found = sweep(list=listed)
    assert labels(found) == ["q", "memory=none", "config=quickstart-seed=3"]
    first, second, third = (trial.config for trial in found.trials)
    assert first.model.memory.discipline == "queue"
    assert second.model.memory is None
    assert (third.model.hidden_size, third.seed) == (128, 3)


def test_everything_multiplies_and_each_trial_is_there_once():
    found = sweep(list=[{"name": "a", S: 4}, {"name": "b", S: 5}], grid={"optimizer.lr": [1e-3, 3e-4]}, seeds=[0, 1])
    assert len(found.trials) == 8
    assert labels(found)[:3] == ["a-lr=0.001-seed=0", "a-lr=0.001-seed=1", "a-lr=0.0003-seed=0"]
    assert found.trials[-1].values == {S: 5, "optimizer.lr": 3e-4, "seed": 1}
    assert len(sweep(grid={H: [1, 1, 2]}).trials) == 2
    assert labels(sweep()) == ["trial"]


def test_a_budget_in_tokens_sets_the_steps():
    assert sweep(tokens=1e6).trials[0].config.trainer.max_steps == 245  # 1e6 / 4096, rounded up
    found = sweep(grid={"tokens": [4096e2, 4096e3], "data.global_batch_tokens": [4096, 8192]})
    assert [trial.config.trainer.max_steps for trial in found.trials] == [100, 50, 1000, 500]


def test_resources_go_into_the_trainer_unless_a_trial_has_its_own():
    listed = [{"name": "a"}, {"name": "b", "trainer.num_nodes": 1, "seed": 1}]
    found = sweep("data.micro_batch_size=4", resources={"devices": 2, "num_nodes": 2}, list=listed)
    assert [(t.config.trainer.devices, t.config.trainer.num_nodes) for t in found.trials] == [(2, 2), (2, 1)]


def test_names_use_as_much_of_a_key_as_tells_them_apart():
    keys = [H, "model.num_heads", "optimizer.lr", "data.x.kind", "model.x.kind"]
    assert list(grid.short_names(keys).values()) == ["H", "num_heads", "lr", "data.x.kind", "model.x.kind"]
    found = sweep(list=[{"name": "a/b c: d"}])
    assert labels(found) == ["a_b_c_d"]


def test_the_hash_is_of_what_is_computed_not_of_where_and_under_which_name():
    there = [
        *("trainer.devices=2", "trainer.strategy=fsdp", "trainer.compile=true", "trainer.accelerator=cpu"),
        *("data.micro_batch_size=1", "data.eval_batch_size=2", "data.num_workers=3", "logging.root=elsewhere"),
        *("trainer.checkpoint_interval=7", "trainer.max_time=00:01:00:00"),
    ]
    one, other = sweep(grid={H: [1]}), sweep(*there, grid={H: [1]}, name="other")
    assert one.trials[0].name == other.trials[0].name
    assert (one.folder, other.folder) == (Path("runs/study"), Path("elsewhere/other"))
    for changed in ("seed=1", "trainer.max_steps=301", "optimizer.lr=1e-3", "trainer.precision=64-true"):
        assert sweep(changed, grid={H: [1]}).trials[0].name != one.trials[0].name


def test_the_hash_stays_when_the_schema_gets_another_option():
    @dataclasses.dataclass
    class Younger(StackMemoryConfig):
        of_tomorrow: bool = False

    config = sweep(grid={H: [1]}).trials[0].config
    before, memory = config_hash(config), vars(config.model.memory)
    config.model.memory = Younger(**memory)
    assert config_hash(config) == before
    config.model.memory = Younger(**memory, of_tomorrow=True)
    assert config_hash(config) != before
    config.model.memory = None
    assert config_hash(config) != before


def test_a_trial_keeps_its_folder_when_it_gets_another_label():
    before = sweep(grid={H: [1, 2]}).trials
    before[0].folder.path.mkdir(parents=True)
    after = sweep(grid={H: [1, 2], "optimizer.lr": [2e-3]}).trials
    assert after[0].folder == before[0].folder
    assert labels(sweep(grid={H: [1, 2], "optimizer.lr": [2e-3]})) == ["H=1", "H=2-lr=0.002"]


def test_the_copy_in_the_folder_means_the_same_from_anywhere(tmp_path, monkeypatch):
    Path("base.yaml").write_text(Path(BASE).read_text())
    keys = {"config": "base.yaml", "overrides": ["seed=5"], "tokens": 1e6, "resources": {"devices": 2}}
    found = sweep("trainer.z_loss=1e-4", grid={H: [1, 2], "model.memory.projection": ["low_rank"]}, **keys)
    found.folder.mkdir(parents=True)
    (found.folder / "sweep.yaml").write_text(found.copy())
    again = grid.read("runs/study")
    assert (again.folder, again.name) == (found.folder, found.name)
    assert again.trials == found.trials
    assert again.trials[0].config == found.trials[0].config
    monkeypatch.chdir("/")
    elsewhere = grid.read(str(tmp_path / "runs/study"))
    assert [trial.name for trial in elsewhere.trials] == [trial.name for trial in found.trials]


@pytest.mark.parametrize(("name", "count"), [("stack_grid", 12), ("ablation", 6), ("scaling", 10), ("quick_grid", 6)])
def test_shipped_sweeps_compose(name, count):
    found = grid.read(name)
    assert found.folder == Path("runs", name)
    assert len(found.trials) == count
    assert found.path.read_text().startswith("# ")


def test_all_shipped_sweeps_are_tested():
    """formal_table in test_configs.py."""
    assert names_in(grid.shipped()) == ["ablation", "formal_table", "quick_grid", "scaling", "stack_grid"]


def test_the_shipped_stack_grid_becomes_a_product_by_one_word():
    text = (grid.shipped() / "stack_grid.yaml").read_text()
    assert len(grid.read(write("full.yaml", text.replace("\naxes:", "\ngrid:"))).trials) == 5 * 5 * 4


def test_the_shipped_ablation_is_that_of_the_configs():
    by_name = {trial.name.rpartition("-")[0]: trial for trial in grid.read("ablation").trials}
    for name, trial in by_name.items():
        path = write(f"{name}.yaml", yaml.safe_dump({"config": f"ablation/{name}"}))
        assert grid.read(path).trials[0].name.rpartition("-")[2] == trial.name.rpartition("-")[2], name


def test_mistakes_name_file_and_line_and_the_nearest_right_name():
    assert mistake(grid={H: [1, 0]}) == f"study.yaml:4: {H}: expected an integer >= 1, found 0"
    assert mistake(grid={"model.memory.nm_heads": [1]}).endswith(f"unknown key; did you mean '{H}'?")
    assert "study.yaml:4: model.memory: unknown choice 'ques'" in mistake(grid={"model.memory": ["ques"]})
    assert "resorces: unknown key; did you mean 'resources'?" in mistake(resorces={})
    assert "resources.device: unknown key; did you mean" in mistake(resources={"device": 1})
    assert "resources.time: expected '24:00:00' or" in mistake(resources={"time": 86400})  # YAML's 24:00:00
    assert "retries: expected an integer >= 0, found -1" in mistake(retries=-1)
    assert "direction: expected one of minimize, maximize, found 'minimise'; did you" in mistake(direction="minimise")
    assert "study.yaml: unknown config 'quickstrt'; did you mean 'quickstart'?" in mistake(config="quickstrt")
    assert "expected a list, found 3" in mistake(grid={H: 3})
    assert f"grid.{H}: expected at least one value" in mistake(grid={H: []})
    assert f"set center.{H}" in mistake(axes={H: [1, 2]})
    assert f"center.{S}: there is no axis of that name" in mistake(axes={H: [1, 2]}, center={H: 1, S: 1})
    assert f"{H} is set by two of" in mistake(grid={H: [1]}, axes={H: [1]}, center={H: 1})
    assert "seed is set by two of" in mistake(grid={"seed": [1]}, seeds=[2])
    assert "name: 'a/b' cannot name a folder" in mistake(name="a/b")
    twice = [{"name": "a"}, {"name": "b", "trainer.devices": 2}]
    assert "study.yaml: a and b are the same trial: they differ in nothing, or only in" in mistake(list=twice)
    assert "config: name the base config" in mistake(config=None)
    assert "must be smaller than trainer.max_steps 1 " in mistake(tokens=1.0)
    assert "trainer.devices: study.yaml:3" in mistake(resources={"devices": 3})


def test_mistakes_on_the_command_line():
    assert mistake("seed=x").startswith("override seed=x: seed: expected an integer")
    assert f"the sweep itself sets {H} at study.yaml:4" in mistake(f"{H}=3", grid={H: [1]})
    assert "trials are named by the sweep" in mistake("name=mine")
    for target, hint in {"stack_gird": "did you mean 'stack_grid'?", "none.yaml": "there is no file none.yaml"}.items():
        with pytest.raises(ConfigError, match=hint.replace("?", r"\?")):
            grid.read(target)


def test_searches_are_checked_too():
    assert "trials: expected an integer >= 1" in mistake(search={"trials": 0, "space": {H: {"values": [1]}}})
    assert "search.space: name at least one key" in mistake(search={})
    assert "with low < high" in mistake(search={"space": {"optimizer.lr": {"low": 1}}})
    assert "hgh: unknown key; did you mean" in mistake(search={"space": {"optimizer.lr": {"low": 1, "hgh": 2}}})
    assert "a search chooses its trials itself" in mistake(search={"space": {H: {"values": [1]}}}, seeds=[1])
    assert "plain keys" in mistake(search={"space": {"model.memory": {"values": ["queue"]}}})


def test_mistakes_are_told_before_torch_is_imported_and_nothing_is_written():
    write("study.yaml", yaml.safe_dump({"config": BASE, "grid": {H: [1, 2, -4]}}))
    program = (
        "import sys; from stackexp.cli import main; code = main(sys.argv[1:]); print('torch' in sys.modules, code)"
    )
    for verb in ("run", "status", "results"):
        done = subprocess.run(
            [sys.executable, "-c", program, "sweep", verb, "study.yaml"], capture_output=True, text=True
        )
        assert done.stdout == "False 2\n"
        assert done.stderr == f"error: study.yaml:4: {H}: expected an integer >= 1, found -4\n"
    assert os.listdir() == ["study.yaml"]
