"""The service survives arbitrary input to any API. The model is small, so that no request takes long."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from midstream.model.folder import open_model_folder
from protos import generation_pb2 as pb
from protos import openengine_pb2 as oe
from tests.faults.small_model import make_small_model
from tests.integration.api_clients import ApiClients, Case, infer_request
from tests.integration.service import Service, eventually_idle

CONTEXT = 64
# Calls with which an administrator stops the requests of others; without authentication, a local client is one.
STOPPING = ("/pause", "/pause_generation", "/abort_requests", "/abort_request", "/sleep", "/wake_up")
NUM_REQUESTS = 150
SCHEMATHESIS_S = 10
TOOLS = "{% if tools %}Call them within <tool_call></tool_call>: {{ tools | tojson }}\n{% endif %}"
# Statuses that are allowed for invalid input. INTERNAL, UNKNOWN and HTTP 5xx would be faults of the service.
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@pytest.fixture(scope="module")
def small_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("model") / "smollm2"  # the name of the model
    folder.mkdir()
    make_small_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    (folder / "midstream.json").unlink(missing_ok=True)
    embedded = open_model_folder("smollm2")
    (folder / "chat_template.jinja").write_text(TOOLS + str(embedded.chat_template))
    service = Service.start(tmp_path_factory.mktemp("service"), "--model", str(folder))
    yield service
    service.stop()


@pytest.fixture(scope="module")
def addresses(small_service: Service) -> Iterator[dict[str, str]]:
    before = small_service.status_once_serving()["processes"]
    yield small_service.processes("router")[0]["addresses"]
    after = small_service.status_once_serving()["processes"]
    # The same processes must be running: none has died and been restarted.
    assert [process["pid"] for process in after] == [process["pid"] for process in before]
    assert {process["health"] for process in after} == {"serving"}


@pytest.fixture
async def clients(addresses: dict[str, str]) -> AsyncIterator[ApiClients]:
    clients = ApiClients(addresses["grpc"], addresses["http"])
    yield clients
    await clients.close()


SANE = Case("so the stream", 20, 2, 1, 0, 0, 1.0, 1.0, 1.0, 0.0, 0.0, ())


async def check_sane(clients: ApiClients) -> None:
    """Check that every API gives the same answer, and that no request or block has leaked."""
    native = await clients.ask_native(SANE)
    for answer in (await clients.ask_openai(SANE), await clients.ask_kserve(SANE), await clients.ask_openengine(SANE)):
        assert [sequence.text for sequence in answer] == [sequence.text for sequence in native]
    stats = await eventually_idle(clients.native)
    assert (stats.num_active_requests, stats.kv_cache_stats.used_num_blocks) == (0, 0)


async def test_random_bytes_on_the_http_port(clients: ApiClients) -> None:
    rng = random.Random(1)

    def draw(number: int) -> bytes:
        data = rng.randbytes(rng.randint(1, 2000))
        if not number % 3:
            return data
        path = rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"))
        size = len(data) + rng.choice((0, 0, 0, 7, -1))
        return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode() + data

    async def send(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", clients.http_port)
        writer.write(data)
        if writer.can_write_eof():
            writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(12), 60)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    answers = await asyncio.gather(*map(send, map(draw, range(NUM_REQUESTS))))
    assert not [answer for answer in answers if answer.startswith(b"HTTP/1.1 5")]
    assert [answer for answer in answers if answer.startswith(b"HTTP/1.1 4")]
    await check_sane(clients)


def _status(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def random_json(rng: random.Random, depth: int = 0) -> object:
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind < 6:
        text = "".join(
            chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xD7FF)))) for _ in range(rng.randrange(9))
        )
        return rng.choice(
            (None, True, False, rng.randint(-(1 << 65), 1 << 65), rng.randint(-2, 3), rng.gauss(0, 9), text)
        )
    if kind == 6:
        return {f"k{i}": random_json(rng, depth + 1) for i in range(rng.randrange(4))}
    return [random_json(rng, depth + 1) for _ in range(rng.randrange(4))]


async def test_random_json_in_every_field(clients: ApiClients) -> None:
    rng, url = random.Random(2), f"http://127.0.0.1:{clients.http_port}"
    with await asyncio.to_thread(urllib.request.urlopen, f"{url}/openapi.json", timeout=30) as response:
        document = json.load(response)
    bodies = {
        path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        for path, operations in document["paths"].items()
        if "application/json" in operations.get("post", {}).get("requestBody", {}).get("content", {})
        and path not in STOPPING
    }
    good = {"prompt": "so", "messages": [{"role": "user", "content": "so"}], "tokens": [1], "max_tokens": 4}
    good |= {"text_input": "so", "inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["so"]}]}

    async def send(path: str) -> int:
        body = {name: value for name, value in good.items() if name in bodies[path]}
        for name in rng.sample(sorted(bodies[path]), min(rng.choice((1, 1, 2)), len(bodies[path]))):
            body[name] = random_json(rng)
        headers = {"anthropic-version": "2026-10-21"}
        request = urllib.request.Request(url + path.replace("{model}", "smollm2"), json.dumps(body).encode(), headers)
        return await asyncio.to_thread(_status, request)

    statuses = [await asyncio.gather(*(send(path) for path in bodies)) for _ in range(NUM_REQUESTS // len(bodies))]
    found = {status for row in statuses for status in row}
    assert {200, 400} <= found
    assert not {status for status in found if status >= 500} - {504}, found
    await check_sane(clients)


def fill(message: Message, rng: random.Random, depth: int = 0) -> None:
    """Set random fields to random values, most of which are small."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    for item in rng.sample(fields, min(3, len(fields))):
        kind, place = item.message_type, getattr(message, item.name)
        if kind is None:
            values = [_value(item, rng) for _ in range(rng.randint(1, 3))]
            if item.is_repeated:
                place.extend(values)
            else:
                setattr(message, item.name, values[0])
        elif depth < 4 and not kind.GetOptions().map_entry:
            part = place.add() if item.is_repeated else place
            part.SetInParent()
            fill(part, rng, depth + 1)


