"""Config errors: one line with the origin, the key, the expected value and the closest valid name."""

import contextlib
from pathlib import Path

import pytest
from config_files import BASE, compose_error
from hypothesis import given, settings
from hypothesis import strategies as st

from stackexp.config.compose import compose
from stackexp.errors import ConfigError

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "override seed: expected KEY=VALUE"),
        ("quickstart", "override quickstart: expected KEY=VALUE; for a config write --config quickstart"),
        ("seed=", "override seed=: empty value; write null, or '\"\"' for empty text"),
        ("--seed", "override --seed: missing value; write --seed=VALUE"),
        ("=3", "override =3: invalid key ''; expected SECTION.KEY=VALUE"),
        ("seed=[1,", "override seed=[1,: not valid YAML: "),
        ("seed=abc", "override seed=abc: seed: expected an integer from 0 to 4294967295, found 'abc'"),
        ("trainer.max_steps=1e4", "trainer.max_steps: expected an integer >= 1, found 10000.0; write 10000"),
        ("trainer.accelerator=mps", "trainer.accelerator: expected one of auto, cpu, cuda, found 'mps'"),
        ("trainer.compile=2", "override trainer.compile=2: trainer.compile: expected true or false, found 2"),
        ("optimizer.lr=[1]", "optimizer.lr: expected a number > 0, found [1]"),
        ("optimizer.lr=0", "override optimizer.lr=0: optimizer.lr: expected a number > 0, found 0.0"),
        ("optimizer.lr=.nan", "optimizer.lr: expected a number > 0, found nan"),
        ("trainer.val_check_interval=0", "trainer.val_check_interval: expected an integer >= 1 or null, found 0"),
        (
            "model.memory.axis=dept",
            "override model.memory.axis=dept: model.memory.axis: expected one of depth, time, token_major, "
            "found 'dept'; did you mean 'depth'?",
        ),
        (
            "model.memory.num_slot=3",
            "override model.memory.num_slot=3: model.memory.num_slot: unknown key; "
            "did you mean 'model.memory.num_slots'?",
        ),
        ("num_slots=3", "override num_slots=3: num_slots: unknown key; did you mean 'model.memory.num_slots'?"),
        (
            "zzz=3",
            "zzz: unknown key; a config has data, evaluation, init, logging, model, name, optimizer, plugins, "
            "schedule, seed, trainer",
        ),
        (
            "model.memory=queu",
            "override model.memory=queu: model.memory: unknown choice 'queu' (choices: adapter, ",
        ),
        (
            "schedule=cosine",
            "unknown choice 'cosine' (choices: olmo-cosine, smollm-wsd, smollm2-wsd); to choose a kind",
        ),
        ("logging=loud", "logging: unknown choice 'loud' (this section has no choices)"),
        ("model=null", "override model=null: model is a section with keys; it cannot be null"),
        ("data.kind=shards", "data.path: no training data; set data.path=FOLDER"),
        ("data.path=x", "override data.path=x: data.path: unknown key; it exists for data.kind: shards"),
        ("model.memory.num_streams=2", "unknown key; it exists for model.memory.kind: hyper_connections, mhc"),
        ("plugins=[../x.py]", "plugins: cannot import '../x.py': no file ../x.py, and no module of that name; correct"),
        ("name=../x", "override name=../x: name: '../x' cannot name a folder"),
        (
            "data.global_batch_tokens=5000",
            "override data.global_batch_tokens=5000: data.global_batch_tokens: 5000 is not a multiple of "
            "trainer.devices * trainer.num_nodes * data.micro_batch_size * data.context_length = 2048; "
            "the nearest multiple is 4096",
        ),
        (
            "trainer.max_steps=20",
            "schedule.warmup_steps: 20 must be smaller than trainer.max_steps 20 "
            "(trainer.max_steps: override trainer.max_steps=20)",
        ),
        (
            "model.num_kv_heads=4",
            "override model.num_kv_heads=4: model.num_kv_heads: num_heads 6 is not a multiple of num_kv_heads 4",
        ),
        ("model.num_heads=64", "RoPE requires an even head size, but hidden_size / num_heads = 3"),
        (
            "model.memory.projection=none",
            "model.memory.head_dim: projection: none requires num_heads * head_dim = hidden_size, but num_heads * "
            "head_dim = 4 * 16 = 64 (model.memory.projection: override model.memory.projection=none; ",
        ),
        ("model.memory.feedback=true", "model.memory.feedback: requires axis: time"),
        (
            "model.memory.feedback_hidden_size=8",
            "model.memory.feedback_hidden_size: requires feedback: true and feedback_activation: tanh",
        ),
        ("model.memory.eval_num_slots=8", "model.memory.eval_num_slots: must not be smaller than num_slots 24"),
        (
            "model.memory.action_scale=slice",
            "model.memory.action_scale: slice requires action_input: hidden",
        ),
        (
            "model.vocab_size=100",
            "override model.vocab_size=100: model.vocab_size: 100 is smaller than data.vocab_size 4096",
        ),
        (
            "seed=${data.vocab_siz}",
            "seed: unknown key in the interpolation ${data.vocab_siz}; did you mean 'data.vocab_size'?",
        ),
        ("seed=${seed}", "override seed=${seed}: seed: circular interpolation ${seed}"),
        ("seed=${data.kind}", "seed: the interpolation ${data.kind} has the wrong type: "),
        (
            "seed=${div:5,2}",
            "override seed=${div:5,2}: seed: cannot resolve the interpolation ${div:5,2}: 5 is not divisible by 2",
        ),
        ("seed=${div:5,x}", "div requires two integers, found 5 and 'x'"),
        ("seed=${div:5,2", "override seed=${div:5,2: seed: malformed interpolation ${div:5,2: "),
        ("trainer.max_steps=???", "override trainer.max_steps=???: trainer.max_steps: expected an integer >= 1"),
        (f"name={'a' * 256}", f"override name={'a' * 256}: name: a part of it is longer than 200 characters"),
        ("model.hidden_size=1000000000000", "model.hidden_size: expected an integer from 1 to 1048576"),
        ("model.memory.action_noise=1e300", "model.memory.action_noise: expected a number of at most 1e+30"),
        (
            f"trainer.cross_entropy_chunk=1{'0' * 23}",
            "trainer.cross_entropy_chunk: expected a number of at most 9.22337e+18",
        ),
        ("plugins=[no_such]", "override plugins=[no_such]: plugins: cannot import 'no_such': no file "),
    ],
)
def test_invalid_override_is_reported(override, message):
    found = compose_error([BASE], override)
    assert message in found
    assert override in found or "no training data" in found


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.streams.a.path=x"], "data.path: give one source (data.path, data.remote) or data.streams, not both"),
        (["data.streams.a.pth=x"], "data.streams.a.pth: unknown key; did you mean 'data.streams.a.path'?"),
        (
            ["data.path=null", "data.streams.a.path=x", "data.streams.a.repeat=0"],
            "expected a number > 0 or null, found 0",
        ),
        (
            ["data.path=null", "data.streams.a.proportion=1"],
            "data.streams.a.path: a stream requires a path, a remote, or",
        ),
        (
            ["data.path=null", "data.streams.a={path: x, proportion: 1}", "data.streams.b.path=y"],
            "data.streams: give proportion to all streams or to none",
        ),
        (
            ["data.path=null", "data.streams.a={path: x, proportion: 1, repeat: 2}"],
            "data.streams.a.repeat: give proportion or repeat, not both",
        ),
        (
            ["model.positional=sinusoidal", "model.embedding_scale=2"],
            "model.embedding_scale: positional: sinusoidal scales by sqrt(hidden_size) already; use 1",
        ),
        (["data.cache_limit=3xb"], "data.cache_limit: expected a size such as 200gb, found '3xb'"),
        (["data.validation={a: {b: 1}}"], "data.validation.a: expected text, found a mapping"),
        (["data.validation=olm"], "choices: custom, olmo, olmo-49152, v2, v3); did you mean 'olmo'?"),
        (["data.document_mask=true", "model.memory.axis=time"], "data.document_mask: not supported by model.memory.ax"),
    ],
)
def test_invalid_data_options_are_reported(overrides, message):
    assert message in compose_error(["ablation/queue"], *overrides)


def test_circular_interpolations_are_reported():
    found = compose_error(
        [BASE], "seed=${data.num_workers}", "data.num_workers=${trainer.devices}", "trainer.devices=${seed}"
    )
    assert "circular interpolation ${" in found


def test_key_of_a_disabled_memory_reports_how_to_enable_it():
    found = compose_error([BASE], "model.memory=null", "model.memory.num_slots=3")
    assert found.startswith("override model.memory.num_slots=3: model.memory: no kind is set; set ")
    assert "model.memory=NAME" in found
    assert "model.memory.kind=KIND (" in found


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
