"""Adapters that requests can name are loaded by all workers or by none, stored in the journal, and resolved when a
request is accepted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.clock import SteadyClock
from midstream.errors import (
    AlreadyExistsError,
    DeadlineError,
    InvalidArgumentError,
    MidstreamError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from midstream.telemetry.picker_metrics import lora_requests_info
from protos import generation_pb2 as pb
from protos import worker_pb2
from scheduler.core.prefix_cache import chain_seed
from scheduler.core.request_spec import RequestSpec
from scheduler.core.worker_group import AdapterRoom
from scheduler.edge import lora_registry
from scheduler.edge.lora_registry import Adapters
from scheduler.edge.metrics import used_loras
from scheduler.journal import LoadedAdapter
from scheduler.journal.log import LogStore
from scheduler.journal.log_folder import LogFolder
from scheduler.journal.threaded import ThreadedJournal
from scheduler.wire.requests import spec_from_proto
from tests.scheduler.harness import LIMITS, Harness

PATH = "/adapters/a"


@dataclass
class Workers:
    """Worker groups 1 and 2, whose responses the test sends."""

    answer: Callable[[int, str, str], worker_pb2.LoraResult | None]
    on_result: Callable[[worker_pb2.LoraResult], None] = lambda _: None
    features: tuple[str, ...] = ("lora",)
    epochs: list[int] = field(default_factory=lambda: [1, 2])
    sent: list[tuple[Any, ...]] = field(default_factory=list)

    def groups(self) -> list[Any]:
        registration = SimpleNamespace(features=self.features)
        return [SimpleNamespace(connection=b"%d" % e, epoch=e, registration=registration) for e in self.epochs]

    def send_load_adapter(self, connection: bytes, epoch: int, name: str, path: str) -> None:
        self.sent.append(("load", epoch, name, path))
        result = self.answer(epoch, name, path)
        if result is not None:
            result.epoch, result.name = epoch, name
            asyncio.get_running_loop().call_soon(self.on_result, result)

    def send_unload_adapter(self, connection: bytes, epoch: int, fingerprint: str) -> None:
        self.sent.append(("unload", epoch, fingerprint))


def good(epoch: int, name: str, path: str) -> worker_pb2.LoraResult:
    count = 5 if "soft" in path else 0
    return worker_pb2.LoraResult(
        rank=8, fingerprint=f"print of {path}", num_bytes=100 + epoch, num_virtual_tokens=count
    )


class JournaledAdapters:
    """Adapters, with a journal in a file."""

    def __init__(self, path: Path, answer: Callable[[int, str, str], worker_pb2.LoraResult | None] = good) -> None:
        self.path = path
        self.workers = Workers(answer)

    async def __aenter__(self) -> JournaledAdapters:
        self.journal = ThreadedJournal(LogStore(LogFolder(self.path)), LIMITS, "print", SteadyClock())
        contents = await self.journal.open(lambda error: None)
        self.adapters = Adapters(
            contents.adapters,
            groups=self.workers.groups,
            sender=self.workers,
            journal=self.journal,
            vocab_size=1000,
        )
        self.workers.on_result = self.adapters.on_result
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.journal.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


async def test_a_loaded_adapter_survives_a_restart_of_the_scheduler(path: Path) -> None:
    async with JournaledAdapters(path) as journaled:
        adapter = await journaled.adapters.load("a", PATH)
        assert adapter == LoadedAdapter(name="a", path=PATH, fingerprint=f"print of {PATH}", num_bytes=102, rank=8)
        assert journaled.workers.sent == [("load", 1, "a", PATH), ("load", 2, "a", PATH)]
        assert await journaled.adapters.load("a", PATH) == adapter
        assert len(journaled.workers.sent) == 2
        with pytest.raises(AlreadyExistsError):
            await journaled.adapters.load("a", "/adapters/b")
        await journaled.adapters.load("gone", "/adapters/gone")
        await journaled.adapters.unload("gone")
        assert journaled.workers.sent[-1] == ("unload", 2, "print of /adapters/gone")
    async with JournaledAdapters(path) as journaled:
        assert journaled.adapters.loaded() == [adapter]
        journaled.adapters.on_joined(b"3", 3)
        assert journaled.workers.sent == [("load", 3, "a", PATH)]
        await journaled.adapters.unload("a")
        with pytest.raises(NotFoundError):
            await journaled.adapters.unload("a")
    async with JournaledAdapters(path) as journaled:
        assert journaled.adapters.loaded() == []


async def test_two_names_of_one_adapter_are_forgotten_with_the_last(path: Path) -> None:
    async with JournaledAdapters(path) as journaled:
        await journaled.adapters.load("a", PATH)
        await journaled.adapters.load("b", PATH)
        await journaled.adapters.unload("a")
        assert not [item for item in journaled.workers.sent if item[0] == "unload"]
        await journaled.adapters.unload("b")
        assert [item[1] for item in journaled.workers.sent if item[0] == "unload"] == [1, 2]


async def test_simultaneous_equal_loads_run_once(path: Path) -> None:
    async with JournaledAdapters(path) as journaled:
        first, second = await asyncio.gather(journaled.adapters.load("a", PATH), journaled.adapters.load("a", PATH))
        assert first == second
        assert len(journaled.workers.sent) == 2


def failing(epoch: int, name: str, path: str) -> worker_pb2.LoraResult:
    if epoch == 1:
        return good(epoch, name, path)
    return worker_pb2.LoraResult(error=InvalidArgumentError("x.safetensors: t is [1]", field="path").to_proto())


def different(epoch: int, name: str, path: str) -> worker_pb2.LoraResult:
    result = good(epoch, name, path)
    result.fingerprint += str(epoch)
    return result


@pytest.mark.parametrize(
    ("name", "where", "answer", "error", "named"),
    [
        ("a", PATH, failing, InvalidArgumentError, "path"),
        ("a", PATH, different, InvalidArgumentError, "path"),
        ("", PATH, good, InvalidArgumentError, "name"),
        ("x" * 129, PATH, good, InvalidArgumentError, "name"),
        ("a", "adapters/a", good, InvalidArgumentError, "path"),
        ("a", "/a\0b", good, InvalidArgumentError, "path"),
        ("a", "", good, InvalidArgumentError, "path"),
    ],
)
async def test_an_adapter_that_a_worker_rejects_is_not_loaded(
    path: Path, name: str, where: str, answer: Any, error: type[MidstreamError], named: str
) -> None:
    async with JournaledAdapters(path, answer) as journaled:
        with pytest.raises(error) as raised:
            await journaled.adapters.load(name, where)
        assert raised.value.field == named
        assert journaled.adapters.loaded() == []
        if answer is failing:
            assert journaled.workers.sent[-1] == ("unload", 1, f"print of {PATH}")


async def test_nothing_is_loaded_without_suitable_workers(path: Path) -> None:
    async with JournaledAdapters(path) as journaled:
        journaled.workers.features = ()
        with pytest.raises(UnsupportedError):
            await journaled.adapters.load("a", PATH)
        journaled.workers.epochs.clear()
        with pytest.raises(UnavailableError):
            await journaled.adapters.load("a", PATH)


async def test_a_worker_that_dies_in_the_meantime_is_not_awaited(path: Path) -> None:
    async with JournaledAdapters(path) as journaled:

        def answer(epoch: int, name: str, where: str) -> worker_pb2.LoraResult | None:
            if epoch == 1:
                return good(epoch, name, where)
            # Worker 2 is gone; worker 7 has registered, but has not been asked to load the adapter.
            journaled.workers.epochs[:] = [1, 7]
            return None if epoch == 2 else good(epoch, name, where)

        journaled.workers.answer = answer
        assert (await journaled.adapters.load("a", PATH)).num_bytes == 101
        assert journaled.workers.sent[-1] == ("load", 7, "a", PATH)


async def test_a_load_that_a_worker_does_not_answer_fails_and_may_be_repeated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_registry, "_ANSWER_TIMEOUT_S", 0.0)
    monkeypatch.setattr(lora_registry, "_LOOK_INTERVAL_S", 0.001)
    async with JournaledAdapters(
        path, lambda epoch, name, where: good(epoch, name, where) if epoch == 1 else None
    ) as journaled:
        with pytest.raises(DeadlineError):
            await journaled.adapters.load("a", PATH)
        assert journaled.workers.sent[-1] == ("unload", 1, f"print of {PATH}")
        late = good(2, "a", PATH)
        late.epoch, late.name = 2, "a"
        journaled.adapters.on_result(late)
        journaled.workers.answer = good
        monkeypatch.setattr(lora_registry, "_ANSWER_TIMEOUT_S", 60.0)
        assert (await journaled.adapters.load("a", "/adapters/b")).path == "/adapters/b"


async def test_a_request_contains_the_identity_of_its_adapters(path: Path) -> None:
    async with JournaledAdapters(path) as journaled:
        await journaled.adapters.load("a", PATH)
        request = pb.GenerateRequest(request_id="r", token_ids=pb.TokenIds(values=[1, 2]), max_tokens=3)
        request.lora.name = "a"
        request.prompt_tuning.name, request.prompt_tuning.path = "s", "/adapters/soft"  # is loaded on first use
        before = spec_from_proto(request, LIMITS, 0)
        await journaled.adapters.resolve(request)
        spec = spec_from_proto(request, LIMITS, 0)
        assert (spec.lora_name, spec.lora_key, spec.lora_bytes) == ("a", f"print of {PATH}", 102)
        assert list(spec.prompt) == [1000, 1001, 1002, 1003, 1004, 1, 2]
        assert (spec.prompt_key, spec.num_virtual_tokens) == ("print of /adapters/soft", 5)
        assert spec.digest == before.digest
        assert [adapter.name for adapter in journaled.adapters.loaded()] == ["a", "s"]
        # The journal returns the same adapters.
        assert spec_from_proto(pb.GenerateRequest.FromString(spec.payload), LIMITS, 0) == spec


@pytest.mark.parametrize(
    ("request_", "error", "named"),
    [
        (pb.GenerateRequest(lora=pb.LoraConfig(name="x")), NotFoundError, "lora.name"),
        (pb.GenerateRequest(lora=pb.LoraConfig(name="a", path="/b")), AlreadyExistsError, "lora.name"),
        (pb.GenerateRequest(lora=pb.LoraConfig(name="n", path="b")), InvalidArgumentError, "lora.path"),
        (pb.GenerateRequest(lora=pb.LoraConfig(name="s")), InvalidArgumentError, "lora.name"),
        (pb.GenerateRequest(prompt_tuning=pb.PromptTuningConfig(name="x")), NotFoundError, "prompt_tuning.name"),
        (pb.GenerateRequest(prompt_tuning=pb.PromptTuningConfig(name="a")), InvalidArgumentError, "prompt_tuning.name"),
    ],
)
async def test_a_request_with_a_wrong_adapter_is_refused_by_field(
    path: Path, request_: pb.GenerateRequest, error: type[MidstreamError], named: str
) -> None:
    async with JournaledAdapters(path) as journaled:
        await journaled.adapters.load("a", PATH)
        await journaled.adapters.load("s", "/adapters/soft")
        with pytest.raises(error) as raised:
            await journaled.adapters.resolve(request_)
        assert raised.value.field == named


def test_a_table_fills_the_prompt_and_the_key() -> None:
    tensor = pb.Tensor(dtype=pb.Tensor.DTYPE_FLOAT32, shape=[2, 1], data=b"\0" * 8)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(values=[1000, 1001, 5]), max_tokens=1)
    request.prompt_tuning.table.CopyFrom(tensor)
    spec = spec_from_proto(request, LIMITS, 0)
    assert (list(spec.prompt), spec.num_virtual_tokens) == ([1000, 1001, 5], 2)
    request.prompt_tuning.table.data = b"\0" * 7 + b"\1"
    other = spec_from_proto(request, LIMITS, 0)
    assert other.prompt_key != spec.prompt_key
    assert len({chain_seed(spec), chain_seed(other), chain_seed(replace(spec, prompt_key=""))}) == 3


def test_requests_with_the_same_adapter_share_its_memory() -> None:
    def spec(key: str, num_bytes: int) -> RequestSpec:
        plain = spec_from_proto(pb.GenerateRequest(token_ids=pb.TokenIds(values=[1])), LIMITS, 0)
        return replace(plain, lora_key=key, lora_bytes=num_bytes)

    room, a, b, c = AdapterRoom(10), spec("a", 6), spec("b", 4), spec("c", 5)
    for item in (a, a, b, spec("", 0)):
        assert room.fits(item)
        room.take(item)
    assert not room.fits(c)
    assert room.fits(a)
    room.give_back(a)
    assert not room.fits(c)
    room.give_back(a)
    assert room.fits(c)
    assert not room.fits_alone(spec("d", 11))


def test_the_metric_names_adapters_that_run_and_that_wait() -> None:
    harness = Harness()
    harness.add_group(max_batch_size=3)
    for number, name in enumerate(("b", "a", "", "b", "c")):
        harness.submit(f"r{number}", 4, max_tokens=4, lora_name=name)
    harness.turn()
    now = time.time()
    (sample,) = lora_requests_info("vllm:", used_loras(harness.core)).samples
    assert sample.name == "vllm:lora_requests_info"
    assert sample.labels == {"max_lora": "0", "running_lora_adapters": "a,b", "waiting_lora_adapters": "b,c"}
    # A picker takes the series with the highest value, which is when it was current.
    assert now <= sample.value <= time.time()
