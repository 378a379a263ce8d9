"""Config errors: one line with the origin, the key, the expected value and the closest valid name."""

import contextlib
from pathlib import Path

import pytest
from config_files import BASE, compose_error, write
from hypothesis import given, settings
from hypothesis import strategies as st

from stackexp.config.compose import RENAMED_KEYS, compose
from stackexp.errors import ConfigError

pytestmark = pytest.mark.usefixtures("empty_folder")


FEEDBACK = ["model.memory.axis=time", "model.memory.feedback=true"]
PUSH_ONLY = "model.memory.discipline=push_only"
MISTAKES = {
    BASE: [
        ("seed", "override seed: expected KEY=VALUE"),
        ("quickstart", "override quickstart: expected KEY=VALUE; for a config write --config quickstart"),
        ("logging.root=~/runs", "override logging.root=~/runs: logging.root: ~/runs: ~ is not expanded here; w"),
        ("seed=", "override seed=: empty value; write null, or '\"\"' for empty text"),
        ("--seed", "override --seed: missing value; write --seed=VALUE"),
        ("=3", "override =3: invalid key ''; expected SECTION.KEY=VALUE"),
        ("seed=010", "override seed=010: seed: expected an integer from 0 to 4294967295, found '010'"),
        ("optimizer.lr=01.5", "optimizer.lr: expected a number > 0, found '01.5'"),
        ("trainer.max_steps=1:30", "trainer.max_steps: expected an integer >= 1, found '1:30'"),
        ("trainer.devices=[010]", "trainer.devices: expected an integer >= 1, found ['010']"),
        ("seed=[1,", "override seed=[1,: not valid YAML: "),
        ("seed=abc", "override seed=abc: seed: expected an integer from 0 to 4294967295, found 'abc'"),
        ("trainer.max_steps=1e4", "trainer.max_steps: expected an integer >= 1, found 10000.0; write 10000"),
        (
            "trainer.compile=2",
            "override trainer.compile=2: trainer.compile: expected one of auto, true, false, found 2",
        ),
        ("optimizer.lr=[1]", "optimizer.lr: expected a number > 0, found [1]"),
        ("optimizer.lr=0", "override optimizer.lr=0: optimizer.lr: expected a number > 0, found 0.0"),
        ("optimizer.lr=.nan", "optimizer.lr: expected a number > 0, found nan"),
        ("model.memory.axis=dept", "one of depth, time, token_major, found 'dept'; did you mean 'depth'?"),
        ("model.memory.num_slot=3", "num_slot: unknown key; did you mean 'model.memory.num_slots'?"),
        ("num_slots=3", "override num_slots=3: num_slots: unknown key; did you mean 'model.memory.num_slots'?"),
        ("zzz=3", "zzz: unknown key; a config has data, evaluation, logging, model, name, optimizer, plugins, "),
        ("model.memory=queu", "model.memory: unknown choice 'queu' (choices: adapter, "),
        ("schedule=cosine", "unknown choice 'cosine' (choices: olmo-cosine, smollm-wsd, smollm2-wsd); to choose a"),
        ("logging=loud", "logging: unknown choice 'loud' (this section has no choices)"),
        ("model=null", "override model=null: model is a section with keys; it cannot be null"),
        ("data.kind=shards", "data.path: no training data; set data.path=FOLDER"),
        ("data.path=x", "override data.path=x: data.path: unknown key; it exists for data.kind: shards"),
        ("model.memory.num_streams=2", "unknown key; it exists for model.memory.kind: hyper_connections, mhc"),
        ("plugins=[../x.py]", "plugins: cannot import '../x.py': no file ../x.py, and no module of that name; correct"),
        ("model.memory={}", "model.memory: {} changes nothing; give its options, or null to remove it"),
        ("model={}", "model: {} changes nothing; give its options"),
        ("name=../x", "override name=../x: name: '../x' cannot name a folder"),
        ("data.global_batch_tokens=5000", "data.context_length = 2048; the nearest multiple is 4096"),
        ("trainer.max_steps=20", "max_steps 20 (trainer.max_steps: override trainer.max_steps=20)"),
        ("model.num_kv_heads=4", "model.num_kv_heads: num_heads 6 is not a multiple of num_kv_heads 4"),
        ("model.num_heads=64", "RoPE requires an even head size, but hidden_size / num_heads = 3"),
        ("model.memory.projection=none", "4 * 16 = 64 (model.memory.projection: override model.memory.projection=none"),
        ("model.memory.action_scale=slice", "model.memory.action_scale: slice requires action_input: hidden"),
        ("model.vocab_size=100", "model.vocab_size: 100 is smaller than data.vocab_size 4096"),
        ("seed=${data.vocab_siz}", "seed: unknown key in the interpolation ${data.vocab_siz}; did you mean"),
        ("seed=${seed}", "override seed=${seed}: seed: circular interpolation ${seed}"),
        ("seed=${data.kind}", "seed: the interpolation ${data.kind} has the wrong type: "),
        (
            "data.packages=${trainer.max_steps}",
            "data.packages: the interpolation ${trainer.max_steps} has the wrong type: expected true or false",
        ),
        ("seed=${div:5,2}", "cannot resolve the interpolation ${div:5,2}: 5 is not divisible by 2"),
        ("seed=${div:5,x}", "div requires two integers, found 5 and 'x'"),
        ("seed=${div:5,2", "override seed=${div:5,2: seed: malformed interpolation ${div:5,2: "),
        ("trainer.max_steps=???", "override trainer.max_steps=???: trainer.max_steps: expected an integer >= 1"),
        (f"name={'a' * 256}", f"override name={'a' * 256}: name: a part of it is longer than 200 characters"),
        ("model.hidden_size=1000000000000", "model.hidden_size: expected an integer from 1 to 1048576"),
        ("model.vocab_size=4294967296", "model.vocab_size: expected an integer from 1 to 2147483647"),
        ("model.memory.head_dim=4294967296", "model.memory.head_dim: expected an integer from 1 to 1048576"),
        ("model.memory.action_noise=1e300", "model.memory.action_noise: expected a number of at most 1e+30"),
        (f"trainer.cross_entropy_chunk=1{'0' * 23}", "expected a number of at most 9.22337e+18"),
        (
            ["model.memory.axis=time", "model.memory.feedback_activation=gated", "model.memory.feedback_hidden_size=8"],
            "model.memory.feedback_activation: gated requires feedback: true",
        ),
        (
            ["model.memory.axis=time", "model.memory.feedback_hidden_size=8"],
            "feedback_hidden_size: requires feedback: true",
        ),
        (
            [*FEEDBACK, "model.memory.feedback_activation=gated"],
            "model.memory.feedback_activation: gated requires feedback_hidden_size",
        ),
        ("model.memory.feedback=true", "model.memory.feedback: requires axis: time"),
        (
            ["model.memory.read=top", "model.memory.read_mask=log"],
            "model.memory.read_mask: log requires read: global, found read: top; use multiply",
        ),
        (
            ["model.memory.state_dtype=bfloat16", "model.memory.axis=time"],
            "model.memory.state_dtype: bfloat16 requires axis: depth, found axis: time; use auto",
        ),
        (
            ["model.memory.empty_slot=true", "model.memory.read=top"],
            "empty_slot: requires axis: depth and read: global",
        ),
        (
            ["model.memory.empty_slot=true", "model.memory.axis=time"],
            "empty_slot: requires axis: depth and read: global",
        ),
        ([*FEEDBACK, "model.memory.push_norm=head"], "model.memory.push_norm: "),
        ([*FEEDBACK, "model.memory.action_bias=2"], "model.memory.action_bias: "),
        (
            [PUSH_ONLY, "model.memory.action_input=hidden"],
            "memory.action_input: not supported by discipline: push_only",
        ),
        ([PUSH_ONLY, "model.memory.action_noise=0.1"], "memory.action_noise: not supported by discipline: push_only"),
        ([PUSH_ONLY, "model.memory.action_sharpness=2"], "action_sharpness: not supported by discipline: push_only"),
        ([PUSH_ONLY, "model.memory.action_bias=1"], "push_only, which always pushes; use null"),
        ([PUSH_ONLY, "model.memory.feedback=true"], "memory.feedback: not supported by discipline: push_only"),
        ("model.mup_base_size=64", "model.mup_base_size: requires init: fan_in and a value of embedding_std"),
        (
            ["model.mup_base_size=64", "model.embedding_std=1", "model.memory=authors_code"],
            "model.memory.init_std: not supported with model.mup_base_size; use null",
        ),
        ("model.init_std=0.5", "model.init_std: has no effect with init: fan_in; use init: normal"),
    ],
    "ablation/queue": [
        (["data.streams.a.path=x"], "data.path: give one source (data.path, data.remote) or data.streams, not both"),
        (["data.streams.a.pth=x"], "data.streams.a.pth: unknown key; did you mean 'data.streams.a.path'?"),
        (["data.path=null", "data.streams.a={path: x, repeat: 0}"], "expected a number > 0 or null, found 0"),
        (
            ["data.path=null", "data.streams={a: {path: x}, b: {path: y}}", "data.shuffle=false"],
            "data.shuffle: without it, an epoch reads one stream after the other; set data.shuffle=true",
        ),
        (["data.path=null", "data.streams.a.proportion=1"], "data.streams.a.path: a stream requires a path, a remote"),
        (["data.path=null", "data.streams={a: {path: x, proportion: 1}, b: {path: y}}"], "to all streams or to none"),
        (["data.path=null", "data.streams.a={path: x, proportion: 1, repeat: 2}"], "proportion or repeat, not both"),
        (["model.positional=sinusoidal", "model.embedding_scale=2"], "sinusoidal scales by sqrt(hidden_size) already"),
        (["data.cache_limit=3xb"], "data.cache_limit: expected a size such as 200gb, found '3xb'"),
        (["data.validation={a: {b: 1}}"], "data.validation.a: expected text, found a mapping"),
        (["data.validation=olm"], "choices: custom, olmo, olmo-49152, v2, v3); did you mean 'olmo'?"),
        (["data.document_mask=true", "model.memory.axis=time"], "data.document_mask: not supported by model.memory.ax"),
        (["model.kind=lstm", "data.document_mask=true"], "data.document_mask: not supported by model.kind: lstm; use"),
        (["trainer.strategy=fsdp", "trainer.precision=64-true"], "trainer.precision: 64-true does not support"),
    ],
    "formal/stacktrans": [
        ("data.task=reverse_strings", "did you mean 'reverse_string'?"),
        ("model.memory.eval_num_slots=8", "model.memory.eval_num_slots: must not be smaller than num_slots 24"),
        (
            "data.eval_max_length=40",
            "data.eval_max_length: must be at least 41, to include strings longer than max_length 40",
        ),
        ("data.output_vocab_size=5", "data.output_vocab_size: data.task reverse_string has 2, found 5; remove this op"),
        ("data.vocab_size=2", "data.vocab_size: data.task reverse_string has 3, found 2; remove this option"),
        (
            ["data.curriculum_steps=5", "data.curriculum_start=50"],
            "data.curriculum_start: must not be larger than max_length 40",
        ),
        ("model.output_vocab_size=3", "reverse_string has 2 output symbols, the model 3; set model.output_vocab_size="),
        (
            ["model.memory.axis=token_major", "model.causal=false"],
            "model.memory.axis: token_major requires model.causal: true",
        ),
        (
            ["data.task=solve_equation", "data.curriculum_start=1", "data.curriculum_steps=10"],
            "data.curriculum_start: 1 is too short: the shortest string of solve_equation has 3 symbols",
        ),
    ],
    "quickstart": [
        (["model.attention=varlen", "trainer.precision=32-true"], "model.attention: varlen requires"),
        (
            ["model.attention=flash_attn", "model.positional=alibi", "trainer.precision=bf16-mixed"],
            "model.attention: flash_attn does not support positional: alibi",
        ),
        (
            ["model.attention=flex", "trainer.accelerator=cpu", "trainer.precision=bf16-mixed"],
            "model.attention: flex requires CUDA, found trainer.accelerator cpu",
        ),
        ("model.attention=flash", "expected one of sdpa, flex, varlen, flash_attn, found 'flash'; did you mean"),
        ("trainer.recompute=selective", "trainer.recompute: selective requires activation_checkpointing: true"),
        (
            ["model.memory=null", "optimizer.memory_lr=0.01"],
            "optimizer.memory_lr: the model has no memory; set model.memory, or memory_lr to null",
        ),
        (
            ["model.residual_dtype=bfloat16", "trainer.precision=32-true"],
            "model.residual_dtype: bfloat16 requires trainer.precision: bf16-mixed, found trainer.precision 32-true",
        ),
    ],
}


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        (config, [overrides] if isinstance(overrides, str) else overrides, message)
        for config, mistakes in MISTAKES.items()
        for overrides, message in mistakes
    ],
)
def test_invalid_overrides_are_reported(config, overrides, message):
    found = compose_error([config], *overrides)
    assert message in found
    assert len(overrides) > 1 or overrides[0] in found or "data.path: " in found


