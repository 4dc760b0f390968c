"""Invalid requests, and invalid data on the worker port, are rejected or dropped and do not affect other clients."""

from __future__ import annotations

import asyncio
import math
import pickle
import random
import socket
import struct
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
import zmq
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from midstream.errors import InvalidArgumentError
from midstream.rpc.errors import error_from_rpc
from midstream.rpc.serving import MAX_METADATA_BYTES
from protos import generation_pb2 as pb
from protos import loads_pb2, worker_pb2
from router.protocols.http_server import HttpPort
from tests.faults.limited_service import LimitedService, read
from tests.router.test_request_checks import BAD

# Additional invalid requests; tests/router/test_request_checks.py tests all fields and their limits.
OVER_ALL_BOUNDS: list[tuple[str, pb.GenerateRequest]] = [
    ("prompt", pb.GenerateRequest(prompt="word " * 600_000)),
    ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds(values=[5] * 9000))),
    ("stopping.stop_words", pb.GenerateRequest(stopping=pb.StoppingConfig(stop_words=["stop"] * 100_000))),
    ("sampling.num_return_sequences", pb.GenerateRequest(sampling=pb.SamplingConfig(num_return_sequences=2**31))),
    ("sampling.temperature", pb.GenerateRequest(sampling=pb.SamplingConfig(temperature=math.nan))),
    ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds(values=[2**32 - 1]))),
    ("prompt", pb.GenerateRequest(prompt="")),
    ("token_ids", pb.GenerateRequest(token_ids=pb.TokenIds())),
    ("chat.messages", pb.GenerateRequest(chat=pb.ChatInput())),
    ("input", pb.GenerateRequest()),
    ("kv_retention.token_ranges", pb.GenerateRequest(kv_retention=pb.KvRetentionConfig(token_ranges=[{}] * 10_000))),  # type: ignore[list-item]
    ("max_tokens", pb.GenerateRequest(max_tokens=0)),
]


async def test_requests_out_of_bounds_are_refused_by_name_before_scheduling(limited: LimitedService) -> None:
    async with limited.parts.stub() as stub:
        before = await asyncio.to_thread(limited.metric, "prompt_tokens_total")
        for field, bad in [*OVER_ALL_BOUNDS, *BAD]:
            request = pb.GenerateRequest(prompt="fine")
            request.MergeFrom(bad)
            if field in ("input", "prompt"):
                request = bad
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in stub.Generate(request, timeout=240):
                    pass
            error = error_from_rpc(raised.value)
            assert isinstance(error, InvalidArgumentError), (field, error)
            assert error.field == field
            assert len(error.message) < 300
        assert await asyncio.to_thread(limited.metric, "prompt_tokens_total") == before
        assert await asyncio.to_thread(limited.metric, "num_requests_waiting") == 0


async def test_messages_and_metadata_beyond_their_limits_are_refused(limited: LimitedService) -> None:
    async with limited.parts.stub() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stub.Generate(pb.GenerateRequest(prompt="x" * (5 << 20)), timeout=240):
                pass
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        metadata = (("x-large", "y" * (2 * MAX_METADATA_BYTES)),)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GetModelInfo(loads_pb2.GetModelInfoRequest(), timeout=240, metadata=metadata)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.GetModelInfo(loads_pb2.GetModelInfoRequest(), timeout=240)).model == "smollm2"


