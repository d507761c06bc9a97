"""Imports point down, and the public door is exactly what it says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import samestep

ROOT = Path(samestep.__file__).parent

# A module imports only from layers above it in this table, and from its own folder.
LAYERS: list[set[str]] = [
    {"errors", "events", "config", "registry"},
    {"topology", "numerics"},
    {"comm", "processes"},
    {"data", "launch"},
    {"sync"},
    {"precision", "optim", "checkpoint"},
    {"loop", "schedules"},
    {"tasks", "track", "callbacks"},
    {"verify", "audience"},
    {"trainer", "testing", "service"},
    {"cli", "integrations"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Edges that the levels would allow and the architecture forbids, and those within one level that it allows.
FORBIDDEN = {
    ("data", "comm"),
    ("data", "processes"),
    ("service", "loop"),
    ("optim", "sync"),
    ("optim", "comm"),
}
ALLOWED_SIDEWAYS = {
    ("config", "errors"),
    ("registry", "errors"),
    ("registry", "config"),
}
ONLY_LAYER_0 = {"track"}


def imported(tree: ast.AST) -> set[str]:
    """Return the samestep modules that a file imports anywhere, inside functions included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "samestep"}


def area(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_imports_point_down(path: Path) -> None:
    here = area(path)
    assert here in LEVEL, f"{here} is in no layer"
    for name in imported(ast.parse(path.read_text())):
        there = name.split(".")[1] if "." in name else ""
        assert there, f"{path}: import samestep's parts from their homes, not from the door"
        if there == here:
            continue
        assert there in LEVEL, f"{path} imports {name}"
        edge = (here, there)
        if here in ONLY_LAYER_0:
            assert LEVEL[there] == 0, f"{path} imports {name}"
        sideways = LEVEL[there] == LEVEL[here] and edge in ALLOWED_SIDEWAYS
        assert LEVEL[there] < LEVEL[here] or sideways, f"{path} imports {name}"
        assert edge not in FORBIDDEN, f"{path} imports {name}"


def test_no_circle_of_files() -> None:
    edges: dict[str, set[str]] = {}
    modules = {".".join(("samestep", *p.relative_to(ROOT).with_suffix("").parts)): p for p in FILES}
    for module, path in modules.items():
        found = imported(ast.parse(path.read_text()))
        edges[module] = {name for name in found if name in modules}
        edges[module] |= {n.rpartition(".")[0] for n in found if n.rpartition(".")[0] in modules}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for other in sorted(edges[module]):
                visit(other, (*above, module))
            done.add(module)

    for module in modules:
        visit(module, ())


def test_no_module_is_a_drawer_for_everything() -> None:
    assert not {p.stem for p in FILES} & {"utils", "util", "common", "helpers", "misc"}


def test_only_one_module_touches_the_environment() -> None:
    for path in FILES:
        if path != ROOT / "topology" / "environment.py":
            reads = [
                node
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
            ]
            assert not reads, f"{path}:{reads[0].lineno if reads else ''} reads the environment"


def test_the_public_names_are_what_the_list_says() -> None:
    assert len(set(samestep.__all__)) == len(samestep.__all__)  # ruff keeps them sorted
    for name in samestep.__all__:
        assert getattr(samestep, name) is not None
    tree = ast.parse((ROOT / "__init__.py").read_text())
    typed = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("samestep")
        for alias in node.names
    }
    assert typed == set(samestep.__all__)


def test_files_and_functions_are_short() -> None:
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 400, f"{path} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                # train() is one list of documented arguments and the loop.
                limit = 110 if (path.name, node.name) == ("trainer.py", "train") else 60
                assert length <= limit, f"{path}:{node.lineno} {node.name} has {length} lines"
