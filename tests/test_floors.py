"""The floors of docs/architecture.md: nothing imports upward, no import circles, light modules import nothing heavy."""

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import stackexp

ROOT = Path(stackexp.__file__).parent
BASE = {
    "config",
    "tasks",
    "runs",
    "run_result",
    "metric_tags",
    "files",
    "frame",
    "lazy",
    "startup",
    "tables",
    "terminal",
}
FLOORS = [
    BASE | {"errors", "__init__"},
    {"stack", "sequential"},
    {"models", "data"},
    {"modules", "datamodules"},
    {"training", "evaluation", "planning"},
    {"sweeps", "benchmarking"},
    {"reports"},
    {"inspection", "certification", "export"},
    {"verbs"},
    {"cli"},
    {"__main__"},
]
NO_LIGHTNING = {"models", "data", "stack", "tasks"}
LIGHT = BASE - {"tasks"} | {"cli", "verbs", "errors"}  # heavy imports only within functions
HEAVY = {"torch", "lightning", "streaming", "numpy", "pandas"}
FILES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}
MODULES = {
    f"stackexp.{name.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__"): FILES[name] for name in FILES
}


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def find_room(name: str) -> str:
    """Return the room of a file or module: `stackexp.config.layers` -> config."""
    return (name.removesuffix(".py").replace("/", ".").removeprefix("stackexp.") + ".").split(".")[0]


def find_floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if find_room(name) in rooms)


def find_imports(node: ast.AST, within_functions: bool = True) -> Iterator[str]:
    """Yield the modules that a piece of code imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from (f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in MODULES)
        if node.module != "stackexp":
            yield node.module
    elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    elif within_functions or not isinstance(node, ast.FunctionDef):
        for child in ast.iter_child_nodes(node):
            yield from find_imports(child, within_functions)


def test_files_import_only_from_their_floor_and_below():
    found = []
    for file, path in FILES.items():
        names = set(find_imports(parse(path)))
        found += [(file, n) for n in names if n.startswith("stackexp.") and find_floor(n) > find_floor(file)]
        roots = {name.split(".")[0] for name in names}
        found += [(file, "lightning")] if find_room(file) in NO_LIGHTNING and "lightning" in roots else []
        if find_room(file) in LIGHT:
            at_module_level = {name.split(".")[0] for name in find_imports(parse(path), within_functions=False)}
            found += [(file, name) for name in HEAVY & at_module_level]
    assert found == []


def test_no_circular_imports():
    graph = {}
    for name, path in MODULES.items():
        found = set(find_imports(parse(path), within_functions=False))
        parent = name.rpartition(".")[0]  # `from package import module` in a package's own __init__ is no circle
        graph[name] = {other for other in found if other in MODULES and other not in (name, parent)}
    circle: list[str] = []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle, f"import circle: {' -> '.join(circle)}"
