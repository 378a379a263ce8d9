"""Config composition: layers, group choices, kinds, interpolation and the YAML round trip."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from config_files import BASE, write
from hypothesis import given, settings
from hypothesis import strategies as st

from stackexp.config import yaml_files
from stackexp.config.compose import compose, load_config, to_dict, to_yaml
from stackexp.config.layers import list_config_names
from stackexp.errors import ConfigError

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_later_layers_override_earlier_layers():
    a = write(
        "a.yaml", "defaults:\n  - schedule: smollm-wsd\nschedule:\n  warmup_steps: 11\ntrainer: {max_steps: 200000}\n"
    )
    b = write("b.yaml", "schedule:\n  warmup_steps: 12\n")
    base = compose([BASE])
    assert (base.schedule.kind, base.schedule.warmup_steps) == ("cosine", 20)
    assert compose([BASE, a]).schedule.warmup_steps == 11
    assert compose([BASE, a]).schedule.decay_fraction == 0.166667
    assert compose([BASE, a, b]).schedule.warmup_steps == 12
    assert compose([BASE, b, a]).schedule.warmup_steps == 11
    assert compose([BASE, a, b], ["schedule=smollm2-wsd", "trainer.max_steps=2600000"]).schedule.warmup_steps == 2000
    chosen = ["schedule.warmup_steps=13", "schedule=smollm2-wsd", "trainer.max_steps=2600000"]
    assert compose([BASE, a, b], chosen).schedule.warmup_steps == 13


def test_override_spellings_are_equivalent():
    spellings = [
        ["model.memory.num_slots=32", "optimizer.lr=3e-4", "seed=-0"],
        ["--model.memory.num_slots=32", "--optimizer.lr=3e-4", "--seed=-0"],
        ["--model.memory.num_slots", "32", "--optimizer.lr", "3e-4", "--seed", "-0"],
    ]
    configs = [compose([BASE], spelling) for spelling in spellings]
    assert configs[0] == configs[1] == configs[2]
    assert (configs[0].model.memory.num_slots, configs[0].optimizer.lr) == (32, 3e-4)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("optimizer.lr=3e-4", "optimizer.lr", 3e-4),
        ("trainer.gradient_clip_val=null", "trainer.gradient_clip_val", None),
        ("trainer.compile=true", "trainer.compile", True),
        ("name=2025-07-20", "name", "2025-07-20"),
        ("data.eval_sequences=${data.micro_batch_size}", "data.eval_sequences", 8),
        ("data.micro_batch_size=${div:${data.global_batch_tokens},1024}", "data.micro_batch_size", 4),
        ("logging.root=a=b", "logging.root", "a=b"),
    ],
)
def test_override_values_are_parsed_as_yaml(text, key, value):
    node = compose([BASE], [text])
    for part in key.split("."):
        node = getattr(node, part)
    assert node == value
    assert type(node) is type(value)


def test_group_choice_replaces_the_section():
    stacktrans = compose(["pretrain/stacktrans-360m"], ["model.num_layers=3"])
    assert stacktrans.model.memory.num_slots == 24
    assert stacktrans.model.num_layers == 3
    transformer = compose(["pretrain/stacktrans-360m"], ["model=transformer-360m"])
    assert transformer.model.memory is None
    assert transformer.model == compose(["pretrain/transformer-360m"]).model
    slots = write("slots.yaml", "model: {memory: {num_slots: 5}}\n")
    assert compose([BASE, slots]).model.memory.num_slots == 5
    assert compose([BASE, slots], ["model.memory=queue"]).model.memory == compose(["ablation/queue"]).model.memory


def test_group_choices_apply_before_keys_and_outer_before_inner():
    orders = [
        ["model.memory.num_slots=7", "model.memory=queue", "model=transformer-360m"],
        ["model=transformer-360m", "model.memory=queue", "model.memory.num_slots=7"],
    ]
    first, second = (compose([BASE], order) for order in orders)
    assert first == second
    assert (first.model.hidden_size, first.model.memory.discipline, first.model.memory.num_slots) == (960, "queue", 7)


def test_options_of_a_section_in_one_override_are_overrides_in_their_order():
    for overrides, layers in (
        (["model.num_layers=9", "model={num_layers: 3}"], 3),
        (["model={num_layers: 3}", "model.num_layers=9"], 9),
        (["model={num_layers: 3, memory: queue}", "model={num_layers: 5, memory: {num_slots: 7}}"], 5),
    ):
        model = compose([BASE], overrides).model
        assert model.num_layers == layers
    assert (model.memory.discipline, model.memory.num_slots) == ("queue", 7)


def test_an_empty_section_of_a_file_does_not_remove_it():
    none = write("none.yaml", "model: {memory: null}\n")
    empty = write("empty.yaml", "model: {memory: {}}\n")
    assert compose([BASE, empty]).model.memory == compose([BASE]).model.memory
    with pytest.raises(ConfigError, match=r"model\.memory: no kind is set"):
        compose([BASE, none, empty])


def test_null_disables_the_memory_and_interpolation_uses_the_final_value():
    assert compose([BASE], ["data.vocab_size=999"]).model.vocab_size == 999, "interpolation uses the final value"
    assert compose([BASE], ["model.memory=full_dim", "model.memory.num_heads=2"]).model.memory.head_dim == 96
    assert compose([BASE], ["model.memory=null"]).model.memory is None
    assert compose([BASE, write("off.yaml", "model: {memory: null}\n")]).model.memory is None
    assert compose([BASE, write("off.yaml", "defaults: [model.memory: null]\n")]).model.memory is None
    on_again = compose([BASE], ["model.memory.kind=stack", "model.memory.num_heads=2"])
    assert on_again.model.memory.num_heads == 2


def test_changing_the_kind_resets_the_section():
    wsd = compose([BASE], ["schedule.decay_steps=100", "schedule.kind=wsd"])
    assert (wsd.schedule.warmup_steps, wsd.schedule.decay_steps, wsd.schedule.final_fraction) == (200, 100, 0.0)
    same = compose([BASE], ["schedule.kind=cosine"])
    assert same.schedule.warmup_steps == 20
    text = "schedule: {kind: linear, final_fraction: 0.5}\n"
    linear = compose([BASE, write("linear.yaml", text)])
    assert (linear.schedule.kind, linear.schedule.warmup_steps, linear.schedule.final_fraction) == ("linear", 200, 0.5)


def test_defaults_accept_configs_paths_and_choices():
    write("sub/steps.yaml", "schedule: {warmup_steps: 7}\ntrainer: {max_steps: 77}\nseed: 5\n")
    write("sub/memory.yaml", "defaults:\n  - queue\nnum_slots: 6\n")
    top = write("sub/top.yaml", "defaults:\n  - quickstart\n  - steps.yaml\n  - model.memory: memory.yaml\nseed: 6\n")
    config = compose([top])
    assert (config.trainer.max_steps, config.seed, config.name) == (77, 6, "top")
    assert (config.model.memory.discipline, config.model.memory.num_slots) == ("queue", 6)


def test_name_defaults_to_the_config_names():
    assert compose(["ablation/queue"]).name == "ablation/queue"
    assert compose([BASE, write("more.yaml", "seed: 1\n")]).name == "base+more"
    assert compose([BASE], ["name=mine"]).name == "mine"


def test_validation_sets_are_merged_by_name_and_replaced_by_a_choice():
    path = write("sets.yaml", "data:\n  validation: {dolma-v1.6: data/a, wiki: data/b}\n")
    config = compose(["ablation/queue", path], ["data.validation.wiki=data/c"])
    olmo = {"v2": "data/olmo-49152/v2", "v3": "data/olmo-49152/v3"}
    assert config.data.validation == olmo | {"dolma-v1.6": "data/a", "wiki": "data/c"}
    for choice, sets in {"v2": {"v2": "data/olmo/v2"}, "null": {}}.items():
        assert compose(["ablation/queue"], [f"data.validation={choice}"]).data.validation == sets
        path = write("mine.yaml", f"defaults:\n  - ablation/queue\n  - data.validation: {choice}\n")
        assert compose([path]).data.validation == sets
    for empty in ("data.validation={}", "data={validation: {}}"):
        assert compose(["ablation/queue", path], [empty]).data.validation == {}
    test = write("test.yaml", "data:\n  test: {wiki: data/b}\n")
    assert compose(["ablation/queue", test, write("none.yaml", "data: {test: {}}\n")]).data.test == {}


@pytest.mark.parametrize("name", list_config_names()[::3])
def test_written_config_is_read_back_unchanged(name):
    config = compose([BASE, name], ["seed=3"])
    Path("config.yaml").write_text(to_yaml(config))
    assert to_dict(load_config("config.yaml", ["seed=4"])) == {**to_dict(config), "seed": 4}


texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00", exclude_categories=["C"]), min_size=1)


EXAMPLE = compose(["ablation/queue"])


@settings(max_examples=20, deadline=None)
@given(
    path=(texts | st.sampled_from(["${name}", "a\\${x}", "\\\\${oc.env:A}${b}"])).filter(lambda text: text != "???"),
    lr=st.floats(1e-300, 1e30),
    slots=st.none() | st.integers(24, 2**20),
    seed=st.integers(0, 2**32 - 1),
)
def test_arbitrary_values_survive_a_yaml_round_trip(path, lr, slots, seed):
    config = copy.deepcopy(EXAMPLE)
    config.data.path, config.data.validation, config.seed = path, {"a.b c": path}, seed
    config.optimizer.lr, config.model.memory.eval_num_slots = lr, slots
    Path("config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config("config.yaml") == config


def test_installed_package_uses_its_own_configs(tmp_path):
    root = Path(yaml_files.__file__).parents[2]
    shutil.copytree(root / "stackexp", tmp_path / "site" / "stackexp", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "configs", tmp_path / "site" / "stackexp" / "configs")
    (tmp_path / "site" / "configs").mkdir()  # of some other package
    code = "from stackexp.config.compose import compose; print(compose(['ablation/queue']).model.memory.discipline)"
    command, environment = [sys.executable, "-c", code], {"PYTHONPATH": "site"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "queue", done.stderr


def test_environment_variables_in_paths_are_stored_unresolved(tmp_path, monkeypatch):
    monkeypatch.setenv("BUCKET", "s3://secret-bucket")
    monkeypatch.setenv("STEPS", "4000")
    shards = ["data.kind=shards", "data.remote=${oc.env:BUCKET}/a", "trainer.max_steps=${oc.env:STEPS}"]
    config = compose(["quickstart"], [*shards, "data.validation={v1.0: '${oc.env:BUCKET}/v'}"])
    assert (config.data.remote, config.data.validation) == ("s3://secret-bucket/a", {"v1.0": "s3://secret-bucket/v"})
    text = to_yaml(config)
    assert "secret-bucket" not in text
    assert "secret-bucket" not in str(to_dict(config))
    assert "max_steps: 4000" in text, "an option that affects training is stored"
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(tmp_path / "config.yaml") == config
    monkeypatch.delenv("BUCKET")
    with pytest.raises(ConfigError, match=r"config.yaml:\d+: data\.remote: .*BUCKET"):
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("key", ["logging.loggers", "trainer.callbacks"])
def test_secrets_of_loggers_and_callbacks_are_stored_unresolved(tmp_path, monkeypatch, key):
    monkeypatch.setenv("API_KEY", "hunter2")
    entry = "{class: 'json:JSONEncoder', options: {key: '${oc.env:API_KEY}', n: 3}}"
    config = compose(["quickstart"], [f"{key}=[{entry}]"])
    section, name = key.split(".")
    assert getattr(getattr(config, section), name)[0]["options"] == {"key": "hunter2", "n": 3}
    text = to_yaml(config)
    assert "hunter2" not in f"{text}{to_dict(config)}"
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(tmp_path / "config.yaml") == config


def test_text_is_kept_as_written(tmp_path):
    overrides = ["logging.root=2025_07", "trainer.max_time=10:00:00:00", "data.kind=shards", "data.path=1e3"]
    for name in ("0123", "no", "1.10", "1e3"):
        config = compose(["quickstart"], [*overrides, f"name={name}"])
        found = (config.name, config.logging.root, config.trainer.max_time, config.data.path)
        assert found == (name, "2025_07", "10:00:00:00", "1e3")
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert load_config(tmp_path / "config.yaml") == config


def test_an_integer_for_a_number_gives_no_warning(recwarn):
    config = compose(["quickstart"], ["schedule.final_fraction=0"])
    assert type(config.schedule.final_fraction) is float
    assert not recwarn.list
