"""The core imports no module that reads the time, draws random numbers, opens sockets or starts threads."""

from __future__ import annotations

import ast
from pathlib import Path

CORE = Path(__file__).parents[2] / "scheduler" / "core"
# These modules outside of the core are allowed: routers compute the same hashes, and the same names, with them.
SHARED = [CORE.parents[1] / "midstream" / name for name in ("kind_names.py", "kv_hashes.py", "record.py")]
PURE = {
    "__future__", "abc", "array", "bisect", "collections", "collections.abc", "dataclasses", "enum", "functools",
    "hashlib", "heapq", "math", "midstream", "midstream.kind_names", "midstream.record", "operator", "typing",
}  # fmt: skip


def imports(file: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module or "")
    return modules


def test_the_core_imports_only_itself_and_pure_modules() -> None:
    files = [*sorted(CORE.rglob("*.py")), *SHARED]
    others = {
        f"{file.name} imports {module}"
        for file in files
        for module in imports(file)
        if module not in PURE and not module.startswith("scheduler.core.")
    }
    assert others == set()
