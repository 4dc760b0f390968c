"""R3: the core imports nothing that could tell the time, draw a number, open a socket or start a thread."""

from __future__ import annotations

import ast
from pathlib import Path

CORE = Path(__file__).parents[2] / "scheduler" / "core.py"
ALLOWED = {
    "__future__", "abc", "array", "bisect", "collections", "collections.abc", "dataclasses", "enum", "functools",
    "hashlib", "heapq", "math", "operator", "typing",
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


def test_the_core_is_pure() -> None:
    waiting, seen = [CORE], set[Path]()
    while waiting:
        file = waiting.pop()
        seen.add(file)
        for module in imports(file):
            if module.startswith("scheduler."):
                other = CORE.parent / (module.removeprefix("scheduler.").replace(".", "/") + ".py")
                if other not in seen:
                    waiting.append(other)
            else:
                assert module in ALLOWED, f"{file.name} imports {module}"
    assert {"block_manager.py", "lifecycle.py", "queue.py", "results.py", "step_builder.py"} <= {f.name for f in seen}