LARGE = MAX_METADATA_BYTES + 1


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * LARGE + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * LARGE, b"431"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * LARGE + b"\r\n", b"431"),
        (b"GET /" + b"p" * LARGE + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nt: " + b"b" * 64 * LARGE, b"431"),
        (b"\r\n" * LARGE, b"431"),
        (b"\x16\x03\x01 this is not HTTP", b"400"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n" + b"b" * 100_000, b"200"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * (LARGE // 2) + b"\r\n\r\n", b"200"),
    ],
)
async def test_http_data_besides_the_body_is_limited(sent: bytes, answer: bytes) -> None:
    num_calls = 0

    async def page(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        while (await receive()).get("more_body", False):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    port = HttpPort(page, "127.0.0.1", 0)
    port.start()
    received = await asyncio.to_thread(_exchange, port.port, sent)
    await port.stop(0)
    # A connection that is closed while more data arrives is reset, so the response may be lost.
    assert received.split()[1:2] == [answer] or (answer == b"431" and not received)
    assert num_calls == (1 if answer == b"200" or b"chunked" in sent else 0)


def _exchange(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=240) as link:
        try:
            link.sendall(data)
            return link.recv(4096)
        except (ConnectionResetError, BrokenPipeError):
            return b""


def greeting() -> bytes:
    """Return the greeting of ZeroMQ's protocol, version 3.1, without encryption."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def ready() -> bytes:
    body = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    return b"\x04" + bytes([len(body)]) + body


def fuzzed(generator: random.Random, message: Message, depth: int = 0) -> None:
    """Fill a message with values that no worker would send."""
    for item in message.DESCRIPTOR.fields:
        if generator.random() < 0.4 or depth > 3:
            continue
        repeated = item.is_repeated
        if item.type == FieldDescriptor.TYPE_MESSAGE:
            if item.message_type is not None and item.message_type.GetOptions().map_entry:
                continue
            child = getattr(message, item.name)
            fuzzed(generator, child.add() if repeated else child, depth + 1)
            if not repeated:
                child.SetInParent()
        else:
            value = _value(generator, item)
            if repeated:
                getattr(message, item.name).extend([value] * generator.choice([1, 3, 1000]))
            else:
                setattr(message, item.name, value)


def _value(generator: random.Random, item: Any) -> object:
    kind = item.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = generator.choice(["", "x", "é" * 1000])
        return text.encode() if item.type == FieldDescriptor.TYPE_BYTES else text
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return generator.choice([0.0, math.nan, math.inf, -1e30])
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return generator.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return generator.choice([value.number for value in item.enum_type.values])
    signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    bits = 31 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 63
    return generator.choice([0, 1, 7, 2**bits - 1, -1 if signed else 2**bits])


class Bomb:
    """A pickle that would run code if it were loaded."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return pytest.fail, ("the pickle was loaded",)


async def test_garbage_on_the_worker_port_is_dropped_and_counted(limited: LimitedService) -> None:
    generator = random.Random(21)
    register = worker_pb2.WorkerMessage(
        register=worker_pb2.Register(group_id="x", kv_store="y" * 64, device="d" * 100)
    ).SerializeToString()
    frames: list[list[bytes]] = [
        [pickle.dumps(Bomb())],
        [b""],
        *([generator.randbytes(size)] for size in (1, 10, 1000, 100_000, 1 << 20)),
        *([register[:size]] for size in (1, len(register) // 2, len(register) - 1)),
        [register, register],
        [b"x"] * 1000,
    ]
    async with limited.parts.stub() as stub:
        before = await asyncio.to_thread(limited.metric, "num_malformed_messages_total")
        memory = limited.resident_bytes("scheduler")
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(limited.parts.worker_address)
            for parts in frames:
                dealer.send_multipart(parts)
            await _until(limited, "num_malformed_messages_total", before + len(frames))
            # These messages parse, but their contents are impossible.
            for _ in range(300):
                message = worker_pb2.WorkerMessage()
                fuzzed(generator, message)
                dealer.send(message.SerializeToString())
            dealer.send(b"\xff")
            await _until(limited, "num_malformed_messages_total", before + len(frames) + 1)
        await read(stub, 100, 50)
        assert await asyncio.to_thread(limited.metric, "num_worker_groups") == 1
        assert limited.resident_bytes("scheduler") - memory < 128 << 20


async def test_bytes_that_are_not_zeromq_and_frames_of_a_gigabyte_cut_their_own_connection(
    limited: LimitedService,
) -> None:
    gigabyte = b"\x02" + struct.pack(">Q", 1 << 30)
    waits = [b"GET / HTTP/1.1\r\n\r\n" * 10, random.Random(1).randbytes(10_000), greeting()]
    is_cut = [
        greeting() + b"\x06" + struct.pack(">Q", 1 << 62),
        greeting() + ready() + gigabyte + bytes(1 << 20),
    ]
    async with limited.parts.stub() as stub:
        refused = await asyncio.to_thread(limited.metric, "num_refused_connections_total")
        memory = limited.resident_bytes("scheduler")
        streams = [asyncio.create_task(read(stub, 100 * i, 400)) for i in range(1, 4)]
        for data in waits:
            await asyncio.to_thread(_send, limited.parts.worker_address, data, is_cut=False)
        for data in is_cut:
            await asyncio.to_thread(_send, limited.parts.worker_address, data, is_cut=True)
        await _until(limited, "num_refused_connections_total", refused + 1)
        await asyncio.gather(*streams)
        assert limited.resident_bytes("scheduler") - memory < 128 << 20


def _send(address: str, data: bytes, *, is_cut: bool) -> None:
    """Send bytes over a connection; if `is_cut`, wait until the other side closes it."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=240) as link:
        try:
            link.sendall(data)
            while is_cut and link.recv(4096):
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass


async def _until(limited: LimitedService, name: str, least: float) -> None:
    async with asyncio.timeout(240):
        while await asyncio.to_thread(limited.metric, name) < least:  # noqa: ASYNC110 (a process)
            await asyncio.sleep(0.05)
