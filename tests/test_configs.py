"""Shipped configs: each composes, builds on the meta device and states its purpose; `configs list|show`."""

import dataclasses
import functools
import sys

import pytest

from stackexp.config.compose import compose
from stackexp.config.layers import find_config, get_group_folder, list_catalog, list_config_names, list_sections
from stackexp.config.yaml_files import get_configs_folder, list_yaml_names, read_purpose
from stackexp.planning.cost import build_meta_model
from stackexp.sweeps.schema import expand
from stackexp.sweeps.sweep import load_sweep
from stackexp.tasks import CHOMSKY_TASKS

CURRICULUM = {"curriculum_steps": 700, "curriculum_start": 3}  # of the formal-language baselines
RECIPES = [name for name in list_config_names() if name.startswith("recipe/")]
CONFIGS = [name for name in list_config_names() if name not in RECIPES]
CHOICES = [(section, name) for section in list_sections() for name in list_yaml_names(get_group_folder(section))]
SIZES = {  # parameters of the backbone and of the stack
    "360m": (361_821_120, 3_940_384),
    "600m": (584_003_840, 4_922_910),
    "1b": (981_579_264, 7_087_140),
    "1.5b": (1_560_381_440, 6_297_624),
    "7b": (6_878_924_800, 16_785_440),
}

build = functools.cache(lambda name: (config := compose([name]), build_meta_model(config)))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_builds(name):
    config, model = build(name)
    assert config.name == name
    assert model.num_parameters() > 0
    assert next(model.parameters()).is_meta
    memory = getattr(config.model, "memory", None)
    assert (memory is None) == (model.num_memory_parameters() == 0)


@pytest.mark.parametrize(("section", "name"), CHOICES)
def test_every_choice_builds(section, name):
    long_enough = ["trainer.max_steps=3000000"]
    config = compose(["ablation/transformer"], [f"{section}={name}", *long_enough])
    assert build_meta_model(config).num_parameters() > 0


def test_every_yaml_file_is_reachable_and_states_its_purpose():
    files = {path.resolve() for path in get_configs_folder().rglob("*") if path.is_file()}
    known = {find_config(name) for name in list_config_names()}
    known |= {get_group_folder(section) / f"{name}.yaml" for section, name in CHOICES}
    assert files == {path.resolve() for path in known}
    folder = get_configs_folder().parent
    files |= {path for kind in ("sweeps", "verdicts") for path in (folder / kind).rglob("*.yaml")}
    for path in files:
        assert path.read_text().startswith("# ")
        assert 10 < len(read_purpose(path)) <= 110, path


@pytest.mark.parametrize("size", SIZES)
def test_presets_have_the_stated_sizes(size):
    backbone, memory = SIZES[size]
    transformer, stacktrans = build(f"pretrain/transformer-{size}")[1], build(f"pretrain/stacktrans-{size}")[1]
    assert transformer.num_parameters() == backbone
    assert stacktrans.num_memory_parameters() == memory
    assert stacktrans.num_parameters() == backbone + memory


CODE = {"site": "after_attention", "projection": "shared_slices", "action_input": "hidden", "action_scale": "slice"}
CODE |= {"read_mask": "additive", "residual_gate": "read", "init_std": 0.02, "entropy_weight": 0}
CHANGES = {
    "queue": {"discipline": "queue"},
    "push_only": {"discipline": "push_only"},
    "single_head": {"num_heads": 1},
    "full_dim": {"projection": "none", "head_dim": 240},
    "authors_code": CODE,
}


@pytest.mark.parametrize(("name", "change"), CHANGES.items(), ids=CHANGES)
def test_ablation_changes_only_its_intervention(name, change):
    ablation, stacktrans = compose([f"ablation/{name}"]), compose(["ablation/stacktrans"])
    memory = vars(ablation.model.memory)
    assert {key: memory[key] for key in memory if memory[key] != vars(stacktrans.model.memory)[key]} == change
    ablation.model.memory, ablation.name = stacktrans.model.memory, stacktrans.name
    assert ablation == stacktrans


