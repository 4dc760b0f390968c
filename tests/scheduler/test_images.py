"""Images on the scheduler's side: which worker encodes them, the loss of workers, and the cache."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from midstream.errors import (
    ExecutionError,
    InvalidArgumentError,
    MidstreamError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from protos import generation_pb2 as pb
from protos import worker_pb2
from scheduler.core.standing import Standing
from scheduler.edge import images as images_module
from scheduler.edge.images import Images
from scheduler.wire.worker_checks import WrongMessageError


@dataclass
class Registration:
    features: tuple[str, ...] = ("vision",)


@dataclass
class Group:
    epoch: int
    num_free_rows: int = 8
    registration: Registration = field(default_factory=Registration)
    connection: bytes = b""
    standing: Standing = field(default_factory=Standing)
    is_held_off: bool = False


class Workers:
    """Worker groups that answer when told to."""

    def __init__(self, *groups: Group, **settings: Any) -> None:
        self.groups = list(groups)
        self.asked: asyncio.Queue[tuple[int, int, bytes]] = asyncio.Queue()
        self.images = Images(
            groups=lambda: cast("Any", self.groups),
            sender=self,
            hidden_size=2,
            **{"max_deaths": 2, "no_worker_timeout_s": 0.0, "answer_timeout_s": 60.0, "cache_bytes": 1 << 20}
            | settings,
        )

    def send_image(self, connection: bytes, epoch: int, image_id: int, data: bytes) -> None:
        self.asked.put_nowait((epoch, image_id, data))

    def fail_worker(self, connection: bytes, reason: str) -> None:
        group = next(group for group in self.groups if group.connection == connection)
        group.standing.note_fault(0, reason)
        self.lose(group.epoch)

    def lose(self, epoch: int) -> None:
        self.groups = [group for group in self.groups if group.epoch != epoch]

    def part(self, epoch: int, image_id: int, data: bytes, offset: int = 0, *, is_last: bool = True) -> None:
        """Send a part of an answer, whose `data` consists of rows of 8 bytes."""
        tensor = pb.Tensor(
            dtype=pb.Tensor.DTYPE_FLOAT32, shape=(len(data) // 8, 2), data=data, data_offset=offset, is_last=is_last
        )
        self.images.on_result(
            worker_pb2.ImageEncoded(epoch=epoch, id=image_id, embeddings=tensor, text="" if offset else "<image>")
        )

    async def answer(self, data: bytes) -> tuple[int, bytes]:
        """Answer the next image; return the epoch and the image."""
        epoch, image_id, image = await self.asked.get()
        self.part(epoch, image_id, data)
        return epoch, image


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "_LOOK_INTERVAL_S", 0.001)


async def test_an_answer_in_parts_is_joined_and_kept() -> None:
    workers = Workers(Group(1))
    calls = [asyncio.create_task(workers.images.encode(b"image")) for _ in range(2)]
    epoch, image_id, data = await workers.asked.get()
    assert (epoch, data) == (1, b"image")
    workers.part(1, image_id, b"a" * 16, is_last=False)
    workers.part(9, image_id, b"x" * 8, 16)
    workers.part(1, image_id, b"b" * 8, 16)
    first, second = await asyncio.gather(*calls)
    assert first == second == await workers.images.encode(b"image")
    assert (list(first.embeddings.shape), first.embeddings.data, first.text) == (
        [3, 2],
        b"a" * 16 + b"b" * 8,
        "<image>",
    )
    assert (workers.images.num_encoded, workers.images.num_cached) == (1, 2)


async def test_the_cache_drops_what_was_not_used_for_longest() -> None:
    workers = Workers(Group(1), cache_bytes=16)
    for image in (b"1", b"2", b"1", b"3", b"1", b"2"):
        call = asyncio.create_task(workers.images.encode(image))
        await asyncio.sleep(0)
        if not call.done():
            await workers.answer(b"a" * 8)
        await call
    assert (workers.images.num_encoded, workers.images.num_cached) == (4, 2)


async def test_each_worker_encodes_one_image_at_a_time_the_least_busy_first() -> None:
    workers = Workers(Group(1, num_free_rows=2), Group(2, num_free_rows=5), Group(3, 9, Registration(())))
    calls = [asyncio.create_task(workers.images.encode(bytes([i]))) for i in range(3)]
    asked = [await workers.asked.get() for _ in range(2)]
    assert [epoch for epoch, _, _ in asked] == [2, 1]
    await asyncio.sleep(0.01)
    assert workers.asked.empty()
    workers.part(*asked[1][:2], b"a" * 8)
    assert (await workers.answer(b"a" * 8))[0] == 1
    workers.part(*asked[0][:2], b"a" * 8)
    await asyncio.gather(*calls)


async def test_an_image_is_encoded_again_after_the_loss_of_a_worker() -> None:
    workers = Workers(Group(1), no_worker_timeout_s=30.0)
    call = asyncio.create_task(workers.images.encode(b"image"))
    await workers.asked.get()
    workers.lose(1)
    await asyncio.sleep(0.01)
    workers.groups.append(Group(2))
    assert await workers.answer(b"a" * 8) == (2, b"image")
    assert (await call).embeddings.data == b"a" * 8


async def test_an_image_that_costs_too_many_workers_is_refused() -> None:
    workers = Workers(*map(Group, (1, 2, 3)))
    call = asyncio.create_task(workers.images.encode(b"image"))
    for _ in range(2):
        epoch, _, _ = await workers.asked.get()
        workers.lose(epoch)
    with pytest.raises(ExecutionError, match="2 workers were lost"):
        await call
    assert workers.asked.empty()
    assert workers.images.num_running == 0


async def test_an_image_that_is_not_answered_is_refused_and_its_workers_are_dropped() -> None:
    workers = Workers(*(Group(epoch, connection=bytes([epoch])) for epoch in (1, 2, 3)), answer_timeout_s=0.0)
    with pytest.raises(ExecutionError, match="2 workers were lost"):
        await workers.images.encode(b"image")
    assert [group.epoch for group in workers.groups] == [3]
    assert workers.images.num_running == 0


@pytest.mark.parametrize(
    ("groups", "data", "kind"),
    [
        ((), b"image", UnavailableError),
        ((Group(1, 8, Registration(())),), b"image", UnsupportedError),
        ((Group(1),), b"", InvalidArgumentError),
        ((Group(1),), bytes(images_module.MAX_IMAGE_BYTES + 1), InvalidArgumentError),
    ],
    ids=["no_worker", "no_vision", "empty", "too_large"],
)
async def test_what_cannot_be_encoded_is_refused(
    groups: tuple[Group, ...], data: bytes, kind: type[MidstreamError]
) -> None:
    with pytest.raises(kind):
        await Workers(*groups).images.encode(data)


async def test_a_workers_error_is_passed_on_and_not_kept() -> None:
    workers = Workers(Group(1))
    for _ in range(2):
        call = asyncio.create_task(workers.images.encode(b"image"))
        epoch, image_id, _ = await workers.asked.get()
        error = InvalidArgumentError("is not an image", field="data").to_proto()
        workers.images.on_result(worker_pb2.ImageEncoded(epoch=epoch, id=image_id, error=error))
        with pytest.raises(InvalidArgumentError, match="not an image"):
            await call


@pytest.mark.parametrize(("num_bytes", "offset"), [(8, 8), (0, 0)])
async def test_invalid_answers_are_blamed_on_the_worker(num_bytes: int, offset: int) -> None:
    workers = Workers(*(Group(epoch, num_free_rows=9 - epoch) for epoch in (1, 2, 3, 4)))
    call = asyncio.create_task(workers.images.encode(b"image"))
    for _ in range(3):  # more often than `max_deaths`
        epoch, image_id, _ = await workers.asked.get()
        with pytest.raises(WrongMessageError, match="image_encoded"):
            workers.part(epoch, image_id, b"a" * num_bytes, offset)
        workers.groups[0].standing.note_fault(0, "wrong message")
        workers.lose(epoch)
    assert (await workers.answer(b"a" * 8))[0] == 4
    assert (await call).embeddings.data == b"a" * 8


async def test_a_worker_that_is_held_off_or_on_trial_encodes_only_if_no_other_can() -> None:
    held, trial, good = Group(1, 9, is_held_off=True), Group(2, 8, standing=Standing(num_faults=1)), Group(3, 1)
    workers = Workers(held, trial, good)
    calls = [asyncio.create_task(workers.images.encode(bytes([i]))) for i in range(3)]
    asked = [await workers.asked.get() for _ in range(2)]
    assert [epoch for epoch, _, _ in asked] == [3, 2]
    await asyncio.sleep(0.01)
    assert workers.asked.empty()
    held.is_held_off = False
    assert (await workers.answer(b"a" * 8))[0] == 1
    for epoch, image_id, _ in asked:
        workers.part(epoch, image_id, b"a" * 8)
    await asyncio.gather(*calls)


async def test_waiting_images_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "_MAX_PENDING_BYTES", 10)
    workers = Workers(Group(1))
    call = asyncio.create_task(workers.images.encode(b"123456"))
    await workers.asked.get()
    with pytest.raises(OverloadedError):
        await workers.images.encode(b"12345")
    call.cancel()
