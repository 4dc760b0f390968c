"""The probe: an interactive client that sends short requests at a fixed rate and measures the time to first token."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import grpc.aio

from midstream.rpc.channel import open_channel
from protos import generation_pb2 as pb
from protos import service_pb2_grpc

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub

INTERVAL_S = 0.2
_TIMEOUT_S = 20.0
_NUM_TOKENS = 4
_Way = Callable[[int], Awaitable[float]]


@dataclass
class Seen:
    """The probe's measurements of one API.

    Attributes:
        times_s: Seconds from the call to the first token, for each successful request.
        errors: Error messages of the failed requests.
    """

    times_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        """Add the measurements of another round."""
        self.times_s += other.times_s
        self.errors += other.errors


class Probe:
    """Sends a native request over gRPC and a chat over HTTP in each interval; each HTTP request uses a new connection.

    It does not wait for a response before it sends the next request, so a long pause of the service affects as many
    requests as it would for real clients.

    Attributes:
        late_s: The longest delay in sending a request during the last run.
    """

    def __init__(self, grpc_address: str, http_port: int, token: str) -> None:
        self._grpc_address = grpc_address
        self._http_port = http_port
        self._token = token
        self.late_s = 0.0
        self._numbers = itertools.count()
        self._words = random.Random(5)

    async def run(self, seconds: float) -> dict[str, Seen]:
        """Send requests for some time, on a new gRPC connection; return the measurements by API."""
        self.late_s = 0.0
        seen = {"gRPC": Seen(), "HTTP": Seen()}
        async with open_channel(self._grpc_address, token=self._token) as channel:
            stub = cast("MidstreamAsyncStub", service_pb2_grpc.MidstreamStub(channel))
            ways: dict[str, _Way] = {"gRPC": lambda number: self._native(stub, number), "HTTP": self._chat}
            async with asyncio.TaskGroup() as group:
                began = asyncio.get_running_loop().time()
                for turn in range(max(1, round(seconds / INTERVAL_S))):
                    await asyncio.sleep(began + turn * INTERVAL_S - asyncio.get_running_loop().time())
                    self.late_s = max(self.late_s, asyncio.get_running_loop().time() - began - turn * INTERVAL_S)
                    for name, way in ways.items():
                        group.create_task(_observe(way, next(self._numbers), seen[name]))
        return seen

    async def _native(self, stub: MidstreamAsyncStub, number: int) -> float:
        request = pb.GenerateRequest(max_tokens=_NUM_TOKENS)
        request.token_ids.values.extend(self._words.randrange(300, 48_000) for _ in range(16))
        request.sampling.seed = number
        request.stopping.ignore_eos = True
        began, first = time.monotonic(), 0.0
        async for response in stub.Generate(request):
            if response.token_ids and not first:
                first = time.monotonic() - began
        return first

    async def _chat(self, number: int) -> float:
        content = f"Question {number}: " + " ".join(str(self._words.randrange(1000)) for _ in range(8))
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": _NUM_TOKENS, "stream": True}
        data = json.dumps({**body, "ignore_eos": True, "seed": number}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self._token}\r\n"
        began, first = time.monotonic(), 0.0
        reader, writer = await asyncio.open_connection("127.0.0.1", self._http_port)
        try:
            writer.write(f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
            status = (await reader.readline()).split()[1:2]
            if status != [b"200"]:
                raise ConnectionError(f"status {status}")
            while line := await reader.readline():
                # The event with the role precedes all tokens.
                if (
                    line.startswith(b"data: {")
                    and not first
                    and "role" not in json.loads(line[6:])["choices"][0]["delta"]
                ):
                    first = time.monotonic() - began
            return first
        finally:
            writer.close()


async def _observe(way: _Way, number: int, seen: Seen) -> None:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            first = await way(number)
    except grpc.aio.AioRpcError as error:
        seen.errors.append(f"{error.code().name}: {error.details()}")
    except TimeoutError:
        seen.errors.append(f"no response within {_TIMEOUT_S:g} s")
    except OSError as error:
        seen.errors.append(f"{type(error).__name__}: {error}")
    else:
        if first:
            seen.times_s.append(first)
        else:
            seen.errors.append("the stream ended without a token")
