"""Errors in config files: one line that starts with the file and the line."""

import re
from pathlib import Path

import pytest
from config_files import BASE, compose_error, write

from stackexp.config.compose import compose

ALIAS_BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
TEXT_BOMB = "".join(f"    s{n}: ${{data.validation.s{n - 1}}}${{data.validation.s{n - 1}}}\n" for n in range(1, 60))
pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seed: 1\nmodel:\n  memory:\n    num_slotz: 3\n",
            "x.yaml:4: model.memory.num_slotz: unknown key; did you mean",
        ),
        (
            "model.memory.num_slots: 3\n",
            "x.yaml:1: model.memory.num_slots: unknown key; nest the parts of a dotted key",
        ),
        ("# c\n\ntrainer:\n  max_steps: many\n", "x.yaml:4: trainer.max_steps: expected an integer >= 1, found 'many'"),
        ("model: {num_layers: [1\n", "x.yaml:2: not valid YAML: "),
        ("seed: !!python/object:os.system {}\n", "x.yaml:1: not valid YAML: "),
        ("seed: 1\nname: a\nseed: 2\n", "x.yaml:3: duplicate key 'seed'"),
        ("model: &a\n  memory: *a\n", "x.yaml:1: not valid YAML: an anchor contains itself"),
        (ALIAS_BOMB, "x.yaml:1: over 20,000 values; remove aliases of aliases"),
        ("data: " + "{a: " * 900 + "1" + "}" * 900, "x.yaml:1: nested too deeply; use at most 100 levels"),
        ("data: " + "[" * 3000 + "]" * 3000, "x.yaml:1: "),  # some versions of PyYAML refuse it first
        ("1: x\n", "x.yaml:1: the key 1 is read as 1; put it in quotes"),
        ("data: {validation: {no: a}}\n", "x.yaml:1: the key no is read as False; put it in quotes"),
        ("? [a, b]\n: c\n", "x.yaml:1: the key ['a', 'b'] is read as ['a', 'b']; put it in quotes"),
        ("data:\n  <<: {seed: 1}\n", "x.yaml:2: data.<<: unknown key"),
        ("- a\n- b\n", "x.yaml:1: expected keys and values at the top of the file, found a list"),
        ("", "x.yaml:1: expected keys and values at the top of the file, found nothing"),
        (
            "model: transformer-360m\n",
            "x.yaml:1: model is a section, not a single value; to choose a file for it, write "
            "`- model: transformer-360m` under defaults:",
        ),
        ("trainer:\n", "x.yaml:1: trainer is a section with keys; it cannot be null"),
        ("defaults: quickstart\n", "x.yaml:1: defaults: expected a list, found a single value"),
        ("defaults:\n  - quickstart\n  - [a]\n", "x.yaml:3: defaults: expected NAME or SECTION: NAME, found ['a']"),
        ("defaults:\n  - quickstrat\n", "x.yaml:2: unknown config 'quickstrat'; did you mean 'quickstart'?"),
        ("defaults:\n  - none.yaml\n", "x.yaml:2: none.yaml: file not found"),
        ("defaults:\n  - model: transformer-36m\n", "x.yaml:2: model: unknown choice 'transformer-36m'"),
        ("defaults:\n  - modle: transformer-360m\n", "x.yaml:2: unknown section 'modle'; did you mean 'model'?"),
        (
            "data:\n  kind: shards\n  path: ???\n",
            "x.yaml:3: data.path: expected text or null, found '???'",
        ),
        (
            "schedule: {kind: [cosine]}\n",
            "x.yaml:1: schedule.kind: expected one of cosine, linear, wsd, found ['cosine']",
        ),
        ("plugins:\n  - broken.py\n", "x.yaml:2: plugins: cannot import 'broken.py': no file "),
    ],
)
def test_file_error_names_the_line(text, message):
    found = compose_error([BASE, write("x.yaml", text)])
    assert message in found
    assert found.startswith("x.yaml:")


def test_a_chosen_file_without_keys():
    error = compose_error([BASE], f"model.memory={write('empty.yaml', '{}')}")
    assert error.startswith("model.memory: no kind is set; set model.memory=NAME (see `configs list`)")


def test_an_interpolation_that_grows_exponentially_is_refused():
    write(
        "x.yaml", f"defaults: [quickstart]\ndata:\n  kind: shards\n  path: x\n  validation:\n    s0: text\n{TEXT_BOMB}"
    )
    message = r"x\.yaml:\d+: data\.validation\.s\d+: the interpolation expands to over 10,000 characters"
    assert re.fullmatch(message, compose_error(["x.yaml"]))


def test_a_chain_of_interpolations_names_the_cause():
    found = compose_error(["quickstart"], "seed=${schedule.warmup_steps}", "schedule.warmup_steps=${nothing.here}")
    cause = "override schedule.warmup_steps=${nothing.here}: unknown key in the interpolation ${nothing.here}"
    assert f"seed: ${{schedule.warmup_steps}} requires schedule.warmup_steps: {cause}" in found


def test_unknown_config_is_reported():
    assert compose_error(["quickstat"]) == "unknown config 'quickstat'; did you mean 'quickstart'?"
    assert compose_error(["queue"]) == "unknown config 'queue'; did you mean 'ablation/queue'?"
    assert compose_error(["no.yaml"]) == "no.yaml: file not found"
    assert compose_error(["zzzz"]).startswith("unknown config 'zzzz'; `configs list` shows the names")


def test_unreadable_file_is_reported():
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


def test_defaults_that_grow_exponentially_are_refused():
    for n in range(30):
        write(f"c{n}.yaml", f"defaults: [c{n + 1}.yaml, c{n + 1}.yaml]\n")
    write("c30.yaml", "seed: 1\n")
    assert compose_error(["c0.yaml"]).endswith("yaml: over 200 files in the defaults; remove repeated ones")


def test_error_in_a_group_file_names_that_file():
    write("memory.yaml", "# wide\nkind: stack\nnum_heads: 5\nprojection: shared_slices\n")
    found = compose_error([BASE, write("x.yaml", "defaults:\n  - model.memory: memory.yaml\n")])
    assert found.startswith(
        "memory.yaml:3: model.memory.num_heads: projection: shared_slices requires num_heads to divide hidden_size 192"
    )
    assert "(model.memory.projection: memory.yaml:4; model.hidden_size: " in found


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.kind=lstm", "data.document_mask=true"], "data.document_mask: not supported by model.kind: lstm; use"),
        (
            ["trainer.strategy=fsdp", "trainer.precision=64-true"],
            "trainer.precision: 64-true does not support strategy",
        ),
    ],
)
def test_options_that_do_not_go_together(overrides, message):
    assert message in compose_error(["quickstart"], *overrides)
