"""Checks of the rules for imports, and that no external package replaces one of ours."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wheel import NOT_COPIED

ROOT = Path(__file__).parent.parent
SERVICES = frozenset({"router", "scheduler", "gpu_worker", "detokenizer"})
PACKAGES = SERVICES | {"midstream", "protos", "kernels"}

MAY_IMPORT = {
    "router": {"midstream", "protos"},
    "scheduler": {"midstream", "protos"},
    "detokenizer": {"midstream", "protos"},
    "gpu_worker": {"midstream", "protos", "kernels"},
    "midstream": {"protos"},
    "kernels": set[str](),
    "protos": set[str](),
}
# Weights from a file and bytes from a socket must never be executed.
EXECUTES_DATA = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
HEAVY = {"torch", "transformers", "accelerate", "safetensors", "triton"}


def source_files(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, package
    return files


@functools.cache
def nodes_of(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def imported_modules(file: Path) -> Iterator[str]:
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


@functools.cache
def imports_of(package: str) -> set[tuple[str, str]]:
    """Return (file, top-level package) for each import in `package`."""
    return {
        (str(file.relative_to(ROOT)), module.partition(".")[0])
        for file in source_files(package)
        for module in imported_modules(file)
    }


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_packages_import_only_what_they_may(package: str) -> None:
    ours = PACKAGES - {package} - MAY_IMPORT[package]
    assert [found for found in imports_of(package) if found[1] in ours] == []


@pytest.mark.parametrize("package", sorted(PACKAGES - {"gpu_worker", "kernels"}))
def test_only_workers_and_kernels_import_torch(package: str) -> None:
    assert [found for found in imports_of(package) if found[1] == "torch"] == []


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_nothing_that_executes_data_is_imported(package: str) -> None:
    assert [found for found in imports_of(package) if found[1] in EXECUTES_DATA] == []


def is_one_of(function: ast.expr, names: set[str]) -> bool:
    """Return whether a called expression is one of `names`, or an attribute of one of them."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}" in names
    return isinstance(function, ast.Name) and function.id in names


@pytest.mark.parametrize("package", sorted(PACKAGES - {"protos"}))
def test_nothing_that_executes_data_is_called(package: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in source_files(package)
        for node in nodes_of(file)
        if isinstance(node, ast.Call) and is_one_of(node.func, {"eval", "exec", "torch.load", "np.load", "numpy.load"})
    ]
    assert found == []


def test_the_package_kernels_is_ours() -> None:
    spec = importlib.util.find_spec("kernels")
    assert spec is not None
    assert spec.origin == str(ROOT / "kernels" / "__init__.py")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")


@pytest.mark.parametrize("extra", ["router", "scheduler", "detokenizer"])
def test_light_services_install_without_torch(extra: str) -> None:
    assert requirements_of(extra).isdisjoint(HEAVY)
    assert "torch" in requirements_of("worker")


def requirements_of(extra: str) -> set[str]:
    """Return the names of the requirements of `pip install midstream[extra]`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = project["dependencies"] + project["optional-dependencies"][extra]
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def import_circles() -> list[list[str]]:
    """Return the import cycles among our modules, whether imported at the top, in a function, or for types only."""
    files = {module_name(file): file for package in PACKAGES - {"protos"} for file in source_files(package)}
    imports: dict[str, set[str]] = {}
    for name, file in files.items():
        imports[name] = found = set[str]()
        for node in nodes_of(file):
            if isinstance(node, ast.Import):
                found |= {item.name for item in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                inner = {f"{node.module}.{item.name}" for item in node.names}
                found |= inner & files.keys() if inner <= files.keys() else inner & files.keys() | {node.module}
        found &= files.keys() - {name}

    def reaches(start: str) -> set[str]:
        seen, waiting = set[str](), [start]
        while waiting:
            new = imports[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reached = {name: reaches(name) for name in files}
    circles = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in files}
    return [list(circle) for circle in sorted(circles) if circle]


def test_no_modules_import_each_other() -> None:
    assert import_circles() == []


def test_imports_can_be_rewritten_for_an_installation() -> None:
    rewrite_imports = runpy.run_path(str(ROOT / "setup.py"))["rewrite_imports"]
    for folder in (*PACKAGES, "tests", "examples"):
        for file in source_files(folder):
            if not set(NOT_COPIED) & set(file.parts):
                rewrite_imports(file.read_text(encoding="utf-8"), file.name)
