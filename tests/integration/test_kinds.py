"""Real workers, routers and detokenizers that differ in what decides the answer, in one cell, while they are killed.

No request gets a token of another kind, or the text of another tokenizer, than it began with, unless its stream says
so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from midstream.model.folder import open_model_folder
from midstream.rpc.channel import open_channel
from protos import generation_pb2 as pb
from protos import loads_pb2, scheduler_pb2_grpc, service_pb2
from tests.faults.small_model import make_small_model
from tests.integration.named_processes import NamedProcesses
from tests.integration.service import eventually, stub_of
from tests.ports import free_ports

if TYPE_CHECKING:
    from protos.service_pb2_grpc import MidstreamAsyncStub as Stub

NUM_REQUESTS = 6
NUM_TOKENS = 300
WAIT_S = 2.0
KINDS = {"plain": (), "int8 cache": ("--kv", "int8"), "int8 weights": ("--weights", "int8")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_small_model(folder)
    return folder


def request_of(number: int) -> pb.GenerateRequest:
    """Return a request whose tokens depend on all tokens before them; every second one is greedy."""
    sampling = pb.SamplingConfig(temperature=0.9 if number % 2 else 0.0, seed=number)
    return pb.GenerateRequest(
        request_id=f"r{number}",
        token_ids=pb.TokenIds(values=range(300 + number, 340 + number)),
        max_tokens=NUM_TOKENS,
        sampling=sampling,
        stopping=pb.StoppingConfig(ignore_eos=True),
    )


@dataclass
class Stream:
    """The output of one request; `changed_at` is the last reported change of its kind."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    changed_at: int | None = None
    final: pb.GenerateResponse | None = None

    async def read(self, stub: Stub, request: pb.GenerateRequest) -> Stream:
        async for response in stub.Generate(request, timeout=400, wait_for_ready=True):
            assert response.token_offset == len(self.tokens)
            self.tokens += response.token_ids
            self.text += response.text
            if response.HasField("kind_changed_at"):
                self.changed_at = response.kind_changed_at
            self.final = response
        return self


class Cell(NamedProcesses):
    """One scheduler, and any number of other processes."""

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder)
        self.model = model
        self.scheduler, self.worker_port = free_ports(2)
        self.ports: dict[str, int] = {}

    def start(self, name: str, *flags: str, model: Path | None = None) -> None:
        """Start or restart a process; its kind is the first part of its name."""
        kind, folder, scheduler = name.partition("-")[0], str(model or self.model), f"127.0.0.1:{self.scheduler}"
        if kind not in ("scheduler", "worker") and name not in self.ports:
            (self.ports[name],) = free_ports(1)
        port = str(self.ports.get(name, 0))
        detokenizers = [f"127.0.0.1:{self.ports[item]}" for item in self.ports if item.startswith("detokenizer")]
        words = {
            "scheduler": ("scheduler", "--port", str(self.scheduler), "--worker-port", str(self.worker_port),
                          "--journal-path", str(self.folder / "journal"), "--no-worker-timeout-s", str(WAIT_S)),
            "worker": ("gpu_worker", "--device", "cpu", "--num-threads", "1", "--max-kv-tokens", "8192", "--group-id",
                       name, "--scheduler", f"tcp://127.0.0.1:{self.worker_port}"),
            "detokenizer": ("detokenizer", "--name", name, "--port", port, "--schedulers", scheduler),
            "router": ("router", "--port", port, "--http-port", "0", "--schedulers", scheduler, "--detokenizers",
                       ",".join(detokenizers)),
        }[kind]  # fmt: skip
        self.launch(name, *words, "--model", folder, *flags)

    @contextlib.asynccontextmanager
    async def stub(self, router: str = "router") -> AsyncIterator[Stub]:
        async with stub_of(f"127.0.0.1:{self.ports[router]}") as stub:
            yield stub

    async def groups(self) -> dict[str, str]:
        """Return the arithmetic of the registered workers, by name."""
        async with open_channel(f"127.0.0.1:{self.scheduler}") as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            try:
                info = await stub.GetServerInfo(loads_pb2.GetServerInfoRequest(), timeout=240)  # type: ignore[misc]
            except Exception:  # noqa: BLE001 (it is not up)
                return {}
        return {group.group_id: group.kind.arithmetic for group in info.worker_groups}

    async def wait_for_workers(self, *names: str) -> dict[str, str]:
        groups = await eventually(self.groups, lambda found: set(found) == set(names), 60)
        assert set(groups) == set(names), [self.log(name) for name in names]
        return groups


@pytest.fixture
def cell(tmp_path: Path, model: Path) -> Iterator[Cell]:
    cell = Cell(tmp_path, model)
    try:
        yield cell
    finally:
        cell.close()


async def run(stub: Stub, requests: Sequence[pb.GenerateRequest]) -> list[Stream]:
    return list(await asyncio.gather(*(Stream().read(stub, request) for request in requests)))


