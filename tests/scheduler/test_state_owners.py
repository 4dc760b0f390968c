"""The core's state objects are changed only by methods of their own modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SCHEDULER = Path(__file__).parents[2] / "scheduler"
# Maps each module to its state classes, and to the names by which other modules refer to their instances.
OWNERS = {
    "core/request.py": (
        {"Sequence", "Request", "RequestTimes", "Counters", "BeamLanes"},
        {"sequence", "request", "times", "counters", "beams"},
    ),
    "core/worker_group.py": ({"WorkerGroup"}, {"group"}),
    "core/prefix_cache.py": ({"PrefixCache"}, {"prefix_cache", "cache"}),
    "core/block_manager.py": ({"BlockManager"}, {"blocks"}),
    "core/block_tables.py": ({"BlockTables"}, {"tables"}),
}
# Plain records, such as plans and totals, also have attributes with these names.
SHARED_NAMES = {
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_preemptions",
    "num_recoveries",
    "num_rows",
    "num_handovers",
    "num_kind_changes",
    "num_steps",
    "num_unproved_tokens",
}


def attributes_of(module: str, classes: set[str]) -> set[str]:
    """Return the attribute names that the classes declare or assign in their methods."""
    tree = ast.parse((SCHEDULER / module).read_text(encoding="utf-8"))
    found = set[str]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or node.name not in classes:
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                if ast.unparse(inner.value) == "self":
                    found.add(inner.attr)
            elif isinstance(inner, ast.AnnAssign) and inner in node.body:
                found.add(ast.unparse(inner.target))
    return found


def writes(source: str) -> Iterator[tuple[str, str, int]]:
    """Yield the object, attribute and line of each assignment to an attribute of anything other than `self`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            target = ast.unparse(node.value)
            if target != "self":
                yield target, node.attr, node.lineno


def foreign_writes(source: str, module: str) -> list[str]:
    """Return the assignments in this module to attributes of state classes that belong to another module."""
    found = []
    for owner, (classes, names) in OWNERS.items():
        if owner == module:
            continue
        attributes = attributes_of(owner, classes)
        for target, attribute, line in writes(source):
            last = target.rpartition(".")[2]
            if attribute in attributes and (last in names or attribute not in SHARED_NAMES):
                found.append(f"{module}:{line} {target}.{attribute}")
    return found


@pytest.mark.parametrize(
    "module", sorted(file.relative_to(SCHEDULER).as_posix() for file in SCHEDULER.glob("core/*.py"))
)
def test_state_changes_through_its_own_methods(module: str) -> None:
    assert foreign_writes((SCHEDULER / module).read_text(encoding="utf-8"), module) == []


def test_a_write_from_another_module_is_found() -> None:
    source = (
        "for lane in beams.spare:\n    lane.num_reserved = 1\ngroup.last_generation = None\nplan.num_draft_tokens = 1\n"
    )
    assert foreign_writes(source, "core/core.py") == [
        "core/core.py:2 lane.num_reserved",
        "core/core.py:3 group.last_generation",
    ]
