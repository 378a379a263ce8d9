"""Sweep YAML files: trials, names, hashes and errors."""

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from config_files import BASE, build_sweep, write

from stackexp.config.layers import list_shipped
from stackexp.config.memory import StackMemoryConfig
from stackexp.errors import ConfigError
from stackexp.sweeps.sweep import Sweep, load_last_run, load_sweep
from stackexp.sweeps.trials import compute_config_hash

H, D, S = "model.memory.num_heads", "model.memory.head_dim", "model.memory.num_slots"
pytestmark = pytest.mark.usefixtures("empty_folder")


def get_labels(sweep: Sweep) -> list[str]:
    """Return the names of the trials without their hashes."""
    return [trial.name.rpartition("-")[0] for trial in sweep.trials]


def get_values(sweep: Sweep) -> list[tuple]:
    return [tuple(trial.values.values()) for trial in sweep.trials]


def get_error(*overrides: str, **keys: object) -> str:
    with pytest.raises(ConfigError) as caught:
        build_sweep(*overrides, **keys).check_trials()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_grid_is_a_product():
    sweep = build_sweep(grid={H: [1, 2], S: [4, 8, 16]})
    assert get_values(sweep) == [(1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (2, 16)]
    memories = [trial.config.model.memory for trial in sweep.trials]
    assert [(memory.num_heads, memory.num_slots) for memory in memories] == get_values(sweep)
    assert get_labels(sweep)[1] == "H=1-S=8"


def test_axes_vary_one_key_at_a_time_around_the_center():
    sweep = build_sweep(axes={H: [1, 4, 8], S: [8, 24]}, center={H: 4, S: 24})
    assert get_values(sweep) == [(4, 24), (1, 24), (8, 24), (4, 8)]


def test_trials_keep_the_names_of_their_folders_and_say_so(capsys):
    first = build_sweep(list=[{"name": "small", S: 8}, {"name": "large", S: 16}])
    for trial in first.trials:
        trial.folder.path.mkdir(parents=True)
    assert get_labels(first) == ["small", "large"]
    assert capsys.readouterr().err == ""
    swapped = build_sweep(list=[{"name": "large", S: 8}, {"name": "small", S: 16}])
    assert get_labels(swapped) == ["small", "large"]
    note = "note: shown by the names of their folders, from an earlier run: large as small, small as large\n"
    assert capsys.readouterr().err == note


def test_list_takes_names_section_choices_and_configs():
    listed = [
        {"name": "q/b c: d", "model.memory": "queue"},
        {"model.memory": None},
        {"config": "quickstart", "seed": 3},
    ]
    sweep = build_sweep(list=listed)
    assert get_labels(sweep) == ["q_b_c_d", "memory=none", "config=quickstart-seed=3"]
    first, second, third = (trial.config for trial in sweep.trials)
    assert first.model.memory.discipline == "queue"
    assert second.model.memory is None
    assert (third.model.hidden_size, third.seed) == (128, 3)


def test_list_grid_and_seeds_multiply_without_duplicates():
    sweep = build_sweep(
        list=[{"name": "a", S: 4}, {"name": "b", S: 5}], grid={"optimizer.lr": [1e-3, 3e-4]}, seeds=[0, 1]
    )
    assert len(sweep.trials) == 8
    assert get_labels(sweep)[:3] == ["a-lr=0.001-seed=0", "a-lr=0.001-seed=1", "a-lr=0.0003-seed=0"]
    assert sweep.trials[-1].values == {S: 5, "optimizer.lr": 3e-4, "seed": 1}
    assert len(build_sweep(grid={H: [1, 1, 2]}).trials) == 2
    assert get_labels(build_sweep()) == ["trial"]


@pytest.mark.parametrize("slots", [4, "${seed}"])
def test_trials_that_differ_in_the_seed_have_their_own_configs(slots):
    """They are composed once, except if other options depend on the seed."""
    base = yaml.safe_load(Path(BASE).read_text())
    base["seed"], base["model"]["memory"]["num_slots"] = 1, slots
    write("base.yaml", yaml.safe_dump(base))
    sweep = build_sweep(config="base.yaml", grid={H: [1, 2]}, seeds=[1, 2, 3])
    for trial in sweep.trials:
        assert trial.config == sweep._compose(trial.values)
    assert [trial.config.model.memory.num_slots for trial in sweep.trials] == ([4] * 6 if slots == 4 else [1, 2, 3] * 2)
    assert "seed: expected an integer" in get_error(seeds=[0, -1])


def test_token_budget_sets_the_steps():
    assert build_sweep(tokens=1e6).trials[0].config.trainer.max_steps == 245  # 1e6 / 4096, rounded up
    sweep = build_sweep(grid={"tokens": [4096e2, 4096e3], "data.global_batch_tokens": [4096, 8192]})
    assert [trial.config.trainer.max_steps for trial in sweep.trials] == [100, 50, 1000, 500]
    warmup = "schedule.warmup_steps=200", "trainer.val_check_interval=200"  # more than the base config has steps
    assert build_sweep(*warmup, tokens=1e6).trials[0].config.trainer.max_steps == 245
    both = "study.yaml: tokens sets trainer.max_steps; give only one of them"
    assert both in get_error("trainer.max_steps=10", tokens=1e6)
    assert both in get_error(tokens=1e6, grid={"trainer.max_steps": [10]})


def test_a_changed_file_is_not_read_from_the_last_run(capsys):
    sweep = build_sweep("trainer.z_loss=1e-4", grid={H: [1, 2]})
    sweep.folder.mkdir(parents=True)
    (sweep.folder / "sweep.yaml").write_text(sweep.to_yaml())
    last = load_last_run("study.yaml")
    assert (last.path.name, last.trials) == ("sweep.yaml", sweep.trials)
    build_sweep(grid={H: [1, 2, 4]})
    assert capsys.readouterr().err == ""
    edited = load_last_run("study.yaml")
    assert [trial.values[H] for trial in edited.trials] == [1, 2, 4]
    assert edited.trials[0].config.trainer.z_loss == 1e-4, "the overrides of the last run remain"
    assert capsys.readouterr().err == "note: study.yaml differs from the last run, runs/study/sweep.yaml\n"
    build_sweep(grid={H: [1, 2]}, overrides=["optimizer.lr=0.25"])
    assert load_last_run("study.yaml").trials[0].config.optimizer.lr == 0.25, "overrides of the file have changed"
    assert "differs from the last run" in capsys.readouterr().err


def test_a_file_of_the_user_may_be_called_like_a_copy():
    sweep = load_sweep(write("sweep.yaml", f"# Mine.\nconfig: {BASE}\n"))
    assert sweep.folder == Path("runs/sweep")
    sweep.folder.mkdir(parents=True)
    (sweep.folder / "sweep.yaml").write_text(sweep.to_yaml())
    assert load_sweep("runs/sweep").folder == sweep.folder
    assert load_sweep("runs/sweep").trials == sweep.trials


def test_resources_are_defaults_of_the_trainer():
    listed = [{"name": "a"}, {"name": "b", "trainer.num_nodes": 1, "seed": 1}]
    sweep = build_sweep("data.micro_batch_size=4", resources={"devices": 2, "num_nodes": 2}, list=listed)
    assert [(t.config.trainer.devices, t.config.trainer.num_nodes) for t in sweep.trials] == [(2, 2), (2, 1)]


def test_hash_covers_options_that_change_the_results():
    execution = [
        *("trainer.devices=2", "trainer.strategy=fsdp", "trainer.compile=true", "trainer.accelerator=cpu"),
        *("data.micro_batch_size=1", "data.eval_batch_size=2", "data.num_workers=3", "logging.root=elsewhere"),
        *("trainer.checkpoint_interval=7", "trainer.max_time=00:01:00:00"),
    ]
    one, other = build_sweep(grid={H: [1]}), build_sweep(*execution, grid={H: [1]}, name="group/other")
    assert one.trials[0].name == other.trials[0].name
    assert (one.folder, other.folder) == (Path("runs/study"), Path("elsewhere/group/other"))
    for changed in ("seed=1", "trainer.max_steps=301", "optimizer.lr=1e-3", "trainer.precision=64-true"):
        assert build_sweep(changed, grid={H: [1]}).trials[0].name != one.trials[0].name


def test_hash_is_unchanged_by_new_options_at_their_defaults():
    @dataclasses.dataclass
    class NewerConfig(StackMemoryConfig):
        new_option: bool = False

    config = build_sweep(grid={H: [1]}).trials[0].config
    before, memory = compute_config_hash(config), vars(config.model.memory)
    config.model.memory = NewerConfig(**memory)
    assert compute_config_hash(config) == before
    config.model.memory = NewerConfig(**memory, new_option=True)
    assert compute_config_hash(config) != before
    config.model.memory = None
    assert compute_config_hash(config) != before


def test_trial_keeps_its_folder_under_a_new_label():
    before = build_sweep(grid={H: [1, 2]}).trials
    before[0].folder.path.mkdir(parents=True)
    after = build_sweep(grid={H: [1, 2], "optimizer.lr": [2e-3]})
    assert after.trials[0].folder == before[0].folder
    assert get_labels(after) == ["H=1", "H=2-lr=0.002"]


@pytest.mark.parametrize("name", ["study", "group/study"])
def test_copy_in_the_folder_means_the_same_anywhere(tmp_path, monkeypatch, name):
    Path("base.yaml").write_text(Path(BASE).read_text())
    keys = {"config": "base.yaml", "overrides": ["seed=5"], "tokens": 1e6, "resources": {"devices": 2}, "name": name}
    sweep = build_sweep("trainer.z_loss=1e-4", grid={H: [1, 2], "model.memory.projection": ["low_rank"]}, **keys)
    sweep.folder.mkdir(parents=True)
    (sweep.folder / "sweep.yaml").write_text(sweep.to_yaml())
    again = load_sweep(f"runs/{name}")
    assert (again.folder, again.name) == (sweep.folder, sweep.name)
    assert again.trials == sweep.trials
    assert again.trials[0].config == sweep.trials[0].config
    monkeypatch.chdir("/")
    elsewhere = load_sweep(str(tmp_path / "runs" / name))
    assert [trial.name for trial in elsewhere.trials] == [trial.name for trial in sweep.trials]


@pytest.mark.parametrize("name", sorted({*list_shipped("sweep")} - {"formal_table"}))  # composed in test_configs.py
def test_shipped_sweep_composes(name):
    sweep = load_sweep(name)
    assert sweep.folder == Path("runs", name)
    assert sweep.trials
    assert sweep.path.read_text().startswith("# ")


def test_shipped_ablation_equals_the_ablation_configs():
    for trial in load_sweep("ablation").trials:
        name, _, digest = trial.name.rpartition("-")
        path = write(f"{name}.yaml", yaml.safe_dump({"config": f"ablation/{name}"}))
        assert load_sweep(path).trials[0].name.rpartition("-")[2] == digest, name


def test_errors_name_file_line_and_nearest_valid_name():
    assert get_error(grid={H: [1, 0]}) == f"study.yaml:4: {H}: expected an integer from 1 to 1048576, found 0"
    choice = get_error(grid={"model.memory": ["quue"]})
    assert choice.startswith("study.yaml:4: model.memory: unknown choice 'quue'")
    assert "(trial" not in choice, "the line of the sweep is enough"
    assert get_error(f"{S}=0", grid={H: [1]}).endswith("found 0 (trial H=1)")
    assert get_error(grid={"model.memory.nm_heads": [1]}).endswith(f"unknown key; did you mean '{H}'?")
    assert "resorces: unknown key; did you mean 'resources'?" in get_error(resorces={})
    assert "resources.time: expected '24:00:00' or" in get_error(resources={"time": 86400})  # YAML's 24:00:00
    assert "study.yaml:1: unknown config 'quickstrt'; did you mean 'quickstart'?" in get_error(config="quickstrt")
    assert f"grid.{H}: expected at least one value" in get_error(grid={H: []})
    assert f"set center.{H}" in get_error(axes={H: [1, 2]})
    assert f"center.{S}: no axis or grid has this name" in get_error(axes={H: [1, 2]}, center={H: 1, S: 1})
    for section, value in {"grid": {"seed": [1]}, "list": [{"seed": 1}]}.items():
        assert f"{section}: seed is set by two of grid, axes" in get_error(**{section: value}, seeds=[2])
    nested = {"model": {"num_layers": 3}}
    for keys in ({"grid": {"model.num_layers": [4]}}, {"axes": {"model.num_layers": [4]}}):
        assert "list: model.num_layers is set by two of" in get_error(list=[nested], **keys)
    for keys, override in (
        ({"list": [nested]}, "model.num_layers=9"),
        ({"grid": {"model": [{"num_layers": 3}]}}, "model.num_layers=9"),
        ({"grid": {"model.num_layers": [3]}}, "model={num_layers: 9}"),
        ({"resources": {"devices": 2}}, "trainer={devices: 1}"),
    ):
        assert f"override {override}: the sweep sets " in get_error(override, **keys)
    assert "list: a_b is the name of two entries" in get_error(list=[{"name": "a/b", S: 8}, {"name": "a b", S: 16}])
    build_sweep(list=[{"name": "a", "seed": 1}, {"name": "a", "seed": 2}]).check_trials()
    build_sweep(grid={"model.memory": [{}, {"num_slots": 3}]}).check_trials()
    assert "objective: score_41_500 is an accuracy; set direction: maximize" in get_error(objective="score_41_500")
    assert "name: 'a b' cannot name a folder" in get_error(name="a b")
    duplicates = [{"name": "a"}, {"name": "b", "trainer.devices": 2}]
    assert "study.yaml: a and b are the same trial: their configs differ in nothing" in get_error(list=duplicates)
    assert "config: expected the base config at the top of the file" in get_error(config=None)
    assert "must be smaller than trainer.max_steps 1 " in get_error(tokens=1.0)
    assert "trainer.devices: study.yaml:3" in get_error(resources={"devices": 3})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"list": [{"config": 5}]}, "study.yaml:3: config: expected the base config"),
        ({"list": [5]}, "list: expected"),
        ({"grid": {"config": ["quickstrt"]}}, "did you mean 'quickstart'?"),
        ({"grid": {H: 5}}, f"grid.{H}: expected"),
        ({"list": [{H: "x"}]}, f"study.yaml:3: {H}: expected an integer from 1 to 1048576, found 'x'"),
        ({"list": [{"memory": "queue", "model.memory": "queue"}]}, "memory: unknown key"),
        ({"grid": {H: [b"x"]}}, f"study.yaml:4: {H}: expected an integer"),
        ({"seeds": [1.5]}, "seeds: expected"),
        ({"axes": {"config": [5]}, "center": {"config": "quickstart"}}, "config: expected the base config"),
        *(
            ({"tokens": value}, "tokens: expected a number > 0")
            for value in ({"a": 1}, [1], float("nan"), math.inf, 10**400)
        ),
        *(({"grid": {"tokens": [value]}}, "study.yaml:4: tokens: expected") for value in ("x", 0, True)),
        ({"list": [{"tokens": "1e6 tokens"}]}, "study.yaml:3: tokens: expected a number > 0"),
    ],
)
def test_invalid_values_are_errors_of_one_line(keys, message):
    assert message in get_error(**keys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("list: [{seed: 010}]", "seed: expected an integer from 0 to 4294967295, found '010'"),
        ("grid: {trainer.max_steps: [1:30]}", "trainer.max_steps: expected an integer >= 1, found '1:30'"),
        ("seeds: [008]", "seeds: expected a list of integers, found ['008']"),
        ("tokens: 02000", "tokens: expected a number > 0 or null, found '02000'"),
    ],
)
def test_numbers_that_are_not_decimal_are_refused_at_every_depth(text, message):
    path = write("study.yaml", f"config: {BASE}\n{text}\n")
    with pytest.raises(ConfigError, match=rf"^study.yaml:2: {re.escape(message)}"):
        load_sweep(path).check_trials()


