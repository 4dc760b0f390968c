"""The abuses, each run by its own client: `python -m benchmarks.abuse.abuses NAME GRPC_PORT HTTP_PORT TOKEN`.

With `ordinary-NAME`, it instead sends a comparable number of ordinary requests (AS_ORDINARY).

The process prints a line once the abuse is in place, and on SIGTERM the number of its requests by outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import resource
import signal
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from midstream.rpc.channel import open_channel
from protos import generation_pb2 as pb
from protos import kserve_pb2, loads_pb2, service_pb2, service_pb2_grpc, stats_pb2, status_pb2
from tests.router.unfinished import UnfinishedCalls

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub

# This address differs from the probe's, since some limits apply per address.
_SOURCE = "127.0.0.2"
_GENERATE = "/midstream.v1.Midstream/Generate"
_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
_NICENESS = 10
ORDINARY = "ordinary-"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Abuser:
    """The abusive client.

    Attributes:
        seen: Number of its requests by outcome.
        ready: Set once the abuse is in place.
    """

    def __init__(self, grpc_port: int, http_port: int, token: str) -> None:
        self.grpc_port, self.http_port, self.token = grpc_port, http_port, token
        self.seen: Counter[str] = Counter()
        self.ready = asyncio.Event()
        self.random = random.Random(15)
        self.channel = open_channel(f"127.0.0.1:{grpc_port}", token=token)
        self.stub = cast("MidstreamAsyncStub", service_pb2_grpc.MidstreamStub(self.channel))

    def request(self, num_prompt_tokens: int = 16, max_tokens: int = 16) -> pb.GenerateRequest:
        """Return a request whose prompt is not cached."""
        request = pb.GenerateRequest(max_tokens=max_tokens)
        request.token_ids.values.extend(self.random.randrange(300, 48_000) for _ in range(num_prompt_tokens))
        request.stopping.ignore_eos = True
        request.sampling.temperature = 0
        return request

    async def generate(self, request: pb.GenerateRequest) -> str:
        """Run a request to its end."""
        async for _ in self.stub.Generate(request):
            pass
        return "complete"

    async def flood(self, at_once: int, send: Callable[[], Awaitable[str]]) -> None:
        """Call `send` repeatedly, with `at_once` calls in progress at a time."""

        async def repeat() -> None:
            while True:
                try:
                    result = await send()
                except grpc.aio.AioRpcError as error:
                    result = error.code().name
                    await asyncio.sleep(0.01)  # otherwise this client would spend all its time on rejected calls
                except (OSError, EOFError):
                    result = "closed"
                self.seen[result] += 1

        self.ready.set()
        await asyncio.gather(*(repeat() for _ in range(at_once)))

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection."""
        return await asyncio.open_connection("127.0.0.1", port, local_addr=(_SOURCE, 0))

    def head(self, method: str, path: str, content_length: int = 0, *more: str) -> bytes:
        """Return the header of an HTTP request."""
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", *more]
        lines += [f"authorization: Bearer {self.token}", f"content-length: {content_length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def http(self, method: str, path: str, body: bytes = b"", *more: str) -> str:
        """Send a request and read the whole response; return its status code."""
        reader, writer = await self.connect(self.http_port)
        try:
            writer.write(self.head(method, path, len(body), *more) + body)
            answer = await reader.readline()
            while await reader.read(1 << 16):
                pass
            return answer.split()[1].decode() if answer else "closed"
        finally:
            writer.close()

    async def post(self, path: str, fields: dict[str, object]) -> str:
        """Send a POST request with a JSON body."""
        return await self.http("POST", path, json.dumps(fields).encode())


async def watches(abuser: Abuser) -> None:
    """Open 4,500 watch streams over five connections, and read none of them."""
    watched = {
        "/midstream.v1.Midstream/GetIterationStats": stats_pb2.GetIterationStatsRequest(stream=True),
        "/midstream.v1.Midstream/GetStatus": status_pb2.GetStatusRequest(stream=True),
        "/grpc.health.v1.Health/Watch": health_pb2.HealthCheckRequest(),
    }
    channels = [open_channel(f"127.0.0.1:{abuser.grpc_port}", token=abuser.token) for _ in range(5)]
    turns = itertools.cycle(watched.items())
    calls: list[Any] = []
    for number in range(4500):
        name, message = next(turns)
        calls.append(channels[number % 5].unary_stream(name)(message.SerializeToString()))
        if number % 100 == 99:
            await asyncio.sleep(0.02)
    await asyncio.sleep(3)
    abuser.ready.set()
    while True:
        abuser.seen = Counter("refused" if call.done() else "open" for call in calls)
        await asyncio.sleep(1)


async def wide_requests(abuser: Abuser) -> None:
    """Keep two requests in progress, each with 14 sequences of 8,000 tokens."""

    async def send() -> str:
        request = abuser.request(max_tokens=8000)
        request.sampling.num_return_sequences = 14
        request.sampling.temperature = 1
        return await abuser.generate(request)

    await abuser.flood(2, send)


async def full_queue(abuser: Abuser) -> None:
    """Keep 1,000 requests of 200 tokens in progress."""
    await abuser.flood(1000, lambda: abuser.generate(abuser.request(max_tokens=200)))


async def long_prompts(abuser: Abuser) -> None:
    """Keep 16 requests with prompts of 8,000 tokens in progress."""
    await abuser.flood(16, lambda: abuser.generate(abuser.request(8000, 1)))


async def oversized_bodies(abuser: Abuser) -> None:
    """Send four request bodies of 64 MB at a time."""
    block = b" " * (1 << 16)

    async def send() -> str:
        reader, writer = await abuser.connect(abuser.http_port)
        answer = asyncio.ensure_future(reader.readline())
        try:
            writer.write(abuser.head("POST", "/v1/completions", 64 << 20))
            for _ in range(1024):
                if answer.done():
                    break
                writer.write(block)
                await writer.drain()
            return (await answer).split()[1].decode()
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            writer.close()

    await abuser.flood(4, send)


async def large_bodies(abuser: Abuser) -> None:
    """Send 16 request bodies of almost 3 MB at a time; their prompts are too long."""
    body = json.dumps({"prompt": [300] * 600_000, "max_tokens": 1}).encode()
    await abuser.flood(16, lambda: abuser.http("POST", "/v1/completions", body))


async def uploads(abuser: Abuser) -> None:
    """Upload four files of 95 MB at a time."""
    head = 'content-disposition: form-data; name="{}"\r\n\r\n'
    start = "--x\r\n" + head.format("purpose") + "batch\r\n--x\r\n" + head.format('file"; filename="f')
    body = start.encode() + b'{"custom_id": "1"}\n' * 5_000_000 + b"\r\n--x--\r\n"
    kind = "content-type: multipart/form-data; boundary=x"
    await abuser.flood(4, lambda: abuser.http("POST", "/v1/files", body, kind))


async def slow_requests(abuser: Abuser) -> None:
    """Open 2,000 connections, and send one byte of a header or body per second on each."""

    async def one(*, has_head: bool) -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await abuser.connect(abuser.http_port)
                try:
                    if has_head:
                        writer.write(abuser.head("POST", "/v1/completions", 1000))
                    else:
                        writer.write(b"GET / HTTP/1.1\r\n")
                    while not writer.is_closing():
                        writer.write(b"x")
                        await writer.drain()
                        await asyncio.sleep(1)
                finally:
                    writer.close()
            abuser.seen["closed"] += 1
            await asyncio.sleep(0.5)

    tasks = [asyncio.create_task(one(has_head=number % 2 == 0)) for number in range(2000)]
    await asyncio.sleep(3)
    abuser.ready.set()
    await asyncio.gather(*tasks)


async def idle_http_connections(abuser: Abuser) -> None:
    """Open as many HTTP connections as the port accepts, and send no request."""
    await _hold(abuser, abuser.http_port, b"")


async def idle_grpc_connections(abuser: Abuser) -> None:
    """Open as many gRPC connections as the port accepts, and make no call."""
    await _hold(abuser, abuser.grpc_port, _PREFACE + _frame(4, 0, 0, b"") + _frame(4, 1, 0, b""))


async def _hold(abuser: Abuser, port: int, first: bytes) -> None:
    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await abuser.connect(port)
                abuser.seen["opened"] += 1
                try:
                    writer.write(first)
                    while data := await reader.read(1 << 12):
                        # Answering pings keeps a gRPC connection open.
                        for at in range(len(data) - 16):
                            if data[at : at + 5] == b"\0\0\x08\x06\0":
                                writer.write(_frame(6, 1, 0, data[at + 9 : at + 17]))
                finally:
                    writer.close()
            abuser.seen["closed"] += 1
            await asyncio.sleep(10)

    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    tasks = []
    for number in range(min(num_files - 200, 6000)):
        tasks.append(asyncio.create_task(one()))
        if number % 100 == 99:
            await asyncio.sleep(0.02)
    await asyncio.sleep(3)
    abuser.ready.set()
    await asyncio.gather(*tasks)


async def continuation_frames(abuser: Abuser) -> None:
    """Open 32 gRPC and 32 HTTP connections, and send a header that never ends on each."""

    async def send(port: int, first: bytes, more: bytes) -> str:
        _, writer = await abuser.connect(port)
        try:
            writer.write(first)
            while not writer.is_closing():
                writer.write(more)
                await writer.drain()
            return "closed"
        finally:
            writer.close()

    by_grpc = _PREFACE + _frame(4, 0, 0, b"") + _frame(1, 0, 1, b"\x82")
    turns = itertools.cycle(
        [
            (abuser.grpc_port, by_grpc, _frame(9, 0, 1, b"\0\x01a\x7f\x80\x01" + b"b" * 255)),
            (abuser.http_port, b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 100),
        ]
    )
    await abuser.flood(64, lambda: send(*next(turns)))


async def unfinished_messages(abuser: Abuser) -> None:
    """Make 1,000 calls, each with a one-megabyte message that lacks its last byte."""
    await _leave_unfinished(abuser, _GENERATE)


async def unfinished_inferences(abuser: Abuser) -> None:
    """Open 1,000 KServe streams, each with a one-megabyte message that lacks its last byte."""
    await _leave_unfinished(abuser, _STREAM_INFER)


async def _leave_unfinished(abuser: Abuser, method: str) -> None:
    connections = [await UnfinishedCalls.connect(abuser.grpc_port) for _ in range(4)]

    def begin() -> None:
        for connection in connections:
            for _ in range(250 - len(connection.num_sent) + len(connection.ended)):
                connection.begin(method, 1 << 20, abuser.token)

    begin()
    await asyncio.sleep(3)
    abuser.ready.set()
    while True:
        with contextlib.suppress(OSError):
            begin()
        abuser.seen["begun"] = sum(len(item.num_sent) for item in connections)
        abuser.seen["ended"] = sum(len(item.ended) for item in connections)
        abuser.seen["MB sent"] = sum(sum(item.num_sent.values()) for item in connections) >> 20
        await asyncio.sleep(0.5)


async def inferences(abuser: Abuser) -> None:
    """Send requests on eight KServe streams as fast as they are accepted, and never read the responses."""
    data = _inference(b"so the stream goes on " * 1000)

    async def send() -> str:
        call: Any = abuser.channel.stream_stream(_STREAM_INFER)()
        while not call.done():
            await call.write(data)
            abuser.seen["written"] += 1
        code: grpc.StatusCode = await call.code()
        return code.name

    await abuser.flood(8, send)


async def ordinary_inferences(abuser: Abuser) -> None:
    """Run eight KServe streams of 32 concurrent requests each, together a full batch, and read the responses."""
    data = _inference(b"so the stream goes on")

    async def send() -> str:
        call: Any = abuser.channel.stream_stream(_STREAM_INFER)()
        for _ in range(32):
            await call.write(data)
        await call.done_writing()
        async for _ in call:
            pass
        return "complete"

    await abuser.flood(8, send)


def _inference(text: bytes) -> bytes:
    message = kserve_pb2.ModelInferRequest(model_name="ensemble")
    for name, datatype, contents, value in (
        ("text_input", "BYTES", "bytes_contents", text),
        ("max_tokens", "INT32", "int_contents", 1000),
        ("stream", "BOOL", "bool_contents", True),
    ):
        item = message.inputs.add(name=name, datatype=datatype, shape=(1, 1))
        getattr(item.contents, contents).append(value)
    return message.SerializeToString()


async def reconnects(abuser: Abuser) -> None:
    """Let 64 clients repeatedly connect to either port and disconnect."""
    preface = _PREFACE + _frame(4, 0, 0, b"")

    async def send() -> str:
        if abuser.random.random() < 0.5:
            return await abuser.http("GET", "/live")
        reader, writer = await abuser.connect(abuser.grpc_port)
        writer.write(preface)
        await reader.read(1)
        writer.close()
        return "connected"

    await abuser.flood(64, send)


async def guides(abuser: Abuser) -> None:
    """Keep 64 requests in progress, each with a large schema that has not been sent before."""
    numbers = itertools.count()

    async def send() -> str:
        number = next(numbers)
        names = {f"name_{number}_{i}": {"enum": [f"{number} {i} {j}" for j in range(50)]} for i in range(200)}
        request = abuser.request()
        request.guided_decoding.guide_type = pb.GUIDE_TYPE_JSON_SCHEMA
        request.guided_decoding.guide = json.dumps({"type": "object", "properties": names, "required": list(names)})
        return await abuser.generate(request)

    await abuser.flood(64, send)


async def long_texts(abuser: Abuser) -> None:
    """Send 16 texts of 400,000 characters at a time, which are expensive to tokenize."""
    letters = "aaaaaaaaaaaaaaab"

    async def send() -> str:
        return await abuser.post("/tokenize", {"prompt": "".join(abuser.random.choices(letters, k=4096)) * 98})

    await abuser.flood(16, send)


async def long_histories(abuser: Abuser) -> None:
    """Send 16 chats of 4,000 messages at a time."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"message {i} goes on and on"} for i in range(4000)]
    await abuser.flood(16, lambda: abuser.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}))


async def stop_words(abuser: Abuser) -> None:
    """Keep 64 requests in progress, each with the maximum number of stop words and banned words of its own."""
    numbers = itertools.count()

    async def send() -> str:
        request, number = abuser.request(max_tokens=200), next(numbers)
        request.stopping.stop_words.extend(f"{i} {number} " + "a" * 240 for i in range(64))
        request.stopping.bad_words.extend(f"{i} {number} " + "b" * 240 for i in range(64))
        return await abuser.generate(request)

    await abuser.flood(64, send)


async def cancelled_streams(abuser: Abuser) -> None:
    """Keep 64 requests in progress, and cancel each immediately or at its first token."""

    async def send() -> str:
        call = abuser.stub.Generate(abuser.request(64, 1000))
        if abuser.random.random() < 0.5:
            await call.read()
        else:
            await asyncio.sleep(0)
        call.cancel()
        return "cancelled"

    await abuser.flood(64, send)


async def resumes(abuser: Abuser) -> None:
    """Resume a completed request of 2,000 tokens, or a request that does not exist, with 64 calls at a time."""
    request = abuser.request(max_tokens=2000)
    request.request_id = f"resumed-{os.getpid()}"
    await abuser.generate(request)

    async def send() -> str:
        name = request.request_id if abuser.random.random() < 0.5 else f"unknown-{abuser.random.random()}"
        async for _ in abuser.stub.Resume(service_pb2.ResumeRequest(request_id=name)):
            pass
        return "complete"

    await abuser.flood(64, send)


async def embeddings(abuser: Abuser) -> None:
    """Make four embedding calls at a time, with 2,048 inputs each."""

    async def send() -> str:
        request = service_pb2.EmbedRequest()
        for _ in range(2048):
            request.inputs.add().token_ids.values.extend(abuser.random.randrange(300, 48_000) for _ in range(16))
        await abuser.stub.Embed(request)
        return "complete"

    await abuser.flood(4, send)


async def polling(abuser: Abuser) -> None:
    """Make 64 calls at a time for metrics, health, models, status and statistics."""
    pages = itertools.cycle(("/metrics", "/health", "/v1/models", "/openapi.json", "/dashboard"))

    async def page() -> str:
        return await abuser.http("GET", next(pages))

    async def status() -> str:
        await abuser.stub.GetStatus(status_pb2.GetStatusRequest()).read()
        return "status"

    async def loads() -> str:
        await abuser.stub.GetLoads(loads_pb2.GetLoadsRequest())
        return "loads"

    async def info() -> str:
        await abuser.stub.GetServerInfo(loads_pb2.GetServerInfoRequest())
        return "info"

    async def stats() -> str:
        await abuser.stub.GetRequestStats(stats_pb2.GetRequestStatsRequest(request_ids=map(str, range(500))))
        return "stats"

    turns = itertools.cycle((page, status, page, loads, page, info, page, stats))

    async def send() -> str:
        return await next(turns)()

    await abuser.flood(64, send)


async def slow_readers(abuser: Abuser) -> None:
    """Keep 200 streams of 8,000 tokens open, and never read them."""

    async def send() -> str:
        call = abuser.stub.Generate(abuser.request(max_tokens=8000))
        return (await call.code()).name

    await abuser.flood(200, send)


async def stored_responses(abuser: Abuser) -> None:
    """Keep 32 requests in progress whose responses are stored."""
    fields: dict[str, object] = {"input": "so the stream goes on " * 200, "max_output_tokens": 1, "store": True}
    await abuser.flood(32, lambda: abuser.post("/v1/responses", fields))


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + struct.pack("!BBI", kind, flags, stream) + body


ABUSES: dict[str, Callable[[Abuser], Awaitable[None]]] = {
    work.__name__.replace("_", "-"): work
    for work in (
        watches, wide_requests, full_queue, long_prompts, oversized_bodies, large_bodies, uploads, slow_requests,
        idle_http_connections, idle_grpc_connections, continuation_frames, unfinished_messages, unfinished_inferences,
        inferences, reconnects, guides, long_texts, long_histories, stop_words, cancelled_streams, resumes, embeddings,
        polling, slow_readers, stored_responses,
    )
}  # fmt: skip


def _generate(at_once: int, num_prompt_tokens: int, max_tokens: int) -> Callable[[Abuser], Awaitable[None]]:
    """Return a client that keeps this many requests with prompts and outputs of these lengths in progress."""
    return lambda abuser: abuser.flood(at_once, lambda: abuser.generate(abuser.request(num_prompt_tokens, max_tokens)))


# For some of the abuses: as many ordinary requests, to which a client is entitled, as the service computes at once
# during the abuse.
AS_ORDINARY: dict[str, Callable[[Abuser], Awaitable[None]]] = {
    "full-queue": _generate(256, 16, 200),
    "stop-words": _generate(64, 16, 200),
    "cancelled-streams": _generate(64, 64, 1),
    "slow-readers": _generate(200, 16, 1000),
    "inferences": ordinary_inferences,
    "stored-responses": _generate(32, 1000, 1),
    "guides": _generate(64, 16, 16),
    "embeddings": _generate(256, 16, 1),
}
# These abuses use features that require a worker with a model.
NEED_A_MODEL = frozenset({"guides", "embeddings"})


def _work(name: str, abuser: Abuser) -> Awaitable[None]:
    ordinary = name.startswith(ORDINARY)
    work = AS_ORDINARY[name.removeprefix(ORDINARY)] if ordinary else ABUSES[name]
    return work(abuser)


async def run(name: str, grpc_port: int, http_port: int, token: str) -> None:
    """Run an abuse until SIGTERM, then print its outcomes."""
    abuser = Abuser(grpc_port, http_port, token)
    work = asyncio.ensure_future(_work(name, abuser))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    ready = asyncio.create_task(abuser.ready.wait())
    await asyncio.wait((work, ready), return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        print("ready", flush=True)
    with contextlib.suppress(asyncio.CancelledError):
        await work
    print(json.dumps(dict(abuser.seen)), flush=True)
    os._exit(0)  # closing thousands of calls one by one would take too long


if __name__ == "__main__":
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
