"""The registry: names, their config dataclasses and lazily imported classes."""

from dataclasses import dataclass, is_dataclass

import pytest

from stackexp.config import registry


@pytest.fixture(autouse=True)
def _restore_the_registry():
    before = dict(registry._entries)
    yield
    registry._entries.clear()
    registry._entries.update(before)


def test_kind_with_an_import_path_is_imported_when_built():
    @registry.register("memory", "fractions", builds="fractions:Fraction")
    @dataclass
    class Config:
        kind: str = "fractions"

    assert registry.get_entry("memory", "fractions").config is Config
    assert {"fractions", "stack", "stack_attention"} <= set(registry.list_kinds("memory"))
    assert registry.get_entry("memory", "fractions").load().__name__ == "Fraction"


def test_registered_class_receives_section_and_arguments():
    @dataclass
    class Config:
        kind: str = "echo"

    @registry.register("memory", "echo", config=Config)
    def echo(config, *args, **kwargs):
        return config, args, kwargs

    config = Config()
    assert registry.build("memory", config, 1, layer=2) == (config, (1,), {"layer": 2})


def test_register_reports_invalid_arguments():
    with pytest.raises(ValueError, match="give `builds` on a dataclass or `config` on what it builds"):
        registry.register("memory", "x")
    with pytest.raises(ValueError, match="Options must be a dataclass with the field `kind"):

        @registry.register("memory", "x", builds="a:b")
        class Options:
            kind: str = "x"

    with pytest.raises(ValueError, match="Other must be a dataclass with the field `kind"):

        @registry.register("memory", "x", builds="a:b")
        @dataclass
        class Other:
            kind: str = "y"

    with pytest.raises(ValueError, match="memory kind 'stack' is already registered by stackexp"):

        @registry.register("memory", "stack", builds="a:b")
        @dataclass
        class Stack:
            kind: str = "stack"

    with pytest.raises(KeyError):
        registry.get_entry("memory", "x")


@pytest.mark.parametrize(("group", "kind"), sorted(registry._entries))
def test_every_registered_kind_can_be_loaded(group, kind):
    entry = registry.get_entry(group, kind)
    assert is_dataclass(entry.config)
    assert entry.config().kind == kind
    assert callable(entry.load())