def test_errors_for_the_command_line():
    assert get_error("seed=x").startswith("override seed=x: seed: expected an integer")
    assert f"the sweep sets {H} at study.yaml:4" in get_error(f"{H}=3", grid={H: [1]})
    assert "the sweep names its trials" in get_error("name=mine")
    (plugin := Path("..", "foreign.py")).touch()
    assert get_error(f"plugins=[{plugin}]").endswith("add --trust-plugins")
    write("mine.yaml", "config: quickstart\n")
    hints = {
        "stack_gird": r"did you mean 'stack_grid'\?",
        "mine": "'mine.yaml'",
        "x.yaml": "no such file",
        "last": "'runs/last'",
    }
    Path("runs/last").mkdir(parents=True)
    write("runs/last/sweep.yaml", "config: quickstart\n")
    for target, hint in hints.items():
        with pytest.raises(ConfigError, match=hint):
            load_sweep(target)


def test_the_copy_has_the_absolute_paths_of_plugins(monkeypatch):
    write("pyproject.toml", "")  # one project: its plugins are trusted
    for folder in ("a", "b"):
        Path(folder).mkdir()
        write(f"{folder}/p.py", f"# {folder}\n")
    file = Path("a/p.py").resolve()
    for keys in (
        {"overrides": ["plugins=[p.py]"]},
        {"list": [{"name": "one", "plugins": ["p"]}]},
        {"grid": {"plugins": [["p.py"]]}},
    ):
        monkeypatch.chdir(file.parent)
        write("study.yaml", yaml.safe_dump({"config": BASE, "name": "s", **keys}))
        sweep = load_sweep("study.yaml")
        copy = Path("runs/s/sweep.yaml")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(sweep.to_yaml())
        assert load_last_run("study.yaml").path.name == "sweep.yaml", "the file has not changed"
        monkeypatch.chdir(file.parents[1] / "b")
        assert [trial.config.plugins for trial in load_sweep("../a/runs/s").trials] == [[str(file)]], keys


