"""The registry, and plugins: files and modules that register new kinds."""

from dataclasses import is_dataclass
from pathlib import Path

import pytest
from config_files import BASE, compose_error, write

from stackexp.cli import main
from stackexp.config import registry
from stackexp.config.compose import compose, load_config, to_yaml
from stackexp.datamodules.formal_language import LengthSet
from stackexp.tasks import TASKS

PLUGIN = """
from dataclasses import dataclass
from stackexp.config.registry import register
from stackexp.config.fields import option

@register("memory", "{kind}", builds="nowhere:Nothing")
@dataclass
class Config:
    kind: str = "{kind}"
    size: int = option(3, min=1)

    def find_errors(self, model):
        if self.size > model.hidden_size:
            yield "size", f"larger than hidden_size {{model.hidden_size}}"
"""
pytestmark = pytest.mark.usefixtures("empty_folder", "restored_registry")


def test_plugin_next_to_the_config_adds_a_kind(monkeypatch, tmp_path):
    write("sub/ring.py", PLUGIN.format(kind="ring"))
    path = write("sub/x.yaml", "plugins: [ring.py]\nmodel: {memory: {kind: ring, size: 4}}\n")
    config = compose([BASE, path])
    assert (config.model.memory.kind, config.model.memory.size) == ("ring", 4)
    assert config.plugins == [str(tmp_path / "sub" / "ring.py")]
    Path("config.yaml").write_text(to_yaml(config))
    monkeypatch.chdir("/")
    assert load_config(tmp_path / "config.yaml", ["model.memory.size=5"]).model.memory.size == 5
    monkeypatch.chdir(tmp_path)
    found = compose_error([BASE, path], "model.memory.size=500")
    assert found.startswith("override model.memory.size=500: model.memory.size: larger than hidden_size 192 ")
    assert "size: expected an integer >= 1" in compose_error([BASE, path], "model.memory.size=0")


CLASS_PLUGIN = """
from dataclasses import dataclass
from stackexp.config.registry import register

@dataclass
class Config:
    kind: str = "recurrent"

@register("memory", "recurrent", config=Config)
class Recurrent:
    axis = "time"
"""


def test_checks_use_the_axis_of_a_plugin_class():
    write("recurrent.py", CLASS_PLUGIN)
    path = write("x.yaml", "plugins: [recurrent.py]\nmodel: {memory: {kind: recurrent}}\n")
    assert compose([BASE, path]).model.memory_axis == "time"
    error = compose_error([BASE, path], "data.document_mask=true")
    assert "data.document_mask: not supported by model.memory.axis: time; use false" in error
    error = compose_error([BASE, path], "trainer.recompute=selective")
    assert "trainer.recompute: selective is only supported by decoders with memories of axis: depth; use all" in error


def test_plugins_of_all_layers_are_merged(monkeypatch):
    for kind in ("one", "two"):
        write(f"{kind}.py", PLUGIN.format(kind=kind))
    write("lib/three_plugin.py", PLUGIN.format(kind="three"))
    monkeypatch.syspath_prepend("lib")
    path = write("x.yaml", "plugins: [one]\n")
    config = compose([BASE, path], ["plugins=[two.py, three_plugin]", "model.memory.kind=three"])
    assert [Path(plugin).name for plugin in config.plugins] == ["one.py", "two.py", "three_plugin"]
    assert config.model.memory.kind == "three"
    assert {"one", "two", "three"} <= set(registry.list_kinds("memory"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("\n1/0\n", "cannot import 'bad.py': line 2: ZeroDivisionError: division by zero"),
        ("def f():\n    len(3)\nf()\n", "cannot import 'bad.py': line 2: TypeError: object of type 'int' has no len()"),
        ("def f(:\n", "cannot import 'bad.py': SyntaxError: "),
        ("import no_such_thing\n", "cannot import 'bad.py': line 1: ModuleNotFoundError: No module named"),
        (PLUGIN.format(kind="stack"), "ValueError: memory kind 'stack' is already registered by"),
        (PLUGIN.format(kind="x").replace("@dataclass", ""), "ValueError: Config must be a dataclass with the field"),
    ],
)
def test_broken_plugin_is_a_one_line_error(code, message):
    write("bad.py", code)
    assert message in compose_error([BASE, write("x.yaml", "seed: 1\nplugins:\n  - bad.py\n")])


