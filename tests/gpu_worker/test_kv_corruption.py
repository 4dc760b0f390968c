"""Blocks that are corrupted in a tier or during a transfer between workers never change a token, and each one is
counted.

To run 10,000 corruptions: TEST_CORRUPTIONS=2500 pytest -o faulthandler_timeout=0
tests/gpu_worker/test_kv_corruption.py
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_worker.kv.block_format import HEADER_BYTES, Bytes
from gpu_worker.kv.transfer import BlockSource, BlockTransport, ZmqTransport
from gpu_worker.model_runner import ModelRunner
from protos import generation_pb2 as pb
from tests.gpu_worker.core_with_runners import CoreWithRunners, outputs
from tests.gpu_worker.tiny_models import make_runner, make_tiny_model

NUM_CORRUPTIONS = int(os.environ.get("TEST_CORRUPTIONS", "60"))
PROMPT = [3 + index * 7 % 320 for index in range(70)]  # 4 blocks of 16 tokens and a partial one
NUM_BLOCKS = 4

Make = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write two models of the same shape, each in its own folder."""
    made = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    for folder, settings in zip(made, ({}, {"rope_theta": 5000.0}), strict=True):
        make_tiny_model(folder, "Llama", **settings)
    return made


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Make:
    def make_one(folder: Path, **settings: Any) -> ModelRunner:
        runner = make_runner(folder, kv="f32", max_num_tokens=64, **settings)
        request.addfinalizer(runner.close)
        return runner

    return make_one


class Client:
    """A client that repeats one prompt."""

    def __init__(self, runner: ModelRunner, *others: ModelRunner) -> None:
        self.system = CoreWithRunners(runner, (), others=others)
        self._num_workers, self._count = 1 + len(others), 0

    def answer(self, salt: str = "") -> list[list[int]]:
        """Run the prompt on workers whose pools are empty, and return the output."""
        for number in range(self._num_workers):
            self.system.lose_worker(number)
        self._count += 1
        request = pb.GenerateRequest(
            request_id=f"r{self._count}",
            token_ids=pb.TokenIds(values=PROMPT),
            max_tokens=6,
            sampling=pb.SamplingConfig(temperature=0),
            cache_salt=salt,
        )
        return outputs(self.system.run([request])[0])