def test_errors_for_searches():
    assert "search.space: name at least one key" in get_error(search={})
    assert "with low < high" in get_error(search={"space": {"optimizer.lr": {"low": 1}}})
    assert "a search chooses its own trials" in get_error(search={"space": {H: {"values": [1]}}}, seeds=[1])
    assert "single options" in get_error(search={"space": {"model.memory": {"values": ["queue"]}}})
    invalid = {"space": {S: {"low": 0, "high": 4, "int": True}}}
    assert "num_slots: expected an integer from 1 to 1048576, found 0" in get_error(search=invalid)


def test_errors_are_raised_before_torch_is_imported_or_files_are_written():
    write("study.yaml", yaml.safe_dump({"config": BASE, "grid": {H: [1, 2, -4]}}))
    program = (
        "import sys; from stackexp.cli import main\n"
        "for verb in ('run', 'status', 'results'): print(main(['sweep', verb, 'study.yaml']))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "2\n2\n2\nFalse\n"
    assert done.stderr == f"error: study.yaml:4: {H}: expected an integer from 1 to 1048576, found -4\n" * 3
    assert [path.name for path in Path().iterdir()] == ["study.yaml"]


@pytest.mark.parametrize("text", ["${seed}", "${..seed}", "${ seed }", "${oc.select:seed}"])
def test_an_interpolated_seed_is_that_of_the_trial(text):
    write("seeded.yaml", f"defaults: [{BASE}]\ndata: {{shuffle_seed: '{text}'}}\n")
    sweep = build_sweep(config="seeded.yaml", seeds=[0, 1, 2])
    assert [trial.config.data.shuffle_seed for trial in sweep.trials] == [0, 1, 2]