@pytest.mark.parametrize(("imported", "order"), [("mine_a", ["mine_a", "user_a"]), ("mine_b", ["user_b", "mine_b"])])
def test_a_plugin_may_import_another(monkeypatch, tmp_path, imported, order):
    monkeypatch.syspath_prepend(str(tmp_path))
    (user,) = set(order) - {imported}
    write(f"{imported}.py", PLUGIN.format(kind=imported))
    write(f"{user}.py", f"from {imported} import Config as Imported\n" + PLUGIN.format(kind=user))
    listed = ", ".join(f"{name}.py" for name in order)
    config = compose([BASE, write("x.yaml", f"plugins: [{listed}]\nmodel: {{memory: {{kind: {user}}}}}\n")])
    assert config.model.memory.kind == user
    assert imported in registry.list_kinds("memory")


def test_another_class_for_a_kind_of_ours_is_refused():
    code = "from stackexp.config.memory import StackMemoryConfig\nfrom stackexp.config.registry import register\n"
    code += '@register("memory", "stack", config=StackMemoryConfig)\nclass Mine: ...\n'
    write("mine.py", code)
    error = compose_error([BASE, write("x.yaml", "seed: 1\nplugins:\n  - mine.py\n")])
    assert "memory kind 'stack' is already registered by stackexp." in error
    assert "choose another kind" in error


def test_a_folder_without_python_files_is_no_plugin(monkeypatch):
    Path("notes").mkdir()
    monkeypatch.syspath_prepend(".")
    message = compose_error([BASE], "plugins=[notes]")
    assert "cannot import 'notes': ImportError: a folder without Python files registers nothing" in message


TASK_PLUGIN = """
from stackexp.tasks import task

@task("letters", symbols="abc", answer_symbols="xy", max_length=9, validation_max_length=12, eval_max_length=50)
def count_letters(rng, batch_size, length):
    '''Return the parity of the letters a.'''
    strings = rng.integers(0, 3, (batch_size, length))
    return strings, (strings == 0).sum(1, keepdims=True) % 2
"""


def test_a_task_from_outside_has_the_rights_of_ours(monkeypatch):
    monkeypatch.setattr("stackexp.tasks.definition.TASKS", TASKS)
    path = write("x.yaml", f"defaults: [formal/transformer]\nplugins: [{write('letters.py', TASK_PLUGIN)}]\n")
    config = compose([path], ["data.task=count_letters"])
    assert (config.model.vocab_size, config.model.output_vocab_size, config.data.context_length) == (4, 2, 10)
    batch = LengthSet(TASKS["count_letters"], "test", length=50, sequences=8).sample()
    assert (batch.inputs.shape, batch.targets.shape) == ((8, 50), (8, 1))
    assert "did you mean 'count_letters'?" in compose_error([path], "data.task=count_leters")
    assert (config.data.max_length, config.data.validation_max_length, config.data.eval_max_length) == (9, 12, 50)
    assert compose([path], ["data.task=count_letters", "data.max_length=7"]).data.context_length == 8
    del TASKS["count_letters"]


def test_a_task_with_the_name_of_ours_is_refused():
    write("ours.py", TASK_PLUGIN.replace("count_letters", "parity_check"))
    error = compose_error([write("x.yaml", "defaults: [formal/transformer]\nplugins: [ours.py]\n")])
    assert (
        "task 'parity_check' is already registered by stackexp.tasks.regular.parity_check; choose another name" in error
    )
    assert TASKS["parity_check"].symbols == "ab"


def test_explain_includes_the_options_of_a_plugin(invoke):
    path = write("x.yaml", f"plugins: [{write('ring.py', PLUGIN.format(kind='ring'))}]\n")
    printed = invoke("configs explain model.memory.size --config", BASE, "--config", path)
    assert "model.memory.size (kind ring)" in printed


NESTED = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import Any
from stackexp.config.registry import register
from stackexp.config.fields import option

@dataclass
class Decay:
    rate: float = option(0.5, above=0)

@dataclass
class Config:
    kind: str = "nested"
    decay: Decay = field(default_factory=Decay)
    sizes: list[int] = option([1, 2], min=1)
    extra: Any = None
    maybe: int | None = None

@register("memory", "nested", config=Config)
class Nested:
    def __init__(self, config, **kwargs):
        self.config = config