def test_circular_and_chained_interpolations_name_the_cause():
    found = compose_error(
        [BASE], "seed=${data.num_workers}", "data.num_workers=${trainer.devices}", "trainer.devices=${seed}"
    )
    assert "circular interpolation ${" in found
    found = compose_error(["quickstart"], "seed=${schedule.warmup_steps}", "schedule.warmup_steps=${nothing.here}")
    cause = "override schedule.warmup_steps=${nothing.here}: unknown key in the interpolation ${nothing.here}"
    assert f"seed: ${{schedule.warmup_steps}} requires schedule.warmup_steps: {cause}" in found


def test_a_memory_without_a_kind_reports_how_to_enable_it():
    found = compose_error([BASE], "model.memory=null", "model.memory.num_slots=3")
    assert found.startswith("override model.memory.num_slots=3: model.memory: no kind is set; set ")
    assert "model.memory=NAME" in found
    assert "model.memory.kind=KIND (" in found
    error = compose_error([BASE], f"model.memory={write('empty.yaml', '{}')}")
    assert error.startswith("model.memory: no kind is set; set model.memory=NAME")


PIECES = ["${", "}", "???", "null", "[", "{", "- ", ": ", "&a ", "*a", "!!int ", "'", "\n", "  ", "1e9", "kind", "wsd"]
PIECES += ["model", "\x00"]


