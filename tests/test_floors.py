"""The floors of the house: nothing imports upwards, and what must stay light imports nothing heavy."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import stackexp

ROOT = Path(stackexp.__file__).parent
FLOORS = [
    {"config", "runs", "files", "errors", "__init__"},
    {"stack"},
    {"models", "tasks", "data"},
    {"modules", "datamodules"},
    {"training", "evaluation", "planning", "reports", "sweeps", "benchmarking"},
    {"verbs"},
    {"cli"},
    {"__main__"},
]
NO_LIGHTNING = {"models", "data", "stack", "tasks"}
LIGHT = {"config", "cli", "errors", "runs"}  # may import these within functions
HEAVY = {"torch", "lightning", "streaming", "numpy"}
FILES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}


def part(name: str) -> str:
    """The part of the package that a file or a module belongs to: `stackexp.config.layers` -> config."""
    return (name.removesuffix(".py").replace("/", ".").removeprefix("stackexp.") + ".").split(".")[0]


def floor(name: str) -> int:
    return next(number for number, parts in enumerate(FLOORS) if part(name) in parts)


def imports(node: ast.AST, within_functions: bool = True) -> Iterator[str]:
    """The modules that a piece of code imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from (f"stackexp.{a.name}" for a in node.names) if node.module == "stackexp" else [node.module]
    elif within_functions or not isinstance(node, ast.FunctionDef):
        for child in ast.iter_child_nodes(node):
            yield from imports(child, within_functions)


@pytest.mark.parametrize("file", FILES)
def test_a_file_imports_only_what_its_floor_allows(file):
    module = ast.parse(FILES[file].read_text(encoding="utf-8"))
    found = list(imports(module))
    assert [name for name in found if name.startswith("stackexp.") and floor(name) > floor(file)] == []
    if part(file) in NO_LIGHTNING:
        assert "lightning" not in {name.split(".")[0] for name in found}
    if part(file) in LIGHT:
        assert not HEAVY & {name.split(".")[0] for name in imports(module, within_functions=False)}
