"""Layers: which package may import which, how large files and functions get, and what does without torch."""

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent / "ogc"

LAYERS = (
    {"errors", "process"},
    {"given", "graph", "torch_state"},
    {"plan"},
    {"program"},
    {"operators"},
    {"parser", "solver", "runtime"},
    {"compiling", "looking", "planning", "rewrites", "sizing"},
    {"in_parts"},
    {"checking"},
    {"planned"},
    {"optimizing"},
    {"__main__"},
    {""},
)
"""From the ground up. A package imports from layers below its own alone; what is called ``""`` is ogc/__init__.py."""

OPTIONAL = {"compiling", "looking", "rewrites", "sizing"}
"""Packages that the others do without, and ask for by :func:`ogc.errors.optional`."""

FLAT_FILES, FILE_LINES, FUNCTION_LINES = 12, 600, 60


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(name: str) -> set[str]:
    """All that a file imports, at its top, in functions and for type checkers alike; ours as files."""
    found = set()
    is_folder = FILES[name].name == "__init__.py"
    for node in ast.walk(ast.parse(FILES[name].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = name.split(".")[: None if is_folder and node.level == 1 else (is_folder - node.level or None)]
            base = ".".join([*(around if node.level else []), *([node.module] if node.module else [])])
            found.update(f"{base}.{a.name}" if f"{base}.{a.name}" in FILES else base for a in node.names)
    return found


def package(name: str) -> str:
    return name.partition(".")[2].partition(".")[0]


def layer(name: str) -> int:
    (found,) = (n for n, packages in enumerate(LAYERS) if package(name) in packages)
    return found


def house() -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(FILES)
    graph.add_edges_from((name, other) for name in FILES for other in imported(name) if other in FILES)
    return graph


@pytest.mark.full
def test_packages_import_from_below():
    rising = [
        f"{a} imports {b}" for a, b in house().edges if package(a) != package(b) and layer(a) <= layer(b) and a != "ogc"
    ]
    assert not rising, "\n".join(rising)


def test_no_package_imports_an_optional_one():
    """But for the names that ``ogc/__init__.py`` has for type checkers."""
    found = [
        f"{a} imports {b}"
        for a, b in house().edges
        if package(b) in OPTIONAL and package(a) != package(b) and package(a)
    ]
    assert not found, "\n".join(found)


def test_files_import_in_no_circle():
    circles = [sorted(part) for part in nx.strongly_connected_components(house()) if len(part) > 1]
    assert not circles


def test_folders_are_small():
    for folder in {path.parent for path in FILES.values()}:
        assert len(list(folder.glob("*.py"))) <= FLAT_FILES, folder


def test_files_and_functions_are_short():
    long = [f"{path}: {n}" for path in FILES.values() if (n := len(path.read_text("utf-8").splitlines())) > FILE_LINES]
    for path in FILES.values():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and (n := lines_of(node)) > FUNCTION_LINES:
                long.append(f"{path}: {node.name} {n}")
    assert not long, "\n".join(long)


def lines_of(function: ast.FunctionDef) -> int:
    """Those of its body, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return function.end_lineno - body[0].lineno + 1 if body else 0


def test_one_file_names_the_front_ends():
    for folder in ("ogc.parser.recorder", "ogc.parser.doors"):
        inner = {b for b in house() if b.startswith(folder)} - {"ogc.parser.doors.scripted"}  # a kind of model
        assert {a for a, b in house().edges if b in inner and not a.startswith(folder)} == {"ogc.parser.faithful"}


TORCHLESS = """
import sys
sys.modules["torch"] = None  # an import of it fails
import ogc, ogc.plan, ogc.solver
reads = [(), *((t,) for t in range(7))]
operations = (ogc.Operation(str(t), reads=reads[t], writes=(t,), saves=(t,), forward_seconds=1.0) for t in range(8))
graph = ogc.Graph(tuple(operations), tuple(ogc.Value(str(v), 10) for v in range(8)))
plan = ogc.solve(graph)
assert plan.peak_bytes < plan.plain_peak_bytes, plan
print(plan, ogc.frontier(graph))
"""


def test_plans_are_found_without_torch():
    done = subprocess.run([sys.executable, "-c", TORCHLESS], capture_output=True, text=True, cwd=ROOT.parent)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("module", ["ogc", "ogc.plan", "ogc.solver"])
def test_torch_and_networkx_are_loaded_where_they_are_needed_alone(module):
    code = f"import sys, {module}; sys.exit(not {{'torch', 'networkx'}}.isdisjoint(sys.modules))"
    assert not subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent).returncode


@pytest.mark.full
def test_one_folder_records():
    trees = {name: ast.walk(ast.parse(path.read_text("utf-8"))) for name, path in FILES.items()}
    names = {name: {n.name for n in nodes if isinstance(n, ast.alias)} for name, nodes in trees.items()}
    assert {name for name, found in names.items() if {"recording", "RECORDING"} & found} == {"ogc.torch_state.dispatch"}


def private_names(node: ast.AST) -> list[str]:
    """What begins with one underscore in an import from torch, the way to an attribute, or a string."""
    if isinstance(node, ast.ImportFrom):
        names = [part for alias in node.names for part in f"{node.module}.{alias.name}".split(".")]
        return [name for name in names if name.startswith("_")] if (node.module or "").startswith("torch") else []
    if isinstance(node, ast.Import):
        names = [part for alias in node.names for part in alias.name.split(".") if alias.name.startswith("torch")]
    elif isinstance(node, ast.Attribute):
        is_operator = isinstance(node.value, ast.Name) and node.value.id == "aten"
        names = [] if is_operator or ast.unparse(node.value) in ("self", "cls", "sys") else [node.attr]
    else:
        names = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
    return [name for name in names if name.startswith("_") and not name.startswith("__")]


@pytest.mark.full
def test_private_names_of_torch_are_in_two_files():
    """An attribute that ogc defines is its own, unless those files have the name; strings are torch's if they have."""
    trees = {name: ast.parse(path.read_text("utf-8")) for name, path in FILES.items()}
    homes = trees.pop("ogc.torch_state.private"), trees.pop("ogc.torch_state.compilers")
    torchs = {found for home in homes for node in ast.walk(home) for found in private_names(node)}
    del trees["ogc.parser.recorder.operators"]  # whose strings are names of operators
    own = {n.name for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {
        n.attr
        for tree in trees.values()
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == "self"
    }
    strangers = [
        f"{file}:{node.lineno} {name}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        for name in private_names(node)
        if name in torchs or (not isinstance(node, ast.Constant) and name not in own)
    ]
    assert "_version" in torchs and not strangers, "\n".join(strangers)


def test_the_library_does_not_print():
    for path in ROOT.rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
        assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], path


def test_all_folders_are_in_the_package():
    """Else a fresh installation lacks some, or cannot be made."""
    text = (ROOT.parent / "pyproject.toml").read_text("utf-8")
    (listed,) = re.findall(r"^packages = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    folders = {".".join(path.parent.relative_to(ROOT.parent).parts) for path in ROOT.rglob("__init__.py")}
    assert set(re.findall(r'"(.*?)"', listed)) == folders


def test_docstrings_name_what_there_is():
    named = {}
    for path in FILES.values():
        for target in re.findall(r":(?:func|class|mod|meth|attr|data):`~?(ogc[\w.]*)`", path.read_text("utf-8")):
            named.setdefault(target, path)
    assert len(named) > 20
    lost = [f"{path}: {target}" for target, path in named.items() if not is_there(target)]
    assert not lost, "\n".join(lost)


def is_there(target: str) -> bool:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True
