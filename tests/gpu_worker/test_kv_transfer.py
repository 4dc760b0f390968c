"""Blocks that one worker fetches from another arrive either unchanged or not at all."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import zmq

from gpu_worker.kv import transfer
from gpu_worker.kv.block_format import Bytes, block_header, checksum, kind_digest
from gpu_worker.kv.shared_store import KvStore, PoolMemory
from gpu_worker.kv.transfer import BlockFetcher, BlockServer, BlockSource, Fetched, TransferError
from protos import blocks_pb2

LAYERS, LAYER_BYTES = 2, 24
BLOCK_BYTES = 2 * LAYERS * LAYER_BYTES
KIND = kind_digest("kind")
HASHES = [1001, 1002, 1003, 1004]


def new_pool(num_blocks: int = 8) -> PoolMemory:
    keys, values = (np.zeros((LAYERS, num_blocks, LAYER_BYTES), dtype=np.uint8) for _ in range(2))
    return PoolMemory(np.zeros(num_blocks, dtype=np.uint64), keys, values)


def fill(pool: PoolMemory) -> None:
    """Fill a pool with random data, and give blocks 3, 2, 1 and 0 the HASHES."""
    rng = np.random.default_rng(3)
    for part in (pool.keys, pool.values):
        part[:] = rng.integers(0, 256, part.shape)
    pool.hashes[: len(HASHES)] = HASHES[::-1]


def outcome(fetcher: BlockFetcher, hashes: Sequence[int], source: BlockSource | str, epoch: int = 1) -> Fetched:
    """Return the result of fetching blocks."""
    store = source.store if isinstance(source, BlockSource) else ""
    fetcher.fetch(epoch, hashes, store, str(source))
    return fetcher._reports.get(timeout=240)


def adopted(fetcher: BlockFetcher, pool: PoolMemory) -> tuple[PoolMemory, list[int]]:
    """Take the fetched blocks with HASHES into blocks 0 to 3 of a new pool; return the pool, and the blocks whose
    hashes were not found. Check the contents of the others.
    """
    mine = new_pool()
    missing = fetcher.take(np.array(HASHES, dtype=np.uint64), np.arange(4, dtype=np.int32), mine)
    for place in set(range(4)) - set(missing.tolist()):
        assert (mine.keys[:, place] == pool.keys[:, 3 - place]).all()
        assert (mine.values[:, place] == pool.values[:, 3 - place]).all()
    return mine, missing.tolist()


@pytest.fixture
def close() -> Iterator[list[BlockServer | BlockFetcher]]:
    opened: list[BlockServer | BlockFetcher] = []
    yield opened
    for item in opened:
        item.close()


Open = Callable[..., BlockFetcher]


@pytest.fixture
def open_fetcher(close: list[BlockServer | BlockFetcher]) -> Open:
    def make(**settings: object) -> BlockFetcher:
        values = {"kind": KIND, "block_bytes": BLOCK_BYTES, "max_bytes": 1 << 20, "store": None} | settings
        fetcher = BlockFetcher(**values)  # type: ignore[arg-type]
        fetcher.begin_epoch(1)
        close.append(fetcher)
        return fetcher

    return make


@pytest.mark.parametrize("curve", [False, True])
def test_blocks_arrive_over_a_socket(open_fetcher: Open, close: list[BlockServer | BlockFetcher], curve: bool) -> None:
    pool = new_pool()
    fill(pool)
    server = BlockServer("127.0.0.1", 0, KIND, pool, None, curve=curve)
    fetcher = open_fetcher()
    close[:0] = [server]
    assert outcome(fetcher, [*HASHES, 5], server.source) == Fetched(1, tuple(HASHES), (5,))
    assert adopted(fetcher, pool)[1] == []
    assert adopted(fetcher, pool)[1] == [0, 1, 2, 3]  # each fetched block is used only once
    assert (server.num_sent, server.sent_bytes, fetcher.fetched_bytes) == (4, 4 * BLOCK_BYTES, 4 * BLOCK_BYTES)


def test_on_one_host_they_are_read_from_shared_memory(
    open_fetcher: Open, close: list[BlockServer | BlockFetcher], tmp_path: Path
) -> None:
    theirs, ours = (KvStore(tmp_path / "kv", "kind", LAYERS) for _ in range(2))
    pool, mine = theirs.make_pool(8, LAYER_BYTES), ours.make_pool(8, LAYER_BYTES)
    assert pool is not None
    assert mine is not None
    fill(pool)
    server = BlockServer("127.0.0.1", 0, KIND, pool, theirs)
    source = BlockSource.parse(str(server.source), theirs.name)
    fetcher = open_fetcher(store=ours)
    close[:0] = [server]
    replies = list(server._answer([_request(source, in_place=True)]))
    assert {(reply.pool, reply.block, reply.contents) for reply in replies} == {
        (theirs.pool_name, place, b"") for place in range(4)
    }
    assert outcome(fetcher, HASHES, source).missing == ()
    assert adopted(fetcher, pool)[1] == []
    # Data that changes between the response and the copy is discarded.
    server._store = ours
    assert outcome(fetcher, HASHES, source).hashes == ()
    assert fetcher.num_damaged == 4
    for store in (theirs, ours):
        store.close()


def _request(source: BlockSource, *, in_place: bool) -> bytes:
    request = blocks_pb2.BlockRequest(token=source.token, kind=KIND, hashes=HASHES, in_place=in_place)
    return request.SerializeToString()


def test_another_models_blocks_and_strangers_get_nothing(
    open_fetcher: Open, close: list[BlockServer | BlockFetcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_TIMEOUT_S", 0.05)
    pool = new_pool()
    fill(pool)
    server = BlockServer("127.0.0.1", 0, KIND, pool, None)
    other, fetcher = open_fetcher(kind=kind_digest("another")), open_fetcher()
    close[:0] = [server]
    assert outcome(other, HASHES, server.source).hashes == ()
    assert outcome(fetcher, HASHES, BlockSource(server.source.address, b"x" * 16)).hashes == ()
    assert list(server._answer([b"\xff"])) == list(server._answer([])) == []
    for nonsense in ("", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1 xyz", "ftp://x 00", "tcp://127.0.0.1:1 00 key"):
        assert outcome(fetcher, HASHES, nonsense) == Fetched(1, (), tuple(HASHES))
    assert outcome(fetcher, HASHES, server.source).missing == ()


class Scripted:
    """A transport whose data a test can corrupt."""

    def __init__(self, pool: PoolMemory, spoil: Callable[[int, Bytes], tuple[Bytes, bytes] | None]) -> None:
        self.pool, self.spoil, self.asked = pool, spoil, []  # type: ignore[var-annotated]

    def fetch(self, hashes: Sequence[int]) -> Iterator[tuple[int, Bytes | None, bytes]]:
        for value in hashes:
            self.asked.append(value)
            contents = self.pool.read(3 - HASHES.index(value), value)
            assert contents is not None
            spoiled = self.spoil(value, contents)
            if spoiled is None:
                raise TransferError("the link was cut")
            yield value, *spoiled

    def close(self) -> None:
        pass


def seal(value: int, contents: Bytes) -> bytes:
    return checksum(block_header(KIND, value, len(contents)), contents)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), zmq.ZMQError(24)])
def test_blocks_are_missing_if_no_socket_can_be_opened(open_fetcher: Open, error: Exception) -> None:
    def connect(_: object) -> NoReturn:
        raise error

    fetcher, reported = open_fetcher(connect=connect), threading.Event()
    fetcher.on_report = reported.set
    for hashes in ([1, 2], [3]):
        reported.clear()
        fetcher.fetch(1, hashes, "", str(BlockSource("tcp://127.0.0.1:1", b"secret")))
        assert reported.wait(240)
        assert [(report.hashes, report.missing) for report in fetcher.reports()] == [((), tuple(hashes))]


def test_an_interrupted_link_resumes_where_it_stopped(open_fetcher: Open) -> None:
    pool = new_pool()
    fill(pool)
    cuts = [HASHES[2]]

    def cut_once(value: int, contents: Bytes) -> tuple[Bytes, bytes] | None:
        if value in cuts:
            cuts.remove(value)
            return None
        return contents, seal(value, contents)

    link = Scripted(pool, cut_once)
    fetcher = open_fetcher(connect=lambda _: link)
    assert outcome(fetcher, HASHES, "tcp://127.0.0.1:1 00") == Fetched(1, tuple(HASHES), ())
    assert link.asked == [*HASHES[:3], *HASHES[2:]]
    assert adopted(fetcher, pool)[1] == []
    cuts += [HASHES[1]] * 2
    assert outcome(fetcher, HASHES, "tcp://127.0.0.1:1 00") == Fetched(1, (HASHES[0],), tuple(HASHES[1:]))
    # The source is not asked again for a while, so that other blocks do not wait for it.
    num_asked = len(link.asked)
    assert outcome(fetcher, HASHES, "tcp://127.0.0.1:1 00").hashes == ()
    assert len(link.asked) == num_asked


def test_blocks_that_fail_verification_count_as_missing(open_fetcher: Open) -> None:
    """With TEST_ALL_CORRUPTIONS=1, the test runs 10,000 corruptions."""
    pool, rng = new_pool(), random.Random(5)
    fill(pool)
    num_spoiled = 0

    def spoil(value: int, contents: Bytes) -> tuple[Bytes, bytes] | None:
        nonlocal num_spoiled
        if rng.random() < 0.3:
            return contents, seal(value, contents)
        num_spoiled += 1
        other = pool.read(HASHES.index(value) and 3, HASHES[0]) if value != HASHES[0] else None
        kinds = [
            lambda: (_flipped(contents, rng), seal(value, contents)),
            lambda: (contents[: rng.randrange(BLOCK_BYTES)], seal(value, contents)),
            lambda: (np.concatenate([contents, contents[:1]]), seal(value, contents)),
            lambda: (contents, seal(value, contents)[: rng.randrange(16)]),
            lambda: (contents, checksum(block_header(kind_digest("another"), value, BLOCK_BYTES), contents)),
            lambda: (contents, seal(value + 1, contents)),
            lambda: (other, seal(HASHES[0], other)) if other is not None else (contents, b""),
        ]
        return rng.choice(kinds)()  # type: ignore[no-untyped-call]

    fetcher = open_fetcher(connect=lambda _: Scripted(pool, spoil))
    for _ in range(3_600 if os.environ.get("TEST_ALL_CORRUPTIONS") else 60):
        found = outcome(fetcher, HASHES, "tcp://127.0.0.1:1 00")
        missing = adopted(fetcher, pool)[1]
        assert [HASHES[place] for place in missing] == sorted(found.missing)
    assert fetcher.num_damaged == num_spoiled > 100


def _flipped(contents: Bytes, rng: random.Random) -> Bytes:
    flipped = contents.copy()
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return flipped


def test_the_oldest_are_dropped_at_the_limit_and_an_epoch_begins_empty(open_fetcher: Open) -> None:
    pool = new_pool()
    fill(pool)
    fetcher = open_fetcher(
        max_bytes=3 * BLOCK_BYTES, connect=lambda _: Scripted(pool, lambda value, found: (found, seal(value, found)))
    )
    assert outcome(fetcher, HASHES, "tcp://127.0.0.1:1 00") == Fetched(1, tuple(HASHES[1:]), (HASHES[0],))
    fetcher.begin_epoch(2)
    assert adopted(fetcher, pool)[1] == [0, 1, 2, 3]
