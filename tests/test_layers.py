"""Who may import whom: parser, solver and runtime meet only in the data types."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "ogc"


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(path.relative_to(ROOT.parent).with_suffix("").parts[: -node.level] if node.level else [])
            names.add(".".join([*base, *([node.module] if node.module else [])]))
    return names


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(
    ("folder", "strangers"),
    [
        ("parser", ("ogc.solver", "ogc.runtime", "ogc.optimize")),
        ("solver", ("ogc.parser", "ogc.runtime", "ogc.optimize", "ogc.program", "torch")),
        ("runtime", ("ogc.parser", "ogc.solver", "ogc.optimize")),
    ],
)
def test_folders_do_not_import_one_another(folder, strangers):
    for path in files(folder):
        for name in imported(path):
            assert not name.startswith(strangers), f"{path.name} imports {name}"


def test_what_the_solver_imports_is_free_of_torch():
    for name in ("graph.py", "plan.py", "schedule.py", "errors.py"):
        assert not any(module.startswith("torch") for module in imported(ROOT / name))


def test_one_folder_records():
    users = {p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py") if "DispatchKeyGuard(" in p.read_text("utf-8")}
    assert users == {"parser/recorder/dispatch.py"}


def test_the_library_does_not_print():
    for path in ROOT.rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
        assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], path


def test_all_folders_are_in_the_package():
    """Else a fresh installation lacks some, or cannot be made."""
    (listed,) = re.findall(r"^packages = \[(.*)\]$", (ROOT.parent / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    folders = {".".join(path.parent.relative_to(ROOT.parent).parts) for path in ROOT.rglob("__init__.py")}
    assert set(re.findall(r'"(.*?)"', listed)) == folders
