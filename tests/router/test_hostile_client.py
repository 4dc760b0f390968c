"""While one client sends random messages to every method, another client must be served.

TEST_FUZZ_MESSAGES=20000 pytest tests/router/test_hostile_client.py sends more messages than the default of 1,000.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import string
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from starlette.applications import Starlette
from starlette.routing import Route

from midstream.client import AsyncClient
from midstream.rpc.channel import open_channel
from protos import kserve_pb2, openengine_pb2, service_pb2
from router.protocols.fields import TABLES
from tests.router.conftest import Cluster
from tests.router.test_stream_hoarders import first_tokens

NUM_MESSAGES = 1000  # messages per round; each round has its own service and seed
NUM_ROUNDS = -(-int(os.environ.get("TEST_FUZZ_MESSAGES", "1000")) // NUM_MESSAGES)
SEED = int(os.environ.get("TEST_FUZZ_SEED", "15"))
MAX_GROWTH_BYTES = 512 << 20
AT_ONCE = 16
UNEXPECTED = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)
INPUTS: tuple[dict[str, Any], ...] = (
    {},
    {"prompt": "hello"},
    {"input": "hello"},
    {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    {"query": "hello", "documents": ["a", "b"]},
)
# The top-level fields of each API.
NAMES = {path: sorted({name.split(".")[0] for name in table}) for path, table in TABLES.items()}
BATCH_NAMES = ("input_file_id", "endpoint", "completion_window", "metadata")
ALL_NAMES = sorted({*BATCH_NAMES, *(name for names in NAMES.values() for name in names)})
BOUNDARY = "x" * 20
INTEGERS = (0, 1, -1, 2, 7, 64, 1024, 1 << 16, (1 << 31) - 1, -(1 << 31), 1 << 31, (1 << 32) - 1, 1 << 62, -(1 << 62))
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("nan"), float("inf"), -float("inf"))
TEXTS = ("", "a", "smollm2", "ensemble", "\0", "🫠" * 50, "{", "[1]", "../../etc/passwd", "/", "a" * 5000, "{{ x }}")

_Field = FieldDescriptor
_RANGES = {
    _Field.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    _Field.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    _Field.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    _Field.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def value_of(field: FieldDescriptor, draw: random.Random, depth: int) -> Any:
    """Return a random value of a field's type, such as a limit of its range, or a message with such values."""
    kind = field.cpp_type
    if kind == _Field.CPPTYPE_MESSAGE:
        assert field.message_type is not None
        return fill(field.message_type, draw, depth + 1)
    if kind in _RANGES:
        low, high = _RANGES[kind]
        return min(max(draw.choice(INTEGERS), low), high)
    if kind in (_Field.CPPTYPE_FLOAT, _Field.CPPTYPE_DOUBLE):
        return draw.choice(FLOATS)
    if kind == _Field.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if kind == _Field.CPPTYPE_ENUM:
        assert field.enum_type is not None
        return draw.choice([item.number for item in field.enum_type.values])
    text = draw.choice(TEXTS)
    return text.encode() if field.type == _Field.TYPE_BYTES else text


def fill(descriptor: Descriptor, draw: random.Random, depth: int = 0) -> Message:
    """Return a message in which about half of the fields are set."""
    message: Message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw.random() < 0.5 or (depth > 4 and field.cpp_type == _Field.CPPTYPE_MESSAGE):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            values = [value_of(field, draw, depth) for _ in range(draw.choice((1, 1, 2, 3, 70)) if depth < 2 else 1)]
            getattr(message, field.name).extend(values)
        elif field.cpp_type == _Field.CPPTYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(value_of(field, draw, depth))
        else:
            setattr(message, field.name, value_of(field, draw, depth))
    return message


def rpc_methods() -> list[Any]:
    modules = (service_pb2, kserve_pb2, openengine_pb2)
    return [
        method
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return the message with some bytes changed, removed or duplicated."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        if changed:
            changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed[: draw.randint(0, len(changed))] if draw.random() < 0.5 else changed * 2)


async def call_rpc(channel: Any, draw: random.Random, methods: list[Any]) -> str:
    """Send a random message to a random method; return the final status of the call."""
    method = draw.choice(methods)
    data = fill(method.input_type, draw).SerializeToString()
    is_damaged = draw.random() < 0.2
    data = damaged(data, draw) if is_damaged else data
    name = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        call = channel.stream_stream(name)(iter([data] * draw.randint(1, 3)), timeout=0.3)
    elif method.server_streaming:
        call = channel.unary_stream(name)(data, timeout=0.3)
    else:
        call = channel.unary_unary(name)(data, timeout=0.3)
    with contextlib.suppress(grpc.aio.AioRpcError):
        if method.server_streaming:
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    code = await call.code()
    # gRPC itself responds with these statuses to invalid bytes.
    if is_damaged and code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        return "damaged"
    # Only the service's own internal errors count, since the client library also reports INTERNAL if a deadline ends
    # its call.
    is_defect = code in UNEXPECTED and "internal error" in (await call.details() or "")
    return f"{code.name} of {name}" if is_defect else code.name


def json_value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(9)
    if kind < 2 and depth < 3:
        return [json_value(draw, depth + 1) for _ in range(draw.randint(0, 4))]
    if kind == 2 and depth < 3:
        return {draw.choice(("role", "content", "type", "text")): json_value(draw, depth + 1) for _ in range(3)}
    return draw.choice((None, True, 0.5, draw.choice(INTEGERS), draw.choice(TEXTS), draw.choice(FLOATS[:6])))