def _value(item: FieldDescriptor, rng: random.Random) -> object:
    kind = item.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = rng.choice(("", "so", "smollm2", "ensemble", "é" * rng.randrange(300)))
        return text.encode() if item.type == FieldDescriptor.TYPE_BYTES else text
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice((0.0, 0.5, -1.0, 3e38, float("nan"), float("inf")))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        assert item.enum_type is not None
        return rng.choice([value.number for value in item.enum_type.values])
    high = 31 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 63
    return rng.choice((0, 1, 2, 50, rng.getrandbits(high)))


def _is_message(kind: type[Message], data: bytes) -> bool:
    try:
        kind.FromString(data)
    except DecodeError:
        return False
    return True


async def test_random_messages_to_every_grpc_api(clients: ApiClients) -> None:
    rng = random.Random(3)
    methods = {
        "/midstream.v1.Midstream/Generate": pb.GenerateRequest(prompt="so", max_tokens=4),
        "/openengine.v1.Inference/Generate": oe.GenerateRequest(prompt="so", stopping=oe.StoppingOptions(max_tokens=4)),
        "/inference.GRPCInferenceService/ModelInfer": infer_request(SANE),
        "/inference.GRPCInferenceService/ModelStreamInfer": infer_request(SANE, stream=True),
    }

    async def send(method: str, number: int) -> tuple[bool, grpc.StatusCode]:
        """In a third of the calls, send random bytes, which are rarely a valid message; in the others, send requests
        with random fields.
        """
        message = type(methods[method])()
        message.MergeFrom(methods[method])
        data = rng.randbytes(rng.randint(0, 300))
        if number % 3:
            fill(message, rng)
            data = message.SerializeToString()
        # There are no serializers, so that raw bytes can be sent.
        channel: Any = clients.channel
        if "Stream" in method:
            call = channel.stream_stream(method)(iter([data]), timeout=30)
        else:
            call = channel.unary_stream(method)(data, timeout=30)
        with contextlib.suppress(grpc.aio.AioRpcError):
            _ = [answer async for answer in call]
        return _is_message(type(message), data), await call.code()

    each = [(method, number) for method in methods for number in range(NUM_REQUESTS // len(methods))]
    answers = set(await asyncio.gather(*(send(*one) for one in each)))
    found = {code for is_message, code in answers if is_message}
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= found <= REFUSALS | {grpc.StatusCode.OK}
    # Most invalid messages fail inside gRPC, before they reach our code.
    assert {code for is_message, code in answers if not is_message} <= REFUSALS | {grpc.StatusCode.UNKNOWN}
    assert (False, grpc.StatusCode.DEADLINE_EXCEEDED) not in answers
    await check_sane(clients)


async def test_schemathesis_finds_no_server_error(clients: ApiClients, tmp_path: Path) -> None:
    """This is a short version of the run described in docs/adapters.md; it takes a few seconds."""
    # A timeout of 1 ms expires, so its status is an expected result.
    statuses = '["2xx", "3xx", "4xx", "504"]'
    (tmp_path / "schemathesis.toml").write_text(f"[checks]\nnot_a_server_error.expected-statuses = {statuses}\n")
    command = [
        str(Path(sys.executable).parent / "schemathesis"), "run", f"http://127.0.0.1:{clients.http_port}/openapi.json",
        "--checks", "not_a_server_error", "--max-time", str(SCHEMATHESIS_S), "--seed", "1", "--workers", "1",
        "--request-timeout", "30", "--suppress-health-check", "all", "--report-dir", str(tmp_path),
        *itertools.chain.from_iterable(("--exclude-path", path) for path in STOPPING),
    ]  # fmt: skip
    run = await asyncio.to_thread(
        subprocess.run, command, check=False, capture_output=True, text=True, timeout=550, cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    await check_sane(clients)