"""


def test_plugin_options_can_be_nested():
    base = [BASE, write("x.yaml", f"plugins: [{write('nested.py', NESTED)}]\nmodel: {{memory: {{kind: nested}}}}\n")]
    config = compose(base, ["model.memory.decay.rate=0.1", "model.memory.sizes=[3]", "model.memory.extra={a: [1]}"])
    memory = registry.build("memory", config.model.memory, layer=1).config
    assert (memory.decay.rate, memory.sizes, memory.extra, memory.maybe) == (0.1, [3], {"a": [1]}, None)
    Path("config.yaml").write_text(to_yaml(config))
    assert load_config("config.yaml") == config
    for override, message in {
        "sizes=[3, 0]": "sizes: expected a list of integers >= 1, found [3, 0]",
        "decay.rate=0": "decay.rate: expected a number > 0, found 0.0",
        "decay.rat=0": "did you mean 'model.memory.decay.rate'?",
        "sizes=[x]": "sizes: expected a list",
        "decay=3": "decay: expected the keys rate",
        "maybe=x": "maybe: expected an integer or null",
    }.items():
        assert message in compose_error(base, f"model.memory.{override}")


def test_unsupported_option_types_are_reported():
    write("bad.py", NESTED.replace("maybe: int | None = None", "maybe: bytearray = field(default_factory=bytearray)"))
    write("x.yaml", "plugins: [bad]\nmodel: {memory: {kind: nested}}\n")
    assert compose_error([BASE, "x.yaml"]).startswith("x.yaml:2: model.memory.kind: Config: ")


@pytest.fixture
def marker(tmp_path) -> Path:
    """A file that exists once the plugin `foreign/evil.py` has run; the working directory is `project`."""
    write("foreign/evil.py", f"open({str(tmp_path / 'code-was-run')!r}, 'w').close()\n")
    write("foreign/config.yaml", "plugins: [evil.py]\n")
    write("project/pyproject.toml", "")
    write("project/sub/inside.py", PLUGIN.format(kind="inside"))
    return tmp_path / "code-was-run"


def test_plugin_of_a_foreign_config_does_not_run(marker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "project" / "sub")
    message = compose_error([BASE, str(tmp_path / "foreign" / "config.yaml")])
    assert f"plugins: {tmp_path}/foreign/evil.py is outside the project {tmp_path}/project and would be exec" in message
    assert message.endswith("add --trust-plugins")
    assert not marker.exists()


def test_foreign_plugin_runs_where_the_user_trusts_or_names_it(marker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "project" / "sub")
    monkeypatch.setenv("STACKEXP_TRUST_PLUGINS", "")  # restored after the test
    assert main(["configs", "show", str(tmp_path / "foreign" / "config.yaml"), "--trust-plugins"]) == 2
    assert marker.exists(), "the plugin runs; the config itself is not complete"
    monkeypatch.setenv("STACKEXP_TRUST_PLUGINS", "")
    (tmp_path / "named.py").write_text(PLUGIN.format(kind="named"))
    compose([BASE], [f"plugins=[{tmp_path}/named.py]"])
    path = write("x.yaml", f"plugins: [{tmp_path}/project/sub/inside.py]\nmodel: {{memory: {{kind: inside}}}}\n")
    assert compose([BASE, path]).model.memory.kind == "inside", "all of the project is trusted"


@pytest.mark.parametrize("verb", ["configs show", "plan", "fit", "validate", "generate"])
def test_no_verb_runs_a_foreign_plugin(marker, tmp_path, monkeypatch, verb):
    write("foreign/checkpoints/00000004/state.pt", "")
    monkeypatch.chdir(tmp_path / "project")
    foreign = str(tmp_path / "foreign")
    words = {"configs show": [f"{foreign}/config.yaml"], "plan": ["--config", f"{foreign}/config.yaml"]}
    assert main([*verb.split(), *words.get(verb, ["--run", foreign])]) == 2
    assert not marker.exists()


@pytest.mark.parametrize(
    "part", ['overrides: ["plugins=[{}]"]', "list: [{{plugins: [{}]}}]", "grid: {{plugins: [[{}]]}}"]
)
def test_plugin_of_a_foreign_sweep_does_not_run(marker, tmp_path, monkeypatch, invoke, part):
    path = write("foreign/sweep.yaml", f"config: quickstart\n{part.format(f'{tmp_path}/foreign/evil.py')}\n")
    monkeypatch.chdir(tmp_path / "project")
    for verb in ("run", "status"):
        assert "/foreign/evil.py is outside the project" in invoke("sweep", verb, tmp_path / path, expect=2)
    assert not marker.exists()


@pytest.mark.parametrize(("group", "kind"), sorted(registry._entries))
def test_every_registered_kind_can_be_loaded(group, kind):
    entry = registry.get_entry(group, kind)
    assert is_dataclass(entry.config)
    assert entry.config().kind == kind
    assert callable(entry.load())
