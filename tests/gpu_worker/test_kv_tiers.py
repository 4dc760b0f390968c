"""KV tiers: blocks are stored and found by hash, and their contents are never wrong."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpu_worker import kind
from gpu_worker.kv import block_kind
from gpu_worker.kv.eviction import EvictionOrder, Retention
from gpu_worker.kv.shared_store import PoolMemory
from gpu_worker.kv.tiers import KvTiers, StoreChanges, TierFolder
from midstream.errors import ConfigError
from protos import worker_pb2
from tests.gpu_worker.tiny_models import make_runner, make_tiny_model

NUM_LAYERS, LAYER_BYTES, NUM_BLOCKS = 3, 40, 8
BLOCK_BYTES = 2 * NUM_LAYERS * LAYER_BYTES
FILE_BYTES = BLOCK_BYTES + 56
# Set the number to 10,000 for a manual run.
NUM_CORRUPTIONS = int(os.environ.get("TEST_CORRUPTIONS", "300"))


def pool(seed: int = 0) -> PoolMemory:
    """Return a pool of random blocks; block i has the hash 100 + i."""
    data = np.random.default_rng(seed).integers(0, 256, (2, NUM_LAYERS, NUM_BLOCKS, LAYER_BYTES), dtype=np.uint8)
    return PoolMemory(np.arange(100, 100 + NUM_BLOCKS, dtype=np.uint64), data[0], data[1])


def empty_pool() -> PoolMemory:
    zeros = np.zeros((2, NUM_LAYERS, NUM_BLOCKS, LAYER_BYTES), dtype=np.uint8)
    return PoolMemory(np.zeros(NUM_BLOCKS, dtype=np.uint64), zeros[0], zeros[1])


def tier(folder: Path, num_blocks: int = 100, kind: str = "kind", name: str = "disk") -> TierFolder:
    return TierFolder(name, folder, kind, BLOCK_BYTES, num_blocks * FILE_BYTES)


def block(value: int) -> np.ndarray:
    return np.random.default_rng(value).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def store_all(folder: Path, memory: PoolMemory) -> None:
    """Store the whole pool of a worker, and end the worker."""
    tiers = KvTiers([tier(folder)], "store", memory)
    tiers.offer([(i, 100 + i) for i in range(NUM_BLOCKS)])
    assert tiers.wait_until_stored(30)
    tiers.close()


def fetch(folder: Path, memory: PoolMemory, hashes: list[int]) -> list[int]:
    """Fetch the blocks with these hashes into blocks 0, 1, ...; return the blocks whose hashes were not found."""
    tiers = KvTiers([tier(folder)], "store", memory)
    missing = tiers.fetch(np.array(hashes, dtype=np.uint64), np.arange(len(hashes), dtype=np.int32))
    tiers.close()
    return [int(target) for target in missing]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_blocks_are_found_again_after_the_worker_ended(tmp_path: Path) -> None:
    before, after = pool(), empty_pool()
    store_all(tmp_path / "tier", before)
    assert fetch(tmp_path / "tier", after, [103, 999, 107]) == [1]
    for target, source in ((0, 3), (2, 7)):
        assert np.array_equal(after.keys[:, target], before.keys[:, source])
        assert np.array_equal(after.values[:, target], before.values[:, source])
    assert not after.keys[:, 1].any()


def test_a_block_that_changed_before_it_was_stored_is_not_stored(tmp_path: Path) -> None:
    memory = pool()
    memory.hashes[2] = 0
    store_all(tmp_path / "tier", memory)
    assert {int(path.name, 16) for path in files(tmp_path)} == {100 + i for i in range(NUM_BLOCKS) if i != 2}


def test_a_pool_without_values_is_stored(tmp_path: Path) -> None:
    """Latent attention caches one vector per token."""
    keys = pool().keys
    memory = PoolMemory(pool().hashes, keys, np.zeros((NUM_LAYERS, NUM_BLOCKS, 0), dtype=np.uint8))
    folder = TierFolder("disk", tmp_path / "tier", "kind", BLOCK_BYTES // 2, 1 << 20)
    tiers = KvTiers([folder], "store", memory)
    tiers.offer([(5, 105)])
    assert tiers.wait_until_stored(30)
    before = keys[:, 5].copy()
    keys[:] = 0
    assert tiers.fetch(np.array([105], dtype=np.uint64), np.array([1], dtype=np.int32)).tolist() == []
    assert np.array_equal(keys[:, 1], before)
    tiers.close()


def test_kinds_never_share_a_block(tmp_path: Path) -> None:
    mine, other = tier(tmp_path / "tier", kind="one model"), tier(tmp_path / "tier", kind="another model")
    assert mine.put(7, block(7))
    assert other.get(7) is None
    # The block is not found either if its file is moved manually.
    (file,) = files(tmp_path)
    (folder,) = [path for path in (tmp_path / "tier").iterdir() if path != file.parent]
    file.rename(folder / file.name)
    other.scan()
    assert other.get(7) is None
    assert other.num_damaged == 1


def test_a_block_that_is_removed_during_a_scan_can_be_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tier(tmp_path / "tier")
    assert folder.put(7, block(7))
    read = folder._read_folder

    def read_before_it_is_removed() -> EvictionOrder:
        order = read()
        (file,) = files(tmp_path)
        file.write_bytes(file.read_bytes()[:-1])
        assert folder.get(7) is None
        return order

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_read_folder", read_before_it_is_removed)
        folder.scan()
    assert 7 not in folder
    assert folder.put(7, block(7))
    folder.scan()
    assert folder.get(7) is not None


def test_the_least_recently_used_is_evicted_first(tmp_path: Path) -> None:
    folder = tier(tmp_path / "tier", num_blocks=3)
    for value in (1, 2, 3):
        assert folder.put(value, block(value))
    assert folder.get(1) is not None
    assert folder.put(4, block(4))
    assert (len(files(tmp_path)), folder.num_evicted) == (3, 1)
    assert [value for value in (1, 2, 3, 4) if value in folder] == [1, 3, 4]


def values_in(folder: TierFolder, values: Iterable[int]) -> list[int]:
    return [value for value in values if value in folder]


def test_retention_decides_before_use(tmp_path: Path) -> None:
    folder = tier(tmp_path / "tier", num_blocks=3)
    folder.retain(1, Retention(80))
    folder.retain(2, Retention(10))
    for value in (1, 2, 3, 4):
        assert folder.put(value, block(value))
    assert values_in(folder, range(1, 5)) == [1, 3, 4], "the block with the lowest priority is evicted first"
    assert folder.put(5, block(5))
    assert values_in(folder, range(1, 6)) == [1, 4, 5], "then the least recently used one"
    folder.retain(4, Retention(10))
    folder.retain(4, Retention(90))
    folder.retain(6, Retention(5))
    assert not folder.put(6, block(6)), "a block evicts none of a higher priority"
    assert folder.put(7, block(7))
    assert values_in(folder, range(1, 8)) == [1, 4, 7]
    assert folder.num_errors == 0


def test_retained_blocks_hold_at_most_half_of_a_tier(tmp_path: Path) -> None:
    """Otherwise one client could keep all others out of a tier, even after restarts."""
    folder = tier(tmp_path / "tier", num_blocks=6)
    for value, priority in ((1, 90), (2, 80), (3, 80), (4, 80), (5, 100)):
        folder.retain(value, Retention(priority))
        assert folder.put(value, block(value))
    for again in (folder, tier(tmp_path / "tier", num_blocks=6)):
        for value in range(10, 16):
            assert again.put(value, block(value)), "there is space for other requests"
        assert values_in(again, range(1, 16)) == [1, 4, 5, 13, 14, 15], "the highest, then the last used"
    folder.retain(13, Retention(85))
    assert {path.name[14:] for path in files(tmp_path) if "." in path.name} == {
        f"{value:02x}.{priority}.{2**63}" for value, priority in ((1, 90), (5, 100), (13, 85))
    }


def test_a_smaller_tier_retains_fewer_blocks_after_a_restart(tmp_path: Path) -> None:
    before = tier(tmp_path / "tier", num_blocks=8)
    for value in (1, 2, 3, 4):
        before.put(value, block(value))
        before.retain(value, Retention(80))
    after = tier(tmp_path / "tier", num_blocks=4)
    for value in (5, 6):
        assert after.put(value, block(value))
    assert values_in(after, range(1, 7)) == [3, 4, 5, 6]


def test_blocks_above_the_limit_are_evicted_even_if_none_is_stored_afterwards(tmp_path: Path) -> None:
    one, other = tier(tmp_path / "tier", num_blocks=3), tier(tmp_path / "tier", num_blocks=3)
    for value in (1, 2, 3):
        assert one.put(value, block(value))
        assert other.put(10 * value, block(10 * value))
    one.scan()
    assert len(files(tmp_path)) == 3
    tier(tmp_path / "tier", num_blocks=2)  # a worker with a lower limit removes a block
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("field", ["disk_kv_bytes", "host_kv_bytes", "disk_kv_bytes_per_s"])
def test_negative_sizes_of_tiers_are_rejected(tiny_folder: Path, tmp_path: Path, field: str) -> None:
    places = {"shared_kv_folder": str(tmp_path / "shared"), "disk_kv_folder": str(tmp_path / "disk")}
    with pytest.raises(ConfigError, match="at least 0") as raised:
        make_runner(tiny_folder, **{**places, field: -1})
    assert raised.value.field == field


@pytest.mark.parametrize(("name", "field"), [("disk", "disk_kv_folder"), ("host", "shared_kv_folder")])
def test_a_folder_that_is_a_link_is_refused(tmp_path: Path, name: str, field: str) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with pytest.raises(ConfigError, match="not a link") as raised:
        tier(tmp_path / "link", name=name)
    assert raised.value.field == field


def test_a_decode_worker_must_be_able_to_hold_a_block(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "Llama")
    with pytest.raises(ConfigError, match="one KV block") as raised:
        make_runner(tmp_path / "model", role="decode", kv_transfer_bytes=1000)
    assert raised.value.field == "kv_transfer_bytes"


def test_retention_ends_with_its_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tier(tmp_path / "tier", num_blocks=2)
    now_ns = time.time_ns()
    folder.retain(1, Retention(80, now_ns + 10**9))
    folder.put(1, block(1))
    folder.put(2, block(2))
    folder.put(3, block(3))
    assert values_in(folder, (1, 2, 3)) == [1, 3]
    folder.retain(1, Retention(80, now_ns + 2 * 10**9))
    monkeypatch.setattr("gpu_worker.kv.tiers.time.time_ns", lambda: now_ns + 10**9)
    folder.put(4, block(4))
    assert values_in(folder, (1, 3, 4)) == [1, 4], "a later request extended it"
    monkeypatch.setattr("gpu_worker.kv.tiers.time.time_ns", lambda: now_ns + 2 * 10**9)
    folder.put(5, block(5))
    folder.put(6, block(6))
    assert values_in(folder, (1, 4, 5, 6)) == [5, 6]


def test_retention_outlives_workers(tmp_path: Path) -> None:
    before = tier(tmp_path / "tier", num_blocks=6)
    until_ns = time.time_ns() + 3600 * 10**9
    before.put(1, block(1))
    before.retain(1, Retention(80))
    before.retain(2, Retention(60, until_ns))
    before.retain(1, Retention(90))
    for value in (2, 3):
        before.put(value, block(value))
    assert {path.name[14:] for path in files(tmp_path) if "." in path.name} == {
        f"01.90.{2**63}",
        f"02.60.{until_ns}",
    }
    after = tier(tmp_path / "tier", num_blocks=6)
    for value in (4, 5, 8, 9):
        assert after.put(value, block(value))
    assert values_in(after, range(1, 10)) == [1, 2, 4, 5, 8, 9]
    after.retain(6, Retention(95))
    after.retain(7, Retention(95))
    after.put(6, block(6))
    after.put(7, block(7))
    assert {path.name[14:16] for path in files(tmp_path) if "." in path.name} == {"01", "06", "07"}


def test_blocks_above_the_rate_of_a_tier_are_stored_later(tmp_path: Path) -> None:
    host = tier(tmp_path / "host", name="host")
    disk = TierFolder("disk", tmp_path / "disk", "kind", BLOCK_BYTES, 100 * FILE_BYTES, 20 * FILE_BYTES)
    tiers = KvTiers([host, disk], "store", pool())
    started = time.monotonic()
    tiers.offer([(i, 100 + i) for i in range(4)])
    assert tiers.wait_until_stored(30)
    assert time.monotonic() - started > 3 / 20
    assert values_in(host, range(100, 108)) == values_in(disk, range(100, 108)) == [100, 101, 102, 103]
    tiers.close()


def test_delayed_blocks_are_stored_before_later_ones(tmp_path: Path) -> None:
    """Otherwise, new blocks would always be stored before those that a write limit has delayed."""
    disk = TierFolder("disk", tmp_path / "disk", "kind", BLOCK_BYTES, 100 * FILE_BYTES, max_bytes_per_s=1)
    new = [(number, 100 + number) for number in range(4, NUM_BLOCKS)]

    def seal(block: int, value: int, _: np.ndarray) -> None:
        """When the newest block is sealed, offer another one and permit one write; when no more are left, permit all
        writes.
        """
        if new and block == new[0][0] - 1:
            tiers.offer([new.pop(0)])
            disk._may_write_at = 0.0
            disk._write_s = disk._write_s if new else 1e-9

    tiers = KvTiers([disk], "store", pool(), seal)
    tiers.offer([(number, 100 + number) for number in range(4)])
    assert tiers.wait_until_stored(30)
    assert [*disk.take_news()] == [100 + number for number in range(NUM_BLOCKS)]
    tiers.close()


def test_blocks_are_read_before_a_step_needs_them(tmp_path: Path) -> None:
    memory = pool()
    store_all(tmp_path / "tier", memory)
    folder, after = tier(tmp_path / "tier"), empty_pool()
    tiers = KvTiers([folder], "store", after, max_held=2)
    (path,) = {file.parent for file in files(tmp_path / "tier")}
    (path / f"{101:016x}").write_bytes(b"damaged")
    tiers.receive(worker_pb2.StepBatch(ahead_hashes=[103, 101, 104, 103, 999]))
    assert tiers.wait_until_read(30)
    assert (folder.num_hits, folder.num_damaged) == (1, 1), "at most as many blocks are read as may be held"
    tiers.receive(worker_pb2.StepBatch(ahead_hashes=[104, 105]))
    assert tiers.wait_until_read(30)
    shutil.rmtree(tmp_path / "tier")
    missing = tiers.fetch(np.array([105, 103, 104, 104], dtype=np.uint64), np.arange(4, dtype=np.int32))
    assert missing.tolist() == [1, 3], "the oldest is dropped, and each is used once"
    assert tiers.num_read_ahead == 2
    assert np.array_equal(after.keys[:, (0, 2)], memory.keys[:, (5, 4)])
    tiers.close()


def test_a_disk_that_does_not_answer_delays_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pool()
    store_all(tmp_path / "tier", memory)
    folder, after = tier(tmp_path / "tier"), empty_pool()
    tiers, answers, get = KvTiers([folder], "store", after), threading.Event(), folder.get
    monkeypatch.setattr("gpu_worker.kv.tiers._HUNG_S", 1.0)

    def hang(value: int) -> np.ndarray | None:
        if value == 104:
            answers.wait(240)
        return get(value)

    def missing(*values: int) -> list[int]:
        targets = np.arange(len(values), dtype=np.int32)
        return [int(target) for target in tiers.fetch(np.array(values, dtype=np.uint64), targets)]

    monkeypatch.setattr(folder, "get", hang)
    assert missing(103, 104, 105) == [1, 2]
    started, done = time.monotonic(), tiers._reading
    assert missing(101, 102) == [0, 1]
    assert time.monotonic() - started < 1.0, "steps do not wait again"
    answers.set()
    while tiers._reading is done:
        time.sleep(0.001)
    monkeypatch.setattr("gpu_worker.kv.tiers._HUNG_S", 30)
    assert missing(104, 999, 101) == [1]
    assert np.array_equal(after.keys[:, (0, 2)], memory.keys[:, (4, 1)])
    tiers.close()


def test_a_slow_disk_delays_a_step_no_more_than_one_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_all(tmp_path / "tier", pool())
    folder = tier(tmp_path / "tier")
    tiers, get = KvTiers([folder], "store", empty_pool()), folder.get
    monkeypatch.setattr("gpu_worker.kv.tiers._HUNG_S", 0.05)

    def read_slowly(value: int) -> np.ndarray | None:
        time.sleep(0.04)
        return get(value)

    monkeypatch.setattr(folder, "get", read_slowly)
    missing = tiers.fetch(np.arange(101, 106, dtype=np.uint64), np.arange(5, dtype=np.int32))
    assert missing.tolist()[-3:] == [2, 3, 4]
    tiers.close()


def test_a_computed_block_that_is_stored_is_reported_again(tmp_path: Path) -> None:
    """If a step did not get a block in time, the scheduler forgets the block, although it is still stored."""
    memory = pool()
    store_all(tmp_path / "tier", memory)
    tiers = KvTiers([tier(tmp_path / "tier")], "store", memory)
    assert len(tiers.hashes()) == NUM_BLOCKS
    tiers.offer([(5, 105)])
    assert tiers.wait_until_stored(30)
    assert tiers.changes() == StoreChanges((105,), ())
    tiers.close()


def test_a_computed_block_that_another_worker_has_evicted_is_stored_again(tmp_path: Path) -> None:
    memory = pool()
    store_all(tmp_path / "tier", memory)
    folder, other = tier(tmp_path / "tier"), tier(tmp_path / "tier")
    tiers = KvTiers([folder], "store", memory)
    other._make_room(0, 100)
    tiers.offer([(5, 105)])
    assert tiers.wait_until_stored(30)
    tiers.close()
    assert values_in(tier(tmp_path / "tier"), range(100, 110)) == [105]


def test_a_tier_leaves_the_space_that_pools_need(tmp_path: Path) -> None:
    """Memory for pools is allocated when they are written; if the tier took all of it, the worker would be killed."""
    used = tmp_path / "tier"
    folder = TierFolder(
        "host",
        used,
        "kind",
        BLOCK_BYTES,
        100 * FILE_BYTES,
        free_bytes=lambda: 3 * FILE_BYTES - sum(path.stat().st_size for path in files(used)),
    )
    for value in range(1, 6):
        assert folder.put(value, block(value))
    assert values_in(folder, range(1, 6)) == [3, 4, 5]
    folder._free_bytes = lambda: 0
    folder._make_room(0, 100)
    assert not folder.put(6, block(6))
    assert folder.num_errors == 0


def test_files_that_are_not_blocks_are_ignored(tmp_path: Path) -> None:
    folder = tier(tmp_path / "tier")
    folder.put(1, block(1))
    (stored,) = files(tmp_path)
    for name in ("-1", "f" * 17, "f" * 18, "1", "notes", "f" * 18 + ".50.60"):
        (stored.parent / name).write_bytes(b"")
    folder.scan()
    assert folder.take_all() == {1}


def test_kinds_that_are_not_in_use_are_removed(tmp_path: Path) -> None:
    """In host memory, they are removed sooner than on disk, because each upgrade leaves blocks of an old kind."""
    old = tier(tmp_path / "tier", kind="old")
    old.put(1, block(1))
    hour_ago = time.time() - 3600
    os.utime(old._folder, (hour_ago, hour_ago))
    new = TierFolder("host", tmp_path / "tier", "new", BLOCK_BYTES, 1 << 20, unused_s=3700)
    assert old._folder.exists()
    new._unused_s = 3500
    new.scan()
    assert not old._folder.exists()
    assert new.put(1, block(1))


def test_a_tier_is_used_again_after_its_folder_was_removed(tmp_path: Path) -> None:
    folder = tier(tmp_path / "tier")
    folder.put(1, block(1))
    shutil.rmtree(tmp_path / "tier")
    assert folder.get(1) is None
    assert not folder.put(2, block(2))
    folder._paused_until = 0.0
    folder.scan()
    assert folder.put(2, block(2))
    assert folder.get(2) is not None
    assert (tmp_path / "tier").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_access_later_is_no_longer_used(tmp_path: Path) -> None:
    """Other users could have written blocks with valid checksums."""
    folder = tier(tmp_path / "tier")
    folder.put(1, block(1))
    folder.take_news()
    (tmp_path / "tier").chmod(0o770)
    folder.scan()
    assert folder.take_news() == {1: False}
    assert folder.get(1) is None
    assert not folder.put(2, block(2))
    (tmp_path / "tier").chmod(0o700)
    folder.scan()
    assert folder.get(1) is not None


def test_usage_is_kept_after_all_workers_exit(tmp_path: Path) -> None:
    folder = tier(tmp_path / "tier", num_blocks=3)
    for value in (1, 2, 3):
        folder.put(value, block(value))
    folder.touch(1)
    again = tier(tmp_path / "tier", num_blocks=3)
    assert again.put(4, block(4))
    assert [value for value in (1, 2, 3, 4) if value in again] == [1, 3, 4]


def test_changes_are_told_once(tmp_path: Path) -> None:
    host, disk = tier(tmp_path / "host", 2, name="host"), tier(tmp_path / "disk", 3)
    disk.put(50, block(50))
    tiers = KvTiers([host, disk], "store", pool())
    assert tiers.hashes() == {50}
    assert tiers.changes() == StoreChanges((), ())
    tiers.offer([(0, 100), (1, 101)])
    assert tiers.wait_until_stored(30)
    found = tiers.changes()
    assert (set(found.stored), found.removed) == ({100, 101}, ())
    tiers.offer([(2, 102)])  # host memory evicts 100, which the disk still stores; the disk evicts 50
    assert tiers.wait_until_stored(30)
    found = tiers.changes()
    assert {102} <= set(found.stored) <= {100, 102}
    assert found.removed == (50,)
    tiers.close()


def test_workers_find_each_others_blocks(tmp_path: Path) -> None:
    one, other = tier(tmp_path / "tier"), tier(tmp_path / "tier")
    one.put(5, block(5))
    assert 5 not in other
    other.scan()
    assert other.take_news() == {5: True}
    found = other.get(5)
    assert found is not None
    assert np.array_equal(found, block(5))
    one._make_room(0, 100)
    assert other.get(5) is None
    assert other.take_news() == {5: False}


def test_a_full_disk_does_not_affect_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", fail)
    folder = tier(tmp_path / "tier")
    assert not folder.put(1, block(1))
    assert (folder.num_errors, files(tmp_path)) == (1, [])
    assert not folder.put(2, block(2))
    assert folder.num_errors == 1, "the tier is not used for a while"


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="700"):
        tier(tmp_path / "open")


def test_damage_is_found_counted_and_removed(tmp_path: Path) -> None:
    """Damage means flipped bits; truncated, extended and renamed files; blocks of another kind; and partial files after
    a crash.
    """
    rng = random.Random(1)
    mine, others = tier(tmp_path / "tier"), tier(tmp_path / "tier", kind="another salt's")
    for number in range(NUM_CORRUPTIONS):
        value = 1000 + number
        assert mine.put(value, block(value))
        path = mine._path(value)
        data = bytearray(path.read_bytes())
        kind = rng.choice(["bit", "cut", "longer", "swapped", "other kind", "zeros", "empty"])
        if kind == "bit":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[rng.randrange(1, len(data)) :]
        elif kind == "longer":
            data += bytes(rng.randint(1, 100))
        elif kind == "swapped":
            assert mine.put(1, block(1))
            data[:] = mine._path(1).read_bytes()
        elif kind == "other kind":
            assert others.put(value, block(value))
            data[:] = others._path(value).read_bytes()
        elif kind == "zeros":
            start = rng.randrange(len(data) - 60)
            data[start:] = bytes(len(data) - start)
        else:
            data.clear()
        path.write_bytes(data)
        assert mine.get(value) is None, kind
        assert mine.num_damaged == number + 1, kind
        assert not path.exists()
        assert value not in mine


def test_blocks_of_another_instruction_set_or_other_code_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may be moved to another machine, and a worker may be upgraded."""
    make_tiny_model(tmp_path / "model", "Llama")
    kinds = set[str]()

    def note(**settings: Any) -> None:
        runner = make_runner(tmp_path / "model", disk_kv_folder=str(tmp_path / "kv"), **settings)
        kinds.update(path.name for path in (tmp_path / "kv").iterdir())
        runner.close()

    note()
    note()
    assert len(kinds) == 1
    with monkeypatch.context() as patch:
        patch.setattr(kind, "load_library", lambda isa: SimpleNamespace(isa="another"))
        note()
    assert len(kinds) == 2
    monkeypatch.setattr(block_kind, "_code", lambda: "other code")
    note()
    assert len(kinds) == 3
    note(kernels="torch")
    note(kernels="torch")
    assert len(kinds) == 4
    monkeypatch.setattr(kind, "_product", lambda: "of another BLAS")
    note()
    assert len(kinds) == 4, "the CPU kernels do not use BLAS"
    note(kernels="torch")
    assert len(kinds) == 5


def test_workers_share_tiers_if_they_use_the_same_folder(tmp_path: Path) -> None:
    """Containers on one host may have different folders at the same path, and one folder at different paths."""
    make_tiny_model(tmp_path / "model", "Llama")

    def name_of(folder: str) -> str:
        runner = make_runner(tmp_path / "model", disk_kv_folder=str(tmp_path / folder))
        runner.close()
        assert runner.kv.tiers is not None
        return runner.kv.tiers.name

    first = name_of("kv")
    assert name_of("model/../kv") == first
    (tmp_path / "kv").rename(tmp_path / "moved")
    assert name_of("kv") != first
    assert name_of("moved") == first