@pytest.mark.parametrize(("billions", "warmup_steps"), [(20, 200), (80, 800), (200, 2000), (980, 2000)])
@pytest.mark.parametrize("model", ["transformer", "stacktrans"])
def test_token_budgets_of_the_paper(billions, warmup_steps, model):
    config, base = compose([f"pretrain/{model}-360m-{billions}b"]), compose([f"pretrain/{model}-360m"])
    assert 0 <= config.total_tokens - billions * 10**9 < config.data.global_batch_tokens
    assert config.schedule.warmup_steps == warmup_steps
    proportions = {name: stream.proportion for name, stream in config.data.streams.items()}
    assert proportions == {"dolma": 3000, "fineweb-edu": 220, "cosmopedia": 28, "python-edu": 4}
    assert config.data.path is None
    changed = {"path", "streams"}
    kept = [{key: value for key, value in vars(c.data).items() if key not in changed} for c in (config, base)]
    assert kept[0] == kept[1]
    assert (config.model, config.optimizer) == (base.model, base.optimizer)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_keeps_the_dataset(name, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("data: {kind: shards, path: mine, vocab_size: 300, context_length: 64, validation: {left: a}}\n")
    config = compose([str(mine), name])
    assert (config.data.path, config.data.vocab_size, config.data.validation) == ("mine", 300, {"left": "a"})
    assert config.data.context_length == 2048
    assert build_meta_model(config).num_parameters() > 0


@pytest.mark.parametrize("memory", ["transformer", "stacktrans", "queue", "push_only", "single_head", "full_dim"])
def test_olmo_ablation_changes_only_the_data(memory):
    olmo, ours = compose([f"pretrain/olmo-ablation-{memory}"]), compose([f"ablation/{memory}"])
    assert (olmo.model.vocab_size, olmo.data.validation) == (50304, {"v2": "data/olmo/v2", "v3": "data/olmo/v3"})
    olmo.model.vocab_size, olmo.data, olmo.name = ours.model.vocab_size, ours.data, ours.name
    assert olmo == ours


def test_list_shows_every_config_and_choice_and_fits_the_terminal(monkeypatch, invoke):
    lines = invoke("configs list").splitlines()
    assert lines[0].split() == ["config", "purpose"]
    row = next(line for line in lines if line.startswith("ablation/stacktrans "))
    assert row.endswith("Ablation: StackTrans 360M, with the paper's stack between the layers.")
    listed = {line.split()[0] for line in lines if line}
    assert {*list_config_names(), "model.memory=queue", *(name for _, name, _ in list_catalog())} <= listed
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, invoke("configs list").splitlines())) <= 80


def test_show_prints_the_config_and_its_cost(invoke):
    shown = invoke("configs show ablation/stacktrans trainer.max_steps=1000")
    assert "  max_steps: 1000\n" in shown
    assert "365,761,504 = 361,821,120 backbone + 3,940,384 memory" in shown
    assert "2,097,152,000\n" in shown
    assert "1,000 of 2,097,152 tokens" in shown
    model = build("ablation/stacktrans")[1]
    assert f"{model.flops_per_token(2048):.3e} per token" in shown


@pytest.mark.parametrize("task", CHOMSKY_TASKS)
def test_formal_recipes_share_model_sizes_and_lengths(task):
    recipe, base = build(f"formal/stacktrans/{task}")[0], build("formal/stacktrans")[0]
    assert recipe.data.task == task
    sizes = ("hidden_size", "num_heads", "intermediate_size", "causal")
    assert [getattr(recipe.model, key) for key in sizes] == [getattr(base.model, key) for key in sizes]
    memory = recipe.model.memory
    assert (memory.num_heads, memory.head_dim) == (4, 8)
    assert memory.eval_num_slots in (memory.num_slots, 128, 512)
    assert memory.axis != "depth"
    lengths = (recipe.data.max_length, recipe.data.validation_max_length, recipe.data.eval_max_length)
    assert lengths == (40, 60, 500)


def replace_memory(config, plain):
    """Return a config with the memory and the name of `plain`."""
    return dataclasses.replace(config, name=plain.name, model=dataclasses.replace(config.model, memory=None))


def test_formal_baselines_differ_only_in_the_memory():
    plain, ours = build("formal/transformer")[0], build("formal/stacktrans")[0]
    for name in ("stacktrans-depth", "stack_attention"):
        config = build(f"formal/{name}")[0]
        data = dataclasses.replace(config.data, eval_batch_size=plain.data.eval_batch_size)
        assert replace_memory(dataclasses.replace(config, data=data), plain) == plain
    data = dataclasses.replace(ours.data, **CURRICULUM)
    optimizer = dataclasses.replace(ours.optimizer, eps=1e-8)
    assert replace_memory(dataclasses.replace(ours, data=data, optimizer=optimizer), plain) == plain
    for name in ("lstm", "stack_rnn", "stack_attention", "transformer", "stacktrans-depth"):
        config, model = build(f"formal/{name}")
        assert {key: getattr(config.data, key) for key in CURRICULUM} == CURRICULUM
        assert config.optimizer.eps == 1e-8
        if name in ("lstm", "stack_rnn"):
            parameters = build("formal/stacktrans")[1].num_parameters()
            assert model.num_parameters() == pytest.approx(parameters, rel=0.02)


def test_formal_table_has_every_task_and_model():
    sweep = load_sweep("formal_table")
    models = ["lstm", "stack_rnn", "stack_attention", "transformer", "stacktrans-depth", "stacktrans"]
    names = [entry["name"] for entry in sweep.config.list]
    assert sorted(names) == sorted(f"{task}-{model}" for task in CHOMSKY_TASKS for model in models)
    assert (sweep.config.seeds, sweep.config.objective) == ([0, 1, 2], "score_41_500")
    for entry in sweep.config.list:
        task, _, model = entry["name"].partition("-")
        assert entry["config"] == (f"formal/stacktrans/{task}" if model == "stacktrans" else f"formal/{model}")
        assert entry["data.task"] == task
    for label, values in expand(sweep.config):
        if values["data.task"] == "parity_check" and values["seed"] == 2:
            config = sweep.build_trial(values, label).config
            assert (config.data.task, config.seed, config.name) == ("parity_check", 2, "formal_table")
            assert (config.data.eval_length_stride, config.data.eval_sequences) == (27, 64)