def blocks_in(folder: Path) -> list[Path]:
    """Return the files of stored blocks, oldest first; the blocks of the prompt are the oldest."""
    files = [path for path in folder.rglob("[0-9a-f]*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_mtime_ns)


def damaged(
    whole: bytes, swapped: bytes, other_model: bytes, other_salt: bytes, rng: random.Random
) -> tuple[str, bytes]:
    """Return the kind of a random corruption, and the contents of a block's file with it."""
    bit, start = rng.randrange(8 * len(whole)), rng.randrange(40, len(whole) - 64)
    kinds = {
        "a flipped bit": whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :],
        "cut": whole[: rng.randrange(len(whole))],
        "swapped": swapped,
        "of an old format": b"MSKVBLK0" + whole[8:],
        "another model's": other_model,
        "another salt's": other_salt,
        "zeros": whole[:start] + bytes(len(whole) - start),
        "another model's under this header": whole[:HEADER_BYTES] + other_model[HEADER_BYTES:],
    }
    kind = rng.choice(list(kinds))
    return kind, kinds[kind]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_damaged_block_of_a_tier_is_recomputed(
    folders: tuple[Path, Path], make: Make, tmp_path: Path, tier: str
) -> None:
    rng = random.Random(tier)
    expected = Client(make(folders[0])).answer()

    def settings(name: str) -> dict[str, Any]:
        path = str(tmp_path / name)
        if tier == "disk":
            return {"disk_kv_folder": path}
        return {"shared_kv_folder": path, "host_kv_bytes": 1 << 24}

    # These blocks are valid but in the wrong place: some have another salt, some are from another model with the same
    # hashes.
    runner, strange = make(folders[0], **settings("own")), make(folders[1], **settings("strange"))
    client = Client(runner)
    client.answer(salt="another")
    salted = [path.read_bytes() for path in blocks_in(tmp_path / "own")]
    assert client.answer() == expected
    Client(strange).answer()
    others = {path.name: path.read_bytes() for path in blocks_in(tmp_path / "strange")}
    tiers = runner.kv.tiers
    assert tiers is not None
    (folder,) = tiers._tiers
    # The blocks of the prompt have the same file names for both models.
    own = [path for path in blocks_in(tmp_path / "own") if path.name in others]
    assert len(own) == NUM_BLOCKS
    whole = {path: path.read_bytes() for path in own}
    for number in range(NUM_CORRUPTIONS):
        path = rng.choice(own)
        swapped = whole[rng.choice([other for other in own if other != path])]
        kind, data = damaged(whole[path], swapped, others[path.name], rng.choice(salted), rng)
        path.write_bytes(data)
        hits = folder.num_hits
        assert client.answer() == expected, kind
        assert folder.num_damaged == number + 1, kind
        assert folder.num_hits - hits == NUM_BLOCKS - 1, "the undamaged blocks are used"
    shutil.rmtree(tmp_path / "own")
    assert client.answer() == expected


class Spoiled:
    """A transport that corrupts one block of each request."""

    def __init__(self, transport: BlockTransport, rng: random.Random) -> None:
        self._transport, self._rng = transport, rng
        self.num_spoiled = 0

    def fetch(self, hashes: Sequence[int]) -> Iterator[tuple[int, Bytes | None, bytes]]:
        chosen = self._rng.randrange(len(hashes))
        before: tuple[Bytes, bytes] | None = None
        for place, (value, contents, checksum) in enumerate(self._transport.fetch(hashes)):
            assert contents is not None
            if place == chosen:
                self.num_spoiled += 1
                yield value, *self._spoil(contents, checksum, before)
            else:
                yield value, contents, checksum
            before = contents, checksum

    def _spoil(self, contents: Bytes, checksum: bytes, before: tuple[Bytes, bytes] | None) -> tuple[Bytes, bytes]:
        rng, spoiled = self._rng, contents.copy()
        spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
        wrong = rng.randrange(len(checksum))
        return rng.choice(
            (
                (spoiled, checksum),
                (contents[: rng.randrange(len(contents))], checksum),
                (np.concatenate([contents, contents[:8]]), checksum),
                (contents, checksum[:wrong] + bytes([checksum[wrong] ^ 1]) + checksum[wrong + 1 :]),
                before or (spoiled, checksum),  # the previous block, with its own checksum
            )
        )

    def close(self) -> None:
        self._transport.close()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", ["TCP", "shared memory"])
def test_a_block_damaged_between_workers_is_not_used(
    folders: tuple[Path, Path], make: Make, tmp_path: Path, way: str
) -> None:
    rng = random.Random(way)
    expected = Client(make(folders[0])).answer()
    shared = {} if way == "TCP" else {"shared_kv_folder": str(tmp_path / "shared")}
    prefill, decode = (make(folders[0], role=role, **shared) for role in ("prefill", "decode"))
    fetcher, store = decode.kv.fetcher, decode.kv.store
    assert fetcher is not None
    made: list[Spoiled] = []

    def connect(source: BlockSource) -> BlockTransport:
        assert fetcher is not None
        made.append(Spoiled(ZmqTransport(fetcher._context, source, fetcher.kind, store), rng))
        return made[-1]

    client = Client(prefill, decode)
    assert client.answer() == expected
    assert client.system.core.totals.num_handovers == 1
    fetcher._disconnect(next(iter(fetcher._transports)))
    fetcher._connect = connect
    for number in range(NUM_CORRUPTIONS):
        assert client.answer() == expected
        assert fetcher.num_damaged == sum(link.num_spoiled for link in made) > number
    assert client.system.core.totals.num_failed_handovers > 0