@settings(max_examples=100, deadline=None)
@given(
    key=st.sampled_from(
        ["seed", "name", "model", "model.memory", "model.kind", "data.path", "plugins", "trainer.x", "defaults"]
    ),
    value=st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=4).map("".join),
)
def test_any_value_is_accepted_or_raises_config_error(key, value):
    for configs, overrides in ([BASE], [f"{key}={value}"]), ([BASE, "x.yaml"], []):
        Path("x.yaml").write_text(f"# any\n{key}: {value}\n", encoding="utf-8")
        with contextlib.suppress(ConfigError):
            assert compose(configs, overrides).trainer.max_steps == 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nmodel:\n  memory:\n    num_slotz: 3\n", "x.yaml:4: model.memory.num_slotz: unknown key; did you"),
        ("model.memory.num_slots: 3\n", "x.yaml:1: model.memory.num_slots: unknown key; nest the parts of a dotted"),
        ("# c\n\ntrainer:\n  max_steps: many\n", "x.yaml:4: trainer.max_steps: expected an integer >= 1, found 'many'"),
        ("model: {num_layers: [1\n", "x.yaml:2: not valid YAML: "),
        ("seed: !!python/object:os.system {}\n", "x.yaml:1: not valid YAML: "),
        (
            "model: !!python/object:os.system {num_layers: 1}\n",
            "x.yaml:1: not valid YAML: remove the tag tag:yaml.org,",
        ),
        ("trainer:\n  max_steps: '10'\n", "x.yaml:2: trainer.max_steps: expected an integer >= 1, found '10'"),
        ("!include\nseed: 1\n", "x.yaml:1: not valid YAML: remove the tag !include"),
        ("seed: 1\nname: a\nseed: 2\n", "x.yaml:3: duplicate key 'seed'"),
        ("model: &a\n  memory: *a\n", "x.yaml:1: nested too deeply, or an anchor contains itself"),
        ("data: " + "{a: " * 900 + "1" + "}" * 900, "x.yaml:1: nested too deeply"),
        ("data: " + "[" * 3000 + "]" * 3000, "x.yaml:1: "),  # some versions of PyYAML refuse it first
        ("seed: 1\ntrainer: {max_steps: 010}\n", "x.yaml:2: trainer.max_steps: expected an integer >= 1, found '010'"),
        ("1: x\n", "x.yaml:1: the key 1 is read as 1; put it in quotes"),
        ("data: {validation: {no: a}}\n", "x.yaml:1: the key no is read as False; put it in quotes"),
        ("? [a, b]\n: c\n", "x.yaml:1: the key ['a', 'b'] is read as ['a', 'b']; put it in quotes"),
        ("data:\n  <<: {seed: 1}\n", "x.yaml:2: data.<<: unknown key"),
        ("- a\n- b\n", "x.yaml:1: expected keys and values at the top of the file, found a list"),
        ("", "x.yaml:1: expected keys and values at the top of the file, found nothing"),
        ("model: transformer-360m\n", "x.yaml:1: model is a section, not a single value; to choose a file"),
        ("trainer:\n", "x.yaml:1: trainer is a section with keys; it cannot be null"),
        ("defaults: quickstart\n", "x.yaml:1: defaults: expected a list, found a single value"),
        ("defaults:\n  - quickstart\n  - [a]\n", "x.yaml:3: defaults: expected NAME or SECTION: NAME, found ['a']"),
        ("defaults:\n  - quickstrat\n", "x.yaml:2: unknown config 'quickstrat'; did you mean 'quickstart'?"),
        ("defaults:\n  - none.yaml\n", "x.yaml:2: none.yaml: file not found"),
        ("defaults:\n  - model: transformer-36m\n", "x.yaml:2: model: unknown choice 'transformer-36m'"),
        ("defaults:\n  - modle: transformer-360m\n", "x.yaml:2: unknown section 'modle'; did you mean 'model'?"),
        ("data:\n  kind: shards\n  path: ???\n", "x.yaml:3: data.path: expected text or null, found '???'"),
        ("schedule: {kind: [cosine]}\n", "schedule.kind: expected one of cosine, linear, wsd, found ['cosine']"),
        ("plugins:\n  - broken.py\n", "x.yaml:2: plugins: cannot import 'broken.py': no file "),
    ],
)
def test_file_error_names_the_line(text, message):
    found = compose_error([BASE, write("x.yaml", text)])
    assert message in found
    assert found.startswith("x.yaml:")