async def half_way(streams: Sequence[Stream]) -> None:
    deadline = time.monotonic() + 240
    while not all(stream.tokens for stream in streams):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def test_a_stream_has_the_tokens_of_one_kind_or_says_from_where_on_it_has_not(cell: Cell) -> None:
    requests = [request_of(number) for number in range(NUM_REQUESTS)]
    cell.start("scheduler")
    cell.start("detokenizer")
    cell.start("router")
    expected: dict[str, list[list[int]]] = {}
    async with cell.stub() as stub:
        for kind, flags in KINDS.items():
            cell.start("worker-0", *flags)
            await cell.wait_for_workers("worker-0")
            named = [request_of(number) for number in range(NUM_REQUESTS)]
            for request in named:
                request.request_id += f" on {kind}"
            expected[kind] = [stream.tokens for stream in await run(stub, named)]
            cell.end("worker-0")
            await cell.wait_for_workers()
        assert expected["plain"] != expected["int8 cache"] != expected["int8 weights"]

        cell.start("worker-0")
        cell.start("worker-1", *KINDS["int8 cache"])
        groups = await cell.wait_for_workers("worker-0", "worker-1")
        assert len(set(groups.values())) == 2
        streams = [Stream() for _ in requests]
        reading = [
            asyncio.create_task(stream.read(stub, request)) for stream, request in zip(streams, requests, strict=True)
        ]
        await half_way(streams)
        # The requests of the first worker wait for it, and continue on the same kind.
        cell.end("worker-0")
        cell.start("worker-0")
        await cell.wait_for_workers("worker-0", "worker-1")
        # Those of the other one wait in vain, because its settings have been changed.
        cell.end("worker-1")
        cell.start("worker-1", *KINDS["int8 weights"])
        await asyncio.gather(*reading)
    by_kind, num_changed = dict.fromkeys(expected, 0), 0
    for number, stream in enumerate(streams):
        end = NUM_TOKENS if stream.changed_at is None else stream.changed_at
        kinds = [kind for kind, outputs in expected.items() if stream.tokens[:end] == outputs[number][:end]]
        assert kinds, f"request {number}: the first {end} tokens are of no kind"
        assert len(stream.tokens) == NUM_TOKENS
        assert stream.final is not None
        if stream.changed_at is not None:
            num_changed += 1
            assert stream.final.kind_changed_at == stream.changed_at > 0
        for kind in kinds:
            by_kind[kind] += 1
    assert by_kind["plain"]
    assert by_kind["int8 cache"]
    assert "continues on another kind" in cell.log("scheduler") or not num_changed


async def test_a_window_changed_at_a_restart_is_said_in_the_streams_of_journaled_requests(cell: Cell) -> None:
    narrow = ("--max-attention-window", "32")
    requests = [request_of(number) for number in range(NUM_REQUESTS)]
    cell.start("scheduler")
    cell.start("detokenizer")
    cell.start("router", "--unavailable-timeout-s", "60")
    cell.start("worker-0")
    async with cell.stub() as stub:
        await cell.wait_for_workers("worker-0")
        named = [request_of(number) for number in range(NUM_REQUESTS)]
        for request in named:
            request.request_id += " undisturbed"
        expected = [stream.tokens for stream in await run(stub, named)]
        streams = [Stream() for _ in requests]
        reading = [
            asyncio.create_task(stream.read(stub, request)) for stream, request in zip(streams, requests, strict=True)
        ]
        await half_way(streams)
        cell.end("worker-0")
        cell.end("scheduler")
        cell.start("scheduler", *narrow)
        cell.start("worker-0", *narrow)
        await asyncio.gather(*reading)
    num_changed = 0
    for stream, tokens in zip(streams, expected, strict=True):
        assert len(stream.tokens) == NUM_TOKENS
        end = NUM_TOKENS if stream.changed_at is None else stream.changed_at
        assert stream.tokens[:end] == tokens[:end]
        num_changed += stream.changed_at is not None
        assert stream.final is not None
        assert stream.final.HasField("kind_changed_at") == (stream.changed_at is not None)
    assert num_changed, "all requests had ended before the kill"


def with_other_words(model: Path, folder: Path) -> Path:
    """Copy a model folder, with a tokenizer that has other texts for some tokens."""
    shutil.copytree(model, folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    words = [word for word in vocabulary if word[0] == "Ġ" and word[1:].isascii() and word[1:].isalpha()]
    first, second = words[: len(words) // 2], words[len(words) // 2 :]
    for one, other in zip(first, second, strict=False):
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


async def test_a_request_has_the_text_of_one_tokenizer_whichever_services_are_killed(
    cell: Cell, tmp_path: Path
) -> None:
    other = with_other_words(cell.model, tmp_path / "other")
    one, two = (open_model_folder(str(path)) for path in (cell.model, other))
    assert one.fingerprint == two.fingerprint
    assert one.tokenizer_fingerprint != two.tokenizer_fingerprint
    cell.start("scheduler")
    cell.start("worker-0")
    cell.start("detokenizer-0")
    cell.start("detokenizer-1", model=other)
    cell.start("router-0", "--unavailable-timeout-s", "60")
    cell.start("router-1", "--unavailable-timeout-s", "60", model=other)
    await cell.wait_for_workers("worker-0")
    async with cell.stub("router-0") as first, cell.stub("router-1") as second:
        undisturbed = await Stream().read(first, request_of(0))
        reading = []
        streams = [(Stream(), Stream()) for _ in range(NUM_REQUESTS)]
        for number, pair in enumerate(streams):
            for stub, stream, name in zip((first, second), pair, ("a", "b"), strict=True):
                request = request_of(0)
                request.request_id = f"{name}{number}"
                reading.append(asyncio.create_task(stream.read(stub, request)))
        await half_way([stream for pair in streams for stream in pair])
        for name in ("detokenizer-0", "detokenizer-1"):
            cell.end(name)
        cell.start("detokenizer-0")
        cell.start("detokenizer-1", model=other)
        await asyncio.gather(*reading)
        assert {pair[0].text for pair in streams} == {undisturbed.text}
        (text,) = {pair[1].text for pair in streams}
        assert text != undisturbed.text
        assert {tuple(stream.tokens) for pair in streams for stream in pair} == {tuple(streams[0][0].tokens)}
        # A client resumes at a router that has another tokenizer than the one that accepted its request.
        resume = service_pb2.ResumeRequest(request_id="a0")
        assert "".join([part.text async for part in second.Resume(resume, timeout=240)]) == undisturbed.text