def form(draw: random.Random) -> bytes:
    """Return an upload form with random values."""
    parts = [f'name="{name}"\r\n\r\n{draw.choice(TEXTS)}' for name in draw.sample(("purpose", "expires_after", "x"), 2)]
    parts.append(f'name="file"; filename="{draw.choice(("a", "../b"))}"\r\n\r\n{json.dumps(json_value(draw))}')
    body = "".join(f"--{BOUNDARY}\r\nContent-Disposition: form-data; {part}\r\n" for part in parts)
    return f"{body}--{BOUNDARY}--\r\n".encode()


async def call_http(port: int, draw: random.Random, method: str, pattern: str) -> str:
    """Send a random request to a route; return the status of the response, or `none`, and the path."""
    path = re.sub("{[^}]*}", lambda _: urllib.parse.quote(draw.choice((*TEXTS, "file-0", "resp_0")), safe=""), pattern)
    names = NAMES.get(pattern, ALL_NAMES)
    fields = {name: json_value(draw) for name in draw.sample(names, draw.randint(0, 8))} | draw.choice(INPUTS)
    is_form = pattern == "/v1/files" and draw.random() < 0.8
    body = form(draw) if is_form else json.dumps(fields).encode()
    if draw.random() < 0.2:
        body = damaged(body, draw)
    length = len(body) if draw.random() < 0.9 else draw.choice((0, len(body) + 5, 10**12))
    if draw.random() < 0.2:
        method = draw.choice(("GET", "PUT", "DELETE", "".join(draw.choices(string.ascii_uppercase, k=5))))
    kind = f"multipart/form-data; boundary={BOUNDARY}" if is_form else "application/json"
    lines = (f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "connection: close", f"content-type: {kind}")
    head = "\r\n".join((*lines, f"content-length: {length}", "", ""))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        with contextlib.suppress(TimeoutError, OSError):
            writer.write(head.encode() + body)
            async with asyncio.timeout(0.3):
                answer = await reader.read(200)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    status = answer.split()[1].decode() if len(answer.split()) > 1 else "none"
    return f"{status} {pattern}"


async def send_all(send: Callable[[], Any], count: int) -> Counter[str]:
    """Call `send` repeatedly, with several calls at a time; return how often each status occurred."""
    statuses, left = Counter[str](), iter(range(count))

    async def run() -> None:
        for _ in left:
            statuses[await send()] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(run())
    return statuses


def http_routes(pages: object) -> list[tuple[str, str]]:
    """Return the methods and paths of all HTTP APIs."""
    assert isinstance(pages, Starlette)
    routes = [route for route in pages.routes if isinstance(route, Route) and "static" not in route.path]
    return [(method, route.path) for route in routes for method in sorted(route.methods or ()) if method != "HEAD"]


@pytest.mark.parametrize("round_number", range(NUM_ROUNDS))
async def test_nothing_that_a_client_sends_harms_another(cluster: Cluster, round_number: int) -> None:
    part = await cluster.add_router(await cluster.add_detokenizer())
    assert part.http is not None
    port, draw, process = part.http.port, random.Random(SEED + round_number), psutil.Process()
    methods, routes = rpc_methods(), http_routes(part.pages)
    draw.shuffle(routes)
    in_turn = itertools.cycle(routes)
    async with AsyncClient(part.address) as probe, open_channel(part.address) as channel:
        alone = await first_tokens(cluster, probe, 20)
        before = process.memory_info().rss
        hostile = asyncio.gather(
            send_all(lambda: call_rpc(channel, draw, methods), NUM_MESSAGES // 2),
            send_all(lambda: call_http(port, draw, *next(in_turn)), NUM_MESSAGES - NUM_MESSAGES // 2),
        )
        beside = []
        while not hostile.done():
            beside += await own_first_token(cluster, probe)
        by_grpc, by_http = await hostile
        grown = process.memory_info().rss - before
        after = await first_tokens(cluster, probe, 5)
    assert not [status for status in by_grpc if " of " in status], by_grpc
    assert not [status for status in by_http if status.startswith("5") and status[:3] not in ("503", "504")], by_http
    assert {path for _, path in routes} == {status.partition(" ")[2] for status in by_http}
    num_answered = by_grpc.total() - by_grpc["DEADLINE_EXCEEDED"]  # on a slow machine, few calls meet their deadline
    assert by_grpc["INVALID_ARGUMENT"] > num_answered // 25
    assert grown < MAX_GROWTH_BYTES
    assert after
    # Clients and services share one event loop here, and `alone` was measured on an idle loop, so the limit is wide. A
    # tenth of the requests is allowed to take longer, because the machine may stall for seconds.
    assert sorted(beside)[len(beside) * 9 // 10] <= max(3 * max(alone), 10.0)


async def own_first_token(cluster: Cluster, client: AsyncClient) -> list[float]:
    """Return the seconds until the first token of a request that runs concurrently with all other load."""
    scheduler, name, began = cluster.scheduler, f"probe-{time.monotonic_ns()}", time.monotonic()
    stream = client.generate(token_ids=[1, 2, 3], request_id=name, timeout_s=60)
    first = asyncio.ensure_future(anext(stream))
    await scheduler.until(lambda: name in scheduler.requests)
    scheduler.emit(name, [5])
    await first
    elapsed = time.monotonic() - began
    scheduler.end(name)
    async for _ in stream:
        pass
    return [elapsed]