def test_unknown_and_unreadable_files_are_reported():
    assert compose_error(["quickstat"]) == "unknown config 'quickstat'; did you mean 'quickstart'?"
    assert compose_error(["queue"]) == "unknown config 'queue'; did you mean 'ablation/queue'?"
    assert compose_error(["no.yaml"]) == "no.yaml: file not found; correct the path"
    assert compose_error(["zzzz"]).startswith("unknown config 'zzzz'; `configs list` shows the names")
    Path("latin.yaml").write_bytes(b"name: \xff\n")
    assert compose_error(["latin.yaml"]).startswith("latin.yaml: cannot read the file: ")
    Path("control.yaml").write_bytes(b"# a\nname: \x01\n")
    assert compose_error(["control.yaml"]).startswith("control.yaml:2: not valid YAML: ")
    assert compose([BASE, write("no_ending", "seed: 9\n")]).seed == 9


def test_circular_defaults_are_listed():
    write("a.yaml", "defaults: [b.yaml]\n")
    write("b.yaml", "defaults: [c.yaml]\n")
    write("c.yaml", "defaults: [b.yaml]\n")
    assert compose_error(["a.yaml"]) == "b.yaml: circular defaults: b.yaml -> c.yaml -> b.yaml"
    write("self.yaml", "defaults: [self.yaml]\n")
    assert compose_error(["self.yaml"]) == "self.yaml: circular defaults: self.yaml -> self.yaml"


def test_error_in_a_group_file_names_that_file():
    write("memory.yaml", "# wide\nkind: stack\nnum_heads: 5\nprojection: shared_slices\n")
    found = compose_error([BASE, write("x.yaml", "defaults:\n  - model.memory: memory.yaml\n")])
    assert found.startswith(
        "memory.yaml:3: model.memory.num_heads: projection: shared_slices requires num_heads to divide hidden_size 192"
    )
    assert "(model.memory.projection: memory.yaml:4; model.hidden_size: " in found


def test_error_for_an_old_key_names_the_new_key():
    for old, new in RENAMED_KEYS.items():
        assert compose_error([BASE], f"{old}=1") == f"override {old}=1: {old}: renamed; use {new}"
    config = write("my.yaml", "trainer:\n  checkpoint_minutes: 5\n")
    message = "my.yaml:2: trainer.checkpoint_minutes: renamed; use trainer.checkpoint_interval_minutes"
    assert compose_error([BASE, config]) == message


def test_error_for_a_removed_key():
    assert compose_error([BASE], "beside.x=[seed=1]").endswith("beside: removed; run a sweep instead")
