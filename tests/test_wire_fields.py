"""Every field of our protos is written by one component and read by another, so no field is unused.

Clients write the requests of the public API and read its responses.

The scan works by names. A field is written where a message's constructor receives it as a keyword, where it is
assigned, or where a method that changes it is called; it is read where an attribute of its name is used, or where its
name appears in HasField, getattr, a comparison or a table. The scan includes only files that import the generated
module of the proto or of another proto that imports it. The scan can miss a field that shares its name with another;
everything it reports is a real finding.
"""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from protos import service_pb2

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("detokenizer", "gpu_worker", "midstream", "router", "scheduler")
# Third-party protocols, some of whose fields are rejected here.
FOREIGN = {"kserve", "openengine"}
# This proto records the scheduler's own types, which tests/scheduler/test_recording.py compares after a round trip.
MIRRORS = {"recording"}

# Uses that the scan cannot detect: (message, field), or the message for all of its fields.
ALLOWED: dict[tuple[str, str] | str, str] = {
    "FramesOffer": "one module of midstream/ both writes and reads it",
    ("SchedulerMessage", "heartbeat_ack"): "a worker only checks that a message arrived",
    ("EarlierKind", "ends"): "the scheduler writes it to the journal for itself",
    "LedgerEntry": "the router shows all of its fields as JSON",
    "LedgerPage": "the scheduler stores it for itself",
    "RouterStatus": "the scheduler passes it unchanged to the other routers",
    "ClientUsage": "a part of RouterStatus",
    "UsageInterval": "a part of RouterStatus",
    **dict.fromkeys(
        ("CountsSinceStart", "JournalAdapter", "JournalFinish", "LoraInfo", "Register"),
        "a dataclass with the same fields is copied to or from it by their names",
    ),
}

_MUTATORS = {"CopyFrom", "MergeFrom", "SetInParent", "add", "append", "extend", "insert", "update", "get_or_create"}
_BY_NAME = {"HasField", "ClearField", "getattr", "setattr"}


def protos() -> dict[str, list[Descriptor]]:
    """Return all messages of each of our protos."""
    stems = sorted(path.stem for path in (ROOT / "protos").glob("*.proto") if path.stem not in FOREIGN | MIRRORS)
    modules = {stem: importlib.import_module(f"protos.{stem}_pb2") for stem in stems}
    return {
        stem: [message for top in module.DESCRIPTOR.message_types_by_name.values() for message in _with_nested(top)]
        for stem, module in modules.items()
    }


def _with_nested(message: Descriptor) -> Iterator[Descriptor]:
    yield message
    for nested in message.nested_types:
        if not nested.GetOptions().map_entry:
            yield from _with_nested(nested)


class Uses:
    """The fields that one file uses, by name."""

    def __init__(self, part: str, tree: ast.AST) -> None:
        self.part = part
        self.constructed: dict[str, set[str]] = defaultdict(set)
        self.written: set[str] = set()
        self.read: set[str] = set()
        self.taken: set[str] = set()
        self.stems: set[str] = set()
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "protos":
                self.stems |= {alias.name.partition("_pb2")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("protos."):
                self.stems.add((node.module or "")[len("protos.") :].partition("_pb2")[0])
            elif isinstance(node, ast.Call):
                callee = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                self.constructed[callee] |= {keyword.arg for keyword in node.keywords if keyword.arg}
            elif isinstance(node, ast.Attribute):
                self._attribute(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._string(node, node.value)

    def _attribute(self, node: ast.Attribute) -> None:
        parent = self._parents[node]
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return
        if isinstance(node.ctx, ast.Store):
            self.written.add(node.attr)
        elif isinstance(parent, ast.Call) and parent.func is node:
            return
        elif (isinstance(parent, ast.Attribute) and parent.attr in _MUTATORS) or (
            isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.ctx, ast.Store)
        ):
            self.written.add(node.attr)
        else:
            self.read.add(node.attr)
            self.taken.add(node.attr)

    def _string(self, node: ast.Constant, value: str) -> None:
        parent = self._parents[node]
        if isinstance(parent, ast.Call):
            callee = parent.func.attr if isinstance(parent.func, ast.Attribute) else getattr(parent.func, "id", "")
            if callee not in _BY_NAME:
                return
        if isinstance(parent, ast.Dict) and isinstance(self._parents[parent], ast.keyword):  # part of a log line
            return
        self.read.add(value)
        if isinstance(parent, ast.Tuple | ast.List | ast.Set | ast.Dict):
            self.written.add(value)


@pytest.fixture(scope="module")
def uses() -> list[Uses]:
    files = [(part, path) for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    return [
        Uses(part, ast.parse(path.read_text(encoding="utf-8")))
        for part, path in files
        if path.name != "recording_codec.py"
    ]


def _writers(field: FieldDescriptor, files: list[Uses]) -> set[str]:
    assert field.containing_type is not None
    constructors = {field.containing_type.name, "add"}
    return {
        file.part
        for file in files
        if field.name in file.written
        or any(field.name in file.constructed[name] for name in constructors)
        # A message field may be modified after it is read.
        or (field.message_type is not None and field.name in file.taken)
    }


def _public(end: str) -> set[str]:
    """Return the names of all messages in the requests ("input_type") or responses ("output_type") of the public
    service.
    """
    found: set[str] = set()
    left = [getattr(method, end) for method in service_pb2.DESCRIPTOR.services_by_name["Midstream"].methods]
    while left:
        message = left.pop()
        if message.name not in found:
            found.add(message.name)
            left += [field.message_type for field in message.fields if field.message_type is not None]
    return found


REQUESTS, RESPONSES = _public("input_type"), _public("output_type")


def _is_used(message: str, writers: set[str], readers: set[str], parts: set[str]) -> bool:
    if message in REQUESTS | RESPONSES:
        return bool(readers or message not in REQUESTS) and bool(writers or message not in RESPONSES)
    return bool(writers and readers) and (len(parts) == 1 or len(writers | readers) > 1)


@pytest.mark.parametrize("stem", protos())
def test_every_field_is_written_and_read(stem: str, uses: list[Uses]) -> None:
    modules = {name: importlib.import_module(f"protos.{name}_pb2").DESCRIPTOR for name in protos()}
    dependents = {name for name, module in modules.items() if modules[stem] in module.dependencies}
    files = [file for file in uses if file.stems & {stem, *dependents}]
    parts = {file.part for file in files}
    unused = []
    for message in protos()[stem]:
        for field in message.fields:
            writers, readers = _writers(field, files), {file.part for file in files if field.name in file.read}
            is_allowed = {message.name, (message.name, field.name)} & ALLOWED.keys()
            if not is_allowed and not _is_used(message.name, writers, readers, parts):
                unused.append(f"{message.name}.{field.name}: written by {writers or None}, read by {readers or None}")
    assert not unused, "\n".join(unused)
